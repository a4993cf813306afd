"""Time and money of clusters, many at a time: the one model that enumeration, study and refinement go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetopt.optimizer.convergence import StepsModel
from hetopt.optimizer.cost import CALM, SCARCE, Rates, interruptions
from hetopt.optimizer.search_space import Cluster, MachineOption, SearchSpace
from hetopt.optimizer.step_time import expected_maximum
from hetopt.profiler.errors import BadInput
from hetopt.trainer.partition import GroupShares, solve_group_shares

Array = NDArray[np.float64]

Z90 = 1.6448536269514722
"""Half-width of a 90 % interval in standard deviations."""

PRICE_ESTIMATE_LOG_SD = 0.15
"""Spot estimates are a published saving on the list price, a month's mean of another season."""


@dataclass(frozen=True, kw_only=True)
class JobModel:
    """What does not depend on the cluster.

    Attributes:
        steps: steps that the goal needs.
        evaluate_every_samples: samples between evaluations.
        jitter: relative standard deviation of a worker's single steps.
        network_log_sd: how well links between machines are known.
        startup_s: from the request to the first step; with its spread.
        checkpoint_s, restart_s: see `cost.interruptions`.
    """

    steps: StepsModel
    evaluate_every_samples: float
    jitter: float
    network_log_sd: float
    startup_s: float
    startup_log_sd: float
    checkpoint_s: float
    restart_s: float
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class ClusterTable:
    """Clusters as columns of equal length: what each brings to the forecast. Units as in the field names."""

    machines: Array
    workers: Array
    batch: Array
    gain: Array
    compute_s: Array
    mean_compute_s: Array
    compress_s: Array
    exchange_s: Array
    evaluation_s: Array
    compute_log_sd: Array
    usd_per_hour: Array
    price_log_sd: Array
    calm_per_hour: Array
    scarce_per_hour: Array
    scarce_chance: Array

    def __len__(self) -> int:
        return len(self.machines)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> ClusterTable:
        """The table with only these rows."""
        return ClusterTable(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted figures of the clusters of a table, as columns. ``*_low`` and ``*_high`` bound 90 %."""

    compute_s: Array
    waiting_s: Array
    communication_s: Array
    step_time_s: Array
    step_time_log_sd: Array
    steps: Array
    steps_log_sd: Array
    work_s: Array
    work_log_sd: Array
    interruption_s: Array
    scarce_factor: Array
    total_s: Array
    total_low_s: Array
    total_high_s: Array
    cost_usd: Array
    cost_low_usd: Array
    cost_high_usd: Array

    def __len__(self) -> int:
        return len(self.total_s)

    def first(self, rows: int) -> Forecast:
        """The leading rows."""
        return Forecast(**{f.name: getattr(self, f.name)[:rows] for f in fields(self)})

    @classmethod
    def concatenate(cls, parts: Sequence[Forecast]) -> Forecast:
        """All rows, in order."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


def forecast(table: ClusterTable, job: JobModel) -> Forecast:
    """Predict every cluster of the table.

    Relative errors of step time, steps and interruptions are independent, so their log variances add. Machines of one
    cluster share their error (all are scaled from one reference), so it does not average out over them.
    """
    counts, which = np.unique(table.workers.astype(np.intp), return_inverse=True)
    slowest = np.array([expected_maximum(count) for count in counts.tolist()])[which]
    compute = table.compute_s * (1 + job.jitter * slowest)
    communication = table.compress_s + table.exchange_s
    step = compute + communication
    # Compression runs on the workers and shares their error; the rest of the exchange has the network's.
    device_share = (compute + table.compress_s) / step
    step_log_sd = np.hypot(device_share * table.compute_log_sd, (1 - device_share) * job.network_log_sd)

    steps = job.steps.steps(table.batch, table.gain)
    steps_log_sd = job.steps.log_sd(table.batch, table.gain)
    work = steps * step + evaluations(steps, table.batch, job.evaluate_every_samples) * table.evaluation_s
    work_log_sd = np.hypot(step_log_sd, steps_log_sd)

    lost = interruptions(
        work,
        calm_per_hour=table.calm_per_hour,
        scarce_per_hour=table.scarce_per_hour,
        scarce_chance=table.scarce_chance,
        checkpoint_s=job.checkpoint_s,
        restart_s=job.restart_s,
    )
    training = work * lost.expected_factor
    training_log_sd = np.hypot(work_log_sd, lost.log_sd)
    total = job.startup_s + training
    low, high = (
        total
        + sign * np.hypot(_reach(training, training_log_sd, sign), _reach(job.startup_s, job.startup_log_sd, sign))
        for sign in (-1, 1)
    )
    hourly = table.usd_per_hour + table.machines * job.rates.per_machine_hour
    cost, cost_low, cost_high = (job.rates.billed_hours(seconds) * hourly for seconds in (total, low, high))
    for sign, bound in ((-1, cost_low), (1, cost_high)):
        reach = np.hypot(np.abs(bound - cost), _reach(cost, table.price_log_sd, sign))
        bound[:] = cost + sign * reach
    return Forecast(
        compute_s=compute,
        waiting_s=np.maximum(0.0, compute - table.mean_compute_s),
        communication_s=communication,
        step_time_s=step,
        step_time_log_sd=step_log_sd,
        steps=steps,
        steps_log_sd=steps_log_sd,
        work_s=work,
        work_log_sd=work_log_sd,
        interruption_s=training - work,
        scarce_factor=lost.scarce_factor,
        total_s=total,
        total_low_s=np.maximum(low, 0.0),
        total_high_s=high,
        cost_usd=cost,
        cost_low_usd=np.maximum(cost_low, 0.0),
        cost_high_usd=cost_high,
    )


def evaluations(steps: ArrayLike, global_batch_size: ArrayLike, every_samples: float) -> Array:
    """How often a run evaluates: whenever a step passes a multiple of the period, and after the last step."""
    before_the_last = (np.asarray(steps) - 1) * np.asarray(global_batch_size)
    return np.asarray(np.floor(before_the_last / every_samples) + 1, dtype=np.float64)


def _reach(value: Array | float, log_sd: Array | float, sign: int) -> Array:
    """Distance from a figure to the end of its 90 % interval."""
    return np.asarray(np.abs(value * np.expm1(sign * Z90 * np.asarray(log_sd))), dtype=np.float64)


def shares_of(space: SearchSpace, cluster: Cluster) -> GroupShares:
    """Exact shares of a cluster's workers, in the order of its machines.

    Raises:
        BadInput: the batch is too small for the workers, or too large for their memory.
    """
    groups = [(space.options[o].worker.time, n * space.options[o].worker.workers) for o, n in cluster.machines]
    return solve_group_shares(groups, space.batch_sizes[cluster.batch])


def tabulate(space: SearchSpace, clusters: Sequence[Cluster]) -> tuple[tuple[Cluster, ...], ClusterTable]:
    """The clusters that are possible at all, and their table."""
    possible: list[Cluster] = []
    rows: list[tuple[float, ...]] = []
    for cluster in clusters:
        if not cluster.machines or cluster.machine_count > space.max_machines:
            continue
        try:
            shares = shares_of(space, cluster)
        except BadInput:
            continue
        possible.append(cluster)
        rows.append(_row(space, cluster, shares))
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(fields(ClusterTable))).T
    return tuple(possible), ClusterTable(**{f.name: c for f, c in zip(fields(ClusterTable), columns, strict=True)})


