"""Decides how the global batch is shared, from the compute times that the workers measured.

A controller is a pure function ``(state, observation) -> (state, decision)`` of values that all ranks hold alike, so
all ranks decide the same without another message. The state is small and plain, and travels in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetopt.profiler.errors import BadInput
from hetopt.trainer.partition import largest_remainder, proportional_quotas


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchObservation:
    """One control period, in rank order: the shares that were computed, and the compute time of a step with them.

    Raises:
        ValueError: the two do not match, or a share or time is not positive and finite.
    """

    local_batch_sizes: tuple[int, ...]
    compute_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.local_batch_sizes or len(self.local_batch_sizes) != len(self.compute_s):
            raise ValueError(f"one time a share is needed, not {len(self.compute_s)} for {len(self.local_batch_sizes)}")
        if any(share < 1 for share in self.local_batch_sizes):
            raise ValueError(f"shares must be positive, not {self.local_batch_sizes}")
        if any(not 0 < time_s < math.inf for time_s in self.compute_s):
            raise ValueError(f"compute times must be positive and finite, not {self.compute_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDecision:
    """The shares from now on, and in words why, if they changed (``None`` if not)."""

    local_batch_sizes: tuple[int, ...]
    reason: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the shares differ from those observed."""
        return self.reason is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchState:
    """What a controller remembers: the shares it watches, and their smoothed compute times.

    ``compute_s`` is ``None`` until a time can be trusted. ``settled`` is false until the first observation of these
    shares has been dropped.
    """

    local_batch_sizes: tuple[int, ...] = ()
    compute_s: tuple[float, ...] | None = None
    settled: bool = False

    def to_dict(self) -> dict[str, object]:
        """The state as plain JSON."""
        return {
            "local_batch_sizes": list(self.local_batch_sizes),
            "compute_s": None if self.compute_s is None else list(self.compute_s),
            "settled": self.settled,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> BatchState:
        """The state that `to_dict` gave.

        Raises:
            BadInput: it is something else.
        """
        match data:
            case {"local_batch_sizes": list(shares), "compute_s": list() | None as times, "settled": bool(settled)}:
                return cls(
                    local_batch_sizes=tuple(shares),
                    compute_s=None if times is None else tuple(times),
                    settled=settled,
                )
        raise BadInput(f"The saved batch controller state is damaged: {dict(data)}.", hint="use an older checkpoint")


class BatchController(Protocol):
    """Shares the global batch: called once a control period, with the same arguments on every rank."""

    def decide(self, state: BatchState, observation: BatchObservation) -> tuple[BatchState, BatchDecision]:
        """The next state, and the shares to use from now on; they sum to what the observed shares sum to."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBatches:
    """Keeps the shares of the plan."""

    def decide(self, state: BatchState, observation: BatchObservation) -> tuple[BatchState, BatchDecision]:
        """The observed shares, unchanged."""
        return state, BatchDecision(local_batch_sizes=observation.local_batch_sizes)


@dataclass(frozen=True, kw_only=True)
class ProportionalBatches:
    """Gives every worker samples in proportion to the throughput ``b_i / t_i`` that it showed (arXiv 2305.12213).

    As printed there, ``b_i <- b_i mean(t) / t_i`` inflates the global batch; here throughputs are only weights of a
    division of B within the bounds, and one decision covers the whole cluster. The steps of the law:

    1. The first observation after a change is dropped: caches, allocators and autotuners are still adapting.
    2. Later ones are averaged: ``m <- smoothing * t + (1 - smoothing) * m``, from scratch after every change.
    3. Nothing happens while no worker's real-valued share would move by more than ``dead_band`` (of its present share).
    4. Nothing happens either when, after rounding, the slowest worker would gain less than ``least_gain``: shares of a
       few samples would flicker between neighbouring integers. (The paper has no such rule.)
    5. Shares outside the bounds are brought inside regardless of 3 and 4.

    Args:
        minimum: least share of each worker, in rank order.
        maximum: largest share of each worker (its memory); ``None`` is no limit.
        smoothing: weight of the newest observation, in (0, 1].
        dead_band: relative change of a share below which it is left alone.
        least_gain: relative gain in the slowest worker's time below which rounded shares are left alone.
    """

    minimum: tuple[int, ...]
    maximum: tuple[int | None, ...]
    smoothing: float = 0.5
    dead_band: float = 0.05
    least_gain: float = 0.01

    def __post_init__(self) -> None:
        if not (0 < self.smoothing <= 1 and 0 <= self.dead_band < math.inf and 0 <= self.least_gain < 1):
            raise ValueError(
                "smoothing must be in (0, 1], dead_band not negative and least_gain in [0, 1), not "
                f"{self.smoothing}, {self.dead_band}, {self.least_gain}"
            )
        if len(self.minimum) != len(self.maximum) or any(low < 1 for low in self.minimum):
            raise ValueError(f"each worker needs bounds and at least one sample, not {self.minimum}, {self.maximum}")

    def decide(self, state: BatchState, observation: BatchObservation) -> tuple[BatchState, BatchDecision]:
        """The next state and shares (see `BatchController`).

        Raises:
            BadInput: the global batch does not fit between the bounds.
        """
        shares = observation.local_batch_sizes
        keep = BatchDecision(local_batch_sizes=shares)
        if not state.settled or state.local_batch_sizes != shares:
            return BatchState(local_batch_sizes=shares, settled=True), keep

        times = _smoothed(state.compute_s, observation.compute_s, self.smoothing)
        state = BatchState(local_batch_sizes=shares, compute_s=times, settled=True)
        throughputs = [share / time_s for share, time_s in zip(shares, times, strict=True)]
        quotas = proportional_quotas(throughputs, sum(shares), minimum=self.minimum, maximum=self.maximum)
        move = max(abs(quota - share) / share for quota, share in zip(quotas, shares, strict=True))
        within = _within(shares, self.minimum, self.maximum)
        if within and move <= self.dead_band:
            return state, keep

        proposed = largest_remainder(throughputs, sum(shares), minimum=self.minimum, maximum=self.maximum)
        predicted_s = max(share / throughput for share, throughput in zip(proposed, throughputs, strict=True))
        if within and predicted_s >= max(times) * (1 - self.least_gain):
            return state, keep
        reason = f"compute of the slowest worker {max(times):.3g} s, expected {predicted_s:.3g} s with the new shares"
        return BatchState(local_batch_sizes=proposed), BatchDecision(local_batch_sizes=proposed, reason=reason)


def _smoothed(old: tuple[float, ...] | None, new: tuple[float, ...], weight: float) -> tuple[float, ...]:
    if old is None:
        return new
    return tuple(weight * fresh + (1 - weight) * before for fresh, before in zip(new, old, strict=True))


def _within(shares: Sequence[int], minimum: Sequence[int], maximum: Sequence[int | None]) -> bool:
    return all(
        low <= share and (high is None or share <= high)
        for share, low, high in zip(shares, minimum, maximum, strict=True)
    )
