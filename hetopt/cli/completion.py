"""What the shell completes beside commands and options: values that are a closed list, and the names of runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import get_args


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Completes one of these.

    Args:
        names: themselves, or ``module:NAME`` of a literal type or a collection, which is imported when it is asked for.
    """

    def complete(incomplete: str) -> list[str]:
        return [name for name in expanded(names) if name.startswith(incomplete)]

    return complete


def expanded(names: tuple[str, ...]) -> list[str]:
    """The names, with those of ``module:NAME`` in its place."""
    found: list[str] = []
    for name in names:
        module, colon, attribute = name.partition(":")
        listed = getattr(import_module(module), attribute) if colon else (name,)
        found += get_args(listed) or list(listed)
    return found


def runs(incomplete: str) -> list[str]:
    """Completes the names of runs, the newest first."""
    from hetopt.core.errors import BadInput
    from hetopt.core.runs import RunFolders, runs_home

    try:
        return [run.name for run in reversed(RunFolders(home=runs_home()).all()) if incomplete in run.name]
    except BadInput:
        return []  # a shell that completes has no place for a sentence
