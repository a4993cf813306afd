"""How workers learn what the conductor of a rehearsal has changed: one small file in the run's folder."""

from __future__ import annotations

from pathlib import Path

from hetopt.core.artifact import read_record, write_atomically
from hetopt.core.errors import BadInput
from hetopt.core.scaled_emulation import Conditions

CONDITIONS_FILE = "conditions.json"


def write_conditions(run_dir: Path, conditions: Conditions) -> None:
    """Replace the conditions of the run; a reader sees the old ones or the new ones, never a mixture."""
    write_atomically(run_dir / CONDITIONS_FILE, conditions.model_dump_json() + "\n")


class ConditionsReader:
    """Reads the conditions again only when the file was replaced: a look costs one system call."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / CONDITIONS_FILE
        self._seen: tuple[int, int] | None = None
        self._conditions = Conditions()

    def now(self) -> Conditions:
        """The present conditions; without a file, everything is as it was declared."""
        try:
            status = self._path.stat()
        except OSError:
            return self._conditions
        identity = (status.st_ino, status.st_mtime_ns)
        if identity != self._seen:
            try:
                self._conditions = read_record(Conditions, self._path, hint="launch the run again")
            except BadInput:
                return self._conditions  # not one that `write_conditions` left: keep what was known
            self._seen = identity
        return self._conditions
