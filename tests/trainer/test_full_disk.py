"""A disk without room for all that a run keeps: its model is written, and whatever checkpoints there is room for."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hetopt.backends.processes import LocalLauncher
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.core.run_folder import MODEL_FILE
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState
from tests.disturbance import PATIENCE_S

from .scenarios import toy_spec

STEPS = 60
CHECKPOINT_KB, MODEL_KB, REST_KB = 2560, 1280, 300
"""Of the toy task, and of logs and specs."""


@contextmanager
def disk(folder: Path, size_kb: int) -> Iterator[Path]:
    """A folder on a disk of so many kB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may make a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("size_kb", "checkpoints"),
    [
        (2 * CHECKPOINT_KB + REST_KB, 1),  # a third finds no room, nor does the model beside two
        (CHECKPOINT_KB + MODEL_KB // 2 + REST_KB, 0),  # the model finds none beside one
        (MODEL_KB + REST_KB, 0),
    ],
)
def test_a_run_comes_to_its_end_with_its_model_and_what_else_there_is_room_for(
    tmp_path: Path, size_kb: int, checkpoints: int
) -> None:
    often = {"control_period_steps": 5, "checkpoint_every_s": 0.01, "learning_rate_scale": 0.01}
    wish = toy_spec("wide", shares=(5, 3), stop={"max_steps": STEPS}, **often)
    launcher = LocalLauncher()
    with disk(tmp_path / "disk", size_kb) as run_dir:
        handle = launcher.start(RunSpec.model_validate_json(json.dumps(wish)), run_dir, {"TOY_WAIT_S": "0.01"})
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while not (status := launcher.poll(handle)).state.is_over:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        finally:
            launcher.stop(handle)
        assert status.state is RunState.FINISHED, status
        assert load_file(run_dir / MODEL_FILE)
        told = [event for event in read_events(run_dir / EVENTS_FILE) if event["event"].startswith("checkpoint_")]
        assert "checkpoint_failed" in [event["event"] for event in told]
        assert len(list(run_dir.glob("checkpoint/step-*/manifest.json"))) == checkpoints
        assert not checkpoints or told[-1] == {**told[-1], "event": "checkpoint_saved", "step": STEPS}
