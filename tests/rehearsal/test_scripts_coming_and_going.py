"""A rehearsed script whose hosts die and return: its workers start again with whoever is there, from a checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.emulation.backend import RehearsalLauncher
from hetopt.backends.emulation.description import parse_change, parse_changes
from hetopt.backends.emulation.injection import check_change
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, Event, read_events, read_log
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
NAMES = ["h0", "h1"]
EPOCHS, EPOCH_STEPS = 30, 10


def spec(schedule: str, **changes: Any) -> RunSpec:
    worker = {"type": "spot", "local_batch_size": 16, "declared": {"fixed_s": 0.02, "per_sample_s": 0.001}}
    usual = {
        "task": "resumable.py",
        "script": [str(SCRIPTS / "resumable.py"), "--epochs", str(EPOCHS)],
        "workers": [{"host": name, **worker} for name in NAMES],
        "stop": {"max_epochs": EPOCHS},
        "batch_policy": "static",
        "max_restarts": 1,
        "control_period_steps": 5,
        "miniature": {
            "hosts": [{"name": name} for name in NAMES],
            "changes": [json.loads(change.model_dump_json()) for change in parse_changes(schedule, NAMES)],
        },
    }
    return RunSpec.model_validate_json(json.dumps({**usual, **changes}))


def rehearsed(spec: RunSpec, run_dir: Path, within_s: float = 300.0) -> RunState:
    launcher = RehearsalLauncher(grace_s=10.0)
    handle = launcher.start(spec, run_dir, {})
    try:
        deadline_s = time.monotonic() + within_s
        while not launcher.poll(handle).state.is_over:
            assert time.monotonic() < deadline_s, read_events(run_dir / EVENTS_FILE)[-5:]
            time.sleep(0.1)
        return launcher.poll(handle).state
    finally:
        launcher.stop(handle)


def hosts(event: Event) -> list[str]:
    return [worker["host"] for worker in event["workers"]]


@pytest.mark.slow
def test_the_first_host_dies_and_returns(box: None, tmp_path: Path) -> None:
    """It has the log's writer and the meeting. Who returns joins at a checkpoint that all save for it."""
    assert rehearsed(spec("step 40 h0 dies\nstep 80 h0 returns"), tmp_path) is RunState.FINISHED
    events = read_events(tmp_path / EVENTS_FILE)
    begun = [event for event in events if event["event"] == "run_started"]
    assert [hosts(event) for event in begun] == [["h0", "h1"], ["h1"], ["h0", "h1"]]
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
        check_change(spec(""), parse_change("h1 cut", NAMES))
    for change in ("h1 returns", "h1 notice"):
        check_change(spec(""), parse_change(change, NAMES))
        with pytest.raises(BadInput, match="this run ends with the first that dies"):
            check_change(spec("", max_restarts=0), parse_change(change, NAMES))
