"""What is in a run's folder: file names, and how the spec gets in and out."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from hetopt.profiler.artifact import write_atomically
from hetopt.profiler.errors import BadInput
from hetopt.trainer.spec import RunSpec

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
    path = run_dir / SPEC_FILE
    try:
        return RunSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.", hint="name the folder of a run") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise BadInput(
            f"{path}: {where + ': ' if where else ''}{reason[:1].lower()}{reason[1:]}.", hint="launch the run again"
        ) from None
