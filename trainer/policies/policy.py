"""What a batch policy is: a pure function from what all workers measured to the shares of the next steps.

``(state, observation) -> (state, decision)`` over values that all ranks hold alike, so all ranks decide the same
without another message. The state is a small plain record, and travels in checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hetopt.core.artifact import Record

StateT = TypeVar("StateT", bound=Record)


class NothingToRemember(Record):
    """The state of a policy that learns nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchObservation:
    """What one control period was like, in rank order. All its steps were computed with these shares.

    Attributes:
        local_batch_sizes: samples of each worker in a step.
        compute_s: median time that a step's computation took.
        spread_s: robust standard deviation of one step's computation (1.4826 x median absolute deviation), 0 where a
            single step was seen.
        steps: how many steps the medians are over.
        epoch: epochs completed when the period ended.
        rates_per_s: samples that arrive at each worker a second, -1 where that is not known; empty: they do not arrive.

    Raises:
        ValueError: the parts do not match, or a share or time is not positive and finite.
    """

    local_batch_sizes: tuple[int, ...]
    compute_s: tuple[float, ...]
    spread_s: tuple[float, ...]
    steps: int
    epoch: int
    rates_per_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        workers = len(self.local_batch_sizes)
        if workers == 0 or len(self.compute_s) != workers or len(self.spread_s) != workers:
            raise ValueError("one compute time and one spread a share are needed")
        if any(share < 1 for share in self.local_batch_sizes):
            raise ValueError(f"shares must be positive, not {self.local_batch_sizes}")
        if any(not 0 < time_s < math.inf for time_s in self.compute_s):
            raise ValueError(f"compute times must be positive and finite, not {self.compute_s}")
        if any(not 0 <= spread < math.inf for spread in self.spread_s):
            raise ValueError(f"spreads must be finite and not negative, not {self.spread_s}")
        if self.steps < 1 or self.epoch < 0:
            raise ValueError(f"a period has at least one step, not {self.steps}, of an epoch not below 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDecision:
    """The shares from now on, and in words why, if they changed (``None`` if not)."""

    local_batch_sizes: tuple[int, ...]
    reason: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the shares differ from those observed."""
        return self.reason is not None


class BatchPolicy(Protocol, Generic[StateT]):
    """Shares the global batch: asked once a control period, with the same arguments on every rank."""

    def initial(self) -> StateT:
        """The state before the first observation; its type reads a checkpoint's back (`Record.model_validate`)."""
        ...

    def decide(self, state: StateT, observation: BatchObservation) -> tuple[StateT, BatchDecision]:
        """The next state, and the shares to use from now on.

        They sum to what the observed shares sum to, but under the policy ``rate``.
        """
        ...


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
