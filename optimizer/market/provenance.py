"""Where the catalogue's figures come from: a source with its date and licence for every column of every file."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog_rows import HINT, read_object

_DAY_OR_MONTH = re.compile(r"\d{4}-\d{2}(-\d{2})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where figures come from.

    Attributes:
        name: the short name that the catalogue's files use.
        date: when the figures were true: a day or a month, ISO 8601.
        caveat: what to know before relying on them.
    """

    name: str
    title: str
    date: str
    licence: str
    url: str | None = None
    caveat: str | None = None

    def __post_init__(self) -> None:
        """Refuse a source without a date."""
        if not _DAY_OR_MONTH.fullmatch(self.date):
            raise ValueError(f"the date of {self.name} is '{self.date}', but must look like 2026-07-20 or 2026-07")

    @property
    def day(self) -> datetime.date:
        """The date; the first of the month where only that is known."""
        return datetime.date.fromisoformat(self.date if len(self.date) == 10 else f"{self.date}-01")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """All sources of a catalogue.

    Attributes:
        columns: the sources of each column, by file; a file ``regions/*.csv`` and a column ``*`` stand for all others.
    """

    path: Path
    by_name: Mapping[str, Source]
    columns: Mapping[str, Mapping[str, tuple[Source, ...]]]

    def of(self, file: str, column: str) -> tuple[Source, ...]:
        """The sources of one column of one file.

        Raises:
            BadInput: sources.json names none.
        """
        folder = file.rpartition("/")[0]
        for pattern in (file, f"{folder}/*.csv"):
            found = self.columns.get(pattern, {})
            if sources := found.get(column) or found.get("*"):
                return sources
        raise BadInput(f"{self.path} names no source for {column} of {file}.", hint=HINT)


def read_sources(path: Path) -> Sources:
    """Read sources.json.

    Raises:
        BadInput: the file is missing or cannot be used.
    """
    data = read_object(path)
    by_name = {name: _source(path, name, fields) for name, fields in _object(path, "sources", data).items()}

    def named(names: object) -> tuple[Source, ...]:
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise BadInput(f"{path}: every column under fields needs a list of source names.", hint=HINT)
        for name in names:
            if name not in by_name:
                raise BadInput(f"{path}: fields name the source '{name}', which is not described.", hint=HINT)
        return tuple(by_name[name] for name in names)

    fields = _object(path, "fields", data)
    columns = {file: {column: named(names) for column, names in _object(path, file, fields).items()} for file in fields}
    return Sources(path=path, by_name=by_name, columns=columns)


def _object(path: Path, key: str, data: Mapping[str, object]) -> dict[str, object]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise BadInput(f"{path}: {key} is not a JSON object.", hint=HINT)
    return value


def _source(path: Path, name: str, fields: object) -> Source:
    known = {"title", "date", "licence", "url", "caveat"}
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise BadInput(f"{path}: the source {name} is not an object of texts.", hint=HINT)
    if not {"title", "date", "licence"} <= set(fields) <= known:
        raise BadInput(
            f"{path}: the source {name} needs a title, a date and a licence, and may have a url and a caveat.",
            hint=HINT,
        )
    try:
        source = Source(name=name, **fields)
        _ = source.day
    except ValueError as error:
        raise BadInput(f"{path}: {error}.", hint=HINT) from None
    return source
