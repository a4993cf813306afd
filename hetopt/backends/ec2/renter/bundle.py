"""The code that machines run, as one archive: hetopt as it is here, the user's own code, and what they install.

The same sources give the same bytes, so the archive is stored once by its hash and machines can check what they got.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hetopt.core
from hetopt.backends.ec2.renter.user_code import carried, distributions, user_code
from hetopt.core.errors import BadInput
from hetopt.core.search_path import code_folder

NEEDED = ("numpy", "psutil", "pydantic", "torch", "safetensors", "scikit-learn", "boto3")
"""What a machine installs: what training needs, and the way to S3. Their versions and hashes: `make locks`."""

PARTS = ("__init__.py", "core", "backends", "profiler", "trainer")
"""What of hetopt machines run, and..."""

_LAUNCHING = tuple(
    f"ssh/{name}.py"
    for name in ("backend", "checking", "conductor", "conversation", "edge", "inventory", "link", "look", "receive")
)
LEFT_OUT = ("ec2/renter", "emulation", "on_this_machine.py", "prediction", "probe_runs.py", "supervisor", *_LAUNCHING)
"""...what of `hetopt.backends` they do not: they plan nothing and rent nothing."""

TASK_FOLDER = "task"

_LEVEL = 6
"""Of gzip: its usual 9 takes twice as long for half a percent of the size."""
_HERE = Path(next(iter(hetopt.core.__path__))).parent


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An archive, and what a task, or a script with its arguments, is called inside it."""

    data: bytes
    task: str
    script: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Its hash, which is also its name."""
        return hashlib.sha256(self.data).hexdigest()


def make_bundle(task: str, script: Sequence[str] = (), *, rented: bool = True) -> Bundle:
    """Pack what the machines of a run need.

    Args:
        task: as the plan names it: a bundled one, or ``file.py:attribute``. A file travels with what it imports of its
            folder.
        script: a training script and its arguments, in place of a task; likewise. Small files among these travel.
        rented: the machines install what their lock names; otherwise they have what their owners installed.

    Raises:
        BadInput: the task is in a module of this machine's, its file is not there, imports what machines lack, or is
            given data that they lack.
    """
    locks = list(_locks())
    files: list[tuple[str, bytes]] = [*locks]
    for name in PARTS:
        files += _sources(name)
    where, colon, attribute = task.rpartition(":")
    if script:
        files += _own(Path(script[0]), locks, rented=rented)
        given = carried(Path(script[0]), script[1:], rented=rented)
        files += [one for one in _in_folder(given.files) if one not in files]
        path = Path(script[0]).resolve()
        inside = (f"{TASK_FOLDER}/{path.relative_to(code_folder(path)).as_posix()}", *given.arguments)
        return Bundle(data=_archive(files), task=task, script=inside)
    if colon and where.endswith(".py"):
        files += _own(Path(where), locks, rented=rented)
        return Bundle(data=_archive(files), task=f"{TASK_FOLDER}/{Path(where).name}:{attribute}")
    if colon:
        raise BadInput(
            f"the task {task} is in a module, which other machines do not have.",
            hint="name its file instead when you profile, such as `hetopt profile my_task.py:task`",
        )
    return Bundle(data=_archive(files), task=task)


def _own(file: Path, locks: Sequence[tuple[str, bytes]], *, rented: bool) -> Iterable[tuple[str, bytes]]:
    """A person's file and what it needs, in the folder of such code. All kinds of machines install alike."""
    provided = frozenset.intersection(*(distributions(text.decode()) for name, text in locks if "torch" not in name))
    code = user_code(file, provided=provided | {"torch"} if rented else None)
    return _in_folder(code.files)


def _in_folder(files: Iterable[tuple[str, bytes]]) -> Iterable[tuple[str, bytes]]:
    return ((f"{TASK_FOLDER}/{name}", content) for name, content in files)


def _sources(name: str) -> Iterable[tuple[str, bytes]]:
    if name.endswith(".py"):
        yield f"hetopt/{name}", (_HERE / name).read_bytes()
        return
    folder = (_HERE / name).resolve()
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).as_posix()
        if not any(inside == part or inside.startswith(f"{part}/") for part in LEFT_OUT):
            yield f"hetopt/{name}/{inside}", path.read_bytes()


def _locks() -> Iterable[tuple[str, bytes]]:
    """What machines install, with the hash of every package: a file for each kind of them."""
    for path in sorted((_HERE / "backends" / "ec2" / "node" / "locks").glob("*.txt")):
        yield f"locks/{path.name}", path.read_bytes()


def _archive(files: Iterable[tuple[str, bytes]]) -> bytes:
    """A tar.gz without dates, owners or order of its own."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=_LEVEL, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
