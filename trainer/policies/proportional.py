"""Re-cuts the batch once an epoch in proportion to the throughput of the last one (arXiv 2110.08941).

    p_i <- (p_i / t_i) / sum_j (p_j / t_j)

with p_i worker i's part of the data and t_i its mean compute time. No smoothing and no dead-band, as published: every
epoch acts on its own noise. Where we depart from the paper: p_i is the part that was really computed, ``b_i / B``, not
the number before rounding, whose rounding errors would pile up; and shares are rounded so that the batch stays whole,
not down, which loses samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.core.batch_partition import largest_remainder
from hetopt.trainer.policies.epoch_mean import EpochMean, Every
from hetopt.trainer.policies.policy import BatchDecision, BatchObservation


@dataclass(frozen=True, kw_only=True, slots=True)
class ProportionalShares:
    """Shares in proportion to ``b / t`` of the last epoch.

    Args:
        minimum: least share of a worker.
        every: when to decide; the paper's is "epoch".
    """

    minimum: int = 1
    every: Every = "epoch"

    def __post_init__(self) -> None:
        if self.minimum < 1:
            raise ValueError(f"a worker's share is at least one sample, not {self.minimum}")

    def initial(self) -> EpochMean:
        """The state before the first period: no measurements."""
        return EpochMean()

    def decide(self, state: EpochMean, observation: BatchObservation) -> tuple[EpochMean, BatchDecision]:
        """What was gathered of the epoch, or its end and the new shares.

        Raises:
            BadInput: the global batch does not hold the workers' least shares.
        """
        shares = observation.local_batch_sizes
        state, times_s = state.gather(observation, self.every)
        if times_s is None:
            return state, BatchDecision(local_batch_sizes=shares)
        proposed = largest_remainder(
            [share / time_s for share, time_s in zip(shares, times_s, strict=True)],
            sum(shares),
            minimum=(self.minimum,) * len(shares),
            maximum=(None,) * len(shares),
        )
        if proposed == shares:
            return state, BatchDecision(local_batch_sizes=shares)
        reason = f"in proportion to throughput; compute took {min(times_s):.3g} to {max(times_s):.3g} s"
        return state, BatchDecision(local_batch_sizes=proposed, reason=reason)
