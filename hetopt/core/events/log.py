"""The run's event log, written and read: JSON Lines, one event a line, appended as it happens.

Every event has ``event`` (its name) and ``time_s`` (seconds since the epoch). A log may come from another machine or
version: a reader ignores names and fields that it does not know, counts lines that are no events, and leaves a last
line that is still being written.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError
from pydantic_core import from_json

from hetopt.core.artifact import faults
from hetopt.core.errors import RunFailed
from hetopt.core.events.records import ANY_EVENT, LogEvent
from hetopt.core.paths import MissingFile, opened_file

EVENTS_FILE = "events.jsonl"

Event = dict[str, Any]


CLOCK_JUMPED, JUMP_S = "clock_jumped", 5.0


class LogUnwritable(RunFailed):
    """The error of an event log that the operating system refused to write."""


@contextmanager
def _written(path: Path | None) -> Iterator[None]:
    """Turn an operating system's refusal into an error that names the log.

    Raises:
        LogUnwritable: the block was refused.
    """
    try:
        yield
    except OSError as error:
        raise LogUnwritable(
            f"the event log {path} cannot be written: {error.strerror}.",
            hint="see that its folder can be written to and has room, then go on with `hetopt launch --resume`",
        ) from error


def is_torn(descriptor: int) -> bool:
    """Return whether the last line of an open file is unfinished: its writer died within it, or the disk was full."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


class EventLog:
    """A run's event log open for appending; without a path (ranks other than 0) it drops events.

    A line that an earlier writer left unfinished is ended first, so that it does not take the next event with it.

    Where the machine's clock is set, or it stood still with the machine, the next event has one before it that says by
    how much: the times on both sides do not belong together.

    Args:
        path: path of the file, made if it is not there; None: events are dropped.
        clock: returns seconds since the epoch.
        steady: returns seconds of a clock that nobody sets.

    Raises:
        LogUnwritable: the file cannot be opened, written or closed.
    """

    def __init__(
        self,
        path: Path | None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the log at ``path`` for appending; None: drop events.

        Raises:
            LogUnwritable: the file cannot be opened.
        """
        self._clock, self._steady = clock, steady
        self._apart_s: float | None = None
        self._path = path
        with _written(path):
            self._stream: TextIO | None = path.open("a+", encoding="utf-8") if path is not None else None
            if self._stream is not None and is_torn(self._stream.fileno()):
                self._stream.write("\n")
                self._stream.flush()

    def write(self, event: str, **fields: Any) -> None:
        """Append an event with its time as a JSON line and flush it; a closed log, or one without a path, does nothing.

        Where the wall clock has jumped since the last event, against the steady clock, an event that says so goes
        first.

        Args:
            event: name of the kind of event.
            fields: fields of the event, as JSON takes them.

        Raises:
            LogUnwritable: the file cannot be written.
            ValueError: a number is NaN or infinite.
        """
        if self._stream is None:
            return
        now_s = round(self._clock(), 6)
        apart_s = now_s - self._steady()
        jump_s, self._apart_s = apart_s - (apart_s if self._apart_s is None else self._apart_s), apart_s
        records = [{"event": event, "time_s": now_s, **fields}]
        if abs(jump_s) > JUMP_S:
            records.insert(0, {"event": CLOCK_JUMPED, "time_s": now_s, "by_s": round(jump_s, 3)})
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        with _written(self._path):
            self._stream.write(text)
            self._stream.flush()

    def close(self) -> None:
        """Close the log's file; closing it again does nothing.

        Raises:
            LogUnwritable: what was written last does not reach the file.
        """
        stream, self._stream = self._stream, None
        if stream is not None:
            with _written(self._path):
                stream.close()


def tell_failure(path: Path, reason: str, **fields: Any) -> None:
    """Append a ``run_failed`` event with its reason to the log at ``path``; print both where it cannot be written.

    Args:
        path: path of the log.
        reason: sentence on what went wrong.
        fields: further fields of the event, such as ``hint``.
    """
    try:
        with closing(EventLog(path)) as log:
            log.write("run_failed", reason=reason, **fields)
    except LogUnwritable as refused:
        print(f"{refused.message} {reason}", file=sys.stderr)


def parse_events(lines: Iterable[str | bytes]) -> Iterator[Event]:
    """Yield a log's events as unchecked dictionaries, up to an unfinished line; skip lines that are no events."""
    for line in lines:
        if line[-1:] not in ("\n", b"\n"):
            return
        try:
            record = from_json(line)  # twice as fast as json.loads: logs of long runs have a hundred megabytes
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("event"), str):
            yield record


