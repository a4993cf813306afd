"""Rehearsals as a person runs them: launched, disturbed, reported, stopped and cleaned up from the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetopt.backends.emulation.namespaces import find_networks, why_not
from hetopt.core.events.log import Event, read_events
from tests.disturbance import PATIENCE_S
from tests.face.conftest import RECORDED, Answer, start

Hetopt = Callable[..., Answer]

HOSTS = "speed=1,rate=200mbit; speed=0.5,rate=100mbit"
ON_TWO_HOSTS = ("--on", "rehearsal", "--hosts", HOSTS, "--yes")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for this module's runs, on a machine that can rehearse."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HETOPT_HOME", str(folder))
        yield folder
        assert networks_of(folder) == [], "a network outlived its rehearsal"


@pytest.fixture(scope="module")
def plan(home: Path) -> Path:
    path = home / "plan.json"
    asked = ("--budget", 2, "--epochs", 500, "--batch-size", 64, "--types", "m6g.*")
    process = start("recommend", RECORDED / "digits.json", *asked, "-o", path)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return path


def networks_of(folder: Path) -> list[str]:
    """Networks whose owner works in the folder. Long folder names are kept by their end."""
    found = []
    for network in find_networks():
        purpose = network.owner.purpose if network.owner else ""
        if str(folder) in purpose or (purpose and str(folder).endswith(purpose)):
            found.append(network.id)
    return found


def wait_for(home: Path, known: set[Path], reached: Callable[[Event], bool], seconds: float = PATIENCE_S) -> Path:
    """The folder of the run that is not ``known``, once it has logged an event that is ``reached``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for run in set((home / "runs").glob("*")) - known:
            if any(reached(event) for event in read_events(run / "events.jsonl")):
                return run
        time.sleep(0.1)
    raise AssertionError(f"nothing of that kind within {seconds} s")


def is_step(event: Event) -> bool:
    return bool(event["event"] == "step")


@pytest.fixture(scope="module")
def rehearsed(home: Path, plan: Path) -> tuple[Path, str, str]:
    """A whole rehearsal in which a host slows down: its folder, and what launch printed."""
    schedule = home / "schedule.txt"
    schedule.write_text("step 20 h1 speed=0.25,rate=50mbit  # a neighbour wakes up\n")
    process = start("launch", plan, *ON_TWO_HOSTS, "--steps", 60, "--schedule", schedule)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return sorted((home / "runs").iterdir())[-1], out, err


def test_what_will_run_is_shown_before(rehearsed: tuple[Path, str, str]) -> None:
    out = " ".join(rehearsed[1].split())
    for said in ("on 2 hosts, rehearsed here", "200 Mbit/s", "100 Mbit/s", "1 change is scheduled", "60 steps"):
        assert said in out
    assert "Nothing is rented" in out


def test_it_trains_and_follows_the_schedule(rehearsed: tuple[Path, str, str]) -> None:
    run, out, err = rehearsed
    events = read_events(run / "events.jsonl")
    assert events[-1]["event"] == "training_finished"
    assert events[-1]["step"] == 60
    changed = [event for event in events if event["event"] == "condition_changed"]
    assert [(event["host"], event["speed"], event["rate_bits_per_s"]) for event in changed] == [("h1", 0.25, 5e7)]
    assert changed[0]["step"] >= 20
    assert "h1: speed 0.25, link 50 Mbit/s" in err, "it is told while it happens"
    assert "finished after 60 steps" in out


def test_report_and_status_tell_what_happened(hetopt: Hetopt, rehearsed: tuple[Path, str, str]) -> None:
    run = rehearsed[0].name
    report = json.loads(hetopt("report", run, "--json").out)
    assert report["on"] == "rehearsal"
    assert report["over_time"]["step"][-1] == 60
    assert "condition_changed" in [one["kind"] for one in report["happenings"]]
    assert [worker["speed"] for worker in report["workers"]] == [1, 0.5]
    shown = hetopt("report", run).out
    assert "Over the run" in shown
    assert "h1: speed 0.25" in " ".join(shown.split())
    status = json.loads(hetopt("status", run, "--json").out)
    assert status["conditions"]["speed_factors"] == {"h1": 0.5}
    assert "h1 computes at 0.5 of the speed" in " ".join(hetopt("status", run).out.split())
    assert hetopt("logs", run).code == 0


