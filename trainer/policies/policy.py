"""What a batch policy is: a pure function from what all workers measured to the shares of the next steps.

``(state, observation) -> (state, decision)`` over values that all ranks hold alike, so all ranks decide the same
without another message. The state is a small plain record, and travels in checkpoints.

Compute times gathered over an epoch, for the policies that decide once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from pydantic import NonNegativeInt, PositiveFloat

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
    """

    local_batch_sizes: tuple[int, ...]
    compute_s: tuple[float, ...]
    spread_s: tuple[float, ...]
    steps: int
    epoch: int


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

    def decide(self, state: StateT, observation: BatchObservation) -> tuple[StateT, BatchDecision]:
        """The next state, and the shares to use from now on.

        They sum to what the observed shares sum to, but under the policy ``rate``.
        """


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


Every = Literal["epoch", "period"]
"""How often a policy decides: at the end of an epoch, on the mean of its steps, or after every control period."""


class EpochMean(Record):
    """Mean compute times of the steps since the last decision, all over the same shares.

    Attributes:
        epoch: the epoch that is being gathered.
        local_batch_sizes: shares of the steps.
        compute_s: mean of the periods' medians, weighted by steps; empty before the first.
        steps: how many steps.
    """

    epoch: NonNegativeInt = 0
    local_batch_sizes: tuple[int, ...] = ()
    compute_s: tuple[PositiveFloat, ...] = ()
    steps: NonNegativeInt = 0

    def gather(self, observation: BatchObservation, every: Every) -> tuple[EpochMean, tuple[float, ...] | None]:
        """What is gathered now, and the mean times if it is time to decide."""
        times_s, steps = observation.compute_s, observation.steps
        if self.steps and self.local_batch_sizes == observation.local_batch_sizes:
            steps += self.steps
            weight = observation.steps / steps
            times_s = tuple(
                old + weight * (new - old) for old, new in zip(self.compute_s, observation.compute_s, strict=True)
            )
        if every == "period" or observation.epoch > self.epoch:
            return EpochMean(epoch=observation.epoch), times_s
        gathered = EpochMean(
            epoch=self.epoch, local_batch_sizes=observation.local_batch_sizes, compute_s=times_s, steps=steps
        )
        return gathered, None
