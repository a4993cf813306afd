"""Who hands how many samples to whom: data injection, as SelSync (2307.07950) and ScaDLES (2301.08897) do it.

In a step ``ceil(alpha N)`` of the N workers give every other a copy of a part beta of the samples they have drawn. A
worker draws ``b / (1 + ceil(alpha N) beta)`` samples for a batch of b, so that what it computes stays about as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.core.synchronization import Injection


@dataclass(frozen=True, kw_only=True)
class Handover:
    """One step's, in rank order.

    Attributes:
        drawn: samples that each worker draws itself.
        given: of them, what each gives to every other.
    """

    drawn: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def held(self) -> tuple[int, ...]:
        """Samples that each worker has in the end."""
        total = sum(self.given)
        return tuple(own + total - gift for own, gift in zip(self.drawn, self.given, strict=True))


def drawn_samples(injection: Injection, shares: Sequence[int]) -> tuple[int, ...]:
    """How many samples each worker draws for its share; at least one, the same in every step."""
    factor = 1 + _givers(injection, len(shares)) * injection.samples
    return tuple(max(1, round(share / factor)) for share in shares)


def handover(injection: Injection, shares: Sequence[int], *, seed: int, position: int) -> Handover:
    """Who gives in the step that begins after ``position`` samples: drawn anew in each, the same on every rank."""
    workers = len(shares)
    drawn = drawn_samples(injection, shares)
    words = np.random.PCG64(np.random.SeedSequence((seed, 0x1217EC7, position))).random_raw(workers)
    givers = set(np.argsort(words, kind="stable")[: _givers(injection, workers)].tolist())
    given = (max(1, round(injection.samples * own)) if rank in givers else 0 for rank, own in enumerate(drawn))
    return Handover(drawn=drawn, given=tuple(given))


def _givers(injection: Injection, workers: int) -> int:
    return math.ceil(injection.workers * workers - 1e-9)
