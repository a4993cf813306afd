"""How the text that names a task (bundled name, ``module:attribute``, ``file.py:attribute``) becomes an object."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import TypeVar

from hetopt.core.errors import BadInput
from hetopt.core.names import unknown
from hetopt.core.stand_in import STAND_IN

T = TypeVar("T")

BUNDLED: Mapping[str, str] = MappingProxyType(
    {
        "digits": "hetopt.trainer.tasks.digits:digits",
        "resnet20-cifar10": "hetopt.trainer.tasks.vision:resnet20_cifar10",
        "resnet101-cifar10": "hetopt.trainer.tasks.vision:resnet101_cifar10",
        "vgg11-cifar10": "hetopt.trainer.tasks.vision:vgg11_cifar10",
        "vgg16-cifar100": "hetopt.trainer.tasks.vision:vgg16_cifar100",
        "lstm-small": "hetopt.trainer.tasks.language:lstm_small",
        "lstm-ptb": "hetopt.trainer.tasks.language:lstm_ptb",
        STAND_IN: "hetopt.trainer.tasks.stand_in:stand_in",
    }
)
"""Name of a bundled task -> where it is defined, as ``module:attribute``. Nobody is offered the one that stands in."""


def resolve(reference: str) -> object:
    """Import what ``reference`` names.

    A module is looked for as Python does for ``python -m`` (the current folder first), and a file may import its
    neighbours as a script may.

    Raises:
        BadInput: nothing has that name, or importing it failed.
    """
    if reference in BUNDLED:
        bundled, _, attribute = BUNDLED[reference].partition(":")
        return getattr(importlib.import_module(bundled), attribute)
    place, colon, attribute = reference.rpartition(":")
    if not colon:
        raise _unknown(reference)
    if not place or not attribute:
        raise BadInput(
            f"'{reference}' does not name a task.",
            hint="Write module:attribute or file.py:attribute, both parts given.",
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    if not hasattr(module, attribute):
        raise unknown(attribute, _candidates(module), f"task in {place}")
    return getattr(module, attribute)


def check_found(reference: str) -> None:
    """Look whether what ``reference`` names is there, without running anything of it.

    Raises:
        BadInput: there is no such bundled task, file or module.
    """
    if reference in BUNDLED:
        return
    place, colon, _ = reference.rpartition(":")
    if not colon:
        raise _unknown(reference)
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise BadInput(
                f"the task's file {place} is not there: {Path(place).resolve()} does not exist.",
                hint="go to the folder that holds it, or give its path when you profile",
            )
        return
    package = place.partition(".")[0]
    if package not in sys.modules and PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
        raise BadInput(
            f"there is no module '{place}' to import the task from.",
            hint="go to the folder that holds it, or name its file when you profile: path/to/file.py:attribute",
        )


def check_data_folder(folder: Path) -> None:
    """Look whether the folder of a task's data is there.

    Raises:
        BadInput: it is not.
    """
    if not folder.is_dir():
        raise BadInput(f"there is no data folder {folder}.", hint="give the folder that holds the task's files")


def user_code(place: str, run: Callable[[], T]) -> T:
    """Run code that the user wrote, and report whatever it raises as bad input that names ``place``.

    This is the one place that catches every exception: what a user's module does when it is imported cannot be known,
    and a failure there is theirs to see as one sentence, not as a traceback through hetopt. ``SystemExit`` counts too:
    a script that parses its own command line when imported ends with it.
    """
    try:
        return run()
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        line = _line_in(place, error)
        where = f"{place}, line {line}," if line else place
        raise BadInput(
            f"{where} failed: {type(error).__name__}: {_first_line(error)}",
            hint="Fix that file; try it alone with `python -c 'import ...'` or `python FILE`.",
        ) from error


def _import_module(name: str) -> ModuleType:
    _search_first(Path.cwd())
    try:
        found = user_code(name, lambda: importlib.util.find_spec(name))
    except BadInput as error:
        # find_spec imports the parents of a dotted name: one that does not exist is a wrong name, any other failure is
        # the parent's own.
        cause = error.__cause__
        if not (isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}.")):
            raise
        found = None
    if found is None:
        raise BadInput(
            f"There is no module '{name}' to import.",
            hint="Run from the folder that holds it, or name the file: path/to/file.py:attribute.",
        )
    return user_code(found.origin or name, lambda: importlib.import_module(name))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"There is no file {path}.", hint="Give the path of the Python file that defines the task.")
    path = path.resolve()
    _search_first(path.parent)
    name = f"hetopt_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name while it is being run
    loader = spec.loader
    user_code(str(path), lambda: loader.exec_module(module))
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _unknown(reference: str) -> BadInput:
    if reference.endswith(".py"):
        return BadInput(f"'{reference}' names a file but no task in it.", hint=f"Add the attribute: {reference}:task")
    if "/" in reference or Path(reference).exists():
        return BadInput(
            f"'{reference}' is neither a bundled task nor a Python script, whose name ends in .py.",
            hint="give the path of the script, or of the file and the task in it: file.py:attribute",
        )
    offered = [name for name in BUNDLED if name != STAND_IN]
    own = "your own is module:attribute or file.py:attribute"
    return unknown(reference, offered, "bundled task", hint=f"choose one of: {', '.join(offered)}; {own}")


def _candidates(module: ModuleType) -> list[str]:
    """Return the names that may be tasks: instances of what `task.py` defines, and the module's own functions."""
    return [
        name
        for name, value in vars(module).items()
        if type(value).__module__ == "hetopt.trainer.task"
        or (isinstance(value, FunctionType) and value.__module__ == module.__name__)
    ]


def _line_in(place: str, error: BaseException) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == place:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
    return lines[-1] if lines else None


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else "(no message)"