def _row(space: SearchSpace, cluster: Cluster, shares: GroupShares) -> tuple[float, ...]:
    exchange = space.exchanges[cluster.exchange]
    machines = cluster.machine_count
    workers = sum(shares.counts)
    batch = space.batch_sizes[cluster.batch]
    computed = 0.0
    evaluation_s = 0.0
    groups: list[tuple[MachineOption, int]] = []
    for (index, count), base, raised, members in zip(
        cluster.machines, shares.base, shares.raised, shares.counts, strict=True
    ):
        option = space.options[index]
        time = option.worker.time
        computed += raised * time.time_s(base + 1) + (members - raised) * time.time_s(base)
        # Each worker evaluates in proportion to its share of the batch; the slowest part decides.
        evaluation_s = max(evaluation_s, option.evaluation_s * (base + (raised > 0)) / batch)
        groups.append((option, count))
    if machines == 1:
        latency, bandwidth = groups[0][0].bus.latency_s, groups[0][0].bus.bytes_per_s
    else:
        # A ring over machines in order: one flow leaves each machine, whatever its number of workers.
        links = [option.links[exchange.collective] for option, _ in groups]
        latency, bandwidth = max(link.latency_s for link in links), min(link.bytes_per_s for link in links)
    calm_chance, scarce = 1.0, 0.0
    spot = sum(count for option, count in groups if option.scarce_chance > 0)
    for option, count in groups:
        calm_chance *= 1 - option.scarce_chance
        scarce += count * option.scarce_chance * SCARCE.mean_per_hour
    calm = spot * CALM.mean_per_hour
    scarce_chance = 1 - calm_chance
    return (
        machines,
        workers,
        batch,
        exchange.gain,
        shares.compute_s,
        computed / workers,
        exchange.compress_s[workers] * max(option.worker.compress_factor for option, _ in groups),
        exchange.messages[workers] * latency + exchange.traffic_bytes[workers] / bandwidth,
        evaluation_s,
        max(option.worker.log_sd for option, _ in groups),
        sum(option.usd_per_hour * count for option, count in groups),
        max(PRICE_ESTIMATE_LOG_SD * option.offer.price.is_estimate for option, _ in groups),
        calm,
        calm + (scarce / scarce_chance if scarce_chance > 0 else 0.0),
        scarce_chance,
    )


