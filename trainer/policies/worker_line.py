"""What is known of one worker's compute time: a line over its share, how sure it is, and whether it has just moved.

A step of b samples takes ``t(b) = a + c b``: ``a`` seconds whatever the share, ``c`` seconds a sample. The pair (a, c)
is followed by a Kalman filter, which is least squares that forgets a little between observations:

    observation    t_k = a + c b_k + e,           sd(e) = r t_k
    drift          (a, c) <- (1 + q) (a, c),      sd(q) = DRIFT

**Prior.** The first observation fixes one point of the line and says nothing about its slope; the prior does: no
overhead, give or take `OVERHEAD_SD` of the time seen. Once two shares are far enough apart for their times to differ by
more than the errors, the data outweigh it.

**Hiccups.** An observation counts for no more than `CLIP` standard errors (Huber 1964), so one bad period hardly moves
the line. Two one-sided cumulative sums (Page 1954) collect what is left of the errors beyond `SLACK`. One observation
alone cannot carry a sum beyond `ALARM`; two bad ones in a row do, and so does a smaller shift that stays. Then the
worker's speed has changed, and the line is scaled through the present observation, overhead and slope alike: a slower
machine is slower at everything, so the ratio a : c, which took two shares to learn, is kept.

**Errors.** r comes from the spread of the steps within periods. Where whole periods differ by more than that explains
(another process, a busy host), `unrest` learns by how much and widens r. It is read off the differences between one
period and the next of the same share (von Neumann 1941), so that a speed that has changed counts once, and not for as
long as the line has not followed it: otherwise the evidence of a change would excuse itself.

The filter is of our own: two numbers in closed form, in a record that goes into checkpoints; no dependency has one.
"""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hetopt.core.artifact import Record

OVERHEAD_SD = 0.5
"""Standard deviation of the overhead's part of a step before a second share was seen."""

LOOSENING = 0.05
"""What a change of the share adds to it: no worker is exactly a line (caches, vector widths, micro-batches)."""

DRIFT = 0.001
"""Relative standard deviation of a worker's speed from one period to the next."""

CLIP, SLACK, ALARM = 2.5, 1.0, 6.0
_LOUDEST = 5.0
"""Most that one observation says in a cumulative sum: below SLACK + ALARM, above SLACK + ALARM / 2."""

_LEAST_SLOPE = 0.02
"""Least part of a step that depends on the share: a flat line would ask for all samples there are."""

_SPREAD_MEMORY = 16
"""Periods over which the spread of a step is averaged."""

_UNREST_WEIGHT, _UNREST_CLIP = 0.1, 4.0
"""What one squared difference between periods counts for in the unrest, and the most that it may be."""


