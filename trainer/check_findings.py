"""What a check of a task finds, and the lines of the user's files that it points at."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch

from hetopt.core.errors import HetoptError

T = TypeVar("T")

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

TOLERANCE = 1e-3
"""Relative; sums in fp32 over another order differ by far less, a sum in the place of a mean by far more."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about a task.

    Attributes:
        level: ``error``: it cannot be trained, or not rightly; ``warning``: it can, at a price that is told.
        text: a sentence.
        hint: what to do.
        where: ``file:line`` of the user's code; empty: nobody can say.
    """

    level: Literal["error", "warning"]
    text: str
    hint: str
    where: str = ""


error = partial(Finding, level="error")
warning = partial(Finding, level="warning")


class Ended(Exception):  # carries the finding that ends the look
    """An error that leaves nothing to go on with: what comes next needs what just failed."""

    def __init__(self, text: str, *, hint: str, where: str = "") -> None:
        super().__init__(text)
        self.finding = error(text=text, hint=hint, where=where)


def run(part: Callable[..., object], do: Callable[[], T], what: str, where: str = "") -> T:
    """Run the user's code; what it raises is a finding with the line of its own file."""
    try:
        return do()
    except Ended:
        raise
    except Exception as failed:
        own = _line(failed, place(part).rpartition(":")[0]) or where or place(part)
        if isinstance(failed, HetoptError):
            raise Ended(failed.message, hint=failed.hint or "correct that line", where=own) from failed
        first = next(iter(str(failed).splitlines()), "(no message)")
        text = f"{what} raised {type(failed).__name__}: {first}"
        raise Ended(text, hint="correct that line", where=own) from failed


def place(*written: object) -> str:
    """``file:line`` of the first function or class that is neither torch's nor hetopt's; empty: there is none."""
    for code in written:
        function = getattr(code, "__wrapped__", code)
        if isinstance(function, type):
            members = vars(function)
            function = members.get("__getitem__") or members.get("__iter__") or members.get("__init__")
        compiled = getattr(function, "__code__", None)
        if compiled is not None and not compiled.co_filename.startswith(_NOT_THE_USERS):
            return f"{compiled.co_filename}:{compiled.co_firstlineno}"
    return ""


def _line(error: BaseException, file: str) -> str:
    """The last line of the user's own file that an error came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if file and lines else ""


def near(left: float, right: float) -> bool:
    """Whether two figures are the same but for rounding."""
    return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=1e-6)
