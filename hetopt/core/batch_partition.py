"""Splits a global batch over unequal workers so that the slowest finishes as early as integers allow.

Minimise ``max_i t_i(b_i)`` with ``t_i(b) = max(floor_i, a_i + c_i b)`` over integers ``b_i`` that sum to B, each
between ``min_i`` and ``max_i``.

A worker pays its floor whatever its share, so that floors change the time, never the best shares, and the lines alone
decide. For lines the continuous optimum is a water level T with ``sum_i clip((T - a_i) / c_i, min_i, max_i) = B``:
piecewise linear and non-decreasing in T, solved on the segment between two of its breakpoints. Rounding down never
exceeds the optimum; handing the rest one by one to the smallest ``t_i(b_i + 1)`` is then exact, because a minimax
allocation under non-decreasing times takes the B earliest unit completion times. `scipy.optimize.milp` finds the same
in a thousand times the time (six workers: 20 µs here, tens of milliseconds there).
`hetopt.optimizer.search.group_shares` has the same for many clusters at once.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hetopt.core.errors import BadInput
from hetopt.core.run_spec import AllocationSettings, RunSpec

# One clamped line of the water level: start, rate (samples per unit of level), minimum, maximum.
_Line = tuple[float, float, int, int]


@dataclass(frozen=True, kw_only=True)
class WorkerTime:
    """The compute time of one worker, in seconds a step, as a function of its local batch size in samples.

        max(floor_s, fixed_s + per_sample_s * samples)    of what is computed together, which is all of the local batch;

    where that is larger than ``micro_batch``, each of its k micro-batches takes that for a k-th of the samples, but for
    ``once_s``, which a step takes once: the optimizer's update. `solve_shares` goes by the lines alone, as workers that
    compute in micro-batches do so with many samples each, among which the fixed part of one more is little.

    Times are in seconds; the bounds of `solve_shares` are ``min_samples`` and ``max_samples`` (None: no upper bound).
    ``micro_batch`` None: the local batch is computed at once.
    """

    fixed_s: float
    per_sample_s: float
    floor_s: float = 0.0
    min_samples: int = 1
    max_samples: int | None = None
    micro_batch: int | None = None
    once_s: float = 0.0

    def time_s(self, samples: int) -> float:
        """Return the seconds this worker computes in a step with ``samples`` local samples.

        More than ``micro_batch`` samples are computed in as few micro-batches as hold them: each costs ``fixed_s`` and
        at least ``floor_s``, and ``once_s`` of it is spent only once a step.
        """
        if self.micro_batch is None or samples <= self.micro_batch:
            return max(self.floor_s, self.fixed_s + self.per_sample_s * samples)
        parts = -(-samples // self.micro_batch)
        return max(parts * self.floor_s, parts * self.fixed_s + self.per_sample_s * samples) - (parts - 1) * self.once_s

    def slower(self, factor: float) -> WorkerTime:
        """Return the compute time of a worker that takes ``factor`` times as long; bounds in samples stay."""
        return replace(
            self,
            fixed_s=factor * self.fixed_s,
            per_sample_s=factor * self.per_sample_s,
            floor_s=factor * self.floor_s,
            once_s=factor * self.once_s,
        )


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The division of a global batch over workers.

    Attributes:
        local_batch_sizes: samples of each worker, in worker order.
        compute_s: seconds that the slowest worker computes in a step.
    """

    local_batch_sizes: tuple[int, ...]
    compute_s: float


def minimum_local_batch(least: int, global_batch_size: int, workers: int) -> int:
    """Return a worker's minimum local batch size: ``least`` samples, or 1 if the global batch is too small for that.

    Too small is a global batch of fewer than ``least`` samples for each of ``workers``.
    """
    return least if global_batch_size >= least * workers else 1


