"""A rehearsed cluster whose hosts die and return while the run goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.emulation.conductor import RehearsalLauncher, ask_for_change, check_change
from hetopt.backends.emulation.plan import parse_change, parse_changes
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, Event, read_events, read_log
from hetopt.core.run_spec import Change, RunSpec
from hetopt.core.run_status import RunState
from tests.disturbance import CoreTime, note
from tests.face.conftest import until

TASK = f"{Path(__file__).resolve().parents[2] / 'benchmarks' / '_toy.py'}:noise"
NAMES = ["h0", "h1", "h2"]


def spec(schedule: str, **changes: Any) -> RunSpec:
    worker = {"type": "spot", "local_batch_size": 32, "declared": {"fixed_s": 0.02, "per_sample_s": 0.001}}
    usual = {
        "task": TASK,
        "workers": [{"host": name, **worker} for name in NAMES],
        "stop": {"max_steps": 10**6},
        "batch_policy": "static",
        "evaluate_every_epochs": 1e5,
        "max_restarts": 5,
        "checkpoint_every_s": 2.0,
        "control_period_steps": 5,
        "exchange_timeout_s": 8.0,
        "miniature": {
            "hosts": [{"name": name} for name in NAMES],
            "changes": [json.loads(change.model_dump_json()) for change in parse_changes(schedule, NAMES)],
        },
    }
    return RunSpec.model_validate_json(json.dumps({**usual, **changes}))


@pytest.fixture(scope="module")
def run_dir(_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one run: its first host dies and returns, all die and one returns."""
    run_dir, begun = tmp_path_factory.mktemp("coming-and-going"), CoreTime.now()

    def all_die_and_one_returns() -> None:
        began_s = told(read_events(run_dir / EVENTS_FILE), "training_started")[0]["time_s"]
        ask_for_change(run_dir, Change(host="h1", at_s=time.time() - began_s + 1.0, returns=True))
        ask_for_change(run_dir, parse_change("* dies", NAMES))

    asked = False
    launcher = RehearsalLauncher(grace_s=10.0)
    handle = launcher.start(spec("step 20 h0 dies\nstep 21 h0 returns"), run_dir, {})
    try:
        deadline_s = time.monotonic() + 300
        while True:
            log = read_events(run_dir / EVENTS_FILE)
            is_back = any(0 in event["new"] for event in told(log, "workers_changed"))
            if not asked and is_back and told(log, "checkpoint_saved"):
                asked = True
                all_die_and_one_returns()
            if asked and log[-1]["event"] == "step" and len(log[-1]["local_batch_sizes"]) == 1:
                break
            assert time.monotonic() < deadline_s, log[-5:]
            assert not launcher.poll(handle).state.is_over, launcher.poll(handle).reason
            time.sleep(0.05)
    finally:
        launcher.stop(handle)
    assert launcher.poll(handle).state is RunState.STOPPED
    note(run_dir, begun)
    return run_dir


@pytest.fixture(scope="module")
def events(run_dir: Path) -> list[Event]:
    """The log of that run."""
    return read_events(run_dir / EVENTS_FILE)