def read_events(path: Path) -> list[Event]:
    """Return all events written to the log at ``path`` so far, as unchecked dictionaries; none without a file.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return list(parse_events(stream))
    except FileNotFoundError:
        return []


MOST_LINE_BYTES = 8 * 2**20
"""Largest line of an event log: longer than the start of a run with ten thousand workers; what is longer is no event,
and is not kept in memory."""

ITS_OWNER = "ask its owner, or run the command as the user who started the run"
"""What to do about a file of a run that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """The number of an event log's lines that are no events, and what is wrong with the first of them.

    Attributes:
        lines: number of lines that are no events.
        first: what is wrong with the first of them, such as ``line 3: step.loss must be a finite number, got nan``;
            empty: there is none.
    """

    lines: int = 0
    first: str = ""

    @property
    def sentence(self) -> str | None:
        """A sentence on the unread lines for people; None where all was read."""
        if not self.lines:
            return None
        many, are = ("1 line", "is") if self.lines == 1 else (f"{self.lines:,} lines", "are")
        return f"{many} of the event log could not be read and {are} left out: {self.first}."

    def __add__(self, other: Unread) -> Unread:
        """Return the unread lines of two logs: their number, and the first of them."""
        return Unread(lines=self.lines + other.lines, first=self.first or other.first)


@dataclass(kw_only=True)
class EventReader:
    """A reader of a growing event log, from where it last stopped; it counts the lines that are no events.

    Attributes:
        path: path of the log; a file that is not there yet has no events.
        offset: bytes that were read so far.
        line: number of the last line that was read.
        unread: the lines that were no events so far.
    """

    path: Path
    offset: int = 0
    line: int = 0
    unread: Unread = Unread()
    _is_within_line: bool = False

    def read(self) -> list[LogEvent]:
        """Read the events that the log has gained since the last call; empty: none, or there is no file yet.

        A last line that is still being written is left for a later call.

        Raises:
            BadInput: the file is there and cannot be read.
        """
        return list(self.events())

    def events(self) -> Iterator[LogEvent]:
        """Yield the events that the log has gained since the last call; count lines that are no events in ``unread``.

        A line that is not finished waits for the next call. Without a file there are no events.

        Raises:
            BadInput: the file is there and cannot be read.
        """
        with suppress(MissingFile), opened_file(self.path, hint=ITS_OWNER) as stream:
            stream.seek(self.offset)
            while part := stream.readline(MOST_LINE_BYTES):
                ends = part[-1:] == b"\n"
                if not ends and len(part) < MOST_LINE_BYTES:
                    return  # until the line's end comes it is read again
                self.offset += len(part)
                begins, self._is_within_line = not self._is_within_line, not ends
                event = self.parse(part) if begins else None
                if event is not None:
                    yield event

    def parse(self, line: bytes) -> LogEvent | None:
        """Return the event of a log's next line; None: it is empty, or no event, which is counted in ``unread``."""
        self.line += 1
        try:
            event: LogEvent = ANY_EVENT.validator.validate_json(line)
            return event
        except ValidationError as error:
            if line.strip():
                is_long = len(line) == MOST_LINE_BYTES
                fault = f"longer than {MOST_LINE_BYTES // 2**20} MiB" if is_long else faults(error)[0]
                self.unread += Unread(lines=1, first=f"line {self.line}: {fault}"[:300])
            return None


def read_log(path: Path) -> list[LogEvent]:
    """Read all events in the log at ``path``, in file order; skip lines that are no events; empty: there is no file.

    Raises:
        BadInput: the file is there and cannot be read.
    """
    return EventReader(path=path).read()


DECISIONS_FILE = "decisions.jsonl"


def write_decision(run_dir: Path, event: str, fields: Mapping[str, Any]) -> None:
    """Append an event with its fields to the supervisor's own log, ``decisions.jsonl`` in a run's folder.

    Args:
        run_dir: the run's folder.
        event: name of the kind of event.
        fields: fields of the event.

    Raises:
        LogUnwritable: the log cannot be written.
    """
    with closing(EventLog(run_dir / DECISIONS_FILE)) as decisions:
        decisions.write(event, **fields)


def read_with_decisions(run_dir: Path) -> tuple[list[LogEvent], Unread]:
    """Read a run's events and its supervisor's, merged by time, and what could not be read as events.

    A log that is not there has no events.

    Raises:
        BadInput: a log is there and cannot be read.
    """
    run, decisions = EventReader(path=run_dir / EVENTS_FILE), EventReader(path=run_dir / DECISIONS_FILE)
    events = heapq.merge(run.read(), decisions.read(), key=lambda event: event.time_s)
    return list(events), run.unread + decisions.unread
