"""How a run is, told from the end of its log and from its processes."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hetopt.backends.processes import LocalLauncher, run_status
from hetopt.core.events.log import EVENTS_FILE, EventLog, read_events
from hetopt.core.events.records import LogEvent
from hetopt.core.run_folder import MODEL_FILE, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, judge, last_log_line
from hetopt.trainer.failure import FailureReport, reason_of
from hetopt.trainer.host.agent import died_of
from tests.logs import an_event

from .scenarios import toy_spec
from .test_local_launcher import over

SPEC = RunSpec.model_validate_json(json.dumps(toy_spec()))


def log(*events: str | LogEvent) -> list[LogEvent]:
    return [an_event(event) if isinstance(event, str) else event for event in events]


FINISHED = an_event("training_finished", reason="steps")
STOPPED = an_event("training_finished", reason="stopped")


def failed(reason: str) -> LogEvent:
    return an_event("run_failed", reason=reason)


@pytest.mark.parametrize(
    ("events", "alive", "stop_wished", "state", "reason"),
    [
        (log(), True, False, RunState.STARTING, None),
        (log("run_started"), True, False, RunState.STARTING, None),
        (log("run_started", "training_started"), True, True, RunState.RUNNING, None),
        (log("run_started", FINISHED), True, False, RunState.RUNNING, None),
        (log("run_started", FINISHED), False, False, RunState.FINISHED, None),
        (log("probe_finished"), False, False, RunState.FINISHED, None),
        (log("run_started", STOPPED), False, True, RunState.STOPPED, None),
        (log("run_started", "step"), False, True, RunState.STOPPED, None),
        (log("run_started", "step"), False, False, RunState.FAILED, "last words"),
        (log(failed("cause"), failed("echo")), False, False, RunState.FAILED, "cause"),
        (log("run_started", failed("first"), "run_started", failed("second")), False, False, RunState.FAILED, "second"),
        (log("run_started", failed("first"), "run_started", FINISHED), False, False, RunState.FINISHED, None),
        (log(FINISHED, failed("resuming failed")), False, False, RunState.FAILED, "resuming failed"),
    ],
)
def test_how_a_run_is(
    events: list[LogEvent], alive: bool, stop_wished: bool, state: RunState, reason: str | None
) -> None:
    status = judge(events, alive=alive, stop_wished=stop_wished, last_line="last words")
    assert (status.state, status.reason) == (state, reason)


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ({0: 6, 1: 1}, None),
        ({0: 6, 2: -9}, "worker 2 on here was killed (SIGKILL)"),
        ({1: -11, 0: -15}, "SIGSEGV"),
        ({0: -15}, None),  # the agent ends survivors with SIGTERM
    ],
)
def test_the_worker_that_a_signal_killed_is_the_cause(codes: dict[int, int], cause: str | None) -> None:
    died = died_of(codes, SPEC)
    assert died is None if cause is None else cause in str(died)


def test_the_last_words_are_an_error_if_there_is_one(tmp_path: Path) -> None:
    assert last_log_line(tmp_path) is None
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "host.log").write_text(
        "=====\nsome banner\n=====\nW1127 05:24:52.804000 26091 torch/x.py:1028] Sending signal SIGTERM\n"
    )
    told = "its processes are gone and gave no reason; the last that they printed is `some banner`"
    assert last_log_line(tmp_path) == told, "a banner is no reason"
    (tmp_path / "log" / "worker.log").write_text("Traceback\n  File x\nValueError: no luck\n  note\n")
    assert last_log_line(tmp_path) == "ValueError: no luck"


def test_a_last_word_that_the_disk_refuses_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path / "events.jsonl")
    with FailureReport(tmp_path, 1) as failure, closing(log):
        log.write("training_started", step=0)
    assert failure.exit_code == 6
    said = capsys.readouterr().err
    refused = f"the event log {tmp_path / 'events.jsonl'} cannot be written: No space left on device."
    assert f"LogUnwritable: {refused}" in said
    assert f"{refused} {refused}" in said, "the log refuses its last word, which is that it refuses"


def test_a_reason_is_one_plain_line() -> None:
    assert reason_of(ValueError("\x1b[1mWeights only\x1b[0m\n  load failed")) == "ValueError: Weights only load failed"


def test_a_run_that_ended_on_a_full_disk_says_so(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", size_kb=256) as folder:
        write_spec(folder, SPEC)
        assert run_status(folder).reason == "its processes are gone and left no word"
        with contextlib.suppress(OSError), (folder / "fills").open("wb", buffering=0) as stream:
            while True:
                stream.write(b"x" * 4096)
        status = run_status(folder)
        assert status.reason == f"the disk that holds {folder} is full, so its event log could not grow"
        assert status.state is RunState.FAILED


# --- A disk without room for all that a run keeps: its model is written, and whatever checkpoints there is room for


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
            status = over(launcher, handle)
        finally:
            launcher.stop(handle)
        assert status.state is RunState.FINISHED, status
        assert load_file(run_dir / MODEL_FILE)
        told = [event for event in read_events(run_dir / EVENTS_FILE) if event["event"].startswith("checkpoint_")]
        assert checkpoints or "checkpoint_failed" in [event["event"] for event in told]
        assert len(list(run_dir.glob("checkpoint/step-*/manifest.json"))) == checkpoints
        assert not checkpoints or told[-1] == {**told[-1], "event": "checkpoint_saved", "step": STEPS}
