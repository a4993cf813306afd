"""Batch policies: pure functions from what all workers measured to the shares of the next steps.

``(state, observation) -> (state, decision)`` over values that all ranks hold alike, so all ranks decide the same
without another message. The state is a small plain record, and travels in checkpoints.

**Dynamic** (arXiv 2305.12213; OmniLearn, 2503.17469): shares by throughput with a dead-band, smoothing, bounds and a
cap on growth. The published law, for worker k with share b_k and smoothed compute time mu_k:

    tau_k = mu_k - mean(mu),   X_k = b_k / mu_k,   b_k <- b_k - X_k tau_k = b_k mean(mu) / mu_k

1. mu is an exponential average of the times since the last change.
2. Nothing happens while no share would move by more than the dead-band: ``max_k |db_k| / b_k``.
3. Shares are clipped to [b_min, b_max].
4. If a worker's throughput falls after its share grew from b0, its b_max becomes b0.
5. There is no derivative term.

Where we depart from the papers: the law as printed inflates the global batch, so throughputs are only the weights of a
division of B, and the workers between their bounds share what the clipped ones leave (water-filling). "Falls" means by
more than the dead-band, judged once, on the first look at the grown share: with noisy times every second throughput
falls a little. Caps that leave no room for the batch are lifted. The smoothing factor is not printed; ours is 0.5.

OmniLearn, as its released code has it, is this law once an epoch on epoch means, with a dead-band of 0.2 and bounds of
[16, 96] at 32 samples a worker, which are [1/2, 3] times the equal share here.

**Model**, hetopt's own, learns how long each worker takes for how many samples, and solves for the best shares.
Published policies move a share in proportion to the throughput it showed, ``b / t``. That is exact only for workers
without overhead; with ``t = a + c b`` the error shrinks by a / t an adjustment, and every adjustment acts on noise.
Here each worker has a line (`WorkerLine`) and the shares solve

    minimise  max_i (a_i + c_i b_i)    over integers b_i >= minimum with sum b_i = B

exactly (`hetopt.core.batch_partition`). From equal shares this takes one adjustment where there is no overhead and two
where there is: the first makes every worker show a second point of its line.

The expected gain is ``1 - T / max_i t_i``, T being the slowest worker's time with the new shares.
Shares change when it exceeds ``least_gain``. Shares that stayed for ``settled_periods`` are settled: from then on a
change has to be worth ``settled_gain``. In a long run noise and slow drift get many chances, and must not make shares
flicker. A worker that changes its speed unsettles them.

**A worker's line.** A step of b samples takes ``t(b) = a + c b``: ``a`` seconds whatever the share, ``c`` seconds a
sample. The pair (a, c) is followed by a Kalman filter, which is least squares:

    observation    t_k = a + c b_k + e,           sd(e) = r t_k

The first observation fixes one point of the line and says nothing about its slope; the prior does: no
overhead, give or take `OVERHEAD_SD` of the time seen. Once two shares are far enough apart for their times to differ by
more than the errors, the data outweigh it.

An observation counts for no more than `CLIP` standard errors (Huber 1964), so one bad period hardly moves
the line. Two one-sided cumulative sums (Page 1954) collect what is left of the errors beyond `SLACK`. One observation
alone cannot carry a sum beyond `ALARM`; two bad ones in a row do, and so does a smaller shift that stays. Then the
worker's speed has changed, and the line is scaled through the present observation, overhead and slope alike: a slower
machine is slower at everything, so the ratio a : c, which took two shares to learn, is kept.

r comes from the spread of the steps within periods.

**Proportional** (arXiv 2110.08941) re-cuts the batch once an epoch in proportion to the throughput of the last one.

    p_i <- (p_i / t_i) / sum_j (p_j / t_j)

with p_i worker i's part of the data and t_i its mean compute time. No smoothing and no dead-band, as published: every
epoch acts on its own noise. Where we depart from the paper: p_i is the part that was really computed, ``b_i / B``, not
the number before rounding, whose rounding errors would pile up; and shares are rounded so that the batch stays whole,
not down, which loses samples.

**Allocation** (self-adaptive, 2111.08272) hands out whole micro-batches, anew each epoch until compute times agree.
Worker i computes w_i micro-batches of the same size before each exchange, sum w_i = C. The memory of a worker and the
statistics of batch normalisation do not depend on its share. From the times t_i of the last epoch:

    w_i <- C (w_i / t_i) / sum_j (w_j / t_j),   in whole micro-batches, at least one.

It rests while the times lie within a tolerance of each other. We know of no printed one; ours is the longest time of
one micro-batch, because a smaller difference cannot be divided. Nor does it move where whole micro-batches would not
finish earlier.

**Rate** (ScaDLES, arXiv 2301.08897): batches follow the streams, and the learning rate follows the batches. A worker's
batch is what its stream brings in a set time, so that nobody waits for samples, and none are left behind; its gradient
weighs as much as its batch. The sum of the shares therefore changes with the rates.

**Critical**, our own after Pollux (Qiao et al. 2021) and AdaScale (Johnson et al. 2020): the batch grows while that
makes as much progress in less time. A step of B samples takes ``T(B) = f + max_i (a_i + c_i b_i)`` with the best
shares, f being what steps take beyond computing, and is worth ``r(B)`` steps of the planned batch (`step_worth`, with
the critical batch size for the noise scale). The batch is that of least ``T(B) / r(B)``, at most twice as large as it
was. Learning rates follow ``r(B)`` (SGD) or its root, schedules and the last epoch the progress made.

Steps of one size do not tell ``a_i`` from ``c_i b_i``. Where all of computing might be ``a_i`` and a larger batch would
then pay, the batch grows by a fourth of a doubling, which shows both; it goes back where that did not pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import (
    WorkerTime,
    allocated_micro_batch_size,
    check_batch,
    divided,
    largest_remainder,
    proportional_quotas,
    solve_shares,
    whole_micro_batches,
)
from hetopt.core.errors import BadInput
from hetopt.core.plain_text import known
from hetopt.core.run_rules import check_follows_noise
from hetopt.core.run_spec import (
    BATCH_POLICIES,
    AllocationSettings,
    CriticalSettings,
    DynamicSettings,
    RunSpec,
    Share,
    Stream,
)
from hetopt.core.training_laws import KAPPA, Moments, NoiseCurve, learning_rate_scale, noise_scale, step_worth

StateT = TypeVar("StateT", bound=Record)


class NothingToRemember(Record):
    """State of a policy that learns nothing from one control period to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchObservation:
    """Compute times of all workers in one control period, in rank order, all with the same local batch sizes.

    Attributes:
        local_batch_sizes: samples of each worker in a step.
        compute_s: median time that a step's computation took on each worker.
        spread_s: robust standard deviation of one step's computation (1.4826 x median absolute deviation), 0 where a
            single step was seen.
        steps: number of steps that the medians are over.
        epoch: epochs completed when the period ended.
        step_time_s: mean time of a step of the period, on the leader's clock.
        noise: gradient noise, the mean of the period's measurements; None: there were none.
        samples_seen: samples of all workers before the next step.
    """

    local_batch_sizes: tuple[int, ...]
    compute_s: tuple[float, ...]
    spread_s: tuple[float, ...]
    steps: int
    epoch: int
    step_time_s: float = 0.0
    noise: Moments | None = None
    samples_seen: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDecision:
    """Local batch sizes from now on, in rank order, and in words why they changed; None: they did not."""

    local_batch_sizes: tuple[int, ...]
    reason: str | None = None

    @property
    def changed(self) -> bool:
        """True where the shares differ from those observed."""
        return self.reason is not None


