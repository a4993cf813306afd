"""Keeps the shares that a run began with: equal ones (``uniform``) or the plan's (``static``)."""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.trainer.policies.policy import BatchDecision, BatchObservation, NothingToRemember


@dataclass(frozen=True, slots=True)
class KeepShares:
    """The policy that changes nothing, whatever is measured."""

    def initial(self) -> NothingToRemember:
        """The empty state: this policy remembers nothing."""
        return NothingToRemember()

    def decide(
        self, state: NothingToRemember, observation: BatchObservation
    ) -> tuple[NothingToRemember, BatchDecision]:
        """Keep the observed local batch sizes."""
        return state, BatchDecision(local_batch_sizes=observation.local_batch_sizes)
