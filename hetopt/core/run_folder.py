"""What is in a run's folder: file names, and how the spec gets in and out."""

from __future__ import annotations

from pathlib import Path

from hetopt.core.artifact import read_record, write_atomically
from hetopt.core.run_spec import RunSpec

SPEC_FILE = "spec.json"
STOP_FILE = "stop"
"""Its presence is the wish that the run ends at its next control period."""
MODEL_FILE = "model.pt"
"""The model of a run that came to its planned end."""
UNFINISHED_MODEL_FILE = "model-unfinished.pt"
"""The model of a run that was stopped before it; the last event says after how many steps. Finishing removes it."""
CHECKPOINT_FOLDER = "checkpoint"
MANIFEST_FILE = "manifest.json"
"""Of each checkpoint, in its folder."""


def write_spec(run_dir: Path, spec: RunSpec) -> None:
    """Put the spec into the run's folder.

    Raises:
        BadInput: the folder cannot be written.
    """
    write_atomically(run_dir / SPEC_FILE, spec.model_dump_json(indent=2) + "\n")


def read_spec(run_dir: Path) -> RunSpec:
    """The spec of the run in ``run_dir``.

    Raises:
        BadInput: there is none, or it is not a spec.
    """
    return read_record(RunSpec, run_dir / SPEC_FILE, hint="name the folder of a run, or launch the run again")
