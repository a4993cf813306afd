"""What is thought of the gain at every ratio, including those that are not in use.

A gain curve is read with the residual of the ratio c0 that *is* in use. At a smaller ratio c the residual would grow
until much less of it is kept; at a larger one it would empty. The gain after settling is taken to be

    gain(c) = curve(c) ^ ((c0 / c) ^ kappa),

which is the curve itself at c0, never above 1, and one number for all ratios: kappa is learned from what gains settled
to after ratios had changed. A family of exchanges that keeps less than exact Top-k does (a sampled threshold, another
worker's indices) has a factor of its own, learned while it is in use.
"""

from __future__ import annotations

import math

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.comm.planner import Option
from hetopt.trainer.policies.ratio.gain_curve import GainCurve, interpolated

FIRST_EXPONENT, FIRST_EXPONENT_SD = 0.1, 0.1
LARGEST_EXPONENT = 0.5
KNOWN_SD = 0.02
"""Relative standard deviation of a gain that was just measured."""

_WEIGHT = 0.3  # of the newest gain
_EXPONENT_WEIGHT = 0.25
_LEAST_SD = 0.02
_SETTLING_PERIODS = 8  # after a change, in which the exponent is learned
_LEAST_GAIN = 1e-6


class Changed(Record):
    """The last change of ratio: from where, and what the curve said of where to."""

    ratio: PositiveFloat
    curve_gain: PositiveFloat
    periods: NonNegativeInt = 0


class GainEstimate(Record):
    """Smoothed curve and gains.

    Attributes:
        points: ratios and gains of the curve, increasing; empty before the first look.
        ratio: c0.
        family: of what is in use.
        own: gain of what is in use; absent before the first observation.
        exponent: kappa.
        exponent_sd: how well it is known.
        factors: of each family, ``compressor by collective``.
        changed: absent where the ratio never changed, or long ago.
    """

    points: tuple[tuple[float, float], ...] = ()
    ratio: PositiveFloat = 1.0
    family: str = ""
    own: PositiveFloat | None = None
    exponent: NonNegativeFloat = FIRST_EXPONENT
    exponent_sd: NonNegativeFloat = FIRST_EXPONENT_SD
    factors: dict[str, PositiveFloat] = Field(default_factory=dict)
    changed: Changed | None = None

    def seen(self, option: Option, gain: float, curve: GainCurve | None) -> GainEstimate:
        """After a period of ``option`` that kept ``gain``, and perhaps looked at the curve."""
        gain = min(1.0, max(gain, _LEAST_GAIN))
        changed = self.changed
        if option.ratio != self.ratio and self.points:
            changed = Changed(ratio=self.ratio, curve_gain=max(_LEAST_GAIN, self._curve(option.ratio)))
        fresh = option.ratio != self.ratio or family(option) != self.family
        own = gain if self.own is None or fresh else self.own + _WEIGHT * (gain - self.own)
        points = self.points
        if curve is not None:
            points = _mixed(points, curve.points(), 1.0 if fresh else _WEIGHT)
        belief = self.model_copy(update={"points": points, "ratio": option.ratio, "family": family(option), "own": own})
        if option.gain is None and curve is not None:
            ratio = gain / max(_LEAST_GAIN, curve.gain(option.ratio))
            before = self.factors.get(family(option), ratio)
            factor = min(1.0, before + _WEIGHT * (ratio - before))
            belief = belief.model_copy(update={"factors": {**self.factors, family(option): factor}})
        return belief._settled(option, changed)

    def gain(self, option: Option) -> float | None:
        """Gain that ``option`` would settle to; None where nothing is known of it."""
        if option.gain is not None:
            return option.gain
        if option.ratio == self.ratio and family(option) == self.family and self.own is not None:
            return self.own
        return self.expected(option)

    def expected(self, option: Option) -> float | None:
        """The same by the curve alone, also for what is in use."""
        if not self.points:
            return None
        settled = math.pow(max(_LEAST_GAIN, self._curve(option.ratio)), (self.ratio / option.ratio) ** self.exponent)
        return max(_LEAST_GAIN, settled * self.factors.get(family(option), 1.0))

    def relative_sd(self, option: Option) -> float:
        """How well `gain` is known."""
        if option.gain is not None or option.ratio == self.ratio or not self.points:
            return KNOWN_SD
        distance = math.log(self.ratio / option.ratio)
        loss = -math.log(max(_LEAST_GAIN, self._curve(option.ratio)))
        # d log gain / d kappa, with log gain = -loss exp(kappa distance)
        slope = loss * abs(distance) * math.exp(self.exponent * distance)
        return math.hypot(KNOWN_SD, slope * self.exponent_sd)

    def _curve(self, ratio: float) -> float:
        ratios, gains = zip(*self.points, strict=True)
        return interpolated(ratios, gains, ratio)

    def _settled(self, option: Option, changed: Changed | None) -> GainEstimate:
        """The exponent after one more look at what a change of ratio has led to."""
        if changed is None or option.gain is not None or self.own is None or changed.periods >= _SETTLING_PERIODS:
            return self.model_copy(update={"changed": None})
        after = changed.model_copy(update={"periods": changed.periods + 1})
        distance = math.log(changed.ratio / option.ratio)
        measured = min(1.0, self.own / self.factors.get(family(option), 1.0))
        # Only a curve that is clearly below 1, and a ratio clearly elsewhere, tell anything.
        if abs(distance) < 0.5 or changed.curve_gain > 0.95 or measured > 0.98:
            return self.model_copy(update={"changed": after})
        seen = math.log(math.log(measured) / math.log(changed.curve_gain)) / distance
        seen = min(max(seen, 0.0), LARGEST_EXPONENT)
        exponent = self.exponent + _EXPONENT_WEIGHT * (seen - self.exponent)
        sd = max(_LEAST_SD, self.exponent_sd * math.sqrt(1 - _EXPONENT_WEIGHT))
        return self.model_copy(update={"exponent": exponent, "exponent_sd": sd, "changed": after})


def family(option: Option) -> str:
    """Name of the options that differ in their ratio alone: compressor and collective."""
    return f"{option.compressor} by {option.collective}"


def _mixed(
    before: tuple[tuple[float, float], ...], fresh: tuple[tuple[float, float], ...], weight: float
) -> tuple[tuple[float, float], ...]:
    """The curve after a look; over other ratios than before it begins anew."""
    if [ratio for ratio, _ in before] != [ratio for ratio, _ in fresh]:
        return fresh
    return tuple((ratio, old + weight * (new - old)) for (ratio, old), (_, new) in zip(before, fresh, strict=True))
