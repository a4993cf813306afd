"""Named bytes that all machines of a run see, wherever they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

GoesOn = Callable[[int, int], bool]
"""Is told the bytes that are there, and all; says whether to go on."""


class Objects(Protocol):
    """Named bytes that all machines of a run see."""

    def get(self, name: str) -> bytes | None:
        """What is under a name; None where there is nothing, or where nobody can be reached."""
        found = self.versioned(name)
        return None if found is None else found.data

    def put(self, name: str, data: bytes) -> bool:
        """Write; says whether that went well."""

    def send(self, name: str, path: Path) -> bool:
        """Write a file, in parts where it is large; says whether that went well.

        Raises:
            FileNotFoundError: there is none.
        """

    def fetch(self, name: str, path: Path) -> bool:
        """Read into a file; says whether that went well. The file is whole, or not there."""

    def versioned(self, name: str) -> Versioned | None:
        """What is under a name, with its version; None where there is nothing, or where nobody can be reached."""

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Write where that version still is (None: where nothing is); says whether that went well, and was so."""

    def names(self, prefix: str) -> Sequence[str]:
        """All names that begin so, sorted."""

    def delete(self, name: str) -> None:
        """Remove, if that goes well."""

    def download(self, url: str, folder: Path, goes_on: GoesOn) -> bool:
        """Fetch every object below a prefix into a folder; whether all of it is there."""


@dataclass(frozen=True, kw_only=True)
class Versioned:
    """What was under a name, and which version that was."""

    data: bytes
    version: str
