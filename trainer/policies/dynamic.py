"""Proportional shares with a dead-band, smoothing, bounds and a growth cap (arXiv 2305.12213; OmniLearn, 2503.17469).

The published law, for worker k with share b_k and smoothed compute time mu_k:

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import PositiveFloat, PositiveInt

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import largest_remainder, proportional_quotas
from hetopt.core.run_spec import DynamicSettings
from hetopt.trainer.policies.policy import BatchDecision, BatchObservation, EpochMean


class Growth(Record):
    """What a worker was before its share grew: ``samples`` of them, at so many samples a second."""

    samples: PositiveInt
    samples_per_s: PositiveFloat


class DynamicState(Record):
    """What the law remembers.

    Attributes:
        gathered: of the present epoch.
        local_batch_sizes: the shares that ``smoothed_s`` belongs to.
        smoothed_s: mu, in rank order; empty before the first look at these shares.
        grown: where a share has just grown, what it was before; empty once that was judged.
        caps: b_max that each worker taught.
    """

    gathered: EpochMean = EpochMean()
    local_batch_sizes: tuple[int, ...] = ()
    smoothed_s: tuple[PositiveFloat, ...] = ()
    grown: tuple[Growth | None, ...] = ()
    caps: tuple[PositiveInt | None, ...] = ()


class DynamicShares(DynamicSettings):
    """The law above. ``least`` and ``most`` are b_min and b_max, in equal shares.

    Attributes:
        minimum: least share of a worker, whatever an equal one is.
    """

    minimum: PositiveInt = 1

    def initial(self) -> DynamicState:
        """The state before the first period: no times, no caps."""
        return DynamicState()

    def decide(self, state: DynamicState, observation: BatchObservation) -> tuple[DynamicState, BatchDecision]:
        """The next state and shares.

        Raises:
            BadInput: the global batch does not hold the workers' least shares.
        """
        shares = observation.local_batch_sizes
        gathered, times_s = state.gathered.gather(observation, self.every)
        if times_s is None:
            return state.model_copy(update={"gathered": gathered}), BatchDecision(local_batch_sizes=shares)

        known = state.local_batch_sizes == shares
        smoothed_s = _smoothed(state.smoothed_s if known else (), times_s, self.smoothing)
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
        """The cap of one worker once the look at its grown share is there."""
        if before is None or samples_per_s >= before.samples_per_s * (1 - self.dead_band):
            return cap
        return before.samples if cap is None else min(cap, before.samples)

    def _bounds(self, total: int, caps: Sequence[int | None]) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        equal = total / len(caps)
        low = max(self.minimum, math.floor(self.least * equal))
        widest = None if self.most is None else max(low, math.ceil(self.most * equal))
        high = tuple(
            max(low, cap if widest is None else min(cap, widest)) if cap is not None else widest for cap in caps
        )
        if sum(total if most is None else most for most in high) < total:
            high = (widest,) * len(caps)
        return (low,) * len(caps), high


def omnilearn(*, minimum: int = 1) -> DynamicShares:
    """The law with the settings of OmniLearn's released code."""
    return DynamicShares(minimum=minimum, smoothing=1.0, dead_band=0.2, least=0.5, most=3.0, every="epoch")


def _smoothed(old: tuple[float, ...], new: tuple[float, ...], weight: float) -> tuple[float, ...]:
    if not old:
        return new
    return tuple(weight * fresh + (1 - weight) * before for fresh, before in zip(new, old, strict=True))
