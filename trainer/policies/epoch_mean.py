"""Compute times gathered over an epoch, for the policies that decide once an epoch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, model_validator

from hetopt.core.artifact import Record
from hetopt.trainer.policies.policy import BatchObservation

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

    @model_validator(mode="after")
    def _is_one_time_a_share(self) -> Self:
        if len(self.compute_s) != len(self.local_batch_sizes):
            raise ValueError("one compute time a share is needed")
        return self

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
