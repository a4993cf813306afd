"""Reading of the catalogue's files as declared records, and the sources of their columns: title, date and licence."""

import csv
import datetime
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from hetopt.core.artifact import Record, faults, validated
from hetopt.core.errors import BadInput
from hetopt.core.paths import read_json, read_text, shortened
from hetopt.core.plain_text import fault_of, texts_in

SCHEMA_VERSION = 1

NAME_ANOTHER = "name a folder in the format of the bundled catalogue (see docs/catalogue.md), or leave `catalog` out"
HINT = "correct the file, or leave `catalog` out to use the bundled catalogue"

FACT = ConfigDict(allow_inf_nan=False, extra="forbid")
"""Configuration of dataclasses that hold values of the catalogue's files: no unknown fields, infinities or NaN."""

Name = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Field(ge=0, le=10**15)]
"""A number of things: a whole number from 0 to 10^15."""

Made = TypeVar("Made")


def read_rows(
    path: Path,
    make: Callable[[Mapping[str, str]], Made],
    *,
    columns: Sequence[str],
    required: int | Sequence[str] = 0,
    others: bool = False,
    filled: Collection[str] = (),
    called: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    hint: str = HINT,
) -> Iterator[tuple[str, Made]]:
    """Yield ('FILE line N', record) for each line of a CSV file; ``make`` builds a record of its non-blank cells.

    Blank cells are unknown, and left out. The whole file is read, and its header checked, before the first record.

    Args:
        path: path of the file.
        make: returns the record of a line's non-blank cells, by column; pydantic's errors become BadInput.
        columns: all columns that the file may have, in any order.
        required: columns that the header must have: their names, or how many of ``columns`` from the first; 0: all.
        others: whether further columns are passed over; False: they are an error.
        filled: columns that a line must fill, else it is passed over.
        called: column of each field whose name differs from it, by the name of the record's class, for messages.
        hint: hint of errors about the file.

    Raises:
        BadInput: there is no such file, it is not UTF-8 or no CSV, its header lacks a column, has an unknown one or one
            twice, or a line cannot be used.
    """
    lines = list(_records(path))
    header = lines[0][1] if lines else []
    wanted = columns[: required or None] if isinstance(required, int) else required
    missing = [column for column in wanted if column not in header]
    unknown = [] if others else [column for column in header if column not in columns]
    if missing or unknown or len(set(header)) < len(header):
        problem = (
            f"lacks the column {missing[0]}"
            if missing
            else f"has the unknown column '{unknown[0]}'"
            if unknown
            else "names a column twice"
        )
        raise BadInput(f"{path} {problem}.", hint=hint)
    is_read, needed, file = [column in columns for column in header], set(filled), str(path)
    names = list(compress(header, is_read))
    for number, cells in lines[1:]:
        where = f"{file} line {number}"
        if len(cells) != len(header):
            raise BadInput(f"{where}: has {len(cells)} cells where the header has {len(header)}.", hint=hint)
        values = {column: cell for column, cell in zip(names, compress(cells, is_read), strict=True) if cell}
        if not needed.issubset(values):
            continue
        try:
            record = make(values)
        except ValidationError as error:
            raise BadInput(f"{where}: {faults(error, called.get(error.title))[0]}.", hint=hint) from None
        yield where, record


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a catalogue's file without its ``schema_version``, which must be the supported one.

    Raises:
        BadInput: the file is missing, is no JSON object, holds text that cannot be shown, or is of another version.
    """
    data = read_json(path, hint=NAME_ANOTHER)
    for text in texts_in(data):
        fault = fault_of(text)
        if fault is not None:
            raise BadInput(f"{path}: a text {fault}.", hint=HINT)
    if not isinstance(data, dict):
        raise BadInput(f"{path} does not hold a JSON object.", hint=HINT)
    version = data.pop("schema_version", None)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadInput(
            f"{path} was written with catalogue schema {version}; this hetopt reads up to {SCHEMA_VERSION}.",
            hint="install the newer hetopt that wrote it",
        )
    if version != SCHEMA_VERSION:
        raise BadInput(
            f"{path} has catalogue schema {shortened(repr(version), 40)}, which this hetopt cannot read.", hint=HINT
        )
    return data


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of each non-blank line of a CSV file.

    Raises:
        BadInput: the file cannot be read or is no CSV, or a cell cannot be shown.
    """
    reader = csv.reader(io.StringIO(read_text(path, hint=NAME_ANOTHER), newline=""), strict=True)
    try:
        for cells in reader:
            # A line that is short and plain as a whole has no cell that is not: tens of thousands of cells are read.
            fault = fault_of("".join(cells)) and next(filter(None, map(fault_of, cells)), None)
            if fault is not None:
                raise BadInput(f"{path} line {reader.line_num}: a cell {fault}.", hint=HINT)
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise BadInput(f"{path} line {reader.line_num}: {error}.", hint=HINT) from None


