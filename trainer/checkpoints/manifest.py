"""The list of a checkpoint's files with their sizes and hashes: what tells a whole checkpoint from a torn one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints

from hetopt.core.artifact import Artifact, Record

SUFFIX, SUFFIX_BEFORE = ".safetensors", ".pt"
"""Of a checkpoint's files, now and up to schema 4."""

STATE_FILE = f"state{SUFFIX}"

CheckpointFile = Annotated[str, StringConstraints(pattern=r"^(state|rank-[0-9]{1,6})\.(safetensors|pt)$")]
"""The files that a checkpoint has; a manifest may come from a bucket, and names no others."""


class FileRecord(Record):
    """One file as it was written."""

    size_bytes: NonNegativeInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @classmethod
    def of(cls, data: bytes | memoryview) -> Self:
        """The record of a file with this content."""
        return cls(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def to_text(self) -> str:
        """In a few words, as workers tell each other."""
        return f"{self.size_bytes} {self.sha256}"

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Read a manifest from the text that `to_text` wrote."""
        size, sha256 = text.split()
        return cls(size_bytes=int(size), sha256=sha256)

    def fault(self, data: bytes) -> str | None:
        """How a file differs from what was written, in a few words; None: it does not."""
        if len(data) != self.size_bytes:
            return f"has {len(data)} bytes instead of {self.size_bytes}"
        return None if hashlib.sha256(data).hexdigest() == self.sha256 else "was altered"


class Manifest(Artifact):
    """Written last, so that a checkpoint that has one was once whole."""

    KIND: ClassVar[str] = "checkpoint"
    VERSION: ClassVar[int] = 5
    READ_AS_WELL: ClassVar[tuple[int, ...]] = (4,)
    MADE_BY: ClassVar[str] = "hetopt launch"

    step: NonNegativeInt
    digest: str = Field(description="of the run, see run_digest")
    workers: PositiveInt
    files: Mapping[CheckpointFile, FileRecord]

    def fault(self, folder: Path) -> str | None:
        """What is wrong with the files in a folder, in a few words that name the first; None: nothing.

        All of every file is read.
        """
        for name, record in sorted(self.files.items()):
            try:
                fault = record.fault((folder / name).read_bytes())
            except OSError as error:
                fault = f"cannot be read ({error.strerror})"
            if fault is not None:
                return f"{name} {fault}"
        return None


def rank_file(rank: int) -> str:
    """The file of what one worker has of its own."""
    return f"rank-{rank}{SUFFIX}"
