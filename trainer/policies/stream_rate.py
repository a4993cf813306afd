"""Batches that follow the streams (``rate``), and a learning rate that follows the batches: ScaDLES, arXiv 2301.08897.

A worker's batch is what its stream brings in a set time, so that nobody waits for samples, and none are left behind;
its gradient weighs as much as its batch. The sum of the shares therefore changes with the rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetopt.core.run_spec import Stream
from hetopt.trainer.policies.policy import BatchDecision, BatchObservation, NothingToRemember

UNKNOWN_RATE = -1.0
"""Of a stream that was not watched for long enough yet."""

DEAD_BAND = 0.05
"""Shares stay while every one of them is within this part of what its rate asks for: counts of arrivals are noisy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateShares:
    """The policy ``rate``. It needs an observation with rates, and is the only one whose shares change their sum.

    Args:
        stream: says what a rate asks for.
        minimum: least share of a worker, in samples.
    """

    stream: Stream
    minimum: int = 1

    def initial(self) -> NothingToRemember:
        """The state before the first period: local batch sizes as they are."""
        return NothingToRemember()

    def decide(
        self, state: NothingToRemember, observation: BatchObservation
    ) -> tuple[NothingToRemember, BatchDecision]:
        """The batch of every stream whose rate is known; the others keep theirs."""
        present = observation.local_batch_sizes
        if len(observation.rates_per_s) != len(present):
            return state, BatchDecision(local_batch_sizes=present)
        wanted = tuple(
            share if rate < 0 else max(self.minimum, self.stream.batch(rate))
            for share, rate in zip(present, observation.rates_per_s, strict=True)
        )
        if all(abs(share - want) <= DEAD_BAND * want for share, want in zip(present, wanted, strict=True)):
            return state, BatchDecision(local_batch_sizes=present)
        rates = ", ".join("?" if rate < 0 else f"{rate:.4g}" for rate in observation.rates_per_s)
        reason = f"the streams bring {rates} samples/s"
        return state, BatchDecision(local_batch_sizes=wanted, reason=reason)


def stream_learning_rate_scale(stream: Stream, batch_size: int, planned_batch_size: int) -> float:
    """The factor on the run's learning rate for steps of ``batch_size`` samples: ``B / B0`` or its root, capped."""
    match stream.learning_rate:
        case "fixed":
            return 1.0
        case "linear":
            scale = batch_size / planned_batch_size
        case "sqrt":
            scale = math.sqrt(batch_size / planned_batch_size)
    cap = stream.max_learning_rate_scale
    return min(cap, max(1 / cap, scale))
