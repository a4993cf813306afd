"""Which batch policy a run has, and the shares and micro-batches that it begins with."""

from __future__ import annotations

import math
from typing import Any

from hetopt.profiler.errors import BadInput
from hetopt.trainer.control.allocation import AllocateMicroBatches, whole_micro_batches
from hetopt.trainer.control.dynamic import DynamicShares, omnilearn
from hetopt.trainer.control.keep import KeepShares
from hetopt.trainer.control.model import ModelShares
from hetopt.trainer.control.policy import BatchPolicy
from hetopt.trainer.control.proportional import ProportionalShares
from hetopt.trainer.control.stream_rate import RateShares
from hetopt.trainer.partition import largest_remainder
from hetopt.trainer.spec import RunSpec

_MICRO_BATCHES_A_WORKER = 8
"""Micro-batches of an equal share where nobody says: shares in steps of an eighth, and still few launches."""


def choose_policy(spec: RunSpec, *, minimum: int) -> BatchPolicy[Any]:
    """The policy of a run. What its state is made of is the policy's own affair; `BatchPolicy.initial` tells its type.

    Args:
        spec: of the run.
        minimum: least share of a worker, in samples.

    Raises:
        BadInput: the global batch does not give every worker its least share, or its micro-batches are no good.
    """
    _check_batch(spec, minimum)
    match spec.batch_policy:
        case "uniform" | "static":
            return KeepShares()
        case "proportional":
            return ProportionalShares(minimum=minimum)
        case "dynamic":
            return DynamicShares(minimum=minimum)
        case "omnilearn":
            return omnilearn(minimum=minimum)
        case "allocation":
            size = _allocated_micro_batch_size(spec)
            if size < minimum:
                raise BadInput(
                    f"Micro-batches of {size} samples are too small: this model needs at least {minimum} at a time.",
                    hint=f"choose a micro-batch size of at least {minimum} that divides the global batch",
                )
            return AllocateMicroBatches(micro_batch_size=size)
        case "model":
            return ModelShares(minimum=minimum)
        case "rate":
            assert spec.stream is not None, "the spec checks it"
            return RateShares(stream=spec.stream, minimum=minimum)


def first_shares(spec: RunSpec, *, minimum: int = 1) -> tuple[int, ...]:
    """The shares of the first step, in rank order: equal (uniform), whole micro-batches (allocation), what streams of
    known rates bring (rate), or the plan's.

    Args:
        spec: of the run.
        minimum: least share of a worker, in samples; the plan's are raised to it at the cost of larger ones.

    Raises:
        BadInput: there are fewer samples than workers, or the global batch is not made of micro-batches.
    """
    _check_batch(spec, 1)
    shares = tuple(worker.local_batch_size for worker in spec.workers)
    match spec.batch_policy:
        case "uniform":
            each, left = divmod(sum(shares), len(shares))
            return tuple(each + (rank < left) for rank in range(len(shares)))
        case "allocation":
            return whole_micro_batches(shares, _allocated_micro_batch_size(spec))
        case "rate" if spec.stream is not None and spec.stream.rates:
            return tuple(spec.stream.batch(rate) for rate in spec.stream.rates)
        case _ if min(shares) < minimum:
            count = len(shares)
            return largest_remainder(shares, sum(shares), minimum=[minimum] * count, maximum=[None] * count)
        case _:
            return shares


def micro_batch_size(spec: RunSpec) -> int | None:
    """How many samples are computed together; ``None``: as many as fit.

    Raises:
        BadInput: shares are to be whole micro-batches, and the global batch cannot be cut into such.
    """
    return _allocated_micro_batch_size(spec) if spec.batch_policy == "allocation" else spec.micro_batch_size


def _allocated_micro_batch_size(spec: RunSpec) -> int:
    """The spec's, or the divisor of the global batch that cuts an equal share into about eight."""
    total, workers = spec.global_batch_size, len(spec.workers)
    if spec.micro_batch_size is not None:
        whole_micro_batches([worker.local_batch_size for worker in spec.workers], spec.micro_batch_size)
        return spec.micro_batch_size
    wished = total / (workers * _MICRO_BATCHES_A_WORKER)
    divisors = [size for size in range(1, total // workers + 1) if total % size == 0]
    # Single samples only where nothing else divides the batch: some layers cannot compute one alone.
    return min(divisors, key=lambda size: (size == 1, abs(math.log(size / wished))))


def _check_batch(spec: RunSpec, minimum: int) -> None:
    samples, workers = spec.global_batch_size, len(spec.workers)
    if samples < workers * minimum:
        each = "one sample" if minimum == 1 else f"{minimum} samples"
        raise BadInput(
            f"A global batch of {samples} is too small for {workers} workers, which take at least {each} each.",
            hint="use fewer workers or a larger global batch",
        )
