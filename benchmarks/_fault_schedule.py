"""What happens to a simulated run, and when: drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["kill", "leave", "freeze", "partition", "slow", "tear", "full", "kill-all", "store"]
KINDS: tuple[FaultKind, ...] = ("kill", "leave", "freeze", "partition", "slow", "tear", "full", "kill-all", "store")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens at a moment, to a worker where it is about one, for some time where it passes."""

    at_s: float
    kind: FaultKind
    place: int
    lasts_s: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A run to simulate."""

    workers: int
    steps: int
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """The schedule of a seed."""
        draw = random.Random(seed)
        workers = draw.randint(2, 6)
        faults = [
            Fault(
                at_s=draw.uniform(0.0, 9.0),
                kind=draw.choice(KINDS),
                place=draw.randrange(workers),
                lasts_s=draw.choice([0.3, 1.0, 4.0, 12.0]),
            )
            for _ in range(draw.randint(1, 6))
        ]
        return cls(workers=workers, steps=draw.randint(20, 60), faults=tuple(sorted(faults, key=lambda one: one.at_s)))
