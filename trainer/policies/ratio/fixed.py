"""Sends the same fraction from first to last."""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.core.artifact import Record
from hetopt.core.comm.network_state import NetworkState
from hetopt.trainer.policies.ratio.policy import RatioDecision, RatioObservation


class NothingToRemember(Record):
    """The state of a policy that learns nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedRatio:
    """The policy that changes nothing, whatever is measured.

    Args:
        ratio: fraction of the elements that is sent; 1: dense.
    """

    ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"a ratio is in (0, 1], not {self.ratio}")

    def initial(self) -> NothingToRemember:
        """The empty state: this policy remembers nothing."""
        return NothingToRemember()

    def first(self, network: NetworkState | None) -> RatioDecision:
        """Begin with the given ratio."""
        return RatioDecision(ratio=self.ratio)

    def decide(
        self, state: NothingToRemember, observation: RatioObservation
    ) -> tuple[NothingToRemember, RatioDecision]:
        """Keep the given ratio, whatever was observed."""
        return state, RatioDecision(ratio=self.ratio)
