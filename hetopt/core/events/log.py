"""The run's event log: JSON Lines, one event a line, appended as it happens and readable while the run goes on.

Every event has ``event`` (its name) and ``time_s`` (seconds since the epoch). A reader ignores names and fields that it
does not know, and a last line that is still being written.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TextIO

from pydantic_core import from_json

from hetopt.core.errors import RunFailed

EVENTS_FILE = "events.jsonl"

Event = dict[str, Any]


CLOCK_JUMPED, JUMP_S = "clock_jumped", 5.0


class LogUnwritable(RunFailed):
    """The operating system refused to write an event log."""


@contextmanager
def _written(path: Path | None) -> Iterator[None]:
    """Say of a refusal which log it is of: whoever sees it from outside cannot tell it from others of the process.

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


class EventLog:
    """Appends events to a file. A log without a path (ranks other than 0) drops them.

    Where the machine's clock is set, or it stood still with the machine, the next event has one before it that says by
    how much: the times on both sides do not belong together.

    Args:
        path: of the file.
        clock: seconds since the epoch.
        steady: seconds that nobody sets.

    Raises:
        LogUnwritable: the file cannot be opened, written or closed.
    """

    def __init__(
        self,
        path: Path | None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._steady = clock, steady
        self._apart_s: float | None = None
        self._path = path
        with _written(path):
            self._stream: TextIO | None = path.open("a", encoding="utf-8") if path is not None else None

    def write(self, event: str, **fields: Any) -> None:
        """Append one event and flush it to the operating system. NaN is refused: it is not JSON."""
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
        """Close the file; closing it again does nothing."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with _written(self._path):
                stream.close()


def tell_failure(path: Path, reason: str, **fields: Any) -> None:
    """Append ``run_failed`` to a log, as somebody's last word. Where the disk refuses even that, stderr has it."""
    try:
        with closing(EventLog(path)) as log:
            log.write("run_failed", reason=reason, **fields)
    except LogUnwritable as refused:
        print(f"{refused.message} {reason}", file=sys.stderr)


def parse_events(lines: Iterable[str | bytes]) -> Iterator[Event]:
    """The events of a log; an unfinished last line and lines that are no event are passed over."""
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
    """All events written to ``path`` so far; none when the file does not exist yet."""
    try:
        with path.open("rb") as stream, nothing_collected():
            return list(parse_events(stream))
    except FileNotFoundError:
        return []


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Of a million objects that all stay, looking for cycles time and again takes as long as reading them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
