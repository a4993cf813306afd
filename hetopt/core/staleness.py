"""How a staleness is spent, where updates are summed by collectives that are waited for some steps later."""

from __future__ import annotations

from dataclasses import dataclass

MOST_FLIGHTS = 4
"""Sums on their way at once, of two vectors of the model's size each; a larger staleness sums several steps first."""


@dataclass(frozen=True, kw_only=True)
class StalenessSchedule:
    """``every`` steps an update leaves, and at most ``flights - 1`` are on their way when the next step begins."""

    every: int
    flights: int

    @classmethod
    def of(cls, staleness: int) -> StalenessSchedule:
        """The rhythm that keeps a staleness: ``every * flights <= staleness + 1``."""
        flights = min(MOST_FLIGHTS, staleness + 1)
        return cls(every=(staleness + 1) // flights, flights=flights)
