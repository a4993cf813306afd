"""How workers learn what the conductor of a rehearsal has changed: one small file in the run's folder."""

from __future__ import annotations

from pathlib import Path

from hetopt.core.artifact import ReplacedRecord, write_atomically
from hetopt.core.scaled_emulation import Conditions

CONDITIONS_FILE = "conditions.json"
AS_DECLARED = Conditions()


def write_conditions(run_dir: Path, conditions: Conditions) -> None:
    """Replace the conditions of the run; a reader sees the old ones or the new ones, never a mixture."""
    write_atomically(run_dir / CONDITIONS_FILE, conditions.model_dump_json() + "\n")


class ConditionsReader:
    """Reads the conditions again only when the file was replaced: a look costs one system call."""

    def __init__(self, run_dir: Path) -> None:
        self._file = ReplacedRecord(Conditions, run_dir / CONDITIONS_FILE)

    def now(self) -> Conditions:
        """The present conditions; without a file, everything is as it was declared."""
        return self._file.now() or AS_DECLARED
