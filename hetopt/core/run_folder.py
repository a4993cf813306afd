"""The files of a run's folder, and where the folders of runs are (`RunFolders`).

There are the spec, logs of workers, models, outputs, and small files that a conductor replaces for workers to read
(`write_present`, `write_conditions`).
"""

import datetime
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.core.artifact import Record, ReplacedRecord, read_record, write_atomically
from hetopt.core.errors import BadInput
from hetopt.core.events.log import ITS_OWNER
from hetopt.core.formatting import bytes_
from hetopt.core.paths import MissingFile, home, inside, opened_file, read_text, shortened, shown
from hetopt.core.run_spec import Conditions, RunSpec

SPEC_FILE = "spec.json"
BUNDLE_FILE = "bundle.tar.gz"
LIVING_FILE = "living.json"
"""File with the spec for the workers of the present hosts, while some of the run's hosts are absent. No such file: all
are present."""
STOP_FILE = "stop"
"""A file whose presence asks the run to end at its next control period."""
SPEC_VARIABLE = "HETOPT_SPEC"
"""Environment variable of a script: the file with the spec of its run."""
RUN_VARIABLE = "HETOPT_RUN"
"""Environment variable of a script: the folder of the run, whose log a session writes and whose stop file it reads."""
MODEL_FILE = "model.safetensors"
"""File of the model of a run that came to its planned end."""
UNFINISHED_MODEL_FILE = "model-unfinished.safetensors"
"""File of the model of a run that was stopped before its end; the last event says after how many steps. Finishing
removes it."""
MODEL_NAMES = "model*.safetensors"
"""Pattern that matches `MODEL_FILE`, `UNFINISHED_MODEL_FILE`, and the later models of a script that has several."""
MODEL_FILES = (MODEL_FILE, UNFINISHED_MODEL_FILE, "model.pt", "model-unfinished.pt")
"""All names that a run's model may have, the better first: the last two are those of hetopt 0.1, in torch's format."""
CHECKPOINT_FOLDER = "checkpoint"
LATEST_FILE = "LATEST"
"""The file in the checkpoint folder that names the newest complete checkpoint."""
OBJECTS_FOLDER = "objects"
"""Folder of what the user's own hosts have sent here, as rented machines send it to a bucket."""
LATEST_OBJECT = "ckpt/LATEST"
"""The object that names the newest complete checkpoint of a run whose hosts send theirs away."""
MANIFEST_FILE = "manifest.json"
"""The file in a checkpoint's folder that lists its files, written last."""


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the file in a run's folder that names its newest complete checkpoint; None: no checkpoint is kept here.

    Checkpoints of rented machines are in their bucket, not here.
    """
    kept = (run_dir / CHECKPOINT_FOLDER / LATEST_FILE, run_dir / OBJECTS_FOLDER / LATEST_OBJECT)
    return next((path for path in kept if path.is_file()), None)


def checkpoint_step(run_dir: Path) -> int | None:
    """Return the optimizer step of the newest checkpoint in a run's folder; None: there is none, or it names no step.

    Raises:
        BadInput: the file that names the checkpoint cannot be read.
    """
    latest = latest_checkpoint(run_dir)
    named = None if latest is None else re.search(r"step-([0-9]{1,15})\b", read_text(latest))
    return None if named is None else int(named[1])


def write_spec(run_dir: Path, spec: RunSpec, name: str = SPEC_FILE) -> None:
    """Write a spec into the run's folder as ``name``: the run's own, or as `LIVING_FILE` that of the present workers.

    A file of that name is replaced.

    Args:
        run_dir: the run's folder, which exists.
        spec: spec to write.
        name: name of the file.

    Raises:
        BadInput: the folder cannot be written.
    """
    write_atomically(run_dir / name, spec.model_dump_json(indent=2) + "\n")


def living_file(run_dir: Path) -> Path:
    """Return the file of the spec for workers that start now: of the present hosts, or of the run if all are there."""
    living = run_dir / LIVING_FILE
    return living if living.is_file() else run_dir / SPEC_FILE


def read_living(run_dir: Path) -> RunSpec:
    """Read the spec for workers that start now: of the present hosts if some are absent, else of the whole run.

    Raises:
        MissingFile: the folder holds no spec.
        BadInput: the file cannot be read, or is not a spec.
    """
    return read_record(RunSpec, living_file(run_dir), hint="name the folder of a run, or launch the run again")


def read_spec(run_dir: Path) -> RunSpec:
    """Read the spec of the whole run from its folder.

    Raises:
        MissingFile: the folder holds no spec.
        BadInput: the file cannot be read, or is not a spec.
    """
    return read_record(RunSpec, run_dir / SPEC_FILE, hint="name the folder of a run, or launch the run again")


LOG_FOLDER = "log"


def host_log_folder(run_dir: Path, host: str) -> Path:
    """Return the folder for the printed output of one host's processes; it need not exist yet.

    Raises:
        BadInput: ``host`` is no name that a host can have.
    """
    return inside(run_dir / LOG_FOLDER, host, what="host")


def read_from(path: Path, offset: int) -> tuple[str, int]:
    """Return the whole lines from byte ``offset`` to a file's end as text, and the offset behind them.

    An unfinished last line is left for later; without a file the text is empty and the offset is as given.

    Raises:
        BadInput: the file is there and cannot be read.
    """
    try:
        with opened_file(path, hint=ITS_OWNER) as stream:
            stream.seek(offset)
            data = stream.read()
    except MissingFile:
        return "", offset
    end = data.rfind(b"\n") + 1
    return data[:end].decode("utf-8", errors="replace"), offset + end


OUTPUT_VARIABLE = "HETOPT_OUTPUT"
"""Environment variable of a script: the folder for the files that it writes for the user."""

OUTPUT_FOLDER = "outputs"
"""Name of that folder in the run's folder, and in the bucket."""