class BatchPolicy(Protocol, Generic[StateT]):
    """Protocol of policies of local batch sizes, asked once a control period with the same input on every rank."""

    def initial(self) -> StateT:
        """Return the state before the first observation; its type also reads the state in a checkpoint."""

    def decide(self, state: StateT, observation: BatchObservation) -> tuple[StateT, BatchDecision]:
        """Return the next state, and the local batch sizes to use from now on; pure, the same on every rank.

        They sum to what the observed shares sum to, but under the policies ``rate`` and ``critical``.
        """


@dataclass(frozen=True, slots=True)
class KeepShares:
    """Batch policy that never changes the local batch sizes."""

    initial: ClassVar[type[NothingToRemember]] = NothingToRemember
    """The empty state: this policy remembers nothing."""

    def decide(
        self, state: NothingToRemember, observation: BatchObservation
    ) -> tuple[NothingToRemember, BatchDecision]:
        """Return the state and the observed local batch sizes, both unchanged."""
        return state, BatchDecision(local_batch_sizes=observation.local_batch_sizes)


Every = Literal["epoch", "period"]
"""How often a policy decides: at the end of an epoch, on the mean of its steps, or after every control period."""


class EpochMean(Record):
    """Mean compute seconds of each worker's steps since the last decision, all with the same local batch sizes.

    Attributes:
        epoch: number of the epoch that the steps are of.
        local_batch_sizes: local batch sizes of these steps, in rank order.
        compute_s: mean seconds of each worker, of the periods' medians weighted by steps; empty before the first.
        steps: number of steps that the mean is over.
    """

    epoch: NonNegativeInt = 0
    local_batch_sizes: tuple[int, ...] = ()
    compute_s: tuple[PositiveFloat, ...] = ()
    steps: NonNegativeInt = 0

    def gather(self, observation: BatchObservation, every: Every) -> tuple[EpochMean, tuple[float, ...] | None]:
        """Return the mean with one more period; and, if a decision is due, each worker's mean seconds, else None.

        Where a decision is due, the mean that is returned begins anew.
        """
        times_s, steps = observation.compute_s, observation.steps
        if self.steps and self.local_batch_sizes == observation.local_batch_sizes:
            steps += self.steps
            times_s = tuple(
                old + observation.steps / steps * (new - old)
                for old, new in zip(self.compute_s, observation.compute_s, strict=True)
            )
        if every == "period" or observation.epoch > self.epoch:
            return EpochMean(epoch=observation.epoch), times_s
        gathered = EpochMean(
            epoch=self.epoch, local_batch_sizes=observation.local_batch_sizes, compute_s=times_s, steps=steps
        )
        return gathered, None


