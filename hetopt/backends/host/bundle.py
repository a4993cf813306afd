"""The code that machines run, as one archive: hetopt as it is here, the user's code, and what they install.

The same sources give the same bytes, so the archive is stored once by its hash and machines can check what they got.
Imports are read from the source, and nothing is run; what a machine would not find is refused before anything is
rented.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import hetopt.core
from hetopt.core.errors import BadInput
from hetopt.core.paths import read_bytes
from hetopt.core.plain_text import typed
from hetopt.core.run_spec import DATA_PLACE
from hetopt.core.search_path import code_folder

REQUIREMENTS = "requirements.txt"
MOST_BYTES = 1_000_000
"""Largest file among a script's arguments that travels: what is larger is data, which has its own way."""

_PLACE = re.compile(r"dir|path|folder|root|data|file|cache|out|save|log|ckpt|checkpoint", re.IGNORECASE)
_HASH = re.compile(r"\s-{2}hash=")
_DISTRIBUTION = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*==")


Files = tuple[tuple[str, bytes], ...]
"""Files that travel: path below the folder of the script or task, and content."""


def user_code(file: Path, *, provided: frozenset[str] | None) -> Files:
    """Return ``file`` and what it imports of its folder, as paths and contents; refuse imports that machines lack.

    A module is looked for in `code_folder`, as Python does for a script. A package travels whole. A
    ``requirements.txt`` there with a hash for every package is installed on the machines.

    Args:
        file: file of a task, or a script.
        provided: distributions that machines install anyway, in normal form (``scikit-learn``); None: nobody knows, so
            that no import is refused.

    Raises:
        BadInput: a file cannot be read or is no Python, or imports what machines do not have; the hint says how to pin
            it.
    """
    folder = code_folder(file)
    listed = _requirements(folder)
    files: dict[str, bytes] = {}
    path = file.resolve()
    package = [] if folder == path.parent else _beside(folder, path.relative_to(folder).parts[0])
    waiting = [path, *package]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(folder).as_posix()
        if name in files:
            continue
        files[name] = read_bytes(path, hint="launch from the folder that the profile was made in")
        for module, line in _imports(files[name], path):
            beside = _beside(folder, module)
            waiting += beside
            if not beside and provided is not None:
                _check_provided(module, path, line, provided | listed)
    if provided is not None and listed - provided:
        files[REQUIREMENTS] = (folder / REQUIREMENTS).read_bytes()
    return tuple(sorted(files.items()))


def carried(script: Path, arguments: Sequence[str], *, rented: bool = True) -> tuple[tuple[str, ...], Files]:
    """Rewrite a script's arguments for machines; return them, and the contents of small files among them, which travel.

    A file in the script's folder keeps its path there. Any other is put beside the script, as ``given-N/NAME``.

    Args:
        script: script that the arguments are given to.
        arguments: arguments as they are typed here.
        rented: True: machines are rented; False: hosts of the user's own; it changes the hint alone.

    Returns:
        the arguments as they are on a machine, and the files among them, which travel.

    Raises:
        BadInput: an argument is a folder, or a file of more than 1 MB, which no other machine has.
    """
    folder = code_folder(script)
    rewritten: list[str] = []
    files: dict[str, bytes] = {}
    for place, argument in enumerate(arguments):
        option, _, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        if not value or not _names_a_path(value, option or (arguments[place - 1] if place else "")):
            rewritten.append(argument)
            continue
        path = Path(value).expanduser().resolve()
        size = None if path.is_dir() else path.stat().st_size
        if size is None or size > MOST_BYTES:
            what = f"the folder {value}" if size is None else f"the file {value} of {size:,} bytes"
            once = f"copy it once, `aws s3 sync {typed(path if size is None else path.parent)} s3://BUCKET/data/NAME`"
            copy = f"{once}, give `data=s3://BUCKET/data/NAME`" if rented else "copy it to one place on each as `data`"
            raise BadInput(
                f"the script is given {what}, which {'rented machines do' if rented else 'the other hosts may'} "
                "not have.",
                hint=f"{copy}, and write {DATA_PLACE} instead; where the script only writes there, name a place that "
                "does not exist yet",
            )
        inside = path.is_relative_to(folder)
        name = path.relative_to(folder).as_posix() if inside else f"given-{place}/{path.name}"
        files[name] = read_bytes(path, hint="see that it can be read")
        rewritten.append(f"{option}={name}" if option else name)
    return tuple(rewritten), tuple(sorted(files.items()))


def _names_a_path(value: str, option: str) -> bool:
    """Return whether an argument names something on this disk.

    A folder's plain name behind an option that does not sound like a place (the ``train`` of a mode) does not; one
    behind no option does, and so do every existing file and whatever exists and has a slash.

    Args:
        value: argument of a script.
        option: option before it, or the word before; empty: it is the first.
    """
    try:
        path = Path(value).expanduser()
        is_meant = "/" in value or path.is_file() or not option.startswith("-") or bool(_PLACE.search(option))
        return is_meant and path.exists()
    except (OSError, RuntimeError, ValueError):
        return False  # too long for a path, an unknown user's home, or a zero byte


def distributions(lock: str) -> frozenset[str]:
    """Return the normalized names of the distributions that a lock file, given as text, pins by ``==``."""
    matches = (_DISTRIBUTION.match(line) for line in lock.splitlines())
    return frozenset(_normal(match[1]) for match in matches if match)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(folder: Path) -> frozenset[str]:
    """Return the distributions that a folder's own requirements pin by hash; empty where any has no hash.

    Empty, too, where it has no such file.
    """
    path = folder / REQUIREMENTS
    if not path.is_file():
        return frozenset()
    text = read_bytes(path).decode("utf-8", errors="replace").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return distributions(text) if all(_HASH.search(line) for line in lines) else frozenset()