MOST_FILES = 1_000
MOST_BYTES = 10_000_000_000
"""Largest sum of the sizes of output files that are copied and paid for unasked, as `MOST_FILES` is their largest
number: a machine sends each file by a request of its own as it ends."""


@dataclass
class Outputs:
    """The files that a run's script wrote for the user, as far as they may be copied: 1,000 files and 10 GB.

    Attributes:
        sizes: bytes of each file by its name, with slashes, in the order in which they were added.
        left_out: a sentence for each name that no file can have, and one for what is beyond the bounds; empty: nothing.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, folder: Path, name: str, size: int) -> Path | None:
        """Add a file's name and size in bytes if it may be copied; return its path in ``folder``, None if left out.

        Why a file is left out, such as a name that leads out of the folder or too many files or bytes, is kept for
        people.

        Args:
            folder: in which the file is, or will be.
            name: name of the file below the folder, with slashes.
            size: size of the file, in bytes.
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
        """Record why outputs are left out; only the first reason is kept."""
        sentence = f"Not all outputs are carried: {why}."
        if not any(earlier.startswith("Not all") for earlier in self.left_out):
            self.left_out.append(sentence)


def written_in(folder: Path) -> Outputs:
    """Return the regular files in and below a folder as outputs, sorted by name, without links; no folder: none."""
    outputs = Outputs()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            outputs.add(folder, path.relative_to(folder).as_posix(), path.stat().st_size)
    return outputs


PRESENT_FILE = "hosts.json"


class PresentHosts(Record):
    """The names of the run's present hosts, as its conductor knows them; workers on others are not waited for."""

    names: tuple[str, ...]


def write_present(run_dir: Path, names: Iterable[str]) -> None:
    """Replace the file that tells a machine's workers which hosts are present; a reader sees old or new names, whole.

    Raises:
        BadInput: the folder cannot be written.
    """
    write_atomically(run_dir / PRESENT_FILE, PresentHosts(names=tuple(names)).model_dump_json() + "\n")


CONDITIONS_FILE = "conditions.json"


def write_conditions(run_dir: Path, conditions: Conditions) -> None:
    """Replace the file of a rehearsal's present speeds, which its workers read; none sees a mixture.

    Raises:
        BadInput: the folder cannot be written.
    """
    write_atomically(run_dir / CONDITIONS_FILE, conditions.model_dump_json() + "\n")


def conditions_in(run_dir: Path) -> Callable[[], Conditions]:
    """Return a function that reads a rehearsal's present slowdown and speed factors; without a file, all are 1.

    It parses the file again only after it was replaced.
    """
    file = ReplacedRecord(Conditions, run_dir / CONDITIONS_FILE)
    return lambda: file.now() or Conditions()


_SECRET_BYTES = 8


def runs_home() -> Path:
    """Return the folder that holds all runs of this user, which need not exist: ``runs`` in hetopt's home folder.

    Raises:
        BadInput: the user's home folder is not known.
    """
    return home() / "runs"


@dataclass(frozen=True, kw_only=True)
class RunFolders:
    """The folders of runs under one home folder.

    Attributes:
        home: folder in which the runs' folders are; it need not exist.
        on_create: called with the name of each run folder that is made; by default nothing.
    """

    home: Path
    on_create: Callable[[str], None] = field(default=lambda name: None)

    def create(self, label: str, now: datetime.datetime, *, secret: bool = False) -> Path:
        """Make and return a new, private run folder, named after ``now``, ``label`` and random digits.

        Args:
            label: what the run is about, such as its task; other characters than letters, digits, ``_`` and ``-`` are
                replaced.
            now: when the run begins; the name starts with it.
            secret: whether the name must not be guessable, as machines of several runs may write to one bucket.

        Raises:
            BadInput: the folder cannot be made.
        """
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", label).strip("-")[:40] or "run"
        name = f"{now:%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(_SECRET_BYTES if secret else 2)}"
        path = self.home / name
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)  # tasks, logs and models are their owner's alone
        except OSError as error:
            raise BadInput(
                f"the run folder {shortened(str(path))} cannot be made: {error.strerror}.",
                hint="set HETOPT_HOME to a folder that you can write to",
            ) from None
        self.on_create(name)
        return path

    def all(self) -> list[Path]:
        """Return the folder of every run, oldest first (their names sort by time); empty: there are none.

        Raises:
            BadInput: the home folder is there and cannot be read.
        """
        try:
            return sorted(path for path in self.home.iterdir() if path.is_dir() and not path.name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadInput(
                f"the runs in {shortened(str(self.home))} cannot be listed: {error.strerror}.",
                hint="set HETOPT_HOME to a folder of yours",
            ) from None

    def find(self, name: str | None) -> Path:
        """Return the folder of the run whose name is or contains ``name``; None: the newest run's.

        Raises:
            BadInput: the runs cannot be listed, there are none, none has this name, or the name fits several and is
                none's whole name.
        """
        runs = self.all()
        if not runs:
            raise BadInput(f"there are no runs in {self.home}.", hint="start one with `hetopt launch PLAN --on local`")
        if name is None:
            return runs[-1]
        matches = [run for run in runs if run.name == name] or [run for run in runs if name in run.name]
        if not matches:
            raise BadInput(f"no run is called {name!r}.", hint="list them with `hetopt status --all`")
        if len(matches) > 1:
            shown = ", ".join(run.name for run in matches[-3:])
            raise BadInput(f"{name!r} fits {len(matches)} runs ({shown}).", hint="give more of the name")
        return matches[0]