class Growth(Record):
    """A worker's local batch size (samples) and throughput (samples/s) before the local batch size grew."""

    samples: PositiveInt
    samples_per_s: PositiveFloat


class DynamicState(Record):
    """State of `DynamicShares`: the epoch's times so far, smoothed times, and what was learned of shares that grew.

    Attributes:
        gathered: mean of the present epoch.
        local_batch_sizes: the shares that ``smoothed_s`` belongs to.
        smoothed_s: mu, in rank order; empty before the first look at these shares.
        grown: share and throughput before a share just grew, by rank; None: it did not; empty once that was judged.
        caps: b_max that each worker taught.
    """

    gathered: EpochMean = EpochMean()
    local_batch_sizes: tuple[int, ...] = ()
    smoothed_s: tuple[PositiveFloat, ...] = ()
    grown: tuple[Growth | None, ...] = ()
    caps: tuple[PositiveInt | None, ...] = ()


class DynamicShares(DynamicSettings):
    """Batch policy of local batch sizes in proportion to smoothed throughput, outside a dead band (dynamic batching).

    ``least`` and ``most`` are b_min and b_max, in equal shares.

    Attributes:
        minimum: least share of a worker, whatever an equal one is.
    """

    minimum: PositiveInt = 1

    initial: ClassVar[type[DynamicState]] = DynamicState
    """The state before the first period: no times, no caps."""

    def decide(self, state: DynamicState, observation: BatchObservation) -> tuple[DynamicState, BatchDecision]:
        """Return the next state, and local batch sizes by throughput, or unchanged within the dead band.

        Raises:
            BadInput: the global batch does not hold the workers' least shares.
        """
        shares = observation.local_batch_sizes
        gathered, times_s = state.gathered.gather(observation, self.every)
        if times_s is None:
            return state.model_copy(update={"gathered": gathered}), BatchDecision(local_batch_sizes=shares)

        known = state.local_batch_sizes == shares
        smoothed_s = times_s
        if known and state.smoothed_s:
            pairs = zip(times_s, state.smoothed_s, strict=True)
            smoothed_s = tuple(self.smoothing * fresh + (1 - self.smoothing) * before for fresh, before in pairs)
        throughputs = [share / time_s for share, time_s in zip(shares, smoothed_s, strict=True)]
        caps = state.caps if len(state.caps) == len(shares) else (None,) * len(shares)
        if known and state.grown:
            caps = tuple(map(self._judged, caps, state.grown, throughputs))
        low, high = self._bounds(sum(shares), caps)

        proposed = self._proposed(shares, throughputs, low, high)
        if proposed is None:
            state = DynamicState(gathered=gathered, local_batch_sizes=shares, smoothed_s=smoothed_s, caps=caps)
            return state, BatchDecision(local_batch_sizes=shares)
        grown = tuple(
            Growth(samples=share, samples_per_s=throughput) if after > share else None
            for share, throughput, after in zip(shares, throughputs, proposed, strict=True)
        )
        reason = f"in proportion to throughput; compute took {min(smoothed_s):.3g} to {max(smoothed_s):.3g} s"
        return (
            DynamicState(gathered=gathered, local_batch_sizes=proposed, grown=grown, caps=caps),
            BatchDecision(local_batch_sizes=proposed, reason=reason),
        )

    def _proposed(
        self, shares: tuple[int, ...], throughputs: Sequence[float], low: Sequence[int], high: Sequence[int | None]
    ) -> tuple[int, ...] | None:
        """Return shares by throughput within the bounds; None: they are as now, or within the dead band."""
        quotas = proportional_quotas(throughputs, sum(shares), minimum=low, maximum=high)
        move = max(abs(quota - share) / share for quota, share in zip(quotas, shares, strict=True))
        within = all(
            least <= share and (most is None or share <= most)
            for share, least, most in zip(shares, low, high, strict=True)
        )
        if within and move <= self.dead_band:
            return None
        proposed = largest_remainder(throughputs, sum(shares), minimum=low, maximum=high)
        return None if proposed == shares else proposed

    def _judged(self, cap: int | None, before: Growth | None, samples_per_s: float) -> int | None:
        """Return the cap of one worker, lowered to its share before if more samples gave less throughput.

        None: no cap.
        """
        if before is None or samples_per_s >= before.samples_per_s * (1 - self.dead_band):
            return cap
        return before.samples if cap is None else min(cap, before.samples)

    def _bounds(self, total: int, caps: Sequence[int | None]) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """Return the least and most samples of each worker; None: no most.

        Caps that hold less than ``total`` do not count.
        """
        equal = total / len(caps)
        low = max(self.minimum, math.floor(self.least * equal))
        widest = None if self.most is None else max(low, math.ceil(self.most * equal))
        high = tuple(
            max(low, cap if widest is None else min(cap, widest)) if cap is not None else widest for cap in caps
        )
        if sum(total if most is None else most for most in high) < total:
            high = (widest,) * len(caps)
        return (low,) * len(caps), high


