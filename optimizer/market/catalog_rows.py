"""Reads the catalogue's files strictly: every cell that cannot be used becomes one sentence with file and line."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.paths import read_json, read_text, shortened
from hetopt.core.plain_text import fault_of, texts_in

SCHEMA_VERSION = 1
MOST_DIGITS = 15
"""Of a whole number: more are no count of anything that is rented."""

NAME_ANOTHER = "name a folder in the format of the bundled catalogue (see docs/catalogue.md), or leave `catalog` out"
HINT = "correct the file, or leave `catalog` out to use the bundled catalogue"


class Row:
    """One line of a CSV file. Blank cells are unknown, never zero; every number in a catalogue is 0 or more."""

    __slots__ = ("_cells", "_columns", "_where")

    def __init__(self, columns: dict[str, int], cells: Sequence[str], where: str) -> None:
        self._columns = columns
        self._cells = cells
        self._where = where

    def bad(self, problem: str) -> BadInput:
        """The error to raise for this line."""
        return BadInput(f"{self._where}: {problem}.", hint=HINT)

    def has(self, column: str) -> bool:
        """Whether the cell is filled."""
        index = self._columns.get(column)
        return index is not None and self._cells[index] != ""

    def text(self, column: str) -> str:
        """The text of the cell; '' where it is blank."""
        return self._cells[self._columns[column]]

    def required(self, column: str) -> str:
        """The cell, which must be filled."""
        cell = self.text(column)
        if not cell:
            raise self.bad(f"{column} is blank")
        return cell

    def number(self, column: str) -> float:
        """A finite number, 0 or more."""
        cell = self.required(column)
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if 0 <= value < math.inf:
            return value
        raise self.bad(f"{column} is '{shortened(cell, 40)}', which is not a number of 0 or more")

    def optional_number(self, column: str) -> float | None:
        """A finite number, 0 or more, or unknown."""
        return self.number(column) if self.has(column) else None

    def count(self, column: str) -> int:
        """A whole number, 0 or more."""
        cell = self.required(column)
        if cell.isdecimal() and len(cell) <= MOST_DIGITS:
            return int(cell)
        raise self.bad(f"{column} is '{shortened(cell, 40)}', which is not a whole number of 0 or more")

    def optional_count(self, column: str) -> int | None:
        """A whole number, 0 or more, or unknown."""
        return self.count(column) if self.has(column) else None

    def flag(self, column: str) -> bool | None:
        """True for 1, False for 0, None for a blank cell."""
        cell = self.text(column)
        if cell in ("", "0", "1"):
            return None if not cell else cell == "1"
        raise self.bad(f"{column} is '{shortened(cell, 40)}', which is neither 0, 1 nor blank")


def read_rows(path: Path, *, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    """The lines of a CSV file whose header names all ``required`` columns and none beyond ``optional``.

    Raises:
        BadInput: no such file, not UTF-8, an unexpected header, or a line with too few or too many cells.
    """
    lines = list(_records(path))
    header = lines[0][1] if lines else []
    missing = [column for column in required if column not in header]
    unknown = [column for column in header if column not in required and column not in optional]
    if missing or unknown or len(set(header)) < len(header):
        problem = (
            f"lacks the column {missing[0]}"
            if missing
            else f"has the unknown column '{unknown[0]}'"
            if unknown
            else "names a column twice"
        )
        raise BadInput(f"{path} {problem}.", hint=HINT)
    columns = {column: index for index, column in enumerate(header)}
    for number, cells in lines[1:]:
        where = f"{path} line {number}"
        if len(cells) != len(header):
            raise BadInput(f"{where}: has {len(cells)} cells where the header has {len(header)}.", hint=HINT)
        yield Row(columns, cells, where)


def read_object(path: Path) -> dict[str, object]:
    """A JSON object with the ``schema_version`` that this hetopt reads."""
    data = read_json(path, hint=NAME_ANOTHER)
    for text in texts_in(data):
        fault = fault_of(text)
        if fault is not None:
            raise BadInput(f"{path}: a text {fault}.", hint=HINT)
    if not isinstance(data, dict):
        raise BadInput(f"{path} does not hold a JSON object.", hint=HINT)
    version = data.get("schema_version")
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
    """Non-blank lines with their numbers."""
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
