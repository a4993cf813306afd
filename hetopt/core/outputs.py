"""Files that a script writes for its user (pictures, tables, tokenizers): which of its folder of the run come back."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.formatting import bytes_
from hetopt.core.paths import inside, shown

OUTPUT_VARIABLE = "HETOPT_OUTPUT"
"""In the environment of a script: the folder."""

OUTPUT_FOLDER = "outputs"
"""What it is called in the run's folder, and in the bucket."""

MOST_FILES = 1_000
MOST_BYTES = 10_000_000_000
"""Bounds of what is copied and paid for unasked: a machine sends each file by a request of its own as it ends."""


@dataclass
class Outputs:
    """Files that may be carried, in the order of their names.

    Attributes:
        sizes: bytes of each, by its name with slashes.
        left_out: a sentence for each kind of what may not.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, folder: Path, name: str, size: int) -> Path | None:
        """Count one file in.

        Args:
            folder: that it is in, or will be.
            name: below it.
            size: in bytes.

        Returns:
            Its path; None: it is left out.
        """
        try:
            path = inside(folder, name, what="output", any_text=True)
        except BadInput as error:
            self.left_out.append(error.message)
            return None
        if len(self.sizes) == MOST_FILES:
            self._leave(f"more than {MOST_FILES:,} files are there")
        elif sum(self.sizes.values()) + size > MOST_BYTES:
            self._leave(f"{shown(name)} would make it more than {bytes_(MOST_BYTES)}")
        else:
            self.sizes[name] = size
            return path
        return None

    def _leave(self, why: str) -> None:
        sentence = f"Not all outputs are carried: {why}."
        if not any(one.startswith("Not all") for one in self.left_out):
            self.left_out.append(sentence)


def written_in(folder: Path) -> Outputs:
    """What was written into a folder; links are not followed, and nothing but files counts."""
    found = Outputs()
    for name, size in sorted(_files(folder)):
        found.add(folder, name, size)
    return found


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield path.relative_to(folder).as_posix(), status.st_size
