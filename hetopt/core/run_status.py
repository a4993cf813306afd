"""A run's state and why it failed, judged by its event log, its processes and their printed output."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hetopt.core.errors import RunFailed
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, ITS_OWNER, EventReader
from hetopt.core.events.records import (
    ConditionChanged,
    LogEvent,
    ProbeEvent,
    Remarked,
    RunStarted,
    TrainingFinished,
)
from hetopt.core.paths import MissingFile, opened_file
from hetopt.core.run_folder import LOG_FOLDER, SPEC_FILE, host_log_folder

_TAIL_BYTES = 65_536
LOG_ROOM_BYTES = 65_536
"""Room on a disk below which the next line of a log may be refused: nothing large may be written then."""


class RunState(StrEnum):
    """The states of a run: starting, running, and the three in which it is over: finished, stopped and failed."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """True where nothing of the run is left running."""
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run's state and, where it failed, a sentence on why and a hint on what would help.

    Attributes:
        state: state of the run.
        reason: why it failed; None: it did not, or nobody knows.
        hint: what would help; None: nothing is known.
    """

    state: RunState
    reason: str | None = None
    hint: str | None = None

    def next_step(self, reading: str) -> str:
        """Return advice after a failure: the hint, if any, then ``reading``, the advice on which log to read."""
        return reading if self.hint is None else f"{self.hint.rstrip('.')}; or {reading}"


def failure_reason(events: Sequence[LogEvent]) -> str | None:
    """Return why a run's latest attempt failed, the first reason since workers last started; None: it did not.

    Args:
        events: events of its log, or the end of them, oldest first.
    """
    return RunFold.of(events).failure


def judge(events: Sequence[LogEvent], *, alive: bool, stop_wished: bool, last_line: str | None) -> RunStatus:
    """Return a run's status from the end of its event log and from whether its host process lives.

    A living run is starting or running; a dead one is finished, stopped or failed.

    Args:
        events: end of its log, oldest first.
        alive: whether its host process lives.
        stop_wished: whether somebody asked it to stop.
        last_line: what the output of its processes says of the end, used where no event says how it ended; None:
            nothing.
    """
    # What others write between the workers' events says nothing about how the run itself is.
    last = next((event for event in reversed(events) if not isinstance(event, ConditionChanged | Remarked)), None)
    if alive:
        is_starting = last is None or isinstance(last, RunStarted)
        return RunStatus(state=RunState.STARTING if is_starting else RunState.RUNNING)
    if isinstance(last, TrainingFinished):
        return RunStatus(state=RunState.STOPPED if last.reason == "stopped" else RunState.FINISHED)
    if isinstance(last, ProbeEvent) and last.event == "probe_finished":
        return RunStatus(state=RunState.FINISHED)
    if stop_wished:
        return RunStatus(state=RunState.STOPPED)
    seen = RunFold.of(events)
    reason = seen.failure or last_line or "its processes are gone and left no word"
    return RunStatus(state=RunState.FAILED, reason=reason, hint=seen.failure_hint)


def exit_code(codes: Sequence[int], *, host_died: bool) -> int:
    """Return a run's exit code: 6 if a host died, else the smallest of ``codes`` from 2 to 127, else 6 if any failed.

    The smallest of hetopt's own is the most specific (2 bad input before 6 run failed). A host that died is a failed
    run, whatever its survivors say.

    Args:
        codes: exit codes of the run's processes; empty: 0.
        host_died: whether a host of the run was lost.
    """
    if host_died:
        return RunFailed.exit_code
    specific = [code for code in codes if 1 < code < 128]
    return min(specific) if specific else RunFailed.exit_code if any(codes) else 0


def log_bytes(run_dir: Path) -> int:
    """Return the size of a run's event log in bytes; 0 where there is none yet."""
    path = run_dir / EVENTS_FILE
    return path.stat().st_size if path.exists() else 0


def last_events(run_dir: Path, since: int = 0) -> list[LogEvent]:
    """Read the events in the last 64 KiB of a run's log, none before byte ``since``; empty: there is no log yet.

    Args:
        run_dir: the run's folder.
        since: byte of the log before which nothing is read, such as the end of earlier sessions.

    Raises:
        BadInput: the log is there and cannot be read.
    """
    return EventReader(path=run_dir / EVENTS_FILE, offset=max(since, log_bytes(run_dir) - _TAIL_BYTES)).read()


def read_tail(path: Path) -> str:
    """Read the last 64 KiB of a file as text, from the start of a line; empty: there is no file.

    Raises:
        BadInput: the file is there and cannot be read.
    """
    try:
        with opened_file(path, hint=ITS_OWNER) as stream:
            begin = stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            data = stream.read(_TAIL_BYTES)
    except MissingFile:
        return ""
    return data[data.find(b"\n") + 1 if begin else 0 :].decode("utf-8", errors="replace")


def last_words(run_dir: Path) -> str | None:
    """Return why a run's processes ended without logging it, by its folder, disk and output; None: nothing tells.

    Raises:
        BadInput: a log cannot be read.
    """
    if not (run_dir / SPEC_FILE).exists():
        return "it was never started: its folder holds no run"
    if shutil.disk_usage(run_dir).free < LOG_ROOM_BYTES:
        return f"the disk that holds {run_dir} is full, so its event log could not grow"
    return last_log_line(run_dir)


_LIBRARY_LOG = re.compile(r"\[?[IWEF]\d{4} \d\d:\d\d:\d\d")


def last_log_line(run_dir: Path, host: str | None = None) -> str | None:
    """Return the newest error that a run's processes printed, else a sentence with their last line; None: no output.

    What a library logs, in the form of glog, is neither: torch tells that it ends workers, whoever wanted that.

    Args:
        run_dir: the run's folder.
        host: name of the host whose output is read; None: all hosts' output.

    Raises:
        BadInput: a log cannot be read, or no host can be called ``host``.
    """
    folder = run_dir / LOG_FOLDER if host is None else host_log_folder(run_dir, host)
    files = sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    lines = [line for path in files for line in reversed(read_tail(path).splitlines())]
    # An exception's last line names its type and says what went wrong; banners and frames do not.
    errors = (line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt|Exit)\b|error: ", line))
    words = (line for line in lines if re.search("[A-Za-z]{3}", line) and not _LIBRARY_LOG.match(line.strip()))
    error, last = next(errors, None), next(words, None)
    if error is not None or last is None:
        return error and error.strip()
    return f"its processes are gone and gave no reason; the last that they printed is `{last.strip()}`"
