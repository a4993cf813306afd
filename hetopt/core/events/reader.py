"""Reads event logs: whoever looks at a run gets its events here, as records, and is told what was passed over.

A log comes from disk, from other machines and from other versions. A line that is no event ends nothing: it is counted.
A last line that is still being written waits for its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from hetopt.core.events.log import nothing_collected
from hetopt.core.events.records import ANY_EVENT, LogEvent
from hetopt.core.faults import faults
from hetopt.core.reading import MissingFile, opened_file

MOST_LINE_BYTES = 8 * 2**20
"""Longer than the start of a run with ten thousand workers; what is longer is no event, and is not kept in memory."""

_CHUNK_BYTES = 2**20

ITS_OWNER = "ask its owner, or run the command as the user who started the run"
"""What to do about a file of a run that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """Lines of a log that are no events.

    Attributes:
        lines: how many.
        first: what is wrong with the first of them, such as ``line 3 (step): loss must be a finite number, got nan``.
    """

    lines: int = 0
    first: str = ""

    @property
    def sentence(self) -> str | None:
        """What a person is told; None where all was read."""
        if not self.lines:
            return None
        many, are = ("1 line", "is") if self.lines == 1 else (f"{self.lines:,} lines", "are")
        return f"{many} of the event log could not be read and {are} left out: {self.first}."

    def __add__(self, other: Unread) -> Unread:
        """The unread lines of two logs: their number, and the first of them."""
        return Unread(lines=self.lines + other.lines, first=self.first or other.first)


@dataclass(frozen=True, kw_only=True)
class EventsRead:
    """Events in their order, and what else was there."""

    events: list[LogEvent]
    unread: Unread = Unread()


@dataclass(kw_only=True)
class LineParser:
    """Turns lines into events and counts the others.

    Attributes:
        unread: so far.
        line: number of the last line that was seen.
    """

    unread: Unread = field(default_factory=Unread)
    line: int = 0

    def parse(self, lines: Iterable[bytes]) -> list[LogEvent]:
        """The events among whole lines."""
        found, parse, number = [], ANY_EVENT.validator.validate_json, self.line
        for line in lines:
            number += 1
            try:
                found.append(parse(line))
            except ValidationError as error:
                if line.strip():
                    self._pass_over(number, error)
        self.line = number
        return found

    def too_long(self) -> None:
        """A line was too long to be kept."""
        self.line += 1
        self._count(f"line {self.line}: longer than {MOST_LINE_BYTES // 2**20} MiB")

    def _pass_over(self, number: int, error: ValidationError) -> None:
        if self.unread.lines:  # only the first is told
            self._count("")
            return
        first = error.errors(include_url=False, include_context=True)[0]
        where = [str(part) for part in first["loc"]]
        match first["type"]:
            case "union_tag_invalid":
                said = f"no event is called {first.get('ctx', {}).get('tag', '')!r:.80}"
            case "union_tag_not_found" | "model_attributes_type" | "model_type":
                said = "not an event"
            case "json_invalid":
                said = "not JSON"
            case _:
                said = faults(error)[0].removeprefix(f"{where[0]}." if where else "")
        kind = f" ({where[0]})" if where else ""
        self._count(f"line {number}{kind}: {said}"[:300])

    def _count(self, first: str) -> None:
        self.unread = self.unread + Unread(lines=1, first=first)


@dataclass(kw_only=True)
class EventReader:
    """Reads on in a log that grows, from where it last stopped.

    Attributes:
        path: of the log; a file that is not there yet has no events.
    """

    path: Path
    _offset: int = 0
    _rest: bytes = b""
    _is_skipping: bool = False
    _parser: LineParser = field(default_factory=LineParser)

    @property
    def unread(self) -> Unread:
        """Lines that were no events so far."""
        return self._parser.unread

    def read(self) -> list[LogEvent]:
        """What the log has gained.

        Raises:
            BadInput: the file cannot be read.
        """
        found: list[LogEvent] = []
        with nothing_collected():
            for some in self.parts():
                found += some
        return found

    def parts(self) -> Iterator[list[LogEvent]]:
        """The same in parts, for whoever does not keep them all.

        Raises:
            BadInput: the file cannot be read.
        """
        try:
            with opened_file(self.path, hint=ITS_OWNER) as stream:
                stream.seek(self._offset)
                while chunk := stream.read(_CHUNK_BYTES):
                    self._offset += len(chunk)
                    with nothing_collected():
                        some = self._parser.parse(self._whole_lines(chunk))
                    yield some
        except MissingFile:
            return

    def _whole_lines(self, chunk: bytes) -> list[bytes]:
        *lines, rest = chunk.split(b"\n")
        if not lines:
            self._keep(rest)
            return []
        if self._is_skipping:
            self._is_skipping = False
            del lines[0]
        else:
            lines[0] = self._rest + lines[0]
        self._rest = b""
        self._keep(rest)
        return lines

    def _keep(self, rest: bytes) -> None:
        """Until the line's end comes; what grows beyond every event is let go."""
        if self._is_skipping:
            return
        self._rest += rest
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._is_skipping = b"", True
            self._parser.too_long()


def read_log(path: Path) -> EventsRead:
    """All that a log holds so far; nothing where there is none yet.

    Raises:
        BadInput: the file cannot be read.
    """
    reader = EventReader(path=path)
    events = reader.read()
    return EventsRead(events=events, unread=reader.unread)
