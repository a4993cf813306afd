"""How work that takes its time says what it is doing, to a terminal, a notebook or nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PIECES = " · "
"""Between the phrases of a progress: a line of a terminal ends there."""


def _silent(text: str, done: float | None = None) -> None:
    """Say nothing."""


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Where progress and remarks go.

    Attributes:
        progress: told what is going on, and the part of it that is done (0 to 1; None: nobody knows).
        note: told a remark that is worth keeping.
    """

    progress: Callable[[str, float | None], None] = _silent
    note: Callable[[str], None] = _silent

    def __call__(self, text: str, done: float | None = None) -> None:
        """Say what is going on."""
        self.progress(text, done)
