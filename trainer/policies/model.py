"""hetopt's own policy: learns how long each worker takes for how many samples, and solves for the best shares at once.

Published policies move a share in proportion to the throughput it showed, ``b / t``. That is exact only for workers
without overhead; with ``t = a + c b`` the error shrinks by a / t an adjustment, and every adjustment acts on noise.
Here each worker has a line (`hetopt.trainer.policies.model`) and the shares solve

    minimise  max_i (a_i + c_i b_i)    over integers b_i >= minimum with sum b_i = B

exactly (`hetopt.core.batch_partition`). From equal shares this takes one adjustment where there is no overhead and two
where there is: the first makes every worker show a second point of its line.

**When to act.** The expected gain is ``1 - T / max_i t_i``, T being the slowest worker's time with the new shares.
Shares change when it exceeds ``least_gain``. Shares that stayed for ``settled_periods`` are settled: from then on a
change has to be worth ``settled_gain``. In a long run noise and slow drift get many chances, and must not make shares
flicker. A worker that changes its speed unsettles them.

What is known of one worker's compute time: a line over its share, how sure it is, and whether it has just moved.

A step of b samples takes ``t(b) = a + c b``: ``a`` seconds whatever the share, ``c`` seconds a sample. The pair (a, c)
is followed by a Kalman filter, which is least squares:

    observation    t_k = a + c b_k + e,           sd(e) = r t_k

**Prior.** The first observation fixes one point of the line and says nothing about its slope; the prior does: no
overhead, give or take `OVERHEAD_SD` of the time seen. Once two shares are far enough apart for their times to differ by
more than the errors, the data outweigh it.

**Hiccups.** An observation counts for no more than `CLIP` standard errors (Huber 1964), so one bad period hardly moves
the line. Two one-sided cumulative sums (Page 1954) collect what is left of the errors beyond `SLACK`. One observation
alone cannot carry a sum beyond `ALARM`; two bad ones in a row do, and so does a smaller shift that stays. Then the
worker's speed has changed, and the line is scaled through the present observation, overhead and slope alike: a slower
machine is slower at everything, so the ratio a : c, which took two shares to learn, is kept.

**Errors.** r comes from the spread of the steps within periods.

The filter is of our own: two numbers in closed form, in a record that goes into checkpoints; no dependency has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import Shares, WorkerTime, solve_shares
from hetopt.trainer.policies.policy import BatchDecision, BatchObservation

OVERHEAD_SD = 0.5
"""Standard deviation of the overhead's part of a step before a second share was seen."""

LOOSENING = 0.05
"""What a change of the share adds to it: no worker is exactly a line (caches, vector widths, micro-batches)."""

CLIP, SLACK, ALARM = 2.5, 1.0, 6.0
_LOUDEST = 5.0
"""Most that one observation says in a cumulative sum: below SLACK + ALARM, above SLACK + ALARM / 2."""

_LEAST_SLOPE = 0.02
"""Least part of a step that depends on the share: a flat line would ask for all samples there are."""

_SPREAD_MEMORY = 16
"""Periods over which the spread of a step is averaged."""


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
    periods: PositiveInt = 1
    since_change: NonNegativeInt | None = None
    slower: NonNegativeFloat = 0.0
    faster: NonNegativeFloat = 0.0

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
        before = self
        if samples != self.samples:
            before = before._turnable(LOOSENING)
            possible = before.possible()
            if before.time_s(samples) < 0.5 * possible.time_s(samples):
                before = possible  # never expect a time near 0 or below: every error is relative to it
        expected_s = before.time_s(samples)
        sd_s = expected_s * math.hypot(before.relative_sd(samples), relative_error)
        error = (time_s - expected_s) / sd_s
        said = min(max(error, -_LOUDEST), _LOUDEST)
        slower, faster = _gathered(self.slower, said), _gathered(self.faster, -said)
        if max(slower, faster) <= ALARM:
            believed_s = expected_s + min(max(error, -CLIP), CLIP) * sd_s
            line = before.conditioned(samples, believed_s, (relative_error * expected_s) ** 2)
            since_change = None if self.since_change is None else self.since_change + 1
        else:
            line = before._scaled(time_s / expected_s, relative_sd=relative_error)
            slower, faster, since_change = 0.0, 0.0, 0
        weight = 1 / min(self.periods + 2, _SPREAD_MEMORY)
        return line.model_copy(
            update={
                "samples": samples,
                "step_variance": (1 - weight) * self.step_variance + weight * step_variance,
                "last_s": time_s,
                "periods": self.periods + 1,
                "since_change": since_change,
                "slower": slower,
                "faster": faster,
            }
        )

    def conditioned(self, samples: int, time_s: float, variance: float) -> WorkerLine:
        """Return the line once ``a + c samples`` was seen to be a time with that variance: the Kalman update."""
        row_fixed = self.fixed_variance + samples * self.covariance
        row_sample = self.covariance + samples * self.per_sample_variance
        total = row_fixed + samples * row_sample + variance
        gain_fixed, gain_sample = row_fixed / total, row_sample / total
        error = time_s - self.fixed_s - samples * self.per_sample_s
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


