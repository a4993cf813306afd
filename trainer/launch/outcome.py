"""What a run's event log and process say about how the run is, and why it failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hetopt.profiler.errors import RunFailed
from hetopt.trainer.events import EVENTS_FILE, Event, parse_events
from hetopt.trainer.launch.base import RunState, RunStatus
from hetopt.trainer.launch.logs import LOG_FOLDER

_TERMINAL = ("training_finished", "probe_finished", "run_failed")
_CIRCUMSTANCES = ("condition_changed", "miniature_slowed")
"""What others write between the workers' events: nothing about how the run itself is."""
_TAIL_BYTES = 65_536


def failure_reason(events: Sequence[Event]) -> str | None:
    """Why the latest attempt failed, if it did: the first reason given since workers last started is the cause."""
    reason: str | None = None
    for event in reversed(events):
        if event["event"] == "run_failed":
            reason = str(event.get("reason", "no reason was given"))
        elif event["event"] == "run_started" or event["event"] in _TERMINAL:
            break
    return reason


def judge(events: Sequence[Event], *, alive: bool, stop_wished: bool, last_line: str | None) -> RunStatus:
    """How the run is.

    Args:
        events: the end of its log, oldest first.
        alive: whether its host process lives.
        stop_wished: whether somebody asked it to stop.
        last_line: the last thing its processes printed, told when a run ended without an event that says how.
    """
    events = [event for event in events if event["event"] not in _CIRCUMSTANCES]
    last = events[-1]["event"] if events else None
    if alive:
        return RunStatus(state=RunState.STARTING if last in (None, "run_started") else RunState.RUNNING)
    if last == "training_finished":
        stopped = events[-1].get("reason") == "stopped"
        return RunStatus(state=RunState.STOPPED if stopped else RunState.FINISHED)
    if last == "probe_finished":
        return RunStatus(state=RunState.FINISHED)
    if stop_wished:
        return RunStatus(state=RunState.STOPPED)
    reason = failure_reason(events) or last_line or "its processes are gone and left no word"
    return RunStatus(state=RunState.FAILED, reason=reason)


def exit_code(codes: Sequence[int], *, host_died: bool) -> int:
    """The exit code for a run whose hosts ended so; negative codes are signals.

    The smallest of hetopt's own is the most specific (2 bad input before 6 run failed). A host that died is a failed
    run, whatever its survivors say.
    """
    if host_died:
        return RunFailed.exit_code
    own = [code for code in codes if 1 < code < 128]
    return min(own) if own else RunFailed.exit_code if any(codes) else 0


def last_events(run_dir: Path) -> list[Event]:
    """The end of a run's log."""
    return list(parse_events(read_tail(run_dir / EVENTS_FILE).splitlines(keepends=True)))


def read_tail(path: Path) -> str:
    """The end of a file, from the start of a line; empty when there is none."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL_BYTES))
            data = stream.read()
    except FileNotFoundError:
        return ""
    if size > _TAIL_BYTES:
        data = data[data.find(b"\n") + 1 :]
    return data.decode("utf-8", errors="replace")


def last_log_line(run_dir: Path) -> str | None:
    """The last line of output that means something to a person, newest file first."""
    folder = run_dir / LOG_FOLDER
    files = sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        for line in reversed(read_tail(path).splitlines()):
            # An exception's last line names its type and says what went wrong; banners and frames do not.
            if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt|Exit)\b.*", line):
                return line.strip()
    for path in files:
        lines = [line.strip() for line in read_tail(path).splitlines() if re.search(r"[A-Za-z]{3}", line)]
        if lines:
            return lines[-1]
    return None
