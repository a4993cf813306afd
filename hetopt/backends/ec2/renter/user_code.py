"""The code that a person brings, as rented machines need it: the file, what it imports of its folder, what it installs.

Nothing is run to find out: imports are read from the source. What a machine would not find is refused before anything
is rented.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from hetopt.core.commands import typed
from hetopt.core.errors import BadInput
from hetopt.core.reading import read_bytes
from hetopt.core.run_spec import DATA_PLACE
from hetopt.core.search_path import code_folder

REQUIREMENTS = "requirements.txt"
MOST_FILES = 500
"""A folder of more Python files than this is no training job's."""

MOST_BYTES = 1_000_000
"""Of a file among a script's arguments: what is larger is data, which has its own way."""

_PLACE = re.compile(r"dir|path|folder|root|data|file|cache|out|save|log|ckpt|checkpoint", re.IGNORECASE)
_HASH = re.compile(r"\s-{2}hash=")
_DISTRIBUTION = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*==")


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """What travels.

    Attributes:
        files: path below the folder of the file, and content.
    """

    files: tuple[tuple[str, bytes], ...]


def user_code(file: Path, *, provided: frozenset[str] | None) -> UserCode:
    """Everything that a file needs of its folder.

    A module is looked for in `code_folder`, as Python does for a script. A package travels whole. A
    ``requirements.txt`` there with a hash for every package is installed on the machines.

    Args:
        file: a task's, or a script.
        provided: distributions that machines install anyway, in normal form (``scikit-learn``); None: nobody
            knows what they have.

    Raises:
        BadInput: the file cannot be read, or imports what machines do not have.
    """
    folder = code_folder(file)
    listed = _requirements(folder)
    found: dict[str, bytes] = {}
    path = file.resolve()
    package = [] if folder == path.parent else _beside(folder, path.relative_to(folder).parts[0])
    waiting = [path, *package]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(folder).as_posix()
        if name in found:
            continue
        if len(found) >= MOST_FILES:
            raise BadInput(
                f"{file} needs more than {MOST_FILES} files of its folder.", hint="put what it imports into a package"
            )
        found[name] = read_bytes(path, hint="launch from the folder that the profile was made in")
        for module, line in _imports(found[name], path):
            own = _beside(folder, module)
            waiting += own
            if not own and provided is not None:
                _check_provided(module, path, line, provided | listed)
    if provided is not None and listed - provided:
        found[REQUIREMENTS] = (folder / REQUIREMENTS).read_bytes()
    return UserCode(files=tuple(sorted(found.items())))


@dataclass(frozen=True, kw_only=True)
class Carried:
    """The arguments of a script as they are on a machine, and the files among them, which travel."""

    arguments: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]


def carried(script: Path, arguments: Sequence[str], *, rented: bool = True) -> Carried:
    """What becomes of the paths that a script is given: small files travel, and have the same name beside the script.

    Args:
        script: that they are given to.
        arguments: as they are typed here.
        rented: they run on machines that are rented, else on hosts of one's own.

    Raises:
        BadInput: one is a folder, or a large file, which no machine has.
    """
    folder = code_folder(script)
    told: list[str] = []
    files: dict[str, bytes] = {}
    for place, argument in enumerate(arguments):
        option, _, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        if not value or not _names_a_path(value, option or (arguments[place - 1] if place else "")):
            told.append(argument)
            continue
        path = Path(value).expanduser().resolve()
        size = None if path.is_dir() else path.stat().st_size
        if size is None or size > MOST_BYTES:
            what = f"the folder {value}" if size is None else f"the file {value} of {size:,} bytes"
            if not rented:
                raise BadInput(
                    f"the script is given {what}, which the other hosts may not have.",
                    hint=f"copy it to the same place on each, give that as `data`, and write {DATA_PLACE} instead; "
                    "where the script only writes there, name a place that does not exist yet",
                )
            folder_of_it = path if size is None else path.parent
            raise BadInput(
                f"the script is given {what}, which rented machines do not have.",
                hint=f"copy it once, `aws s3 sync {typed(folder_of_it)} s3://BUCKET/data/NAME`, give "
                f"`data=s3://BUCKET/data/NAME`, and write {DATA_PLACE} in its place; where the script only writes "
                "there, name a place that does not exist yet",
            )
        inside = path.is_relative_to(folder)
        name = path.relative_to(folder).as_posix() if inside else f"given-{place}/{path.name}"
        files[name] = read_bytes(path, hint="see that it can be read")
        told.append(f"{option}={name}" if option else name)
    return Carried(arguments=tuple(told), files=tuple(sorted(files.items())))


def _names_a_path(value: str, option: str) -> bool:
    """Whether an argument names something on this disk; a plain word that a folder is called by may be meant otherwise
    (the ``train`` of a mode), unless its option says that it is a place."""
    try:
        path = Path(value).expanduser()
        if not path.exists():
            return False
        return "/" in value or path.is_file() or not option.startswith("-") or bool(_PLACE.search(option))
    except (OSError, RuntimeError, ValueError):
        return False  # too long for a path, an unknown user's home, or a zero byte


def distributions(lock: str) -> frozenset[str]:
    """The distributions that a lock file pins, in normal form."""
    matches = (_DISTRIBUTION.match(line) for line in lock.splitlines())
    return frozenset(_normal(match[1]) for match in matches if match)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(folder: Path) -> frozenset[str]:
    """What the folder's own requirements pin by hash; nothing where a package has none."""
    path = folder / REQUIREMENTS
    if not path.is_file():
        return frozenset()
    text = read_bytes(path).decode("utf-8", errors="replace").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return distributions(text) if all(_HASH.search(line) for line in lines) else frozenset()


def _imports(source: bytes, path: Path) -> Iterator[tuple[str, int]]:
    """Modules that a file cannot do without, with the line; of relative ones the place below the folder."""
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
            yield from ((one.name, node.lineno) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", node.lineno


def _beside(folder: Path, module: str) -> list[Path]:
    """The files of a module in the folder: itself, or all of the package that it is in."""
    first = module.partition(".")[0]
    package, single = folder / first, folder / f"{first}.py"
    if single.is_file():
        return [single]
    if package.is_dir() and any(package.glob("*.py")):
        return sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    return []


def _check_provided(module: str, path: Path, line: int, provided: frozenset[str]) -> None:
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names or first == "hetopt":
        return
    names = {_normal(one) for one in _distributions_here().get(first, [first])}
    if not names & provided:
        raise BadInput(
            f"{path.name}, line {line}, imports {first}, which rented machines do not install.",
            hint=f"put a {REQUIREMENTS} beside it that pins every package by version and hash (uv writes one)",
        )


@cache
def _distributions_here() -> dict[str, list[str]]:
    return dict(packages_distributions())