class WorkerLine(Record):
    """The line of one worker with its covariance, the noise around it, and the alarm sums.

    Attributes:
        samples: the share last seen.
        last_s: the time that it took then.
        fixed_s: a. Noise may push it below 0; `possible` brings it back.
        per_sample_s: c.
        fixed_variance: of a.
        covariance: of a and c.
        per_sample_variance: of c.
        step_variance: relative variance of the time of one step.
        unrest: variance between periods, over what `step_variance` explains.
        periods: observations so far.
        since_change: periods since the worker's speed changed; None: it never did.
        slower: evidence that the worker has become slower than the line says.
        faster: that it has become faster.
    """

    samples: PositiveInt
    last_s: PositiveFloat
    fixed_s: float
    per_sample_s: float
    fixed_variance: NonNegativeFloat
    covariance: float
    per_sample_variance: NonNegativeFloat
    step_variance: NonNegativeFloat
    unrest: float = Field(default=1.0, ge=1)
    periods: PositiveInt = 1
    since_change: NonNegativeInt | None = None
    slower: NonNegativeFloat = 0.0
    faster: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.time_s(self.samples) <= 0:
            raise ValueError("a step takes time")
        return self

    @classmethod
    def through(cls, samples: int, time_s: float, *, relative_error: float, step_variance: float) -> WorkerLine:
        """The line after one observation: through it, and through the origin until more is known."""
        slope_s = time_s / samples
        through_origin = cls(
            samples=samples,
            last_s=time_s,
            fixed_s=0.0,
            per_sample_s=slope_s,
            fixed_variance=0.0,
            covariance=0.0,
            per_sample_variance=(relative_error * slope_s) ** 2,
            step_variance=step_variance,
        )
        return through_origin._turnable(OVERHEAD_SD)

    def time_s(self, samples: float) -> float:
        """Expected compute time of a step."""
        return self.fixed_s + self.per_sample_s * samples

    def relative_sd(self, samples: float) -> float:
        """Standard error of `time_s`, relative to it."""
        squares = self.fixed_variance + samples * samples * self.per_sample_variance
        return math.sqrt(max(0.0, squares + 2 * samples * self.covariance)) / self.time_s(samples)

    def seen(self, samples: int, time_s: float, *, relative_error: float, step_variance: float) -> WorkerLine:
        """The line after one more period.

        Args:
            samples: the worker's share in it.
            time_s: median compute time of its steps.
            relative_error: relative standard error of that median, as far as the spread of the steps explains it.
            step_variance: relative variance of those steps.
        """
        before = self._scaled(1.0, relative_sd=DRIFT)
        if samples != self.samples:
            before = before._turnable(LOOSENING)
            possible = before.possible()
            if before.time_s(samples) < 0.5 * possible.time_s(samples):
                before = possible  # never expect a time near 0 or below: every error is relative to it
        expected_s = before.time_s(samples)
        own_error = relative_error * math.sqrt(self.unrest)
        sd_s = expected_s * math.hypot(before.relative_sd(samples), own_error)
        error = (time_s - expected_s) / sd_s
        said = min(max(error, -_LOUDEST), _LOUDEST)
        slower, faster = _gathered(self.slower, said), _gathered(self.faster, -said)
        if max(slower, faster) <= ALARM:
            believed_s = expected_s + min(max(error, -CLIP), CLIP) * sd_s
            line = before.conditioned((1.0, samples), believed_s, (own_error * expected_s) ** 2)
            since_change = None if self.since_change is None else self.since_change + 1
        else:
            line = before._scaled(time_s / expected_s, relative_sd=own_error)
            slower, faster, since_change = 0.0, 0.0, 0
        unrest = self.unrest
        if samples == self.samples:
            difference = math.log(time_s / self.last_s) / own_error
            unrest *= 1 + _UNREST_WEIGHT * (min(difference * difference / 2, _UNREST_CLIP) - 1)
        weight = 1 / min(self.periods + 2, _SPREAD_MEMORY)
        return line.model_copy(
            update={
                "samples": samples,
                "step_variance": (1 - weight) * self.step_variance + weight * step_variance,
                "last_s": time_s,
                "unrest": max(1.0, unrest),
                "periods": self.periods + 1,
                "since_change": since_change,
                "slower": slower,
                "faster": faster,
            }
        )

    def conditioned(self, on: tuple[float, float], value: float, variance: float) -> WorkerLine:
        """The line once ``on[0] a + on[1] c`` was seen to be ``value`` with that variance: the Kalman update."""
        row_fixed = on[0] * self.fixed_variance + on[1] * self.covariance
        row_sample = on[0] * self.covariance + on[1] * self.per_sample_variance
        total = on[0] * row_fixed + on[1] * row_sample + variance
        gain_fixed, gain_sample = row_fixed / total, row_sample / total
        error = value - on[0] * self.fixed_s - on[1] * self.per_sample_s
        return self.model_copy(
            update={
                "fixed_s": self.fixed_s + gain_fixed * error,
                "per_sample_s": self.per_sample_s + gain_sample * error,
                "fixed_variance": max(0.0, self.fixed_variance - gain_fixed * row_fixed),
                "covariance": self.covariance - gain_fixed * row_sample,
                "per_sample_variance": max(0.0, self.per_sample_variance - gain_sample * row_sample),
            }
        )

    def possible(self) -> WorkerLine:
        """The likeliest line that can be: no overhead below 0, and a step that depends on the share.

        The errors stay what they were: an overhead that is cut off at 0 is not thereby known to be 0.
        """
        time_s = self.time_s(self.samples)
        fixed_s, per_sample_s = self.fixed_s, self.per_sample_s
        if fixed_s < 0:
            # The likeliest slope if the overhead is 0; where that makes no sense, the one through the last time.
            slope_s = per_sample_s - fixed_s * self.covariance / self.fixed_variance if self.fixed_variance > 0 else 0.0
            fixed_s, per_sample_s = 0.0, slope_s if slope_s > 0 else time_s / self.samples
        if per_sample_s * self.samples < _LEAST_SLOPE * time_s:
            fixed_s, per_sample_s = (1 - _LEAST_SLOPE) * time_s, _LEAST_SLOPE * time_s / self.samples
        return self.model_copy(update={"fixed_s": fixed_s, "per_sample_s": per_sample_s})

    def _scaled(self, factor: float, *, relative_sd: float) -> WorkerLine:
        """The line of a worker that is so many times slower, give or take ``relative_sd``."""
        fixed_s, per_sample_s = self.fixed_s * factor, self.per_sample_s * factor
        return self.model_copy(
            update={
                "fixed_s": fixed_s,
                "per_sample_s": per_sample_s,
                "fixed_variance": self.fixed_variance * factor**2 + (relative_sd * fixed_s) ** 2,
                "covariance": self.covariance * factor**2 + relative_sd**2 * fixed_s * per_sample_s,
                "per_sample_variance": self.per_sample_variance * factor**2 + (relative_sd * per_sample_s) ** 2,
            }
        )

    def _turnable(self, overhead_sd: float) -> WorkerLine:
        """The line free to turn around its time at the last share: the overhead's part is less sure by that much."""
        slope_variance = (overhead_sd * self.time_s(self.samples) / self.samples) ** 2
        return self.model_copy(
            update={
                "fixed_variance": self.fixed_variance + slope_variance * self.samples**2,
                "covariance": self.covariance - slope_variance * self.samples,
                "per_sample_variance": self.per_sample_variance + slope_variance,
            }
        )


def _gathered(evidence: float, said: float) -> float:
    """A cumulative sum after one more observation; one to the contrary also halves what was said before."""
    return max(0.0, (evidence if said > 0 else evidence / 2) + said - SLACK)
