"""Imports the `Task` that a text names: a bundled task, or an attribute of a module or file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TypeVar

from hetopt.core.errors import BadInput
from hetopt.core.plain_text import unknown
from hetopt.core.run_rules import BUNDLED, check_found
from hetopt.trainer.failure import Lines, reason_of
from hetopt.trainer.task import Task


def load_task(reference: str) -> Task:
    """Return the `Task` of a bundled name, ``module:attribute`` or ``file.py:attribute``; a function there is called.

    Args:
        reference: as above; an attribute is a `Task`, or a function without arguments that returns one.

    Raises:
        BadInput: there is no such task, its code failed, or it is neither a `Task` nor a function that returns one.
    """
    task = resolve(reference)
    if not isinstance(task, (Task, type)) and callable(task):
        code = getattr(task, "__code__", None)
        task = user_code(code.co_filename if code else reference, task)
    if not isinstance(task, Task):
        raise BadInput(
            f"'{reference}' is of type {type(task).__name__}, not a hetopt Task.",
            hint="Name a hetopt.trainer.task.Task, or a function without arguments that returns one.",
        )
    return task


T = TypeVar("T")


def resolve(reference: str) -> object:
    """Return the object that a text names as in `load_task`, importing its module; adds its folder to ``sys.path``.

    A module is looked for as Python does for ``python -m`` (the current folder first), and a file may import its
    neighbours as a script may.

    Args:
        reference: bundled name, ``module:attribute`` or ``file.py:attribute``.

    Raises:
        BadInput: nothing has that name, or importing it failed.
    """
    if reference in BUNDLED:
        bundled, _, attribute = BUNDLED[reference].partition(":")
        return getattr(importlib.import_module(bundled), attribute)
    place, colon, attribute = reference.rpartition(":")
    if colon and not (place and attribute):
        raise BadInput(
            f"'{reference}' does not name a task.",
            hint="Write module:attribute or file.py:attribute, both parts given.",
        )
    check_found(reference)
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    if not hasattr(module, attribute):
        raise unknown(attribute, _candidates(module), f"task in {place}")
    return getattr(module, attribute)


def user_code(place: str, run: Callable[[], T]) -> T:
    """Return the result of the user's code ``run``, with any exception of it turned into BadInput.

    This is the one place that catches every exception: what a user's module does when it is imported cannot be known,
    and a failure there is theirs to see as one sentence, not as a traceback through hetopt. ``SystemExit`` counts too:
    a script that parses its own command line when imported ends with it.

    Args:
        place: file or module of the code, for the error where no line of the user's is known.
        run: calls the code.

    Raises:
        BadInput: the code raised an exception or exited; a BadInput of its own is raised as it is.
    """
    try:
        return run()
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"{Lines(place).of(error)} failed: {reason_of(error)}",
            hint="Fix that file; try it alone with `python -c 'import ...'` or `python FILE`.",
        ) from error


def _import_module(name: str) -> ModuleType:
    _search_first(Path.cwd())
    return user_code(name, lambda: importlib.import_module(name))


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module, even if it was before, with its folder first in ``sys.path``; BadInput: it failed."""
    path = path.resolve()
    _search_first(path.parent)
    name = f"hetopt_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name of a file of Python"  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name while it is being run
    loader = spec.loader
    user_code(str(path), lambda: loader.exec_module(module))
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _candidates(module: ModuleType) -> list[str]:
    """Return the names that may be tasks: instances of what `task.py` defines, and the module's own functions."""
    return [
        name
        for name, value in vars(module).items()
        if type(value).__module__ == "hetopt.trainer.task"
        or (isinstance(value, FunctionType) and value.__module__ == module.__name__)
    ]
