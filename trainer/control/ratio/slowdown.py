"""How many more steps training takes when gradients arrive late: a law of one number, learned from measured progress.

    slowdown(gain) = 1 + a sqrt(1 / gain - 1)

What the law rests on, and what was measured of ``a``, is said where planning reads it: `hetopt.profiler.inflation`.

``a`` is fitted by least squares to ``dense - achieved = a achieved sqrt(1 / gain - 1)`` over the looks so far, with the
root as instrument, for both sides are noisy (`hetopt.trainer.exchange.progress`); older looks count for less, and a
prior for as much as its spread is worth.
"""

from __future__ import annotations

import math

from pydantic import NonNegativeFloat, PositiveFloat

from hetopt.profiler.artifact import Record
from hetopt.profiler.inflation import COEFFICIENT_SD, distance
from hetopt.trainer.exchange.progress import Progress

LARGEST = 1.0
"""Of ``a``: where a single look says more, it is noise."""

_DECAY = 0.95  # of what a look has said, with every further one
_WEIGHT = 0.2  # of the newest look in the scale of progress, and in the noise
_FIRST_NOISE = 0.25  # of one look, in dense steps' progress
_LEAST_NOISE = 0.01


class Slowdown(Record):
    """What the looks have said.

    Attributes:
        scale: progress of a dense step, smoothed; absent before the first look.
        noise: variance of one look, relative to the scale.
        moment, information, squares: sums over looks of root x shortfall, root x root x achieved, and root squared.
    """

    scale: PositiveFloat | None = None
    noise: NonNegativeFloat = _FIRST_NOISE**2
    moment: float = 0.0
    information: float = 0.0
    squares: NonNegativeFloat = 0.0

    def seen(self, gain: float, progress: Progress, *, prior: float, weight: float = 1.0) -> Slowdown:
        """After a look at an exchange that kept ``gain``; ``weight`` in [0, 1] is how much it says of that gain."""
        scale = progress.dense
        if self.scale is not None:
            scale = self.scale + _WEIGHT * (progress.dense - self.scale)
        if scale <= 0:
            return self  # a look that was nothing but noise
        root = distance(gain)
        shortfall, carried = (progress.dense - progress.achieved) / scale, progress.achieved / scale * root
        seen = (shortfall - self.coefficient(prior) * carried) ** 2
        noise = self.noise + _WEIGHT * (min(seen, 4 * self.noise) - self.noise)
        return Slowdown(
            scale=scale,
            noise=max(_LEAST_NOISE**2, noise),
            moment=_DECAY * self.moment + weight * root * shortfall,
            information=_DECAY * self.information + weight * root * carried,
            squares=_DECAY * self.squares + (weight * root) ** 2,
        )

    def coefficient(self, prior: float) -> float:
        """The best guess of ``a``, where it was ``prior`` before any look."""
        weight = self.noise / _prior_sd(prior) ** 2
        known = weight + self.information
        return min(LARGEST, max(0.0, (weight * prior + self.moment) / known)) if known > 0 else prior

    def coefficient_sd(self, prior: float) -> float:
        """Its standard deviation."""
        first = _prior_sd(prior)
        weight = self.noise / first**2
        known = weight + self.information
        return min(first, math.sqrt(self.noise * (weight + self.squares)) / known) if known > 0 else first


def _prior_sd(prior: float) -> float:
    """How far a guess may be off: as much as it is, or as what was met elsewhere."""
    return max(prior, COEFFICIENT_SD)