LEAST_ERROR = 0.01
"""Relative error of a period's median that no number of quiet steps undercuts."""

UNKNOWN_NOISE = 0.03
"""Relative standard deviation of a step's time before any spread was seen."""

_FEW_STEPS = 3  # fewer have no spread to speak of


class ModelState(Record):
    """The lines of all workers in rank order, and for how many periods neither shares nor speeds have changed."""

    lines: tuple[WorkerLine, ...] = ()
    quiet_periods: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShares:
    """Fits each worker's line and hands out the shares that are best for the lines.

    Args:
        minimum: least share of a worker.
        least_gain: gain in the slowest worker's time that is worth a change.
        settled_gain: the same once shares are settled.
        settled_periods: periods without a change after which they are.
    """

    minimum: int = 1
    least_gain: float = 0.02
    settled_gain: float = 0.05
    settled_periods: int = 4

    def initial(self) -> ModelState:
        """The state before the first period: no worker's speed is known."""
        return ModelState()

    def decide(self, state: ModelState, observation: BatchObservation) -> tuple[ModelState, BatchDecision]:
        """The lines after this period, and the shares that are best for them where that is worth a change.

        Raises:
            BadInput: the global batch does not hold the workers' least shares.
        """
        shares = observation.local_batch_sizes
        state = _learned(state, observation)
        lines = [line.possible() for line in state.lines]
        best = solve_shares([self._worker(line) for line in lines], sum(shares))
        decision = BatchDecision(local_batch_sizes=shares)
        if best.local_batch_sizes != shares and (min(shares) < self.minimum or self._is_worth(state, lines, best)):
            reason = self._reason(lines, best)
            decision = BatchDecision(local_batch_sizes=best.local_batch_sizes, reason=reason)
        return state, decision

    def _worker(self, line: WorkerLine) -> WorkerTime:
        return WorkerTime(fixed_s=line.fixed_s, per_sample_s=line.per_sample_s, min_samples=self.minimum)

    def _is_worth(self, state: ModelState, lines: Sequence[WorkerLine], best: Shares) -> bool:
        slowest_s = max(line.time_s(line.samples) for line in lines)
        least = self.least_gain if state.quiet_periods < self.settled_periods else self.settled_gain
        return 1 - best.compute_s / slowest_s > least

    def _reason(self, lines: Sequence[WorkerLine], best: Shares) -> str:
        now_s = max(line.time_s(line.samples) for line in lines)
        parts = [
            f"compute of the slowest worker {now_s:.3g} s, expected {best.compute_s:.3g} s with new local batch sizes"
        ]
        parts += [f"worker {rank} has changed its speed" for rank, line in enumerate(lines) if line.since_change == 0]
        return "; ".join(parts)


def _learned(state: ModelState, observation: BatchObservation) -> ModelState:
    """The state after one more period; afresh where the number of workers is another one."""
    if len(state.lines) != len(observation.local_batch_sizes):
        return ModelState(lines=_first_lines(observation))
    lines = _next_lines(state.lines, observation)
    quiet = all(
        now.samples == was.samples and now.since_change != 0 for now, was in zip(lines, state.lines, strict=True)
    )
    return ModelState(lines=lines, quiet_periods=state.quiet_periods + 1 if quiet else 0)


def _first_lines(observation: BatchObservation) -> tuple[WorkerLine, ...]:
    unknown = UNKNOWN_NOISE**2
    noise = [(unknown + seen) / 2 for seen in _step_variances(observation, [unknown] * len(observation.compute_s))]
    return tuple(
        WorkerLine.through(
            share,
            time_s,
            relative_error=_median_error(own, observation.steps),
            step_variance=own,
        )
        for share, time_s, own in zip(observation.local_batch_sizes, observation.compute_s, noise, strict=True)
    )


def _next_lines(lines: Sequence[WorkerLine], observation: BatchObservation) -> tuple[WorkerLine, ...]:
    shares = observation.local_batch_sizes
    noise = [line.step_variance for line in lines]
    return tuple(
        line.seen(
            share,
            time_s,
            relative_error=_median_error(line.step_variance, observation.steps),
            step_variance=min(variance, max(4 * line.step_variance, UNKNOWN_NOISE**2)),
        )
        for line, share, time_s, variance in zip(
            lines, shares, observation.compute_s, _step_variances(observation, noise), strict=True
        )
    )


def _step_variances(observation: BatchObservation, otherwise: Sequence[float]) -> Sequence[float]:
    """Relative variance of one step's time of each worker; ``otherwise`` where the steps were too few to tell."""
    if observation.steps < _FEW_STEPS:
        return otherwise
    return [(sd / time_s) ** 2 for sd, time_s in zip(observation.spread_s, observation.compute_s, strict=True)]


def _median_error(step_variance: float, steps: int) -> float:
    """Relative standard error of the median over a period's steps (pi / 2 times a mean's variance, if normal)."""
    return math.hypot(LEAST_ERROR, math.sqrt(math.pi / 2 * step_variance / steps))
