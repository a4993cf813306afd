"""How much of the gradient's energy each ratio would have kept, on every worker: what one Top-k yields for free.

Sorted by magnitude, the sum of the first k squares over the sum of all is the gain of every k at once; only the largest
kept fraction needs selecting. The gradient is the one with what earlier steps held back, so a gain at a ratio that is
not in use is what it would be *this* step, with the residual of the ratio that is.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

_NOTHING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class GainCurve:
    """Kept energies at some ratios and the whole energy, of every worker in rank order.

    Attributes:
        ratios: fractions of the elements kept, increasing, each in (0, 1].
        kept: energies at those ratios, a row for each worker.
        energy: of the whole gradient and residual, of each worker.

    Raises:
        ValueError: the parts do not match, or an energy is negative or not finite.
    """

    ratios: tuple[float, ...]
    kept: tuple[tuple[float, ...], ...]
    energy: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.ratios or any(not 0 < ratio <= 1 for ratio in self.ratios):
            raise ValueError(f"a curve needs ratios in (0, 1], not {self.ratios}")
        if any(one >= other for one, other in zip(self.ratios, self.ratios[1:], strict=False)):
            raise ValueError(f"ratios must increase, not {self.ratios}")
        if not self.energy or len(self.kept) != len(self.energy):
            raise ValueError("a curve needs one row of kept energies for each worker's energy")
        if any(len(row) != len(self.ratios) for row in self.kept):
            raise ValueError("a curve needs a kept energy for each ratio")
        if any(not 0 <= energy < math.inf for row in (*self.kept, self.energy) for energy in row):
            raise ValueError("energies must be finite and not negative")

    def gain(self, ratio: float) -> float:
        """Kept energy of all workers over their energy, in (0, 1]; 1 where there is no gradient to lose."""
        return self._at(ratio, [sum(column) for column in zip(*self.kept, strict=True)], sum(self.energy))

    def gains(self, ratio: float) -> tuple[float, ...]:
        """The same of each worker by itself."""
        return tuple(self._at(ratio, row, energy) for row, energy in zip(self.kept, self.energy, strict=True))

    def points(self) -> tuple[tuple[float, float], ...]:
        """Ratios with the gain over all workers."""
        return tuple((ratio, self.gain(ratio)) for ratio in self.ratios)

    def _at(self, ratio: float, kept: Sequence[float], energy: float) -> float:
        if not 0 < ratio <= 1:
            raise ValueError(f"a ratio is in (0, 1], not {ratio}")
        if energy <= 0:
            return 1.0
        return interpolated(self.ratios, [min(1.0, part / energy) for part in kept], ratio)


def gain_of(kept: float, energy: float) -> float:
    """Kept energy over energy, in [0, 1]; 1 where there was none. Rounding can keep less than nothing: that is 0."""
    return min(1.0, max(0.0, kept / energy)) if energy > 0 else 1.0


def interpolated(ratios: Sequence[float], gains: Sequence[float], ratio: float) -> float:
    """Gain at any ratio: a power law between measured points, and 1 at a ratio of 1.

    Below the smallest point the gain is taken to fall in proportion, which is the least that it can be: the largest
    elements come first, so what is kept falls no faster than what is sent.
    """
    if ratio < ratios[0]:
        return gains[0] * ratio / ratios[0]
    xs, ys = (*ratios, 1.0), (*gains, 1.0)
    right = bisect.bisect_left(xs, ratio)
    if xs[right] == ratio:
        return ys[right]
    low, high = math.log(xs[right - 1]), math.log(xs[right])
    below, above = (math.log(max(y, _NOTHING)) for y in ys[right - 1 : right + 1])
    return math.exp(below + (math.log(ratio) - low) / (high - low) * (above - below))