def solve_shares(workers: Sequence[WorkerTime], global_batch_size: int) -> Shares:
    """Return the local batch sizes of a global batch that minimise the slowest worker's time; micro-batches ignored.

    The time is the line ``fixed_s + per_sample_s * samples``; floors and micro-batches are left out of the choice, and
    are in the returned ``compute_s``.

    Identical workers differ by at most one sample (earlier ones take the larger share); the order of the workers does
    not matter otherwise.

    Args:
        workers: compute times and bounds of the workers, in rank order.
        global_batch_size: samples of a step, over all workers.

    Raises:
        BadInput: the global batch is smaller than all ``min_samples`` together, or larger than all ``max_samples``.
    """
    lines = [
        (
            worker.fixed_s,
            1.0 / worker.per_sample_s,
            worker.min_samples,
            global_batch_size if worker.max_samples is None else worker.max_samples,
        )
        for worker in workers
    ]
    _check_feasible(lines, global_batch_size)
    level = _water_level(lines, global_batch_size)

    # Round down, and by a little more than the error of `level`: floor(x + eps) could hand out more than B.
    sizes: list[int] = []
    for start, rate, low, high in lines:
        share = (level - start) * rate
        slack = 1e-9 * (1.0 + abs(share)) + 1e-13 * (level * rate + global_batch_size)
        sizes.append(min(max(math.floor(share - slack), low), high))

    # The earliest next sample goes first; ties go by the worker's own figures, so that the order of the workers does
    # not matter.
    following = [
        (worker.fixed_s + worker.per_sample_s * (sizes[rank] + 1), _tie_break(worker), rank)
        for rank, worker in enumerate(workers)
        if sizes[rank] < lines[rank][3]
    ]
    heapq.heapify(following)
    for _ in range(global_batch_size - sum(sizes)):
        _, tie, rank = heapq.heappop(following)
        sizes[rank] += 1
        if sizes[rank] < lines[rank][3]:
            worker = workers[rank]
            heapq.heappush(following, (worker.fixed_s + worker.per_sample_s * (sizes[rank] + 1), tie, rank))
    compute_s = max(worker.time_s(size) for worker, size in zip(workers, sizes, strict=True))
    return Shares(local_batch_sizes=tuple(sizes), compute_s=compute_s)


def largest_remainder(
    weights: Sequence[float], total: int, *, minimum: Sequence[int], maximum: Sequence[int | None]
) -> tuple[int, ...]:
    """Return integers in proportion to positive ``weights``, summing to ``total``, each within its bounds.

    The real-valued quotas come from `proportional_quotas`; the samples lost by rounding them down go to the largest
    fractions (Hamilton's method), ties to the larger weight, then to the earlier position.

    Args:
        weights: one for each part, above 0.
        total: sum of the parts.
        minimum: least value of each part.
        maximum: largest value of each part; None: no bound.

    Raises:
        BadInput: the bounds together leave no room for ``total``.
    """
    quotas = proportional_quotas(weights, total, minimum=minimum, maximum=maximum)
    parts = [math.floor(quota) for quota in quotas]
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - quotas[i], -weights[i], i))
    left = total - sum(parts)
    while left > 0:
        for i in order:
            bound = maximum[i]
            if left > 0 and (bound is None or parts[i] < bound):
                parts[i] += 1
                left -= 1
    return tuple(parts)


def proportional_quotas(
    weights: Sequence[float], total: int, *, minimum: Sequence[int], maximum: Sequence[int | None]
) -> tuple[float, ...]:
    """Return real numbers ``clip(x * weight_i, minimum_i, maximum_i)`` summing to ``total``, by water-filling for x.

    Args:
        weights: one for each part, above 0.
        total: sum of the parts.
        minimum: least value of each part.
        maximum: largest value of each part; None: no bound.

    Raises:
        BadInput: the bounds together leave no room for ``total``.
    """
    lines = [
        (0.0, weight, low, total if high is None else high)
        for weight, low, high in zip(weights, minimum, maximum, strict=True)
    ]
    _check_feasible(lines, total)
    level = _water_level(lines, total)
    return tuple(min(max(level * rate, low), high) for _, rate, low, high in lines)


