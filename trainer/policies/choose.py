"""The batch policies by name, which of them a run has, and those of a few lines, as published.

**Proportional** (arXiv 2110.08941) re-cuts the batch once an epoch in proportion to the throughput of the last one.

    p_i <- (p_i / t_i) / sum_j (p_j / t_j)

with p_i worker i's part of the data and t_i its mean compute time. No smoothing and no dead-band, as published: every
epoch acts on its own noise. Where we depart from the paper: p_i is the part that was really computed, ``b_i / B``, not
the number before rounding, whose rounding errors would pile up; and shares are rounded so that the batch stays whole,
not down, which loses samples.

**Allocation** (self-adaptive, 2111.08272) hands out whole micro-batches, anew each epoch until compute times agree.
Worker i computes w_i micro-batches of the same size before each exchange, sum w_i = C. The memory of a worker and the
statistics of batch normalisation do not depend on its share. From the times t_i of the last epoch:

    w_i <- C (w_i / t_i) / sum_j (w_j / t_j),   in whole micro-batches, at least one.

It rests while the times lie within a tolerance of each other. We know of no printed one; ours is the longest time of
one micro-batch, because a smaller difference cannot be divided. Nor does it move where whole micro-batches would not
finish earlier.

**Rate** (ScaDLES, arXiv 2301.08897): batches follow the streams, and the learning rate follows the batches. A worker's
batch is what its stream brings in a set time, so that nobody waits for samples, and none are left behind; its gradient
weighs as much as its batch. The sum of the shares therefore changes with the rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import PositiveInt

from hetopt.core.batch_partition import (
    allocated_micro_batch_size,
    check_batch,
    divided,
    largest_remainder,
    whole_micro_batches,
)
from hetopt.core.errors import BadInput
from hetopt.core.plain_text import known
from hetopt.core.run_spec import BATCH_POLICIES, AllocationSettings, ProportionalSettings, RunSpec, Stream
from hetopt.trainer.policies.dynamic import DynamicShares, omnilearn
from hetopt.trainer.policies.model import ModelShares
from hetopt.trainer.policies.policy import (
    BatchDecision,
    BatchObservation,
    BatchPolicy,
    EpochMean,
    KeepShares,
    NothingToRemember,
)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RateShares:
    """The policy ``rate``, the only one whose shares change their sum.

    Args:
        stream: the rates, and what a rate asks for.
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
        """What every stream brings in a set time."""
        wanted = tuple(max(self.minimum, self.stream.batch(rate)) for rate in self.stream.rates)
        if wanted == observation.local_batch_sizes:
            return state, BatchDecision(local_batch_sizes=wanted)
        rates = ", ".join(f"{rate:.4g}" for rate in self.stream.rates)
        return state, BatchDecision(local_batch_sizes=wanted, reason=f"the streams bring {rates} samples/s")


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


Maker: TypeAlias = Callable[[RunSpec, int], BatchPolicy[Any]]
"""Makes the policy of a run; the number is the least share of a worker, in samples."""


def _allocation(spec: RunSpec, minimum: int) -> BatchPolicy[Any]:
    size = allocated_micro_batch_size(spec)
    if size < minimum:
        raise BadInput(
            f"Micro-batches of {size} samples are too small: this model needs at least {minimum} at a time.",
            hint=f"choose a micro-batch size of at least {minimum} that divides the global batch",
        )
    return AllocateMicroBatches.model_validate({**spec.batch_settings, "micro": size})


def _told(policy: type[ProportionalShares | DynamicShares]) -> Maker:
    """Makes a policy by what the run tells it."""
    return lambda spec, minimum: policy.model_validate({**spec.batch_settings, "minimum": minimum})


def _rate(spec: RunSpec, minimum: int) -> BatchPolicy[Any]:
    assert spec.stream is not None, "the spec checks it"
    return RateShares(stream=spec.stream, minimum=minimum)


POLICIES: dict[str, Maker] = {
    "uniform": lambda spec, minimum: KeepShares(),
    "static": lambda spec, minimum: KeepShares(),
    "proportional": _told(ProportionalShares),
    "dynamic": _told(DynamicShares),
    "omnilearn": lambda spec, minimum: omnilearn(minimum=minimum),
    "allocation": _allocation,
    "model": lambda spec, minimum: ModelShares(minimum=minimum),
    "rate": _rate,
}


def register(name: str, about: str, make: Maker) -> None:
    """Add a batch policy: from here on a run may ask for it by this name.

    Args:
        name: as people write it.
        about: half a sentence: how it shares the batch.
        make: makes it for a run, with the least share of a worker in samples.

    Raises:
        ValueError: there is one of this name.
    """
    if name in POLICIES:
        raise ValueError(f"there is a batch policy {name!r} already")
    BATCH_POLICIES[name] = about
    POLICIES[name] = make


def choose_policy(spec: RunSpec, *, minimum: int) -> BatchPolicy[Any]:
    """The policy of a run. What its state is made of is the policy's own affair; `BatchPolicy.initial` tells its type.

    Args:
        spec: of the run.
        minimum: least share of a worker, in samples.

    Raises:
        BadInput: there is no policy of that name, the global batch does not give every worker its least share, or its
            micro-batches are no good.
    """
    check_batch(spec, minimum)
    return POLICIES[known(spec.batch_policy, list(POLICIES), "batch policy")](spec, minimum)