def told(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def test_the_first_host_dies_and_returns(events: list[Event]) -> None:
    """It holds the store in which the others meet; they meet in another."""
    lost, *later = told(events, "workers_changed")
    back = next(change for change in later if 0 in change["workers"])
    assert (lost["workers"], lost["lost"], lost["from"]) == ([1, 2], [0], "memory")
    assert (back["new"], back["from"]) == ([0], "memory")
    assert "left in the middle of an exchange" in lost["reason"]
    steps = [event for event in told(events, "step") if event["time_s"] < back["time_s"]]
    assert [event["step"] for event in steps] == sorted(event["step"] for event in steps), "nothing is done again"
    assert all(sum(event["local_batch_sizes"]) == 96 for event in told(events, "step"))


def test_when_nobody_is_left_who_returns_begins_with_the_newest_checkpoint(events: list[Event]) -> None:
    last = told(events, "run_started")[-1]
    assert [worker["host"] for worker in last["workers"]] == ["h1"]
    saved = [event["step"] for event in told(events, "checkpoint_saved") if event["time_s"] < last["time_s"]]
    assert last["resumed_step"] == max(saved)


@pytest.mark.usefixtures("_possible")
def test_a_host_that_is_cut_off_stands_still_until_it_reaches_the_others_again(tmp_path: Path) -> None:
    """Those that were more go on without it, though it holds their store; it trains nothing of its own meanwhile."""
    launcher = RehearsalLauncher(grace_s=10.0)
    handle = launcher.start(spec("step 20 h0 cut"), tmp_path, {})

    def changes_until(workers: list[int]) -> list[Event]:
        def seen() -> list[Event]:
            return told(read_events(tmp_path / EVENTS_FILE), "workers_changed")

        until(
            lambda: workers in [change["workers"] for change in seen()], lambda: not launcher.poll(handle).state.is_over
        )
        return seen()

    try:
        (without,) = changes_until([1, 2])
        assert (without["lost"], without["from"]) == ([0], "memory")
        time.sleep(1.0)
        ask_for_change(tmp_path, parse_change("h0 heals", NAMES))
        # Who is slow to register (a busy machine) is left out of one generation, and asks for the next.
        _, *back = changes_until([0, 1, 2])
        assert all((change["new"], change["from"]) == ([], "memory") for change in back), "its worker is the same"
        time.sleep(1.0)
    finally:
        launcher.stop(handle)
    log = read_events(tmp_path / EVENTS_FILE)
    cut, healed = told(log, "condition_changed")
    assert (cut["cut"], healed["heals"]) == (True, True)
    assert without["time_s"] - cut["time_s"] < 60, "a quarter of an hour is what the kernel would wait"
    steps = [event["step"] for event in told(log, "step")]
    assert steps == sorted(set(steps)), "one line of training, and nothing is done again"
    assert {len(event["local_batch_sizes"]) for event in told(log, "step")} == {2, 3}


def test_a_run_that_cannot_do_without_a_host_takes_none_back() -> None:
    alone = spec("", max_restarts=0)
    for change in ("h1 returns", "h1 notice", "h1 cut"):
        with pytest.raises(BadInput, match="ends with the first that dies"):
            check_change(alone, parse_change(change, NAMES))
        check_change(spec(""), parse_change(change, NAMES))


# A rehearsed script whose hosts_of die and return: its workers start again with whoever is there, from a checkpoint.

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
TWO = ["h0", "h1"]
EPOCHS, EPOCH_STEPS = 30, 10


def spec_of_script(schedule: str, **changes: Any) -> RunSpec:
    worker = {"type": "spot", "local_batch_size": 16, "declared": {"fixed_s": 0.02, "per_sample_s": 0.001}}
    usual = {
        "task": "resumable.py",
        "script": [str(SCRIPTS / "resumable.py"), "--epochs", str(EPOCHS)],
        "workers": [{"host": name, **worker} for name in TWO],
        "stop": {"max_epochs": EPOCHS},
        "batch_policy": "static",
        "max_restarts": 1,
        "control_period_steps": 5,
        "miniature": {
            "hosts": [{"name": name} for name in TWO],
            "changes": [json.loads(change.model_dump_json()) for change in parse_changes(schedule, TWO)],
        },
    }
    return RunSpec.model_validate_json(json.dumps({**usual, **changes}))


def rehearsed(run: RunSpec, run_dir: Path) -> RunState:
    launcher = RehearsalLauncher(grace_s=10.0)
    handle = launcher.start(run, run_dir, {})
    try:
        until(lambda: launcher.poll(handle).state.is_over)
        return launcher.poll(handle).state
    finally:
        launcher.stop(handle)


def hosts_of(event: Event) -> list[str]:
    return [worker["host"] for worker in event["workers"]]


@pytest.mark.slow
def test_the_first_host_of_a_script_dies_and_returns(box: None, tmp_path: Path) -> None:
    """It has the log's writer and the meeting. Who returns joins at a checkpoint that all save for it."""
    assert rehearsed(spec_of_script("step 40 h0 dies\nstep 80 h0 returns"), tmp_path) is RunState.FINISHED
    events = read_events(tmp_path / EVENTS_FILE)
    begun = [event for event in events if event["event"] == "run_started"]
    assert [hosts_of(event) for event in begun] == [["h0", "h1"], ["h1"], ["h0", "h1"]]
    first, alone, both = (event["resumed_step"] for event in begun)
    assert first == 0
    assert 5 <= alone <= 50, "from the newest checkpoint before the loss"
    [paused, finished] = [event for event in events if event["event"] == "training_finished"]
    assert (paused["reason"], paused["step"]) == ("stopped", both), "nothing is lost by joining"
    assert (finished["reason"], finished["step"]) == ("script", EPOCHS * EPOCH_STEPS)
    assert all(sum(event["local_batch_sizes"]) == 32 for event in events if event["event"] == "step")
    told = RunFold.of(read_log(tmp_path / EVENTS_FILE).events)
    assert (told.step, told.failure) == (EPOCHS * EPOCH_STEPS, None)
    assert told.lost_steps <= 15, "what was done since that checkpoint"
    assert (tmp_path / "model.safetensors").is_file()


def test_what_cannot_be_done_to_a_script_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be cut off for a while: its workers would wait for it"):
        check_change(spec_of_script(""), parse_change("h1 cut", TWO))
    for change in ("h1 returns", "h1 notice"):
        check_change(spec_of_script(""), parse_change(change, TWO))
        with pytest.raises(BadInput, match="this run ends with the first that dies"):
            check_change(spec_of_script("", max_restarts=0), parse_change(change, TWO))
