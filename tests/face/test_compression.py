"""Compression from the command line: what was typed is what the workers do, and the report tells what it came to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetopt.core.events.log import Event, read_events
from tests.disturbance import PATIENCE_S
from tests.face.conftest import RECORDED, Answer, forked

Hetopt = Callable[..., Answer]

STEPS = 30
WITHOUT_TORCH = """
import sys
from hetopt.cli.main import main
sys.argv = ["hetopt", *sys.argv[1:]]
main()
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for this module's runs."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HETOPT_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def plan(home: Path) -> Path:
    path = home / "plan.json"
    asked = ("--budget", 2, "--epochs", 100, "--types", "m6g.*")
    process = forked("recommend", RECORDED / "digits.json", *asked, "-o", path)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return path


def launched(home: Path, plan: Path, *options: str) -> tuple[str, list[Event]]:
    """The run of two unequal workers with these options, and its log."""
    known = set((home / "runs").glob("*"))
    process = forked("launch", plan, "--on", "local", "--slowdown", "1,2", "--steps", STEPS, "--yes", *options)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    [run] = set((home / "runs").glob("*")) - known
    return run.name, list(read_events(run / "events.jsonl"))


@pytest.mark.slow
def test_a_named_compression_is_what_the_workers_send(hetopt: Hetopt, home: Path, plan: Path) -> None:
    run, events = launched(home, plan, "--compression", "topk:0.01")
    exchanges = [event["exchange"] for event in events if event["event"] == "step"]
    assert {exchange["way"] for exchange in exchanges} == {"topk 0.01 by all_gather"}
    assert all(0 < exchange["gain"] < 1 for exchange in exchanges)
    report = json.loads(hetopt("report", run, "--json").out)
    # An index and a value for one element in a hundred.
    assert report["sent"]["sent_bytes"] / report["sent"]["dense_bytes"] == pytest.approx(0.02, rel=1e-3)
    assert report["sent"]["ways"] == [{"way": "topk 0.01 by all_gather", "steps": STEPS}]
    [ratios] = [series["values"] for series in report["over_time"]["series"] if series["key"] == "ratio"]
    assert ratios[-1] == 0.01
    shown = " ".join(hetopt("report", run).out.split())
    assert "communication (in a step" in shown
    assert "sent 2 % of dense bytes" in shown
    assert "gradients: topk 1 % (all-gather);" in " ".join(hetopt("status", run).out.split())
    assert json.loads(hetopt("status", run, "--json").out)["exchange"]["way"] == "topk 0.01 by all_gather"


def test_auto_measures_the_network_and_tells_what_it_did(hetopt: Hetopt, home: Path, plan: Path) -> None:
    run, events = launched(home, plan, "--compression", "auto")
    [begun] = [event for event in events if event["event"] == "run_started"]
    assert (begun["ratio_policy"], begun["collective_policy"]) == ("auto", "cheapest")
    # A busy machine measures again.
    measured, *_ = [event for event in events if event["event"] == "network_measured"]
    assert measured["bytes_per_s"] > 0
    exchanges = [event["exchange"] for event in events if event["event"] == "step" and "exchange" in event]
    assert exchanges
    changes = [event for event in events if event["event"] == "exchange_changed"]
    report = json.loads(hetopt("report", run, "--json").out)
    assert report["sent"]["changes"] == len(changes)
    assert 0 < report["sent"]["sent_bytes"] <= report["sent"]["dense_bytes"]
    assert [one["kind"] for one in report["happenings"]].count("exchange_changed") == len(changes)
    shown = " ".join(hetopt("report", run).out.split())
    assert "sent" in shown
    assert all(f"(step {change['step']})" in shown for change in changes[-1:]), "the last of them is told"


def test_what_would_be_sent_is_told_without_torch(plan: Path) -> None:
    asked = ("launch", plan, "--on", "local", "--slowdown", "1,2", "--dry-run")
    for options, said in (
        (("--compression", "auto"), "compression auto, the cheapest collective"),
        (
            ("--compression", "dgc:1000x", "--ratio-policy", "warm_up"),
            "compression dgc 0.1 % (1000x), ratio policy warm_up",
        ),
    ):
        result = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *map(str, asked), *options],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert said in " ".join(result.stdout.split())
        assert "decided while training goes on" in " ".join(result.stdout.split())


def test_the_launch_record_keeps_the_wish(hetopt: Hetopt, plan: Path) -> None:
    answer = hetopt(
        *("launch", plan, "--on", "local", "--slowdown", "1,2", "--dry-run", "--json"),
        *("--compression", "topk:100x,coding=packed", "--collective", "auto"),
    )
    record = json.loads(answer.out)
    assert record["spec"]["compression"] == {"name": "topk", "ratio": 0.01, "coding": "packed"}
    assert (record["spec"]["ratio_policy"], record["spec"]["collective_policy"]) == ("fixed", "cheapest")
    assert record["plan"]["run"]["ratio_policy"] == "fixed", "the plan is kept as it was made"
    assert any("collective follows the network" in note for note in record["notes"])