def _day_of(date: str) -> datetime.date:
    """Return a day or month, ISO 8601, as a day: of a month, the first."""
    return datetime.date.fromisoformat(date if len(date) == 10 else f"{date}-01")


def _dated(date: str) -> str:
    """Return the date as it is if it is a day or a month, ISO 8601; raise `ValueError` otherwise."""
    try:
        _day_of(date)
    except ValueError:
        raise ValueError("it must look like 2026-07-20 or 2026-07") from None
    return date


class Source(Record):
    """Source of some figures of a catalogue: title, date, licence and caveat.

    Attributes:
        title: title of the data, for people.
        date: when the figures were true: a day or a month, ISO 8601.
        licence: under which the figures may be used.
        url: url where the data are; None: nowhere that can be linked.
        caveat: what to know before relying on them; None: nothing.
    """

    title: str
    date: Annotated[str, AfterValidator(_dated)]
    licence: str
    url: str | None = None
    caveat: str | None = None

    @property
    def day(self) -> datetime.date:
        """The day at which the figures were true; the first of the month where only that is known."""
        return _day_of(self.date)


class Sources(Record):
    """Contents of a catalogue's sources.json: its sources by short name, and the sources of each file's columns.

    Attributes:
        provider: provider of the machines.
        by_name: sources by their short names.
        columns: short names of each column's sources, by file and column; ``regions/*.csv`` and ``*`` stand for others.
    """

    provider: str = ""
    by_name: dict[str, Source] = Field(alias="sources")
    columns: dict[str, dict[str, Annotated[list[str], Field(min_length=1)]]] = Field(alias="fields")

    def of(self, file: str, column: str) -> tuple[Source, ...]:
        """Return the sources, at least one, of a column of a catalogue's file, such as ``regions/us-east-1.csv``.

        A file's own entry goes before its folder's (``regions/*.csv``), and a column's before ``*``.

        Raises:
            BadInput: sources.json names none for that column.
        """
        folder = file.rpartition("/")[0]
        for pattern in (file, f"{folder}/*.csv"):
            by_column = self.columns.get(pattern, {})
            if names := by_column.get(column) or by_column.get("*"):
                return tuple(self.by_name[name] for name in names)
        raise BadInput(f"sources.json names no source for {column} of {file}.", hint=HINT)


def read_sources(path: Path) -> Sources:
    """Return the sources of a catalogue, read from the sources.json at ``path``.

    Raises:
        BadInput: the file is missing or cannot be used, or a column names a source that the file does not describe.
    """
    sources = validated(Sources, read_object(path), origin=str(path), hint=HINT)
    named = {name for columns in sources.columns.values() for names in columns.values() for name in names}
    for name in sorted(named - sources.by_name.keys()):
        raise BadInput(f"{path}: fields name the source '{name}', which is not described.", hint=HINT)
    return sources
