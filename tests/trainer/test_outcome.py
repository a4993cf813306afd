"""How a run is, told from the end of its log and from its processes."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hetopt.backends.processes import run_status
from hetopt.core.events.log import EventLog
from hetopt.core.events.records import LogEvent
from hetopt.core.listening import collectives_on
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, judge, last_log_line
from hetopt.trainer.failure import FailureReport
from hetopt.trainer.host.agent import died_of, torchrun_arguments
from tests.logs import an_event

from .scenarios import toy_spec

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


def test_the_worker_that_a_signal_killed_is_the_cause() -> None:
    assert died_of({0: 6, 1: 1}, SPEC) is None
    assert died_of({0: 6, 2: -9}, SPEC) == (
        "worker 2 on here was killed (SIGKILL); the kernel does this when memory runs out"
    )
    assert "SIGSEGV" in (died_of({1: -11, 0: -15}, SPEC) or "")
    assert died_of({0: -15}, SPEC) is None, "the agent ends survivors with SIGTERM"


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


def test_a_local_run_stays_on_this_machine(tmp_path: Path) -> None:
    arguments = torchrun_arguments(SPEC, tmp_path)
    assert "--nproc-per-node=3" in arguments
    assert collectives_on("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may make a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_run_that_ended_on_a_full_disk_says_so(small_disk: Path) -> None:
    write_spec(small_disk, SPEC)
    assert run_status(small_disk).reason == "its processes are gone and left no word"
    with contextlib.suppress(OSError), (small_disk / "fills").open("wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)
    assert run_status(small_disk).reason == f"the disk that holds {small_disk} is full, so its event log could not grow"
    assert run_status(small_disk).state is RunState.FAILED