def _tie_break(worker: WorkerTime) -> tuple[float, ...]:
    high, most = (-1 if limit is None else limit for limit in (worker.max_samples, worker.micro_batch))
    return worker.per_sample_s, worker.fixed_s, worker.floor_s, worker.min_samples, high, most, worker.once_s


def _check_feasible(lines: Sequence[_Line], total: int) -> None:
    """Check that ``total`` samples lie between the workers' minimums together and their maximums together.

    Raises:
        BadInput: the samples are fewer, or more.
    """
    least, most = sum(low for _, _, low, _ in lines), sum(high for _, _, _, high in lines)
    if least > total:
        raise BadInput(
            f"the global batch size must be at least {least} for {len(lines)} workers, got {total}.",
            hint="use fewer workers or a larger global batch size",
        )
    if most < total:
        raise BadInput(
            f"the global batch size must be at most {most} to fit into the memory of {len(lines)} workers, "
            f"got {total}.",
            hint="use more or larger workers, or a smaller global batch size",
        )


def _water_level(lines: Sequence[_Line], total: int) -> float:
    """Return the smallest level T at which ``sum clip((T - start) * rate, minimum, maximum)`` reaches ``total``.

    The bounds must leave room for ``total`` (see `_check_feasible`); without active bounds the level is the plain
    solution.
    """
    # Where no bound is active, which is usual, the level follows at once.
    slope = sum(rate for _, rate, _, _ in lines)
    level = (total + sum(rate * start for start, rate, _, _ in lines)) / slope
    if all(low <= (level - start) * rate <= high for start, rate, low, high in lines):
        return level

    def filled(level: float) -> float:
        return sum(min(max((level - start) * rate, low), high) for start, rate, low, high in lines)

    # No share exceeds the total, so a higher maximum is the same as `total` and every breakpoint is finite.
    ends = [(start + low / rate, start + min(high, total) / rate) for start, rate, low, high in lines]
    breakpoints = sorted(level for pair in ends for level in pair)
    right = bisect_left(breakpoints, float(total), key=filled)
    if right == 0:
        return breakpoints[0]
    below = breakpoints[right - 1]
    if right == len(breakpoints):
        return below
    middle = 0.5 * (below + breakpoints[right])
    slope = sum(line[1] for line, (low, high) in zip(lines, ends, strict=True) if low <= middle <= high)
    return below + (total - filled(below)) / slope if slope > 0 else below


_MICRO_BATCHES_A_WORKER = 8
"""Micro-batches of an equal share where nobody says: shares in steps of an eighth, and still few launches."""


def first_shares(spec: RunSpec, *, minimum: int = 1) -> tuple[int, ...]:
    """Return the local batch sizes (samples) of a run's first step, in rank order, as its batch policy sets them.

    Equal (``uniform``), whole micro-batches (``allocation``), what streams of known rates bring (``rate``), or the
    plan's.

    Args:
        spec: spec of the run.
        minimum: least share of a worker, in samples; the plan's shares are raised to it at the cost of larger ones.
            Shares by the three other policies may be smaller.

    Raises:
        BadInput: there are fewer samples than workers need, or the global batch is not made of whole micro-batches.
    """
    shares = tuple(worker.local_batch_size for worker in spec.workers)
    match spec.batch_policy:
        case "uniform":
            return divided((1.0,) * len(shares), sum(shares))
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
    """Return a script's local batch sizes cut to each worker's memory, their sum kept; unchanged for a task.

    A script computes what its loader gives it at once; a task cuts what does not fit into micro-batches. Unchanged,
    too, are shares that do not fit into the memory of all workers together.

    Args:
        spec: spec of the run, whose workers have bounds in ``max_local_batch_size``.
        shares: local batch sizes in samples, in rank order.
    """
    limits = [worker.max_local_batch_size for worker in spec.workers]
    over = any(limit is not None and share > limit for share, limit in zip(shares, limits, strict=True))
    room = sum(sum(shares) if limit is None else limit for limit in limits)
    if not spec.script or not over or room < sum(shares):
        return shares
    return largest_remainder(shares, sum(shares), minimum=[1] * len(shares), maximum=limits)