class ProportionalShares(DynamicShares):
    """Batch policy of local batch sizes in proportion to each worker's throughput in the last epoch (or period).

    Dynamic batching without smoothing, dead-band and caps.
    """

    smoothing: Share = 1.0
    dead_band: Annotated[float, Field(ge=0)] = 0.0
    every: Every = "epoch"

    def _judged(self, cap: int | None, before: Growth | None, samples_per_s: float) -> int | None:
        return None


OVERHEAD_SD = 0.5
"""Standard deviation of the overhead's part of a step before a second share was seen."""

LOOSENING = 0.05
"""What a change of the share adds to it: no worker is exactly a line (caches, vector widths, micro-batches)."""

CLIP, SLACK, ALARM = 2.5, 1.0, 6.0
_LOUDEST = 5.0
"""Most that one observation says in a cumulative sum: below SLACK + ALARM, above SLACK + ALARM / 2."""

_LEAST_SLOPE = 0.02
"""Least part of a step that depends on the share: a flat line would ask for all samples there are."""


class WorkerLine(Record):
    """A worker's compute seconds as a line over its samples, with errors, noise, and evidence of a changed speed.

    Attributes:
        samples: local batch size of the last period.
        last_s: compute seconds of a step of the last period.
        fixed_s: a, in s. Noise may push it below 0; `possible` brings it back.
        per_sample_s: c, in s.
        fixed_variance: variance of a.
        covariance: covariance of a and c.
        per_sample_variance: variance of c.
        step_variance: relative variance of the time of one step.
        periods: number of periods observed.
        since_change: periods since the worker's speed changed; None: it never did.
        slower: cumulative sum of evidence that the worker has become slower than the line.
        faster: the same of having become faster.
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
        """Return the line through the origin and a first period's time, which may be off by ``relative_error``."""
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
        """Return the expected compute seconds of a step of ``samples`` samples."""
        return self.fixed_s + self.per_sample_s * samples

    def relative_sd(self, samples: float) -> float:
        """Return the standard error of `time_s` for ``samples`` samples, as a fraction of `time_s`."""
        squares = self.fixed_variance + samples * samples * self.per_sample_variance
        return math.sqrt(max(0.0, squares + 2 * samples * self.covariance)) / self.time_s(samples)

    def seen(self, samples: int, time_s: float, *, relative_error: float, step_variance: float) -> WorkerLine:
        """Return the line after one more period, scaled by the new time if the worker's speed has changed.

        Args:
            samples: the worker's local batch size in the period.
            time_s: median compute time of the period's steps.
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
        vote = min(max(error, -_LOUDEST), _LOUDEST)
        slower, faster = _gathered(self.slower, vote), _gathered(self.faster, -vote)
        if max(slower, faster) <= ALARM:
            believed_s = expected_s + min(max(error, -CLIP), CLIP) * sd_s
            line = before.conditioned(samples, believed_s, (relative_error * expected_s) ** 2)
            since_change = None if self.since_change is None else self.since_change + 1
        else:
            line = before._scaled(time_s / expected_s, relative_sd=relative_error)
            slower, faster, since_change = 0.0, 0.0, 0
        weight = 1 / min(self.periods + 2, 16)  # the spread is that of about 16 periods
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
        """Return the line after a Kalman update by a time for ``samples``, in s, of variance ``variance``, in s^2."""
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
        """Return the likeliest line with an overhead of 0 s or more and with seconds that grow with the samples.

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
        """Return the line of a worker ``factor`` times as slow, give or take ``relative_sd``."""
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
        """Return the line free to turn around its time at the last share: the overhead is less sure by that much."""
        slope_variance = (overhead_sd * self.time_s(self.samples) / self.samples) ** 2
        return self.model_copy(
            update={
                "fixed_variance": self.fixed_variance + slope_variance * self.samples**2,
                "covariance": self.covariance - slope_variance * self.samples,
                "per_sample_variance": self.per_sample_variance + slope_variance,
            }
        )


