"""Where the catalogue's figures come from: a source with its date and licence for every column of every file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from hetopt.core.artifact import Record, validated
from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog_rows import HINT, read_object


def _day_of(date: str) -> datetime.date:
    """Return a day or month, ISO 8601, as a day: the first where only the month is known."""
    return datetime.date.fromisoformat(date if len(date) == 10 else f"{date}-01")


def _dated(date: str) -> str:
    try:
        _day_of(date)
    except ValueError:
        raise ValueError("it must look like 2026-07-20 or 2026-07") from None
    return date


class Source(Record):
    """A source of figures: title, date, licence and caveat.

    Attributes:
        date: when the figures were true: a day or a month, ISO 8601.
        caveat: what to know before relying on them.
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
    """All sources of a catalogue, by the short names that its files use.

    Attributes:
        provider: of what can be rented.
        by_name: the sources.
        columns: the sources of each column, by file; a file ``regions/*.csv`` and a column ``*`` stand for all others.
    """

    provider: str = ""
    by_name: dict[str, Source] = Field(alias="sources")
    columns: dict[str, dict[str, Annotated[list[str], Field(min_length=1)]]] = Field(alias="fields")

    def of(self, file: str, column: str) -> tuple[Source, ...]:
        """Return the sources of one column of one file.

        Raises:
            BadInput: none are named.
        """
        folder = file.rpartition("/")[0]
        for pattern in (file, f"{folder}/*.csv"):
            by_column = self.columns.get(pattern, {})
            if names := by_column.get(column) or by_column.get("*"):
                return tuple(self.by_name[name] for name in names)
        raise BadInput(f"sources.json names no source for {column} of {file}.", hint=HINT)


def read_sources(path: Path) -> Sources:
    """Read the sources of a catalogue from its sources.json.

    Raises:
        BadInput: the file is missing or cannot be used.
    """
    sources = validated(Sources, read_object(path), origin=str(path), hint=HINT)
    named = {name for columns in sources.columns.values() for names in columns.values() for name in names}
    for name in sorted(named - sources.by_name.keys()):
        raise BadInput(f"{path}: fields name the source '{name}', which is not described.", hint=HINT)
    return sources