def test_a_rehearsal_is_disturbed_and_a_dead_host_fails_it(hetopt: Hetopt, home: Path, plan: Path) -> None:
    known = set((home / "runs").glob("*"))
    process = start("launch", plan, *ON_TWO_HOSTS)
    try:
        run = wait_for(home, known, is_step)
        slowed = hetopt("inject", run.name, "h1 speed=0.25")
        assert slowed.code == 0, slowed.err
        wait_for(home, known, lambda event: event["event"] == "condition_changed" and event["speed"] == 0.25)
        assert hetopt("inject", run.name, "h1 dies", "--json").code == 0
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 6, err
    assert "h1 died" in err
    late = hetopt("inject", run.name, "h0 speed=2")
    assert late.code == 2
    assert "is over" in late.err


@pytest.mark.slow  # in a place of its own; tests/face/test_main_job.py does it on this machine
def test_stop_and_resume(hetopt: Hetopt, home: Path, plan: Path) -> None:
    known = set((home / "runs").glob("*"))
    process = start("launch", plan, *ON_TWO_HOSTS, "--batch-policy", "static", "--steps", 100_000)
    try:
        run = wait_for(home, known, is_step)
        stopped = hetopt("stop", run.name, "--json")
        assert json.loads(stopped.out)["is"] == "stopped", stopped.err
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 7, err
    assert networks_of(run) == []
    assert hetopt("launch", "--on", "local", "--resume", run.name).code == 2
    known = set((home / "runs").glob("*")) - {run}
    steps = len([event for event in read_events(run / "events.jsonl") if is_step(event)])
    again = start("launch", "--on", "rehearsal", "--resume", run.name, "--yes")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len([event for event in read_events(run / "events.jsonl") if is_step(event)]) <= steps:
            assert time.monotonic() < deadline, "it did not go on"
            time.sleep(0.2)
        assert hetopt("stop", run.name).code == 0
        again.communicate(timeout=PATIENCE_S)
    finally:
        again.kill()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="nothing here takes rights away")
def test_without_rights_one_sentence_says_so(plan: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    refused = subprocess.run(
        [
            *("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"),
            *(sys.executable, "-m", "hetopt.cli.main", "launch", str(plan), *ON_TWO_HOSTS),
        ],
        env={**os.environ, "HETOPT_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2, refused.stderr
    said = " ".join(refused.stderr.split())
    assert "error: no cluster can be rehearsed here" in said
    assert "choose --on local" in said
    assert not home.exists(), "no run is begun"


LEAVES_A_NETWORK = """
import os, signal, sys
from hetopt.backends.emulation.namespaces import EmulatedNetwork
from hetopt.core.scaled_emulation import EmulatedHost
network = EmulatedNetwork.create([EmulatedHost(name="h0"), EmulatedHost(name="h1")], owner=sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("own_leftovers")
def test_gc_removes_what_a_killed_process_left(hetopt: Hetopt, home: Path) -> None:
    owner = home / "killed"
    subprocess.run([sys.executable, "-c", LEAVES_A_NETWORK, str(owner)], check=False)
    (left,) = networks_of(owner)
    shown = hetopt("gc", "--dry-run")
    assert f"would remove rehearsal {left}" in " ".join(shown.out.split())
    assert networks_of(owner) == [left], "looking removes nothing"
    removed = json.loads(hetopt("gc", "--json").out)
    assert left in [one["id"] for one in removed if one["removed"]]
    assert networks_of(owner) == []
    assert hetopt("gc").code == 0