def _gathered(evidence: float, vote: float) -> float:
    """Return a cumulative sum after one more observation; one to the contrary also halves the sum before."""
    return max(0.0, (evidence if vote > 0 else evidence / 2) + vote - SLACK)


LEAST_ERROR = 0.01
"""Relative error of a period's median that no number of quiet steps undercuts."""

UNKNOWN_NOISE = 0.03
"""Relative standard deviation of a step's time before any spread was seen."""


class ModelState(Record):
    """Fitted compute-time lines of all workers, in rank order, and periods since a size or speed last changed."""

    lines: tuple[WorkerLine, ...] = ()
    quiet_periods: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShares:
    """Batch policy that fits each worker's compute time by a line and solves for the quickest local batch sizes.

    Args:
        minimum: least share of a worker.
        least_gain: gain in the slowest worker's time that is worth a change.
        settled_gain: gain that is worth a change once shares are settled.
        settled_periods: periods without a change after which shares are settled.
    """

    minimum: int = 1
    least_gain: float = 0.02
    settled_gain: float = 0.05
    settled_periods: int = 4

    initial: ClassVar[type[ModelState]] = ModelState
    """The state before the first period: no worker's speed is known."""

    def decide(self, state: ModelState, observation: BatchObservation) -> tuple[ModelState, BatchDecision]:
        """Return the lines after this period, and the quickest local batch sizes if they gain enough, else as before.

        Raises:
            BadInput: the global batch does not hold the workers' least shares.
        """
        shares = observation.local_batch_sizes
        state = _learned(state, observation)
        lines = [line.possible() for line in state.lines]
        best = solve_shares(self.times(state), sum(shares))
        decision = BatchDecision(local_batch_sizes=shares)
        now_s = max(line.time_s(line.samples) for line in lines)
        least = self.least_gain if state.quiet_periods < self.settled_periods else self.settled_gain
        is_worth = 1 - best.compute_s / now_s > least
        if best.local_batch_sizes != shares and (is_worth or min(shares) < self.minimum):
            parts = [
                f"compute of the slowest worker {now_s:.3g} s, expected {best.compute_s:.3g} s with new local batch "
                "sizes",
                *(f"worker {rank} has changed its speed" for rank, line in enumerate(lines) if line.since_change == 0),
            ]
            decision = BatchDecision(local_batch_sizes=best.local_batch_sizes, reason="; ".join(parts))
        return state, decision

    def times(self, state: ModelState) -> list[WorkerTime]:
        """Return the fitted compute times of all workers, in rank order, as `solve_shares` takes them."""
        lines = [line.possible() for line in state.lines]
        return [
            WorkerTime(fixed_s=line.fixed_s, per_sample_s=line.per_sample_s, min_samples=self.minimum) for line in lines
        ]


def _learned(state: ModelState, observation: BatchObservation) -> ModelState:
    """Return the state after one more period; afresh where the number of workers is another one.

    Counts the periods in a row in which no worker's line changed.
    """
    shares, times_s, unknown = observation.local_batch_sizes, observation.compute_s, UNKNOWN_NOISE**2
    if len(state.lines) != len(shares):
        noise = [(unknown + seen) / 2 for seen in _step_variances(observation, [unknown] * len(shares))]
        first = (
            WorkerLine.through(
                share,
                time_s,
                relative_error=_median_error(variance, observation.steps),
                step_variance=variance,
            )
            for share, time_s, variance in zip(shares, times_s, noise, strict=True)
        )
        return ModelState(lines=tuple(first))
    variances = _step_variances(observation, [line.step_variance for line in state.lines])
    lines = tuple(
        line.seen(
            share,
            time_s,
            relative_error=_median_error(line.step_variance, observation.steps),
            step_variance=min(variance, max(4 * line.step_variance, unknown)),
        )
        for line, share, time_s, variance in zip(state.lines, shares, times_s, variances, strict=True)
    )
    quiet = all(
        now.samples == was.samples and now.since_change != 0 for now, was in zip(lines, state.lines, strict=True)
    )
    return ModelState(lines=lines, quiet_periods=state.quiet_periods + 1 if quiet else 0)


def _step_variances(observation: BatchObservation, otherwise: Sequence[float]) -> Sequence[float]:
    """Return the relative variance of one step's time by worker; ``otherwise`` where steps were too few to tell."""
    if observation.steps < 3:  # which have no spread to speak of
        return otherwise
    return [(sd / time_s) ** 2 for sd, time_s in zip(observation.spread_s, observation.compute_s, strict=True)]


