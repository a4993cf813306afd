"""What is in a run's folder: file names, and how the spec gets in and out."""

from __future__ import annotations

import re
from pathlib import Path

from hetopt.core.artifact import read_record, write_atomically
from hetopt.core.reading import read_text
from hetopt.core.run_spec import RunSpec

SPEC_FILE = "spec.json"
LIVING_FILE = "living.json"
"""The spec for the workers of the hosts that are there, while some of the run's are not. Absent: all are."""
STOP_FILE = "stop"
"""Its presence is the wish that the run ends at its next control period."""
SPEC_VARIABLE = "HETOPT_SPEC"
"""In the environment of a script: the file with the spec of its run."""
RUN_VARIABLE = "HETOPT_RUN"
"""Likewise: the folder of the run, whose log a session writes and whose wish to stop it hears."""
MODEL_FILE = "model.safetensors"
"""The model of a run that came to its planned end."""
UNFINISHED_MODEL_FILE = "model-unfinished.safetensors"
"""The model of a run that was stopped before it; the last event says after how many steps. Finishing removes it."""
MODEL_NAMES = "model*.safetensors"
"""What those two match, and the later models of a script that has several."""
MODEL_FILES = (MODEL_FILE, UNFINISHED_MODEL_FILE, "model.pt", "model-unfinished.pt")
"""All names that a run's model may have, the better first: the last two are those of hetopt 0.1, in torch's format."""
CHECKPOINT_FOLDER = "checkpoint"
LATEST_FILE = "LATEST"
"""In it: names the newest checkpoint that is complete."""
OBJECTS_FOLDER = "objects"
"""What hosts of one's own have sent here, as machines that are rented send it to a bucket."""
LATEST_OBJECT = "ckpt/LATEST"
"""The same of a run whose hosts send their checkpoints away."""
MANIFEST_FILE = "manifest.json"
"""Of each checkpoint, in its folder."""


def is_unfinished(model: Path) -> bool:
    """Whether a file of this name is the model of a run that was stopped before its planned end."""
    return model.stem == Path(UNFINISHED_MODEL_FILE).stem


def latest_checkpoint(run_dir: Path) -> Path | None:
    """What names the newest checkpoint that is kept in a run's folder, wherever the run was; None: none is.

    Those of rented machines are in their bucket.
    """
    kept = (run_dir / CHECKPOINT_FOLDER / LATEST_FILE, run_dir / OBJECTS_FOLDER / LATEST_OBJECT)
    return next((path for path in kept if path.is_file()), None)


def checkpoint_step(run_dir: Path) -> int | None:
    """After how many steps the newest of those was saved; None: there is none, or it does not say."""
    latest = latest_checkpoint(run_dir)
    named = None if latest is None else re.search(r"step-([0-9]{1,15})\b", read_text(latest))
    return None if named is None else int(named[1])


def model_in(run_dir: Path) -> Path | None:
    """The model in a run's folder: the trained one, or that of so far; None: there is none yet."""
    return next((path for name in MODEL_FILES if (path := run_dir / name).is_file()), None)


def write_spec(run_dir: Path, spec: RunSpec) -> None:
    """Put the spec into the run's folder.

    Raises:
        BadInput: the folder cannot be written.
    """
    write_atomically(run_dir / SPEC_FILE, spec.model_dump_json(indent=2) + "\n")


def write_living(run_dir: Path, spec: RunSpec) -> None:
    """Tell the workers that begin now who of the run is there.

    Raises:
        BadInput: the folder cannot be written.
    """
    write_atomically(run_dir / LIVING_FILE, spec.model_dump_json(indent=2) + "\n")


def living_file(run_dir: Path) -> Path:
    """The file with the spec that workers who begin now have to follow."""
    living = run_dir / LIVING_FILE
    return living if living.is_file() else run_dir / SPEC_FILE


def read_living(run_dir: Path) -> RunSpec:
    """The run as those who begin now have to follow it.

    Raises:
        BadInput: there is none, or it is not a spec.
    """
    return read_record(RunSpec, living_file(run_dir), hint="name the folder of a run, or launch the run again")


def read_spec(run_dir: Path) -> RunSpec:
    """The spec of the run in ``run_dir``.

    Raises:
        BadInput: there is none, or it is not a spec.
    """
    return read_record(RunSpec, run_dir / SPEC_FILE, hint="name the folder of a run, or launch the run again")
