"""Keeps the pages of an interrupted reading, so that the next one goes on where it stopped."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.core.errors import BadInput
from hetopt.core.reading import parse_json, read_text

KEPT_HOURS = 6
"""Prices of an older reading would be mixed with today's, and page tokens do not live much longer."""


MOST_BYTES_KEPT = 1_000_000_000
"""The price list of a region has tens of megabytes."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is there of one part: its items, the token of the next page, and whether there is none any more."""

    items: tuple[Any, ...]
    next_token: str | None
    complete: bool


@dataclass(frozen=True, kw_only=True)
class AnswerStore:
    """Pages of several parts under one folder, a line a page.

    ``begun`` is when the first page was asked for. Later pages belong to the same question, so it stays.
    """

    folder: Path
    begun: datetime.datetime

    @classmethod
    def open(cls, folder: Path, now: datetime.datetime) -> AnswerStore:
        """The store, emptied if it was begun too long ago."""
        note = folder / "begun"
        begun = now
        with contextlib.suppress(BadInput, ValueError):
            begun = datetime.datetime.fromisoformat(read_text(note))
        if not datetime.timedelta() <= now - begun <= datetime.timedelta(hours=KEPT_HOURS):
            shutil.rmtree(folder)
            begun = now
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(begun.isoformat(), encoding="utf-8")
        return cls(folder=folder, begun=begun)

    def progress(self, part: str) -> Progress:
        """Whole pages that were kept; one that was cut short by a kill is read again."""
        items: list[Any] = []
        token, complete = None, False
        path = self._path(part)
        with contextlib.suppress(BadInput):  # what cannot be read is asked for again
            for line in read_text(path, most_bytes=MOST_BYTES_KEPT).splitlines():
                page = parse_json(line, origin=str(path))
                if not isinstance(page, dict) or not isinstance(page.get("items"), list) or "next" not in page:
                    break
                items += page["items"]
                token, complete = page["next"], page["next"] is None
        return Progress(items=tuple(items), next_token=token, complete=complete)

    def add(self, part: str, items: Sequence[Any], next_token: str | None) -> None:
        """Keep one page; it is on the disk when this returns."""
        path = self._path(part)
        with path.open("ab+") as stream:
            if stream.tell() > 0:
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":  # after a page that was cut short
                    _drop_last_line(path)
            page = json.dumps({"items": items, "next": next_token}, default=str)
            stream.write(page.encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def forget(self, part: str) -> None:
        """Delete the stored pages of one part, so that it is read anew."""
        self._path(part).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the store; everything in it has been used."""
        shutil.rmtree(self.folder)

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.jsonl"


def _drop_last_line(path: Path) -> None:
    whole = path.read_bytes()
    os.truncate(path, whole.rfind(b"\n") + 1)
