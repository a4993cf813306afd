"""What ratio policies read and return: pure functions from what all workers measured to what is sent next.

``(state, observation) -> (state, decision)`` over values that all ranks hold alike, so all ranks decide the same
without another message. The state is a small plain record, and travels in checkpoints.

**Gain curve.** How much of the gradient's energy each ratio would have kept, one Top-k tells for free. Sorted by
magnitude, the sum of the first k squares over the sum of all is the gain of every k at once; only the largest kept
fraction needs selecting. The gradient is the one with what earlier steps held back, so a gain at a ratio that is not in
use is what it would be *this* step, with the residual of the ratio that is.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveFloat

from hetopt.core.artifact import Record
from hetopt.trainer.comm.network import Network

_NOTHING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class GainCurve:
    """Energy that each worker's largest gradient elements hold, at several ratios, and the whole energy, by rank.

    Attributes:
        ratios: fractions of the elements kept, increasing, each in (0, 1].
        kept: energies that the largest elements hold at those ratios, a row for each worker.
        energy: energy of the whole gradient and residual, of each worker.
    """

    ratios: tuple[float, ...]
    kept: tuple[tuple[float, ...], ...]
    energy: tuple[float, ...]

    def gain(self, ratio: float) -> float:
        """Return the fraction, 0 to 1, of all workers' gradient energy kept at ``ratio``; 1: there is no gradient.

        Args:
            ratio: fraction of the elements, in (0, 1]; between measured ratios it is interpolated.
        """
        return self._at(ratio, [sum(column) for column in zip(*self.kept, strict=True)], sum(self.energy))

    def gains(self, ratio: float) -> tuple[float, ...]:
        """Return the fraction, 0 to 1, of each worker's gradient energy kept at ``ratio``, in rank order.

        1: that worker has no gradient.
        """
        return tuple(self._at(ratio, row, energy) for row, energy in zip(self.kept, self.energy, strict=True))

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return each measured ratio, increasing, with the fraction of all workers' energy that it keeps."""
        return tuple((ratio, self.gain(ratio)) for ratio in self.ratios)

    def _at(self, ratio: float, kept: Sequence[float], energy: float) -> float:
        """Return the share of ``energy`` that a ratio keeps, interpolated; 1 where there is none."""
        if energy <= 0:
            return 1.0
        return interpolated(self.ratios, [min(1.0, part / energy) for part in kept], ratio)


def gain_of(kept: float, energy: float) -> float:
    """Return the kept part of the gradient's energy as a fraction, clipped to [0, 1]; 1 where ``energy`` is 0."""
    return min(1.0, max(0.0, kept / energy)) if energy > 0 else 1.0


def interpolated(ratios: Sequence[float], gains: Sequence[float], ratio: float) -> float:
    """Return the fraction of energy kept at ``ratio``, by a power law between measured points; 1 at a ratio of 1.

    Below the smallest point the gain is taken to fall in proportion, which is the least that it can be: the largest
    elements come first, so what is kept falls no faster than what is sent.

    Args:
        ratios: measured ratios, increasing, each in (0, 1]; at least one.
        gains: fraction of the energy kept at each of them.
        ratio: fraction of the elements that is asked about, in (0, 1].
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


DENSE = 1.0
"""The ratio at which everything is sent, uncompressed and with nothing held back."""


class Verdict(Record):
    """Result of a paired trial: whether sending ``ratio`` of the elements, or more of them, harms training.

    ``harmless``: it takes few enough more steps.

    ``undecided``: training had not begun to learn.
    """

    ratio: PositiveFloat
    says: Literal["harmless", "harmful", "undecided"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioObservation:
    """Times, energies and loss of one control period, all of whose steps were exchanged in the same way.

    Attributes:
        step: number of steps done when the period ended.
        steps: number of the period's steps that were exchanged in this way.
        epoch: passes over the data completed, with fractions.
        ratio: fraction of the elements that was sent; 1: dense.
        compute_s: median time of a step's computation on the slowest worker, the backward pass included.
        step_s: median time of a step from begin to end.
        kept_energy, energy: of gradient and residual, in rank order: what was sent and what there was, means over the
            period. Equal where everything is sent. The first is negative where rounding the sum of a slice, which
            counts against whoever sums it, was more than that worker had itself.
        gradient_norm: of the gradient without residuals, root of the mean square over workers and steps.
        gain_curve: energy kept at other ratios; None: no step of the period looked.
        network: network as measured before training; None: nobody asked for it.
        option: `Option.key` of the exchange that was in use; None: it has none.
        learning_rate: learning rate of the first parameter group; None: nobody asks.
        steps_left: steps until the run ends by its own rules; None: not known.
        loss: mean loss over the samples of the period; None: nobody asks.
        verdict: outcome of a trial that was made since the last decision; None: none was.
        level_gains: mean fractions of the energy that candidate and floor would have kept; None: steps did not choose
            between them.
    """

    step: int
    steps: int
    epoch: float
    ratio: float
    compute_s: float
    step_s: float
    kept_energy: tuple[float, ...]
    energy: tuple[float, ...]
    gradient_norm: float
    gain_curve: GainCurve | None = None
    network: Network | None = None
    option: str | None = None
    learning_rate: float | None = None
    steps_left: int | None = None
    loss: float | None = None
    verdict: Verdict | None = None
    level_gains: tuple[float, float] | None = None

    @property
    def gain(self) -> float:
        """Energy sent over energy there was, of all workers, in [0, 1]; 1 where there was none."""
        return gain_of(sum(self.kept_energy), sum(self.energy))


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioDecision:
    """The ratio (fraction of elements sent) or exchange to use from now on, and what to measure next.

    Attributes:
        ratio: fraction of the elements; 1: dense, nothing held back, and what was held back goes first.
        reason: words on why something changed; None: nothing did.
        option: `Option.key` of the exchange to use; None: the quickest at this ratio.
        measure_gain: whether the last step of the next period yields a gain curve, even a dense one.
        look_after_steps: steps of the next period; None: as many as the run's control period has.
        try_ratio: ratio at which twins are to be trained, before anything else is exchanged, to tell whether it holds
            training back; None: no trial.
        floor_ratio, least_gain: of a selection from a selection, that each step sends what keeps so much; absent: it
            sends the ratio (`hetopt.trainer.comm.topk`).
    """

    ratio: float
    reason: str | None = None
    option: str | None = None
    measure_gain: bool = False
    look_after_steps: int | None = None
    try_ratio: float | None = None
    floor_ratio: float | None = None
    least_gain: float | None = None


def percent(ratio: float) -> str:
    """Format a ratio for people, as '1 % (100x)': the part sent, and the reduction; from 1 on 'everything'."""
    return "everything" if ratio >= 1 else f"{100 * ratio:.3g} % ({1 / ratio:.4g}x)"
