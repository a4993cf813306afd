"""Re-cuts the batch once an epoch in proportion to the throughput of the last one (arXiv 2110.08941).

    p_i <- (p_i / t_i) / sum_j (p_j / t_j)

with p_i worker i's part of the data and t_i its mean compute time. No smoothing and no dead-band, as published: every
epoch acts on its own noise. Where we depart from the paper: p_i is the part that was really computed, ``b_i / B``, not
the number before rounding, whose rounding errors would pile up; and shares are rounded so that the batch stays whole,
not down, which loses samples.
"""

from __future__ import annotations

from pydantic import PositiveInt

from hetopt.core.batch_partition import largest_remainder
from hetopt.core.run_spec import ProportionalSettings
from hetopt.trainer.policies.policy import BatchDecision, BatchObservation, EpochMean


class ProportionalShares(ProportionalSettings):
    """Shares in proportion to ``b / t`` of the last epoch.

    Attributes:
        minimum: least share of a worker.
    """

    minimum: PositiveInt = 1

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
