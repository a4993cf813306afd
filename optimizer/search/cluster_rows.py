"""Clusters as arrays, one per row: mixes of up to three machine options, and the columns of their forecast.

A row of `Boxes` stands for all clusters with counts between two ends, and its columns are lower bounds for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.cost.preemption_rate import effective_machines
from hetopt.optimizer.market.quota import bucket_of
from hetopt.optimizer.search.forecast import ClusterTable, JobModel, network_factor, straggler_factor
from hetopt.optimizer.search.group_shares import (
    Array,
    Integers,
    Lines,
    Mask,
    Table,
    earliest_finish,
    feasible,
    share,
    water_level,
)
from hetopt.optimizer.search.objective import NEAR
from hetopt.optimizer.search.search_space import MAX_TYPES, Cluster, SearchSpace
from hetopt.optimizer.step_time.device_memory import ExchangeLine
from hetopt.optimizer.step_time.links import COLLECTIVES
from hetopt.optimizer.step_time.step_time import overlapped, slower

NEVER_S = 1e12
"""Seconds beyond what anything takes; finite, so that arithmetic stays so."""


@dataclass(frozen=True, kw_only=True)
class ClusterRows(Table):
    """Clusters as index arrays, one per row: each group's option and machine count, the batch size, the exchange.

    Attributes:
        option, count: index into the space's options, and machines, of each group, (rows, groups); an empty group has
            count 0.
        batch, exchange: indices into the space's batch sizes and exchanges, (rows,).
    """

    option: Integers
    count: Integers
    batch: Integers
    exchange: Integers

    @classmethod
    def of(cls, clusters: Sequence[Cluster]) -> Self:
        """Return the clusters as arrays, one row each in the same order, with `MAX_TYPES` groups a row.

        A cluster with fewer groups has empty ones (count 0) behind them.
        """
        option = np.zeros((len(clusters), MAX_TYPES), dtype=np.intp)
        count = np.zeros_like(option)
        for row, cluster in enumerate(clusters):
            for place, (index, machines) in enumerate(cluster.machines):
                option[row, place], count[row, place] = index, machines
        return cls(
            option=option,
            count=count,
            batch=np.array([cluster.batch for cluster in clusters], dtype=np.intp),
            exchange=np.array([cluster.exchange for cluster in clusters], dtype=np.intp),
        )

    def cluster(self, row: int) -> Cluster:
        """Return row number ``row``, from 0, as a `Cluster`: indices into the search space, and machine counts."""
        counts = zip(self.option[row].tolist(), self.count[row].tolist(), strict=True)
        return Cluster.of(counts, int(self.batch[row]), int(self.exchange[row]))

    def widened(self) -> Self:
        """Return the rows padded with empty groups to `MAX_TYPES` groups a row; itself if they have as many."""
        missing = MAX_TYPES - self.option.shape[1]
        if not missing:
            return self
        more = np.zeros((len(self), missing), dtype=np.intp)
        return replace(
            self,
            option=np.concatenate([self.option, more], axis=1),
            count=np.concatenate([self.count, more], axis=1),
        )


class Columns:
    """Read-only arrays of a search space: by machine option, by exchange and number of workers, by batch size.

    Args:
        space: the search space, by whose indices of options, exchanges and batch sizes arrays are indexed.
    """

    def __init__(self, space: SearchSpace) -> None:
        """Lay the figures of a space's options, exchanges and batch sizes out as arrays; infinite: no limit."""
        options, exchanges = space.options, space.exchanges
        names, networks = COLLECTIVES, [option.network for option in options]
        buckets, ways = sorted(space.quotas), space.ways
        place = {bucket: index for index, bucket in enumerate(buckets)}

        def column(values: Sequence[float]) -> Array:
            return np.array(values, dtype=np.float64)

        def per_workers(name: str) -> Array:
            return np.stack([getattr(exchange, name) for exchange in exchanges]).astype(np.float64)

        times = [option.worker.time for option in options]
        rooms = [option.worker.room for option in options]
        taken = [exchange.memory or ExchangeLine(kept_bytes=0, fixed_bytes=0, each_bytes=0) for exchange in exchanges]

        def least_from(values: Array) -> Array:
            return np.asarray(np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1])

        self.space = space
        self.lines = Lines(
            fixed_s=column([t.fixed_s for t in times]),
            per_sample_s=column([t.per_sample_s for t in times]),
            floor_s=column([t.floor_s for t in times]),
            most=column([np.inf if t.max_samples is None else t.max_samples for t in times]),
            together=column([np.inf if t.micro_batch is None else t.micro_batch for t in times]),
            once_s=column([t.once_s for t in times]),
        )
        self.workers = np.array([option.worker.workers for option in options], dtype=np.intp)
        self.usd_per_hour = column([option.usd_per_hour for option in options])
        self.worst_usd_per_hour = column([option.offer.worst_usd_per_hour for option in options])
        self.price_log_sd = column([option.offer.price.log_sd for option in options])
        self.log_sd = column([option.worker.log_sd for option in options])
        self.compress_factor = column([option.worker.compress_factor for option in options])
        self.evaluation_s = column([option.evaluation_s for option in options])
        self.startup_s = column([option.startup_s for option in options])
        self.disk_gb = column([option.disk_gb for option in options])
        self.scarce_chance = column([option.losses.scarce_chance for option in options])
        self.calm_per_hour = column([option.losses.calm.mean_per_hour for option in options])
        self.scarce_per_hour = column([option.losses.scarce.mean_per_hour for option in options])
        self.missing = column([option.losses.missing for option in options])
        self.bus_latency_s = column([option.bus.latency_s for option in options])
        self.bus_s_per_byte = column([1 / option.bus.bytes_per_s for option in options])
        self.link_latency_s = np.array([[network.links[name].latency_s for network in networks] for name in names])
        self.link_s_per_byte = np.array(
            [[1 / network.links[name].bytes_per_s for network in networks] for name in names]
        )
        self.relief = column([network.relief for network in networks])
        self.network_log_sd = column([network.log_sd for network in networks])
        self.ways, self.way = len(ways), np.array([ways.index(option.way) for option in options], dtype=np.intp)
        self.shares_model = np.array([option.way[1].shards > 1 for option in options], dtype=np.bool_)
        self.precision_stretch = column([option.stretch for option in options])
        self.precision_stretch_log_sd = column([option.stretch_log_sd for option in options])
        self.quota = np.array([place.get(bucket_of(option.offer), -1) for option in options], dtype=np.intp)
        self.vcpus = np.array([option.offer.instance_type.vcpus for option in options], dtype=np.intp)
        self.collective = np.array([names.index(exchange.collective) for exchange in exchanges], dtype=np.intp)
        self.gain = column([exchange.gain for exchange in exchanges])
        self.under_backward = column([float(exchange.under_backward) for exchange in exchanges])
        self.stretch, self.stretch_log_sd = per_workers("stretch"), per_workers("stretch_log_sd")
        self.wire = tuple(map(per_workers, ("messages", "traffic_bytes", "compress_s")))
        # What the least of so many workers or more would bring: some collectives of few workers cost more than of many.
        self.fewest = tuple(map(least_from, self.wire))
        self.fewest_steps = (least_from(self.stretch), least_from(self.stretch_log_sd))
        self.largest = tuple(np.maximum.accumulate(values, axis=1) for values in self.wire)
        self.share_log_sd = column([exchange.share_log_sd for exchange in exchanges])
        self.compress_log_sd = column([exchange.compress_log_sd for exchange in exchanges])
        self.lost_progress = per_workers("lost_progress")
        self.is_plain = np.array([exchange.is_plain for exchange in exchanges], dtype=np.bool_)
        self.is_local = np.array([exchange.sync.is_local for exchange in exchanges], dtype=np.bool_)
        self.scales_loss = np.array([option.precision == "fp16" for option in options], dtype=np.bool_)
        self.on_cpu = np.array([option.worker.kind == "cpu" for option in options], dtype=np.bool_)
        self.batches = np.array(space.batch_sizes, dtype=np.intp)
        self.free_bytes = column([np.inf if r is None or r.free_bytes is None else r.free_bytes for r in rooms])
        self.step_bytes = column([0.0 if r is None else r.step_bytes for r in rooms])
        self.fresh_bytes = column([0.0 if r is None else r.fresh_bytes for r in rooms])
        self.exchange_bytes = np.array([[memory.kept_bytes, memory.fixed_bytes, memory.each_bytes] for memory in taken])
        self.open = np.array(
            [(1.0,) if space.open_hours is None else space.open_hours.of_host(option.name) for option in options],
            dtype=np.float64,
        )

    def most_machines(self) -> Integers:
        """Return how many machines a cluster of each option alone may have within the limits, [options]; 0: none."""
        space = self.space
        most = np.minimum(space.max_machines, space.max_workers // self.workers)
        if space.max_hourly_usd is not None:
            most = np.minimum(most, np.floor(space.max_hourly_usd / self.usd_per_hour + 1e-9).astype(np.intp))
        for index, bucket in enumerate(sorted(space.quotas)):
            most = np.where(self.quota == index, np.minimum(most, space.quotas[bucket] // self.vcpus), most)
        return np.asarray(np.maximum(most, 0), dtype=np.intp)

    def allowed(self, option: Integers, count: Integers) -> Mask:
        """Return the mask [rows] of non-empty clusters within the limits on machines, workers, USD an hour and quotas.

        Machines of unlike precision or memory scheme are not allowed; memory itself is not checked.

        Args:
            option: index of each group's machine option, [rows, groups].
            count: machines of each group, [rows, groups]; 0: the group is empty.
        """
        space = self.space
        kept = (count.sum(axis=1) >= 1) & (count.sum(axis=1) <= space.max_machines)
        kept &= (count * self.workers[option]).sum(axis=1) <= space.max_workers
        if space.max_hourly_usd is not None:
            kept &= (count * self.usd_per_hour[option]).sum(axis=1) <= space.max_hourly_usd * (1 + 1e-9)
        for index, bucket in enumerate(sorted(space.quotas)):
            used = (count * self.vcpus[option] * (self.quota[option] == index)).sum(axis=1)
            kept &= used <= space.quotas[bucket]
        if self.ways > 1:
            kept &= self.computes_alike(option, count)
        return np.asarray(kept)

    def computes_alike(self, option: Integers, count: Integers) -> Mask:
        """Return the mask [rows] of clusters in one precision and memory scheme; arguments as of `allowed`."""
        way = self.way[option]
        highest = np.where(count > 0, way, -1).max(axis=1, initial=-1)
        return np.asarray(((count == 0) | (way == highest[:, None])).all(axis=1))

    def hold(self, rows: ClusterRows, workers: Integers) -> Mask:
        """Return the mask [rows] of clusters with memory for exchange and micro-batch; ``workers``: [rows, groups].

        Needed is ``kept + max(step, taken + fresh) <= free``, in bytes of every worker's device.
        """
        kept, fixed, each = self.exchange_bytes[rows.exchange].T
        together = workers.sum(axis=1)
        several = together > 1
        taken = np.where(several, fixed + each * together, 0.0)[:, None]
        exchanging = np.where(taken > 0, taken + self.fresh_bytes[rows.option], 0.0)
        needed = np.where(several, kept, 0.0)[:, None] + np.maximum(self.step_bytes[rows.option], exchanging)
        return np.asarray(((workers == 0) | (needed <= self.free_bytes[rows.option])).all(axis=1))


def tabulate_rows(columns: Columns, rows: ClusterRows, job: JobModel | None = None) -> tuple[ClusterRows, ClusterTable]:
    """Return the possible clusters and their forecast columns; given a ``job``, each cluster with its best exchange.

    Args:
        columns: arrays of the search space.
        rows: clusters; those beyond the limits of the space or of memory are left out.
        job: law by which each cluster's best exchange is chosen, in place of the row's; None: the row's stands.

    Returns:
        The possible rows, in their order, and their columns; both may be empty.
    """
    workers = rows.count * columns.workers[rows.option]
    batch = columns.batches[rows.batch]
    lines = columns.lines.take(rows.option)
    possible = columns.allowed(rows.option, rows.count) & feasible(lines, workers, batch)
    if job is None:
        possible &= columns.hold(rows, workers)
    if not possible.all():
        rows, workers, batch, lines = rows.take(possible), workers[possible], batch[possible], lines.take(possible)
    shares = share(lines, workers, batch)
    if job is not None:
        best = best_exchange(columns, job, rows, shares.compute_s)
        rows = replace(rows, exchange=np.maximum(best, 0))
        if (best < 0).any():
            possible = best >= 0
            rows, workers, batch, lines = rows.take(possible), workers[possible], batch[possible], lines.take(possible)
            shares = share(lines, workers, batch)
    base = shares.base.astype(np.float64)
    raised_s, base_s = lines.time_s(np.add(base, 1)), lines.time_s(base)
    computed = np.where(workers > 0, shares.raised * raised_s + (workers - shares.raised) * base_s, 0.0).sum(axis=1)
    largest = shares.base + (shares.raised > 0)
    evaluation = (columns.evaluation_s[rows.option] * largest / batch[:, None]).max(axis=1)
    table = _table(columns, rows, workers.sum(axis=1), columns.wire, shares.compute_s, evaluation)
    return rows, replace(table, mean_compute_s=computed / workers.sum(axis=1))


def given_table(columns: Columns, rows: ClusterRows, compute_s: Array) -> ClusterTable:
    """Return forecast columns of clusters by the slowest worker's compute time of a step, ``compute_s``, [rows].

    Evaluations take no time; limits and memory are not checked.
    """
    workers = (rows.count * columns.workers[rows.option]).sum(axis=1)
    return _table(columns, rows, workers, columns.wire, compute_s, np.zeros_like(compute_s))


@dataclass(frozen=True, kw_only=True)
class Boxes(ClusterRows):
    """Boxes, one per row, of all clusters whose groups have from ``count`` to ``most`` machines, [rows, groups]."""

    most: Integers


def least_table(columns: Columns, boxes: Boxes) -> ClusterTable:
    """Return forecast columns, one row per box, of which each is a lower bound for every cluster in the box."""
    workers = boxes.count * columns.workers[boxes.option]
    most_workers = boxes.most * columns.workers[boxes.option]
    batch = columns.batches[boxes.batch]
    compute = earliest_finish(columns.lines.take(boxes.option), most_workers, batch)
    per_sample = np.where(boxes.most > 0, columns.evaluation_s[boxes.option], 0.0)
    # The parts that workers evaluate add up to one, and each has a sample at least.
    rate = np.divide(most_workers, per_sample, out=np.zeros_like(per_sample), where=per_sample > 0).sum(axis=1)
    evenly = np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0)
    evaluation = np.maximum((per_sample / batch[:, None]).max(axis=1), evenly)
    # Boxes of two machines may hold larger clusters, whose links may be better.
    return _table(columns, boxes, workers.sum(axis=1), columns.fewest, compute, evaluation, most=boxes.most)


def most_compute_s(columns: Columns, boxes: Boxes) -> Array:
    """Return an upper bound on a step's compute time in each box, seconds, [boxes]; `NEVER_S`: too little memory."""
    workers = boxes.count * columns.workers[boxes.option]
    batch = columns.batches[boxes.batch]
    lines = columns.lines.take(boxes.option)
    present = workers > 0
    coarsest = np.where(present, lines.per_sample_s, 0.0).max(axis=1)
    alone = np.where(present, lines.time_s(np.ones_like(lines.fixed_s)), 0.0).max(axis=1)
    parts = np.where(present, lines.most_over_line_s(np.broadcast_to(batch[:, None], present.shape)), 0.0).max(axis=1)
    latest = np.maximum(water_level(lines, workers, batch) + coarsest, alone) + parts
    return np.asarray(np.where(feasible(lines, workers, batch) | (workers.sum(axis=1) > batch), latest, NEVER_S))


def _table(
    columns: Columns,
    rows: ClusterRows,
    workers: Integers,
    wire: tuple[Array, ...],
    compute_s: Array,
    evaluation_s: Array,
    *,
    most: Integers | None = None,
) -> ClusterTable:
    """Return the forecast columns of clusters, or columns of lower bounds for boxes.

    Args:
        columns: arrays of the search space.
        rows: clusters, or boxes with their fewest machines.
        workers: number of workers of each row.
        wire: messages, bytes and compression of each exchange, by number of workers.
        compute_s: seconds in which the slowest worker computes, [rows].
        evaluation_s: seconds of an evaluation, [rows].
        most: most machines of each group of boxes, whose columns are lower bounds; None: rows are clusters.
    """
    option, count, exchange = rows.option, rows.count, rows.exchange
    present = count > 0
    messages, traffic, compress = (values[exchange, _members(columns, rows, workers)] for values in wire)
    # Of a box, `most` of its machines: what the least of so many workers or more would take.
    steps = (columns.stretch, columns.stretch_log_sd) if most is None else columns.fewest_steps
    stretch, stretch_log_sd = (values[exchange, workers] for values in steps)
    latency, s_per_byte = _link(columns, rows, columns.collective[exchange][:, None], most=most)

    def worst(values: Array) -> Array:
        return np.asarray(np.where(present, values, 0.0).max(axis=1))

    chance = np.where(present, columns.scarce_chance[option], 0.0)
    # Machines on demand are not taken back, and have no chance of it.
    # Machines of a pool go together, so that they stop a job less often than as many of different pools.
    effective = np.where(present, effective_machines(count), 0.0)
    calm = (effective * columns.calm_per_hour[option]).sum(axis=1)
    any_scarce = 1 - (1 - chance).prod(axis=1)
    scarce = (effective * chance * columns.scarce_per_hour[option]).sum(axis=1)
    return ClusterTable(
        machines=count.sum(axis=1).astype(np.float64),
        workers=workers.astype(np.float64),
        batch=columns.batches[rows.batch].astype(np.float64),
        gain=columns.gain[exchange],
        stretch=stretch * worst(columns.precision_stretch[option]),
        stretch_log_sd=np.hypot(stretch_log_sd, worst(columns.precision_stretch_log_sd[option])),
        share_log_sd=columns.share_log_sd[exchange],
        compute_s=compute_s,
        mean_compute_s=compute_s,
        compress_s=compress * worst(columns.compress_factor[option]),
        compress_log_sd=columns.compress_log_sd[exchange],
        latency_s=messages * latency,
        traffic_s=traffic * s_per_byte,
        traffic_bytes=traffic,
        under_backward=_beside(columns, rows, exchange),
        evaluation_s=evaluation_s,
        compute_log_sd=worst(columns.log_sd[option]),
        network_log_sd=worst(columns.network_log_sd[option]),
        usd_per_hour=(count * columns.usd_per_hour[option]).sum(axis=1),
        worst_usd_per_hour=(count * columns.worst_usd_per_hour[option]).sum(axis=1),
        price_log_sd=worst(columns.price_log_sd[option]),
        calm_per_hour=calm,
        scarce_per_hour=calm + np.divide(scarce, any_scarce, out=np.zeros_like(scarce), where=any_scarce > 0),
        scarce_chance=any_scarce,
        # A cluster begins with the last of its machines, and all of them get the disk of the largest need.
        startup_s=worst(columns.startup_s[option]),
        # What is missing of a mix is anything between what is missing of its parts: of a box, at least nothing.
        missing=(count * columns.missing[option]).sum(axis=1) / count.sum(axis=1)
        if most is None
        else np.zeros(len(rows)),
        disk_gb=worst(columns.disk_gb[option]),
        open_parts=_open_parts(columns, rows) if most is None else np.ones((len(rows), columns.open.shape[1])),
    )


def _members(columns: Columns, rows: ClusterRows, workers: Integers) -> Integers:
    """Return the number of members of each row's collectives, [rows]: its ``workers``; of a sharded model its machines.

    Devices sum their shards with their counterparts, all at the same time: the machine's link carries as much as if one
    worker summed the whole gradient.
    """
    shared = ((rows.count > 0) & columns.shares_model[rows.option]).any(axis=1)
    return np.where(shared, rows.count.sum(axis=1), workers)


def _open_parts(columns: Columns, rows: ClusterRows) -> Array:
    """Return the part of each cluster's speed, 0 to 1, that may be used in each slot of `OpenHours`, (rows, slots)."""
    if columns.open.shape[1] == 1:
        return np.ones((len(rows), 1))
    adds = rows.count * columns.workers[rows.option] / columns.lines.per_sample_s[rows.option]
    there = (adds[:, :, None] * columns.open[rows.option]).sum(axis=1)
    return np.asarray(there / adds.sum(axis=1, keepdims=True))


def _link(
    columns: Columns, rows: ClusterRows, collective: Integers | int, *, most: Integers | None = None
) -> tuple[Array, Array]:
    """Return the seconds of a message, and of a byte, over each row's slowest hop, inside machines or between them.

    A ring over machines in order: one flow leaves each machine, whatever its number of workers. Devices that share a
    model have summed its gradient inside their machine before (`transfer`).
    """
    option, present = rows.option, rows.count > 0
    machines = rows.count.sum(axis=1)

    def worst(values: Array) -> Array:
        return np.asarray(np.where(present, values, 0.0).max(axis=1))

    crowded = (columns.workers[option] > 1) & ~columns.shares_model[option]
    bus_latency = worst(crowded * columns.bus_latency_s[option])
    bus_s_per_byte = worst(crowded * columns.bus_s_per_byte[option])
    relief = np.where(present, columns.relief[option], np.inf).min(axis=1, initial=np.inf)
    if most is None:
        relieved = np.where(machines > 2, relief, 1.0)
    else:
        relieved = np.where(most.sum(axis=1) > 2, np.maximum(relief, np.where(machines > 2, relief, 1.0)), 1.0)
    between = machines > 1
    return (
        slower(bus_latency, between * worst(columns.link_latency_s[collective, option])),
        slower(bus_s_per_byte, between * worst(columns.link_s_per_byte[collective, option]) / relieved),
    )


def _beside(columns: Columns, rows: ClusterRows, exchange: Integers | int) -> Array:
    """Return 1 where an exchange runs under backward, else 0, [rows]; rounding does so on CPUs alone."""
    on_cpu = (columns.on_cpu[rows.option] | (rows.count == 0)).all(axis=1)
    return np.asarray(columns.under_backward[exchange] * (columns.is_plain[exchange] | on_cpu))


def best_exchange(columns: Columns, job: JobModel, rows: ClusterRows, compute_s: Array) -> Integers:
    """Return the index of each cluster's quickest exchange, [rows]; -1: none fits into memory.

    A compressed or averaging exchange counts with the upper ends of its uncertain figures: work on the workers, steps
    over those of dense gradients (in a run of fixed length, lost progress), and how often workers average. It has to be
    quicker than dense gradients by the factor `NEAR`. Inside one machine nothing is compressed, and gradients of a
    sharded model are summed whole, as the trainer does.

    Args:
        columns: arrays of the search space.
        job: inputs of a forecast that do not depend on the cluster.
        rows: the clusters; their own exchanges do not count.
        compute_s: seconds of a step that the slowest worker computes, [rows].
    """
    workers_of = rows.count * columns.workers[rows.option]
    workers, alone = workers_of.sum(axis=1), rows.count.sum(axis=1) == 1
    members = _members(columns, rows, workers)
    batches, which = columns.batches.astype(np.float64)[:, None], rows.batch
    whole, gain = np.ones(1), columns.gain[None, :]
    steps = job.steps.steps(batches, gain)
    more_sd = np.sqrt(np.maximum(job.steps.log_sd(batches, gain) ** 2 - job.steps.log_sd(batches, whole) ** 2, 0.0))
    links = [_link(columns, rows, collective) for collective in range(len(columns.link_latency_s))]
    factor, startup_s = (
        np.where(rows.count > 0, values[rows.option], 0.0).max(axis=1)
        for values in (columns.compress_factor, columns.startup_s)
    )
    computed_s = compute_s * straggler_factor(workers, job.shape)
    more_traffic = network_factor(workers, alone, job.shape)
    overlap, is_short = job.shape.overlap("identity"), bool(np.isfinite(columns.free_bytes).any())
    scaled, shared = (
        ((rows.count > 0) & which[rows.option]).any(axis=1) for which in (columns.scales_loss, columns.shares_model)
    )
    best, least = np.full(len(rows), -1, dtype=np.intp), np.full(len(rows), np.inf)
    for exchange in np.argsort(~columns.is_plain, kind="stable").tolist():
        latency, s_per_byte = links[columns.collective[exchange]]
        messages, traffic_bytes, compress_s = (values[exchange, members] for values in columns.wire)
        exchange_s = messages * latency + traffic_bytes * s_per_byte * more_traffic
        step_s = computed_s + exchange_s * np.exp(Z90 * columns.share_log_sd[exchange])
        if (beside := _beside(columns, rows, exchange) > 0).any():
            hidden = overlapped(
                computed_s[beside], exchange_s[beside], forward=overlap.forward, power=overlap.power, last=overlap.last
            )
            step_s[beside] = hidden.time_s
        slow = np.exp(Z90 * columns.compress_log_sd[exchange])
        step_s += slow * factor * compress_s
        unsure = np.hypot(more_sd[which, exchange], columns.stretch_log_sd[exchange, workers])
        took = steps[which, exchange] * columns.stretch[exchange, workers] * np.exp(Z90 * unsure)
        time_s = startup_s + took * step_s * columns.lost_progress[exchange, workers]
        if not columns.is_plain[exchange] and columns.is_plain.any():
            time_s = np.where(alone & ~columns.is_local[exchange], np.inf, NEAR * time_s)
        if not columns.is_plain[exchange]:
            time_s = np.where(shared, np.inf, time_s)
        if columns.is_local[exchange] and scaled.any():
            time_s = np.where(scaled, np.inf, time_s)  # workers agree on the loss scale in every step
        if is_short:
            held = columns.hold(replace(rows, exchange=np.full(len(rows), exchange, dtype=np.intp)), workers_of)
            time_s = np.where(held, time_s, np.inf)
        better = time_s < least
        best[better], least[better] = exchange, time_s[better]
    return best


def uniform_rows(columns: Columns) -> ClusterRows:
    """Return every allowed cluster of one machine option, at each batch size; counts above 32 go in steps of a tenth.

    All have exchange 0: `tabulate_rows` chooses each cluster's best. See `SearchSpace.machine_counts` for the steps.
    Memory is not checked.
    """
    space = columns.space
    counts = np.array(space.machine_counts, dtype=np.intp)
    option, place, batch = np.indices((len(space.options), len(counts), len(space.batch_sizes))).reshape(3, -1)
    count = counts[place]
    kept = count <= columns.most_machines()[option]
    return ClusterRows(
        option=option[kept][:, None],
        count=count[kept][:, None],
        batch=batch[kept],
        exchange=np.zeros(int(kept.sum()), dtype=np.intp),
    )
