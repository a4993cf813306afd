"""hetopt's own policy: learns how long each worker takes for how many samples, and solves for the best shares at once.

Published policies move a share in proportion to the throughput it showed, ``b / t``. That is exact only for workers
without overhead; with ``t = a + c b`` the error shrinks by a / t an adjustment, and every adjustment acts on noise.
Here each worker has a line (`hetopt.trainer.policies.worker_line`) and the shares solve

    minimise  max_i (a_i + c_i b_i)    over integers b_i >= minimum with sum b_i = B

exactly (`hetopt.core.batch_partition`). From equal shares this takes one adjustment where there is no overhead and two
where there is: the first makes every worker show a second point of its line.

**Workers help each other.** What one worker has not shown at two shares, others may have. The overhead of a step is
much the same work on every device, so the overhead in samples, ``h = a / c``, of the workers that know theirs is what
the others are expected to have, give or take `KINSHIP` of their time. A worker's own evidence outweighs it.

**When to act.** The expected gain is ``g = 1 - T / max_i t_i``, T being the slowest worker's time with the new shares.
Around the optimum T answers to worker j's speed with the weight ``w_j = (1 / c_j) / sum_k (1 / c_k)``. With relative
errors s_j of the times at the present shares, and m the slowest worker,

    sd(g)^2 = (T / t_m)^2 [ (1 - w_m)^2 s_m^2 + sum_{j != m} w_j^2 s_j^2 ].

Shares change when g exceeds both ``least_gain`` and ``z sd(g)`` with ``z^2 = confidence^2 + 2 ln N``: the slowest of N
workers tends to be the one with the unluckiest error, and the largest of N normal errors is about ``sqrt(2 ln N)``. So
a large gain is taken after one period, and a small one when enough periods agree. Shares that stayed for
``settled_periods`` are settled: from then on a change has to be worth ``settled_gain``. In a long run noise and slow
drift get many chances, and must not make shares flicker. A worker that changes its speed unsettles them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import NonNegativeInt

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import Shares, WorkerTime, solve_shares
from hetopt.trainer.policies.policy import BatchDecision, BatchObservation
from hetopt.trainer.policies.worker_line import WorkerLine

KINSHIP = 0.3
"""How far workers' overheads differ, as a part of a step's time. One that is known better than this can tell others."""

LEAST_ERROR = 0.01
"""Relative error of a period's median that no number of quiet steps undercuts."""

FIRST_LOOK = 0.03
"""Relative error of the very first period on top of that: a run that has just begun is not yet itself."""

SETTLING = 2.0
"""Errors are so many times larger in the first period of new shares: caches and allocators adapt."""

UNKNOWN_NOISE = 0.03
"""Relative standard deviation of a step's time before any spread was seen."""

