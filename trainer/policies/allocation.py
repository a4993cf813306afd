"""Hands out whole micro-batches, anew each epoch until compute times agree: self-adaptive allocation, 2111.08272.

Worker i computes w_i micro-batches of the same size before each exchange, sum w_i = C. The memory of a worker and the
statistics of batch normalisation do not depend on its share. From the times t_i of the last epoch:

    w_i <- C (w_i / t_i) / sum_j (w_j / t_j),   in whole micro-batches, at least one.

It rests while the times lie within a tolerance of each other. We know of no printed one; ours is the longest time of
one micro-batch, because a smaller difference cannot be divided. Nor does it move where whole micro-batches would not
finish earlier.
"""

from __future__ import annotations

from pydantic import PositiveInt

from hetopt.core.batch_partition import divided, whole_micro_batches
from hetopt.core.run_spec import AllocationSettings
from hetopt.trainer.policies.policy import BatchDecision, BatchObservation, EpochMean


class AllocateMicroBatches(AllocationSettings):
    """Shares in whole micro-batches.

    Attributes:
        micro: samples of a micro-batch.
    """

    micro: PositiveInt

    def initial(self) -> EpochMean:
        """The state before the first period: no measurements."""
        return EpochMean()

    def decide(self, state: EpochMean, observation: BatchObservation) -> tuple[EpochMean, BatchDecision]:
        """What was gathered of the epoch, or its end and the new shares; shares that are no multiples become such.

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
