"""The main job as a person does it: plan a recorded profile, train it on unequal processes, report.

Rehearsals likewise: launched, disturbed, reported, stopped and cleaned up from the command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.backends.emulation.namespaces import find_networks, why_not
from hetopt.core.events.log import read_events
from tests.disturbance import PATIENCE_S
from tests.docs.shown import assert_shown
from tests.face.conftest import RECORDED, Answer, forked, until

Hetopt = Callable[..., Answer]

HOSTS = "speed=1,rate=200mbit; speed=0.5,rate=100mbit"
ON_TWO_HOSTS = ("--on", "rehearsal", "--hosts", HOSTS, "--yes")


@pytest.fixture(scope="module")
def plan(home: Path) -> Path:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    path = home / "plan.json"
    asked = ("--budget", 2, "--epochs", 500, "--batch-size", 64, "--types", "m6g.*")
    process = forked("recommend", RECORDED / "digits.json", *asked, "-o", path)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return path


@pytest.fixture(scope="module")
def rehearsed(home: Path, plan: Path) -> tuple[Path, str, str]:
    """A whole rehearsal in which a host slows down: its folder, and what launch printed."""
    schedule = home / "schedule.txt"
    schedule.write_text("step 15 h1 speed=0.25,rate=50mbit  # a neighbour wakes up\n")
    process = forked("launch", plan, *ON_TWO_HOSTS, "--steps", 40, "--schedule", schedule)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return sorted((home / "runs").iterdir())[-1], out, err


def test_it_trains_and_follows_the_schedule(hetopt: Hetopt, rehearsed: tuple[Path, str, str]) -> None:
    run, _, err = rehearsed
    events = read_events(run / "events.jsonl")
    assert (events[-1]["event"], events[-1]["step"]) == ("training_finished", 40)
    [changed] = [event for event in events if event["event"] == "condition_changed"]
    assert (changed["host"], changed["speed"], changed["rate_bits_per_s"]) == ("h1", 0.25, 5e7)
    assert changed["step"] >= 15
    assert "h1: speed 0.25, link 50 Mbit/s" in err, "it is told while it happens"
    report = json.loads(hetopt("report", run.name, "--json").out)
    assert (report["on"], report["over_time"]["step"][-1]) == ("rehearsal", 40)
    assert "condition_changed" in [one["kind"] for one in report["happenings"]]
    status = json.loads(hetopt("status", run.name, "--json").out)
    assert status["conditions"]["speed_factors"] == {"h1": 0.5}


def test_a_rehearsal_is_disturbed_and_a_dead_host_fails_it(hetopt: Hetopt, home: Path, plan: Path) -> None:
    known = set((home / "runs").glob("*"))
    process = forked("launch", plan, *ON_TWO_HOSTS)

    def has(text: str) -> bool:
        return text in (run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else False

    try:
        [run] = until(lambda: set((home / "runs").glob("*")) - known)
        until(lambda: has('"step_time_s"'))
        assert hetopt("inject", run.name, "h1 speed=0.25").code == 0
        until(lambda: has('"condition_changed"'))
        assert hetopt("inject", run.name, "h1 dies", "--json").code == 0
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 6, err
    assert "h1 died" in err
    assert hetopt("inject", run.name, "h0 speed=2").code == 2, "it is over"
    assert (run / "network").read_text() not in find_networks()


LEAVES_A_NETWORK = """
import os, signal, sys
from hetopt.backends.emulation.namespaces import EmulatedNetwork
from hetopt.core.run_spec import EmulatedHost
network = EmulatedNetwork.create([EmulatedHost(name="h0"), EmulatedHost(name="h1")])
print(network.id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("own_leftovers")
def test_gc_removes_what_a_killed_process_left(hetopt: Hetopt) -> None:
    left = subprocess.run([sys.executable, "-c", LEAVES_A_NETWORK], capture_output=True, text=True).stdout.strip()
    shown = hetopt("gc", "--dry-run")
    assert f"would remove rehearsal {left}" in " ".join(shown.out.split())
    assert left in find_networks(), "looking removes nothing"
    removed = json.loads(hetopt("gc", "--json").out)
    assert left in [one["id"] for one in removed if one["removed"]]
    assert left not in find_networks()


STOPPED = "training_finished"


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, str, str]:
    """One whole run of two unequal workers: its folder, and what launch printed on stdout and stderr."""
    plan = home / "short.json"
    planning = forked("recommend", RECORDED / "digits.json", "--budget", 2, "--epochs", 4, "-o", plan)
    _, err = planning.communicate(timeout=PATIENCE_S)
    assert planning.returncode == 0, err
    process = forked("launch", plan, "--on", "local", "--slowdown", "1,3", "--yes")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return sorted((home / "runs").iterdir())[-1], out, err


def test_the_run_trains_on_every_sample_and_learns(finished: tuple[Path, str, str]) -> None:
    run, out, _ = finished
    *steps, last = [event for event in read_events(run / "events.jsonl") if event["event"] in ("step", STOPPED)]
    assert (last["event"], last["reason"]) == (STOPPED, "epochs")
    assert last["epoch"] >= 4
    assert last["metrics"]["accuracy"] > 0.9
    fast, slow = steps[-1]["local_batch_sizes"]
    assert fast > 1.2 * slow, "how near to twice is measured by benchmarks.balance, on a quiet machine"
    assert all(sum(event["local_batch_sizes"]) == fast + slow for event in steps)
    assert_shown("quickstart.md", "hetopt launch", out)


@pytest.mark.usefixtures("finished")
def test_report_status_and_logs_from_another_process(hetopt: Hetopt) -> None:
    data = json.loads(hetopt("report", "--json").out)
    figures = {figure["name"]: figure for figure in data["compared"]}
    assert {"step time", "steps", "training time", "run time", "cost at the plan's rate"} <= set(figures)
    assert figures["steps"]["measured"] == figures["steps"]["predicted"], "epochs fix the number of steps"
    status = json.loads(hetopt("status", "--json").out)
    assert (data["state"], status["state"]) == ("finished", "finished")
    assert_shown("quickstart.md", "hetopt report", hetopt("report").out)
    assert json.loads(hetopt("logs", "--events").out.splitlines()[0])["event"] == "run_started"
    assert hetopt("logs").code == 0


@pytest.mark.usefixtures("finished")
def test_a_detached_run_goes_on_to_its_end(hetopt: Hetopt, home: Path) -> None:
    process = forked("launch", home / "short.json", "--on", "local", "--slowdown", "1,3", "--yes", "--detach")
    assert (process.communicate(timeout=PATIENCE_S), process.returncode)[1] == 0
    assert json.loads(hetopt("status", "--json").out)["state"] in ("starting", "running")
    until(lambda: json.loads(hetopt("status", "--json").out)["state"] == "finished")