_POOLED_PERIODS = 4  # what the average noise of all workers counts for beside a worker's own
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
        confidence: standard errors by which a gain must be sure, before the allowance for the number of workers.
    """

    minimum: int = 1
    least_gain: float = 0.02
    settled_gain: float = 0.05
    settled_periods: int = 4
    confidence: float = 2.5

    def __post_init__(self) -> None:
        if self.minimum < 1 or self.settled_periods < 1:
            raise ValueError(f"minimum and settled_periods are at least 1, not {self.minimum}, {self.settled_periods}")
        if not 0 <= self.least_gain <= self.settled_gain < 1:
            raise ValueError(f"gains must be ordered in [0, 1), not {self.least_gain}, {self.settled_gain}")
        if not 0 <= self.confidence < math.inf:
            raise ValueError(f"confidence must be finite and not negative, not {self.confidence}")

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
        lines = believed(state)
        best = solve_shares([self._worker(line) for line in lines], sum(shares))
        decision = BatchDecision(local_batch_sizes=shares)
        if best.local_batch_sizes != shares and (min(shares) < self.minimum or self._is_worth(state, lines, best)):
            reason = self._reason(state, lines, best)
            decision = BatchDecision(local_batch_sizes=best.local_batch_sizes, reason=reason)
        return state, decision

    def overhead_bound(self, state: ModelState, shares: Sequence[int]) -> tuple[int, ...]:
        """The ranks whose overhead alone outlasts the others' whole steps: they get the minimum, and should leave."""
        lines = believed(state)
        times_s = [line.time_s(share) for line, share in zip(lines, shares, strict=True)]
        return tuple(
            rank
            for rank, line in enumerate(lines)
            if shares[rank] <= self.minimum
            and line.fixed_s >= max((t for other, t in enumerate(times_s) if other != rank), default=math.inf)
        )

    def _worker(self, line: WorkerLine) -> WorkerTime:
        return WorkerTime(fixed_s=line.fixed_s, per_sample_s=line.per_sample_s, min_samples=self.minimum)

    def _is_worth(self, state: ModelState, lines: Sequence[WorkerLine], best: Shares) -> bool:
        least = self.least_gain if state.quiet_periods < self.settled_periods else self.settled_gain
        times_s = [line.time_s(line.samples) for line in lines]
        slowest = times_s.index(max(times_s))
        # Workers at their minimum do not move with the level.
        rates = [
            1 / line.per_sample_s if share > self.minimum else 0.0
            for line, share in zip(lines, best.local_batch_sizes, strict=True)
        ]
        weights = [rate / sum(rates) if rate else 0.0 for rate in rates]
        weights[slowest] = 1 - weights[slowest]
        sd = math.hypot(*(w * line.relative_sd(line.samples) for w, line in zip(weights, lines, strict=True)))
        ratio = best.compute_s / times_s[slowest]
        z = math.sqrt(self.confidence**2 + 2 * math.log(len(lines)))
        return 1 - ratio > max(least, z * ratio * sd)

    def _reason(self, state: ModelState, lines: Sequence[WorkerLine], best: Shares) -> str:
        now_s = max(line.time_s(line.samples) for line in lines)
        parts = [
            f"compute of the slowest worker {now_s:.3g} s, expected {best.compute_s:.3g} s with new local batch sizes"
        ]
        parts += [f"worker {rank} has changed its speed" for rank, line in enumerate(lines) if line.since_change == 0]
        parts += [
            f"worker {rank} is bound by its overhead of {lines[rank].fixed_s:.3g} s a step"
            for rank in self.overhead_bound(state, best.local_batch_sizes)
        ]
        return "; ".join(parts)


def believed(state: ModelState) -> tuple[WorkerLine, ...]:
    """The likeliest lines that can be, given what the workers know of each other."""
    weights, overheads = [], []
    for line in state.lines:
        possible = line.possible()
        sd = math.sqrt(line.fixed_variance) / line.time_s(line.samples)
        if sd < KINSHIP:
            weights.append(1 / (sd**2 + KINSHIP**2))
            overheads.append(possible.fixed_s / possible.per_sample_s)
    if not weights:
        return tuple(line.possible() for line in state.lines)
    usual = sum(w * overhead for w, overhead in zip(weights, overheads, strict=True)) / sum(weights)
    return tuple(_like_others(line, usual).possible() for line in state.lines)


def _like_others(line: WorkerLine, overhead_samples: float) -> WorkerLine:
    """The line once its overhead is expected to be worth so many samples: a is then a known part of ``a + c b``."""
    part = overhead_samples / (overhead_samples + line.samples)
    sd_s = KINSHIP * line.time_s(line.samples)
    return line.conditioned((1 - part, -part * line.samples), 0.0, sd_s**2)


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
    pooled = sum(noise) / len(noise)
    return tuple(
        WorkerLine.through(
            share,
            time_s,
            relative_error=math.hypot(FIRST_LOOK, _median_error(own, pooled, 1, observation.steps)),
            step_variance=own,
        )
        for share, time_s, own in zip(observation.local_batch_sizes, observation.compute_s, noise, strict=True)
    )


def _next_lines(lines: Sequence[WorkerLine], observation: BatchObservation) -> tuple[WorkerLine, ...]:
    shares = observation.local_batch_sizes
    noise = [line.step_variance for line in lines]
    pooled = sum(noise) / len(noise)
    settling = SETTLING if any(line.samples != share for line, share in zip(lines, shares, strict=True)) else 1.0
    return tuple(
        line.seen(
            share,
            time_s,
            relative_error=settling * _median_error(line.step_variance, pooled, line.periods, observation.steps),
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


def _median_error(own: float, pooled: float, periods: int, steps: int) -> float:
    """Relative standard error of the median over a period's steps (pi / 2 times a mean's variance, if normal)."""
    step_variance = (periods * own + _POOLED_PERIODS * pooled) / (periods + _POOLED_PERIODS)
    return math.hypot(LEAST_ERROR, math.sqrt(math.pi / 2 * step_variance / steps))
