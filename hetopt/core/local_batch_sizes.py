"""The local batch sizes and micro-batches that a run begins with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hetopt.core.batch_partition import largest_remainder
from hetopt.core.errors import BadInput
from hetopt.core.policy_settings import AllocationSettings
from hetopt.core.run_spec import RunSpec

_MICRO_BATCHES_A_WORKER = 8
"""Micro-batches of an equal share where nobody says: shares in steps of an eighth, and still few launches."""


def first_shares(spec: RunSpec, *, minimum: int = 1) -> tuple[int, ...]:
    """The shares of the first step, in rank order: equal (uniform), whole micro-batches (allocation), what streams of
    known rates bring (rate), or the plan's.

    Args:
        spec: of the run.
        minimum: least share of a worker, in samples; the plan's are raised to it at the cost of larger ones.

    Raises:
        BadInput: there are fewer samples than workers, or the global batch is not made of micro-batches.
    """
    check_batch(spec, 1)
    shares = tuple(worker.local_batch_size for worker in spec.workers)
    match spec.batch_policy:
        case "uniform":
            each, left = divmod(sum(shares), len(shares))
            return tuple(each + (rank < left) for rank in range(len(shares)))
        case "allocation":
            return whole_micro_batches(shares, allocated_micro_batch_size(spec))
        case "rate" if spec.stream is not None and spec.stream.rates:
            return tuple(spec.stream.batch(rate) for rate in spec.stream.rates)
        case _ if min(shares) < minimum:
            count = len(shares)
            return largest_remainder(shares, sum(shares), minimum=[minimum] * count, maximum=[None] * count)
        case _:
            return shares


def within_memory(spec: RunSpec, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Local batch sizes as near to these as the workers' memory allows.

    A script computes what its loader gives it at once; a task cuts what does not fit into micro-batches.
    """
    limits = [worker.max_local_batch_size for worker in spec.workers]
    over = any(limit is not None and share > limit for share, limit in zip(shares, limits, strict=True))
    room = sum(sum(shares) if limit is None else limit for limit in limits)
    if not spec.script or not over or room < sum(shares):
        return shares
    return largest_remainder(shares, sum(shares), minimum=[1] * len(shares), maximum=limits)


def micro_batch_size(spec: RunSpec) -> int | None:
    """How many samples are computed together; ``None``: as many as fit.

    Raises:
        BadInput: shares are to be whole micro-batches, and the global batch cannot be cut into such.
    """
    return allocated_micro_batch_size(spec) if spec.batch_policy == "allocation" else spec.micro_batch_size


def allocated_micro_batch_size(spec: RunSpec) -> int:
    """The spec's, or the divisor of the global batch that cuts an equal share into about eight."""
    total, workers = spec.global_batch_size, len(spec.workers)
    asked = AllocationSettings.model_validate(spec.batch_settings).micro or spec.micro_batch_size
    if asked is not None:
        whole_micro_batches([worker.local_batch_size for worker in spec.workers], asked)
        return asked
    wished = total / (workers * _MICRO_BATCHES_A_WORKER)
    divisors = [size for size in range(1, total // workers + 1) if total % size == 0]
    # Single samples only where nothing else divides the batch: some layers cannot compute one alone.
    return min(divisors, key=lambda size: (size == 1, abs(math.log(size / wished))))


def check_batch(spec: RunSpec, minimum: int) -> None:
    """Refuse a global batch that does not give each worker ``minimum`` samples.

    Raises:
        BadInput: it does not.
    """
    samples, workers = spec.global_batch_size, len(spec.workers)
    if samples < workers * minimum:
        raise BadInput(
            f"the global batch size must be at least {workers * minimum} for {workers} workers, got {samples}.",
            hint="use fewer workers or a larger global batch size",
        )


def whole_micro_batches(shares: Sequence[int], micro_batch_size: int) -> tuple[int, ...]:
    """The shares that are nearest to ``shares``, of the same sum, in whole micro-batches, at least one a worker.

    Raises:
        BadInput: the sum is not made of micro-batches, or of fewer than there are workers.
    """
    count, rest = divmod(sum(shares), micro_batch_size)
    if rest or count < len(shares):
        raise BadInput(
            f"A global batch of {sum(shares)} cannot be cut into micro-batches of {micro_batch_size} samples, "
            f"at least one for each of {len(shares)} workers.",
            hint="choose a micro-batch size that divides the global batch, or another policy",
        )
    return tuple(units * micro_batch_size for units in divided(shares, count))


def divided(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """``count`` whole units in proportion to the weights, at least one each."""
    return largest_remainder(weights, count, minimum=(1,) * len(weights), maximum=(None,) * len(weights))


def spec_of_living(spec: RunSpec, places: Sequence[int], shares: Mapping[int, int]) -> RunSpec:
    """The spec of a generation.

    The shares were balanced when they were last in use, so everyone takes over the same part of what the lost ones
    leave. A worker that comes back was planned with a share beside those of the others: it begins with as much more
    than that as they have more than theirs. The batch policy goes on from there.

    Args:
        spec: of the run, with all of its workers.
        places: of the workers that are there, in rank order.
        shares: last local batch sizes by place, as far as they are known.
    """
    if len(places) == len(spec.workers) and not shares:
        return spec
    planned = {place: spec.workers[place].local_batch_size for place in places}
    known = {place: share for place, share in shares.items() if place in planned}
    growth = sum(known.values()) / sum(planned[place] for place in known) if known else 1.0
    weights = [float(known.get(place, growth * planned[place])) for place in places]
    batch = spec.global_batch_size
    local = largest_remainder(weights, batch, minimum=[1] * len(places), maximum=[None] * len(places))
    workers = tuple(
        spec.workers[place].model_copy(update={"local_batch_size": size})
        for place, size in zip(places, local, strict=True)
    )
    return spec.model_copy(update={"workers": workers})