def tabulate_uniform(space: SearchSpace) -> tuple[NDArray[np.intp], ClusterTable]:
    """Clusters of a single machine type, without solving shares: equal workers share equally.

    Returns:
        Rows of (option index, machines, batch index, exchange index), machines running over
        `SearchSpace.machine_counts`, and the table in the same order; impossible clusters are left out.
    """
    options, exchanges = space.options, space.exchanges
    counts = np.array(space.machine_counts)
    index = np.indices((len(options), len(counts), len(space.batch_sizes), len(exchanges))).reshape(4, -1)
    option, count, batch, exchange = index[0], counts[index[1]], index[2], index[3]

    def column(values: Sequence[float]) -> Array:
        return np.asarray(np.array(values, dtype=np.float64)[option], dtype=np.float64)

    times = [o.worker.time for o in options]
    per_machine = np.array([o.worker.workers for o in options])[option]
    workers = count * per_machine
    samples = np.array(space.batch_sizes)[batch]
    low, extra = samples // workers, samples % workers
    high = low + (extra > 0)
    most = column([np.inf if t.max_samples is None else t.max_samples for t in times])
    fixed, slope, floor = (
        column([t.fixed_s for t in times]),
        column([t.per_sample_s for t in times]),
        column([t.floor_s for t in times]),
    )
    slowest, others = np.maximum(floor, fixed + slope * high), np.maximum(floor, fixed + slope * low)
    gather = np.array([e.collective == "all_gather" for e in exchanges])[exchange]

    def hop(alone: Sequence[float], reduce: Sequence[float], all_gather: Sequence[float]) -> Array:
        return np.where(count == 1, column(alone), np.where(gather, column(all_gather), column(reduce)))

    latency = hop(
        [o.bus.latency_s for o in options],
        [o.links["all_reduce"].latency_s for o in options],
        [o.links["all_gather"].latency_s for o in options],
    )
    bandwidth = hop(
        [o.bus.bytes_per_s for o in options],
        [o.links["all_reduce"].bytes_per_s for o in options],
        [o.links["all_gather"].bytes_per_s for o in options],
    )
    messages, traffic, compress = (
        np.stack([getattr(e, name) for e in exchanges])[exchange, workers]
        for name in ("messages", "traffic_bytes", "compress_s")
    )
    chance = column([o.scarce_chance for o in options])
    calm = np.where(chance > 0, count * CALM.mean_per_hour, 0.0)
    table = ClusterTable(
        machines=count.astype(np.float64),
        workers=workers.astype(np.float64),
        batch=samples.astype(np.float64),
        gain=np.array([e.gain for e in exchanges])[exchange],
        compute_s=slowest,
        mean_compute_s=(extra * slowest + (workers - extra) * others) / workers,
        compress_s=compress * column([o.worker.compress_factor for o in options]),
        exchange_s=messages * latency + traffic / bandwidth,
        evaluation_s=column([o.evaluation_s for o in options]) * high / samples,
        compute_log_sd=column([o.worker.log_sd for o in options]),
        usd_per_hour=column([o.usd_per_hour for o in options]) * count,
        price_log_sd=column([PRICE_ESTIMATE_LOG_SD * o.offer.price.is_estimate for o in options]),
        calm_per_hour=calm,
        scarce_per_hour=calm + np.where(chance > 0, count * SCARCE.mean_per_hour, 0.0),
        scarce_chance=chance,
    )
    possible = (low >= 1) & (high <= most)
    return np.stack([option, count, batch, exchange], axis=1)[possible].astype(np.intp), table.take(possible)
