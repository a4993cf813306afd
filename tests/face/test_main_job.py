"""The main job as a person does it: plan a recorded profile, train it on unequal processes, stop, resume, report."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hetopt.core.events.log import read_events
from hetopt.optimizer.plan import Plan
from tests.disturbance import PATIENCE_S
from tests.docs.shown import assert_shown
from tests.face.conftest import RECORDED, Answer, start

Hetopt = Callable[..., Answer]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for this module's runs."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HETOPT_HOME", str(folder))
        yield folder
        assert _processes_of(folder) == [], "a run outlived its test"


def _processes_of(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line:
            found.append(line)
    return found


def _plan(home: Path, name: str, *goal: str) -> Path:
    plan = home / name
    process = start("recommend", RECORDED / "digits.json", "--budget", 2, *goal, "-o", plan)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "next: hetopt launch" in out
    assert len(out.splitlines()) <= 22
    return plan


def _runs(home: Path) -> set[Path]:
    return set((home / "runs").glob("*"))


def _wait_for(home: Path, event: str, known: set[Path], seconds: float = PATIENCE_S) -> Path:
    """The folder of the run that is not ``known``, once it has logged ``event``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for run in _runs(home) - known:
            if any(entry["event"] == event for entry in read_events(run / "events.jsonl")):
                return run
        time.sleep(0.1)
    raise AssertionError(f"no {event} within {seconds} s")


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, str, str]:
    """One whole run of two unequal workers: its folder, and what launch printed on stdout and stderr."""
    plan = _plan(home, "short.json", "--epochs", "6")
    process = start("launch", plan, "--on", "local", "--slowdown", "1,3", "--yes")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return sorted((home / "runs").iterdir())[-1], out, err


def test_the_plan_keeps_its_budget_and_stands_alone(home: Path, finished: tuple[Path, str, str]) -> None:
    plan = Plan.load(home / "short.json")
    assert plan.chosen.prediction.cost_usd.high <= 2
    assert plan.profile.job.task == "digits"
    assert plan.run.stop.max_epochs == 6


def test_the_run_trains_on_every_sample_and_learns(finished: tuple[Path, str, str]) -> None:
    events = read_events(finished[0] / "events.jsonl")
    last = events[-1]
    assert last["event"] == "training_finished"
    assert last["reason"] == "epochs"
    assert last["epoch"] >= 6
    assert last["metrics"]["accuracy"] > 0.9
    assert (finished[0] / "model.pt").is_file() or (finished[0] / "model.safetensors").is_file()


def test_unequal_workers_get_unequal_shares(finished: tuple[Path, str, str]) -> None:
    steps = [event for event in read_events(finished[0] / "events.jsonl") if event["event"] == "step"]
    fast, slow = steps[-1]["local_batch_sizes"]
    assert fast > 1.5 * slow
    assert all(sum(event["local_batch_sizes"]) == fast + slow for event in steps)


def test_report_and_status_from_another_process(hetopt: Hetopt, home: Path, finished: tuple[Path, str, str]) -> None:
    report = hetopt("report", "--json")
    assert report.code == 0, report.err
    data = json.loads(report.out)
    figures = {figure["name"]: figure for figure in data["compared"]}
    assert {"step time", "steps", "training time", "run time", "cost at the plan's rate"} <= set(figures)
    assert figures["steps"]["measured"] == figures["steps"]["predicted"], "epochs fix the number of steps"
    assert data["within_tolerance"] in (True, False)
    assert data["state"] == "finished"
    status = json.loads(hetopt("status", "--json").out)
    assert status["state"] == "finished"
    assert [worker["slowdown"] for worker in status["workers"]] == [1, 3]
    shown = hetopt("report")
    assert "Predicted and measured" in shown.out
    assert_shown("quickstart.md", "hetopt report", shown.out)
    assert "Verdict" in shown.out


def test_logs_show_events_and_output(hetopt: Hetopt, finished: tuple[Path, str, str]) -> None:
    events = hetopt("logs", "--events")
    assert json.loads(events.out.splitlines()[0])["event"] == "run_started"
    assert hetopt("logs").code == 0


def test_launch_says_what_it_will_do_and_how_it_went(finished: tuple[Path, str, str]) -> None:
    _, out, err = finished
    assert "Nothing is rented" in " ".join(out.split())
    assert_shown("quickstart.md", "hetopt launch", out)
    assert "hetopt report" in " ".join(err.split())


@pytest.mark.slow
def test_stop_and_resume_from_another_terminal(hetopt: Hetopt, home: Path) -> None:
    plan = _plan(home, "long.json", "--epochs", "4000")
    known = _runs(home)
    process = start("launch", plan, "--on", "local", "--slowdown", "1,2", "--yes")
    run = _wait_for(home, "step", known)
    stopped = hetopt("stop", run.name, "--json")
    assert stopped.code == 0, stopped.err
    assert json.loads(stopped.out)["is"] == "stopped"
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7, err
    assert _processes_of(run) == []
    first = read_events(run / "events.jsonl")[-1]
    assert first["reason"] == "stopped"

    again = start("launch", "--on", "local", "--resume", run.name, "--yes")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            steps = [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "step"]
            if steps[-1] > first["step"]:
                break
            time.sleep(0.1)
        assert steps[-1] > first["step"], "the run went on from its checkpoint"
        # Ctrl-C in the terminal that follows the run.
        again.send_signal(signal.SIGINT)
        _, err = again.communicate(timeout=PATIENCE_S)
    finally:
        again.kill()
    assert again.returncode == 130, err
    assert "Traceback" not in err
    assert _processes_of(run) == []
    told = json.loads(hetopt("status", run.name, "--json").out)
    assert (told["state"], told["sessions"]) == ("stopped", 2)
    answer = hetopt("report", run.name)
    assert answer.code == 0
    assert "Its 2 sessions are added up" in " ".join(answer.out.split())


def test_interrupted_profile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, output = tmp_path / "scratch", tmp_path / "output"
    scratch.mkdir()
    output.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    process = start("profile", "digits", "-o", output / "p.json")
    deadline = time.monotonic() + PATIENCE_S
    while not _processes_of(scratch) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _processes_of(scratch), "the probe never started"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert list(output.iterdir()) == []
    assert not list(scratch.glob("hetopt-*")), "the probe's folder stays behind"
    assert _processes_of(scratch) == []