def _imports(source: bytes, path: Path) -> Iterator[tuple[str, int]]:
    """Yield the absolute imports that a file cannot do without, each with its line.

    Left out are imports in a ``try`` block or under TYPE_CHECKING, and relative ones, as a package travels whole.

    Raises:
        BadInput: the file is no Python that can be read.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        raise BadInput(f"{path} is no Python that can be read.", hint="see that it runs by itself") from None
    optional = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.Try) or (isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test))
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in optional:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", node.lineno


def _beside(folder: Path, module: str) -> list[Path]:
    """Return the files of a module in the folder: itself, or all of the package that it is in."""
    first = module.partition(".")[0]
    package, single = folder / first, folder / f"{first}.py"
    if single.is_file():
        return [single]
    if package.is_dir() and any(package.glob("*.py")):
        return sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    return []


def _check_provided(module: str, path: Path, line: int, provided: frozenset[str]) -> None:
    """Raise BadInput if a module is neither Python's, hetopt's nor of a distribution in ``provided``."""
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names or first == "hetopt":
        return
    names = {_normal(distribution) for distribution in _distributions_here().get(first, [first])}
    if not names & provided:
        raise BadInput(
            f"{path.name}, line {line}, imports {first}, which rented machines do not install.",
            hint=f"put a {REQUIREMENTS} beside it that pins every package by version and hash (uv writes one)",
        )


_distributions_here = cache(packages_distributions)


NEEDED = ("numpy", "psutil", "pydantic", "torch", "safetensors", "scikit-learn", "boto3", "uv")
"""Distributions that a machine installs: what training needs, the way to S3, and what installs. Versions, hashes: `make
locks`."""

PARTS = ("__init__.py", "core", "backends", "profiler", "trainer")
"""Packages and files of hetopt that machines run: they plan nothing."""

TASK_FOLDER = "task"

_LEVEL = 6
"""Of gzip: its usual 9 takes twice as long for half a percent of the size."""
_HERE = Path(next(iter(hetopt.core.__path__))).parent


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An archive of code for machines.

    Attributes:
        data: contents of the archive, tar.gz.
        task: name of the task inside it, or of a bundled one.
        script: path of the script inside it, and its arguments there; empty: a task runs.
    """

    data: bytes
    task: str
    script: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """The SHA-256 of the archive in hex, which is also its name."""
        return hashlib.sha256(self.data).hexdigest()


def make_bundle(task: str, script: Sequence[str] = (), *, rented: bool = True) -> Bundle:
    """Pack hetopt, the task or script with its imports, and small files among its arguments into a tar.gz archive.

    Args:
        task: as the plan names it: a bundled one, or ``file.py:attribute``. A file travels with what it imports of its
            folder.
        script: a training script and its arguments, in place of a task; it travels likewise, with small files among its
            arguments. Empty: the task.
        rented: True: the machines install what their lock names; False: they have what their owners installed.

    Raises:
        BadInput: the task is in a module of this machine's, its file is not there, imports what machines lack, or an
            argument is data that machines lack.
    """
    locks = list(_locks())
    files = dict([*locks, *chain.from_iterable(map(_sources, PARTS))])
    where, colon, attribute = task.rpartition(":")
    if script:
        path = Path(script[0])
        arguments, given = carried(path, script[1:], rented=rented)
        files |= _user_files(path, locks, rented=rented) | _in_folder(given)
        script = (f"{TASK_FOLDER}/{path.resolve().relative_to(code_folder(path)).as_posix()}", *arguments)
    elif colon and where.endswith(".py"):
        files |= _user_files(Path(where), locks, rented=rented)
        task = f"{TASK_FOLDER}/{Path(where).name}:{attribute}"
    elif colon:
        raise BadInput(
            f"the task {task} is in a module, which other machines do not have.",
            hint="name its file instead when you profile, such as `hetopt profile my_task.py:task`",
        )
    return Bundle(data=_archive(files), task=task, script=tuple(script))


def _user_files(file: Path, locks: Sequence[tuple[str, bytes]], *, rented: bool) -> dict[str, bytes]:
    """Return a person's file and all that it needs, in the folder of such code. All kinds of machines install alike."""
    provided = frozenset.intersection(*(distributions(text.decode()) for name, text in locks if "torch" not in name))
    return _in_folder(user_code(file, provided=provided | {"torch"} if rented else None))


def _in_folder(files: Files) -> dict[str, bytes]:
    return {f"{TASK_FOLDER}/{name}": content for name, content in files}


def _sources(name: str) -> Iterable[tuple[str, bytes]]:
    """Yield path and content of a part of hetopt: of one file, or of all Python and TOML files below a folder."""
    if name.endswith(".py"):
        yield f"hetopt/{name}", (_HERE / name).read_bytes()
        return
    folder = (_HERE / name).resolve()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".toml")):
        yield f"hetopt/{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _locks() -> Iterable[tuple[str, bytes]]:
    """Yield the lock files of machines, with the hash of every package: a file for each kind of machine."""
    for path in sorted((_HERE / "backends" / "ec2" / "node" / "locks").glob("*.txt")):
        yield f"locks/{path.name}", path.read_bytes()


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Return files as a tar.gz without dates, owners or an order of its own.

    The same files give the same bytes.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=_LEVEL, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