def micro_batch_size(spec: RunSpec) -> int | None:
    """Return the run's micro-batch size in samples; None: as many as fit into a worker's memory.

    Raises:
        BadInput: under the batch policy ``allocation``, the global batch cannot be cut into such micro-batches.
    """
    return allocated_micro_batch_size(spec) if spec.batch_policy == "allocation" else spec.micro_batch_size


def allocated_micro_batch_size(spec: RunSpec) -> int:
    """Return the micro-batch size that was set, or the global batch's divisor nearest to 1/8 of an equal local batch.

    The batch policy's ``micro`` goes before the run's ``micro_batch_size``. Nearest is meant in ratio; single samples
    are chosen only where nothing else divides the global batch.

    Raises:
        BadInput: the size that was set does not divide the global batch, or gives fewer micro-batches than workers.
    """
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
    """Refuse a run whose global batch has fewer than ``minimum`` samples for each worker.

    Raises:
        BadInput: the global batch is smaller than ``minimum`` times the number of workers.
    """
    _check_feasible([(0.0, 1.0, minimum, spec.global_batch_size)] * len(spec.workers), spec.global_batch_size)


def whole_micro_batches(shares: Sequence[int], micro_batch_size: int) -> tuple[int, ...]:
    """Return local batch sizes, each one or more whole micro-batches, nearest to ``shares`` and with the same sum.

    Args:
        shares: wished local batch sizes, in samples.
        micro_batch_size: samples of a micro-batch.

    Raises:
        BadInput: the sum is no multiple of the micro-batch size, or has fewer micro-batches than there are workers.
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
    """Divide ``count`` units into integers in proportion to positive weights, at least one each.

    Raises:
        BadInput: there are fewer units than weights.
    """
    return largest_remainder(weights, count, minimum=(1,) * len(weights), maximum=(None,) * len(weights))


def begun_on(spec: RunSpec, there: Collection[str]) -> RunSpec:
    """Return a run's spec as it begins on the hosts ``there``, whose workers get the first ranks.

    In an elastic run (`RunSpec.is_elastic`) the workers of absent hosts keep their places behind these, and may join
    later. In any other run absent workers are left out, and the present ones take over their samples.

    Args:
        spec: spec of the run, with all of its workers.
        there: names of the hosts that are present.

    Raises:
        BadInput: the run is not elastic, and too few workers are present for the global batch, or none.
    """
    if not spec.is_elastic:
        return spec_of_living(spec, [rank for rank, worker in enumerate(spec.workers) if worker.host in there], {})
    return spec.model_copy(update={"workers": tuple(sorted(spec.workers, key=lambda worker: worker.host not in there))})


def spec_of_living(spec: RunSpec, places: Sequence[int], shares: Mapping[int, int]) -> RunSpec:
    """Return the run's spec with only the workers at ``places``; the same global batch, by the last ``shares``.

    The shares were balanced when they were last in use, so all grow by one factor to take over the samples of the lost
    workers. A worker that comes back begins with its planned share, scaled as the others' have grown over their plans.
    The batch policy goes on from there. With all workers present and no shares, the spec is returned as it is.

    Args:
        spec: spec of the run, with all of its workers.
        places: indices of the present workers in ``spec.workers``, in rank order.
        shares: last local batch sizes in samples, by place, as far as they are known; those of lost workers are
            ignored.

    Raises:
        BadInput: the global batch has fewer samples than there are present workers.
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
