"""Whether thin exchanges hold a task back: two models that begin alike are trained beside each other to see.

No look at gradients tells: neither the energy that is kept, nor the delay, nor the first-order progress of what is
sent says how much a task minds that most of its gradient comes late. Measured on three (first 80 steps, Top-k of
0.1 %, batches of 10 windows and of 32 images): an LSTM on text learns as fast as with everything, or faster; a small
ResNet on CIFAR-10 is still where it began, and a VGG drifts away first. Ten steps of both, on the same samples, show
which it is.

The twins are trained by every worker for itself, without exchanging anything: a few steps of computation, however slow
the network is, and as many comparisons as there are workers. What is held back is larger, in steps, than among all
workers, each of which sends its own selection; so the trial is on the safe side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.compression_slowdown import MOST_LOST

CHUNK_STEPS = 4
"""Steps of a model before the other's turn, and before losses are compared."""

MOST_STEPS = 40
"""After which a task that has learned nothing yet cannot be told."""

PART = 2
"""One in so many of a worker's samples is trained on: that is enough to tell, and takes half the time."""

LEAST_DROP = 0.05
"""Part of the first loss by which training must have lowered it before something can be said of how fast it does."""

HARMFUL = 3 * MOST_LOST
"""Part of what was learned, or of `LEAST_DROP`, that a twin is behind when it is clear that it will not catch up."""


def most_cost_s(compute_s: float) -> float:
    """Seconds that a trial may take, where a step computes for ``compute_s``."""
    return 2 * MOST_STEPS * compute_s / PART


class Verdict(Record):
    """What a trial says of exchanges at ``ratio`` and above: they cost no more steps than may be lost, or they do.

    ``undecided``: training had not begun to learn.
    """

    ratio: PositiveFloat
    says: Literal["harmless", "harmful", "undecided"]


@dataclass(kw_only=True)
class PairedTrial:
    """Losses of both twins so far.

    Attributes:
        ratio: of the thin one.
        whole, thin: mean loss over workers, of each chunk.
    """

    ratio: float
    whole: list[float] = field(default_factory=list)
    thin: list[float] = field(default_factory=list)

    def after(self, rows: Sequence[Sequence[float]]) -> Verdict | None:
        """What can be said after another chunk; None: not yet.

        Args:
            rows: of each worker, mean losses of the whole and of the thin twin over the chunk, and its samples a step.
        """
        samples = sum(row[2] for row in rows)
        self.whole.append(sum(row[0] * row[2] for row in rows) / samples)
        self.thin.append(sum(row[1] * row[2] for row in rows) / samples)
        says = self._says()
        return None if says is None else Verdict(ratio=self.ratio, says=says)

    def _says(self) -> Literal["harmless", "harmful", "undecided"] | None:
        chunks = len(self.whole)
        if chunks < 2:
            return None
        first = self.whole[0]
        behind, drop = self.thin[-1] - self.whole[-1], first - self.whole[-1]
        least = LEAST_DROP * abs(first)
        # Not "more than": a loss that is not finite is behind, too.
        if not behind < HARMFUL * max(drop, least):
            return "harmful"
        if drop >= least and behind <= MOST_LOST * drop:
            return "harmless"
        return "undecided" if chunks * CHUNK_STEPS >= MOST_STEPS else None
