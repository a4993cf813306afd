"""The main job as a person does it: plan a recorded profile, train it on unequal processes, stop, resume, report."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.core.events.log import read_events
from tests.disturbance import PATIENCE_S
from tests.docs.shown import assert_shown
from tests.face.conftest import RECORDED, Answer, processes_of, start, until

Hetopt = Callable[..., Answer]
STOPPED = "training_finished"


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, str, str]:
    """One whole run of two unequal workers: its folder, and what launch printed on stdout and stderr."""
    plan = home / "short.json"
    planning = start("recommend", RECORDED / "digits.json", "--budget", 2, "--epochs", 4, "-o", plan)
    _, err = planning.communicate(timeout=PATIENCE_S)
    assert planning.returncode == 0, err
    process = start("launch", plan, "--on", "local", "--slowdown", "1,3", "--yes")
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


@pytest.mark.slow  # tests/api/test_backends.py stops and resumes by the library
def test_stop_and_resume_from_another_terminal(hetopt: Hetopt, home: Path, finished: tuple[Path, str, str]) -> None:
    process = start("launch", home / "short.json", "--on", "local", "--slowdown", "1,2", "--steps", 10**6, "--yes")
    known = set((home / "runs").iterdir())
    [run] = until(lambda: set((home / "runs").iterdir()) - known)
    until(lambda: (run / "events.jsonl").exists() and '"step"' in (run / "events.jsonl").read_text())
    assert json.loads(hetopt("stop", run.name, "--json").out)["is"] == "stopped"
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7, err
    assert processes_of(run) == []
    again = start("launch", "--on", "local", "--resume", run.name, "--yes")
    until(lambda: (run / "events.jsonl").read_text().count('"training_started"') == 2)
    again.send_signal(signal.SIGINT)  # Ctrl-C in the terminal that follows the run
    _, err = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 130, err
    assert json.loads(hetopt("status", run.name, "--json").out)["sessions"] == 2