def _median_error(step_variance: float, steps: int) -> float:
    """Return the median's relative standard error over a period's steps (pi / 2 times a mean's variance, if normal)."""
    return math.hypot(LEAST_ERROR, math.sqrt(math.pi / 2 * step_variance / steps))


class AllocateMicroBatches(AllocationSettings):
    """Batch policy of local batch sizes in whole micro-batches, dealt out by throughput once an epoch (or period).

    Attributes:
        micro: samples of a micro-batch.
    """

    micro: PositiveInt

    initial: ClassVar[type[EpochMean]] = EpochMean
    """The state before the first period: no measurements."""

    def decide(self, state: EpochMean, observation: BatchObservation) -> tuple[EpochMean, BatchDecision]:
        """Return the mean so far, and local batch sizes in whole micro-batches.

        Sizes that are no multiples of the micro-batch are made so at once. Else they change at the end of an epoch, or
        of each control period if ``every`` says so, if compute times differ by more than the tolerance and a quicker
        step is expected; the mean begins anew then.

        Raises:
            BadInput: the global batch is not made of micro-batches, or of too few.
        """
        shares, size = observation.local_batch_sizes, self.micro
        if any(share % size for share in shares):
            multiples = whole_micro_batches(shares, size)
            reason = f"local batch sizes are multiples of {size} samples"
            return state, BatchDecision(local_batch_sizes=multiples, reason=reason)
        state, times_s = state.gather(observation, self.every)
        if times_s is None:
            return state, BatchDecision(local_batch_sizes=shares)

        counts = [share // size for share in shares]
        each_s = [time_s / count for time_s, count in zip(times_s, counts, strict=True)]
        tolerance_s = max(each_s) if self.tolerance is None else self.tolerance * max(times_s)
        proposed = divided([1 / time_s for time_s in each_s], sum(counts))
        expected_s = max(count * time_s for count, time_s in zip(proposed, each_s, strict=True))
        if max(times_s) - min(times_s) <= tolerance_s or expected_s >= max(times_s):
            return state, BatchDecision(local_batch_sizes=shares)
        reason = f"compute took {min(times_s):.3g} to {max(times_s):.3g} s; expected {expected_s:.3g} s at most"
        return state, BatchDecision(local_batch_sizes=tuple(count * size for count in proposed), reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class RateShares:
    """Batch policy ``rate``: a local batch is what the worker's stream brings in a set time, so the global one varies.

    Args:
        stream: the rates, and what a rate asks for.
        minimum: least share of a worker, in samples.
    """

    stream: Stream
    minimum: int = 1

    initial: ClassVar[type[NothingToRemember]] = NothingToRemember
    """The state before the first period: local batch sizes as they are."""

    def decide(
        self, state: NothingToRemember, observation: BatchObservation
    ) -> tuple[NothingToRemember, BatchDecision]:
        """Return the state unchanged, and as local batch sizes the samples that streams bring in a set time.

        At least ``minimum`` each; a reason is given with a change alone.
        """
        wanted = tuple(max(self.minimum, self.stream.batch(rate)) for rate in self.stream.rates)
        if wanted == observation.local_batch_sizes:
            return state, BatchDecision(local_batch_sizes=wanted)
        rates = ", ".join(f"{rate:.4g}" for rate in self.stream.rates)
        return state, BatchDecision(local_batch_sizes=wanted, reason=f"the streams bring {rates} samples/s")


def stream_learning_rate_scale(stream: Stream, batch_size: int, planned_batch_size: int) -> float:
    """Return the factor on the learning rate at a global batch of ``batch_size``: ``B / B0``, its root or 1, capped."""
    rule = "none" if stream.learning_rate == "fixed" else stream.learning_rate
    cap = stream.max_learning_rate_scale
    return min(cap, max(1 / cap, learning_rate_scale(rule, batch_size, planned_batch_size)))


class CriticalState(Record):
    """State of `CriticalBatch`: workers' lines, gradient noise, and progress in samples of the planned batch.

    Attributes:
        given: samples of the planned batch; 0 before the first period.
        model: the workers' lines.
        curve: gradient noise of the run so far.
        rest_s: seconds that a step of the last period took beyond computing; None: no period yet.
        worth: steps of the planned batch that one of the next steps is worth.
        spent: samples until ``since`` beyond those that the planned batch would have taken to get as far.
        since: samples seen when ``worth`` was found.
    """

    given: NonNegativeInt = 0
    model: ModelState = ModelState()
    curve: NoiseCurve = NoiseCurve()
    rest_s: NonNegativeFloat | None = None
    worth: PositiveFloat = 1.0
    spent: float = 0.0
    since: NonNegativeInt = 0

    def progress(self, samples_seen: int, batch_size: int) -> float:
        """Return the samples that the planned batch size would have taken for the progress made by ``samples_seen``.

        Args:
            samples_seen: samples of all workers so far, those after `since` in steps of one size.
            batch_size: samples of these steps.
        """
        wasted = 1 - self.worth * self.given / batch_size if self.given else 0.0
        return samples_seen - self.spent - (samples_seen - self.since) * wasted


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalBatch:
    """Batch policy of a global batch that follows the gradient noise while that makes progress in less time.

    Args:
        given: samples of the planned batch.
        least: samples of the smallest batch, for which the task's learning rate is.
        most: samples of the largest batch.
        critical: critical batch size that the plan reckons with, samples; None: only what is measured is known.
        overhead: samples that are computed in the rest of a step's time, by the plan; infinite: that is not known.
        least_gain: part of the time for as much progress that another batch must save.
        minimum: least share of a worker.
    """

    given: int
    least: int
    most: int
    critical: float | None = None
    overhead: float = math.inf
    least_gain: float = 0.05
    minimum: int = 1

    initial: ClassVar[type[CriticalState]] = CriticalState
    """The state before the first period: no speeds, no noise."""

    def decide(self, state: CriticalState, observation: BatchObservation) -> tuple[CriticalState, BatchDecision]:
        """Return the next state, and local batch sizes: of another global batch if that pays, else by `ModelShares`.

        Raises:
            BadInput: the global batch does not hold the workers' least shares.
        """
        shares, seen = observation.local_batch_sizes, observation.samples_seen
        curve = state.curve if observation.noise is None else state.curve.add(observation.noise)
        believed = self.believed(curve)
        model, decision = ModelShares(minimum=self.minimum).decide(state.model, observation)
        rest_s = max(0.0, observation.step_time_s - max(observation.compute_s))
        if believed is not None and state.rest_s is not None and not decision.changed:
            # Of two periods the quieter: one hiccup must not look like a step that costs the same whatever its size.
            decision = self.moved(decision, model, min(rest_s, state.rest_s), believed)
        batch = sum(decision.local_batch_sizes)
        state = CriticalState(
            given=self.given,
            model=model,
            curve=curve,
            rest_s=rest_s,
            worth=state.worth if believed is None else step_worth(believed, batch, self.least) / self.planned_worth,
            spent=seen - state.progress(seen, sum(shares)),
            since=seen,
        )
        return state, decision

    @property
    def planned_worth(self) -> float:
        """The steps of the smallest batch size that a step of the planned one is worth, as the plan has it."""
        planned = Moments(gradient_variance=self.critical or 0.0, gradient_square=1.0)
        return step_worth(planned, self.given, self.least)

    def believed(self, curve: NoiseCurve) -> Moments | None:
        """Return gradient noise by the measured curve and the plan's critical batch size; None: neither is known."""
        likely, planned = curve.likely, self.critical
        if likely is None:
            return None if planned is None else Moments(gradient_variance=planned, gradient_square=1.0)
        weight = 1.0 if planned is None else curve.samples / (curve.samples + PRIOR_SAMPLES)
        inverse = likely.gradient_square / (KAPPA * likely.gradient_variance)
        return Moments(
            gradient_variance=1.0, gradient_square=min(inverse, inverse**weight * (planned or 1.0) ** (weight - 1))
        )

    def moved(self, kept: BatchDecision, model: ModelState, rest_s: float, noise: Moments) -> BatchDecision:
        """Return the shares of the batch size of least time for a step of progress, or ``kept`` where little is gained.

        Args:
            kept: decision with the present shares.
            model: the workers' lines.
            rest_s: seconds that a step takes beyond computing.
            noise: noise of the gradient, whose scale is the critical batch size.
        """
        now = sum(kept.local_batch_sizes)
        is_seen = all(line.relative_sd(2 * line.samples) <= LINE_KNOWN for line in model.lines)
        is_known = is_seen or math.isfinite(self.overhead)
        # In steps of a fourth of a doubling, finer than the noise is known. In steps of a half, batches that no plan
        # began took 5 and 13 % more of the time of the best one.
        wanted = (round(now * 2 ** (step / 4)) for step in (range(-4, 5) if is_known else (0, 1)))
        sizes = sorted({now, *(max(min(now, self.least), min(max(now, self.most), size)) for size in wanted)})
        solved = [solve_shares(ModelShares(minimum=self.minimum).times(model), size) for size in sizes]
        worths = [step_worth(noise, size, self.least) for size in sizes]
        # Until two sizes were seen: as the plan has it, or, without one, at best, which is as long whatever the size.
        costs_s = [
            (rest_s + shares.compute_s if is_seen else 1 + size / self.overhead) / worth
            for shares, size, worth in zip(solved, sizes, worths, strict=True)
        ]
        best = costs_s.index(min(costs_s))
        saved = 1 - costs_s[best] / costs_s[sizes.index(now)]
        if saved <= (self.least_gain if sizes[best] > now else WORTH_GOING_BACK):
            return kept
        return BatchDecision(
            local_batch_sizes=solved[best].local_batch_sizes,
            reason=f"{sizes[best]} samples are worth {worths[best]:.3g} steps of {self.least}, as the critical batch "
            f"size is about {noise_scale(noise) or math.inf:.3g}: "
            + (f"{100 * saved:.0f} % less time" if is_known else "to see how long a step of more samples takes"),
        )


PRIOR_SAMPLES = 100
"""Samples of the noise that the plan's critical batch size counts as where less is measured: noise is below its average
while a run is young, so what is above the plan's is believed at once. With 20, 50, 100, 200 and no end of them two of
the contest's jobs took 1.05, 1.04, 1.02, 1.02 and 1.02 of the time of the best constant batch. Where more had to wait,
too, the third one took 1.17 times as long, and the two as long (`benchmarks.convergence`, six other seeds, two
profiles)."""

LINE_KNOWN = 0.1
"""Relative standard error of the time of twice the samples, above which a worker's line is not known: 0.25 before a
second size was seen. Where no size was tried to see it, batches without a plan took 5 % more of the best one's time."""

WORTH_GOING_BACK = 0.01
"""Part of the time for equal progress that a smaller batch must save: less than a larger one, whose progress is a law
and not a measurement. Where it is as much, a first look that costs 4 % is never taken back."""


Maker: TypeAlias = Callable[[RunSpec, int], BatchPolicy[Any]]
"""Makes the policy of a run; the number is the least share of a worker, in samples."""


def _allocation(spec: RunSpec, minimum: int) -> BatchPolicy[Any]:
    """Return the policy of whole micro-batches; BadInput: they are smaller than ``minimum``, or do not fit the spec."""
    size = allocated_micro_batch_size(spec)
    if size < minimum:
        raise BadInput(
            f"Micro-batches of {size} samples are too small: this model needs at least {minimum} at a time.",
            hint=f"choose a micro-batch size of at least {minimum} that divides the global batch",
        )
    return AllocateMicroBatches.model_validate({**spec.batch_settings, "micro": size})


def _by_settings(policy: type[DynamicShares]) -> Maker:
    """Return a maker of a policy by the run's settings."""
    return lambda spec, minimum: policy.model_validate({**spec.batch_settings, "minimum": minimum})


def _critical(spec: RunSpec, minimum: int) -> BatchPolicy[Any]:
    """Return the policy that follows the gradient noise, within the workers' memory.

    BadInput: the spec rules it out.
    """
    check_follows_noise(spec)
    settings, given = CriticalSettings.model_validate(spec.batch_settings), spec.global_batch_size
    most = min(settings.most * given, sum(worker.max_local_batch_size or math.inf for worker in spec.workers))
    return CriticalBatch(
        given=given,
        least=max(1, round(settings.least * given)),
        most=max(given, int(most)),
        critical=settings.critical,
        overhead=settings.overhead or math.inf,
        least_gain=settings.least_gain,
        minimum=minimum,
    )


POLICIES: dict[str, Maker] = {
    "uniform": lambda spec, minimum: KeepShares(),
    "static": lambda spec, minimum: KeepShares(),
    "proportional": _by_settings(ProportionalShares),
    "dynamic": _by_settings(DynamicShares),
    "omnilearn": lambda spec, minimum: DynamicShares(
        minimum=minimum, smoothing=1.0, dead_band=0.2, least=0.5, most=3.0, every="epoch"
    ),
    "allocation": _allocation,
    "model": lambda spec, minimum: ModelShares(minimum=minimum),
    "rate": lambda spec, minimum: RateShares(stream=cast(Stream, spec.stream), minimum=minimum),  # the spec checks it
    "critical": _critical,
}


def register(name: str, about: str, make: Maker) -> None:
    """Register a batch policy by ``name``: half a sentence on what it does, and its factory (spec, least samples).

    Args:
        name: as people write it.
        about: half a sentence: how it shares the batch.
        make: makes it for a run, with the least share of a worker in samples.

    Raises:
        ValueError: there is one of this name.
    """
    if name in POLICIES:
        raise ValueError(f"there is a batch policy {name!r} already")
    BATCH_POLICIES[name] = about
    POLICIES[name] = make


def choose_policy(spec: RunSpec, *, minimum: int) -> BatchPolicy[Any]:
    """Return the batch policy that a run asks for; raise BadInput for a batch without ``minimum`` samples a worker.

    Args:
        spec: spec of the run.
        minimum: least share of a worker, in samples.

    Raises:
        BadInput: there is no policy of that name, the global batch does not give every worker its least share, or its
            micro-batches are no good.
    """
    check_batch(spec, minimum)
    return POLICIES[known(spec.batch_policy, list(POLICIES), "batch policy")](spec, minimum)
