"""Clusters in columns: mixes of up to three options, many at a time, and what each brings to the forecast.

A row with a box of counts stands for every cluster in it: its columns are those that no cluster of the box undercuts.
A box of one cluster is that cluster, and then the integer shares are solved exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hetopt.core.comm.payload_bytes import Collective
from hetopt.optimizer.cost.preemption_rate import SHOCKS
from hetopt.optimizer.market.quota import bucket_of
from hetopt.optimizer.search.forecast import ClusterTable
from hetopt.optimizer.search.group_shares import Lines, earliest_finish, feasible, share, water_level
from hetopt.optimizer.search.search_space import MAX_TYPES, Cluster, SearchSpace

Array = NDArray[np.float64]
Integers = NDArray[np.intp]
Mask = NDArray[np.bool_]

NEVER_S = 1e12
"""Longer than anything takes; finite, so that arithmetic stays so."""


@dataclass(frozen=True, kw_only=True)
class ClusterRows:
    """Clusters as arrays.

    Attributes:
        option, count: of each group, (rows, groups); a group without machines has count 0.
        batch, exchange: indices into the space, (rows,).
    """

    option: Integers
    count: Integers
    batch: Integers
    exchange: Integers

    def __len__(self) -> int:
        return len(self.batch)

    @classmethod
    def of(cls, clusters: Sequence[Cluster]) -> Self:
        """Clusters as rows of arrays, one a cluster."""
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
        """One of them as a record."""
        counts = zip(self.option[row].tolist(), self.count[row].tolist(), strict=True)
        return Cluster.of(counts, int(self.batch[row]), int(self.exchange[row]))

    def take(self, rows: Integers | Mask) -> Self:
        """The rows at these indices, or where the mask is true."""
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def counting(self, count: Integers) -> Self:
        """The same clusters with other numbers of machines."""
        return replace(self, count=count)

    def widened(self) -> Self:
        """The same rows with as many groups as a cluster may have."""
        missing = MAX_TYPES - self.option.shape[1]
        if not missing:
            return self
        more = np.zeros((len(self), missing), dtype=np.intp)
        return replace(
            self,
            option=np.concatenate([self.option, more], axis=1),
            count=np.concatenate([self.count, more], axis=1),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A search space as arrays: of options, of exchanges by number of workers, of batches."""

    space: SearchSpace
    lines: Lines
    workers: Integers
    usd_per_hour: Array
    worst_usd_per_hour: Array
    price_log_sd: Array
    log_sd: Array
    compress_factor: Array
    evaluation_s: Array
    scarce_chance: Array
    calm_per_hour: Array
    scarce_per_hour: Array
    bus_latency_s: Array
    bus_s_per_byte: Array
    link_latency_s: Array
    link_s_per_byte: Array
    relief: Array
    quota: Integers
    vcpus: Integers
    collective: Integers
    gain: Array
    under_backward: Array
    messages: Array
    traffic_bytes: Array
    compress_s: Array
    stretch: Array
    stretch_log_sd: Array
    share_log_sd: Array
    fewest: tuple[Array, Array, Array]
    largest: tuple[Array, Array, Array]
    batches: Integers

    @classmethod
    def of(cls, space: SearchSpace) -> Self:
        """The arrays of a space."""
        options, exchanges = space.options, space.exchanges
        names: tuple[Collective, ...] = ("all_reduce", "all_gather")
        buckets = sorted(space.quotas)
        place = {bucket: index for index, bucket in enumerate(buckets)}

        def column(values: Sequence[float]) -> Array:
            return np.array(values, dtype=np.float64)

        def per_workers(name: str) -> Array:
            return np.stack([getattr(exchange, name) for exchange in exchanges]).astype(np.float64)

        times = [option.worker.time for option in options]
        wire = tuple(per_workers(name) for name in ("messages", "traffic_bytes", "compress_s"))
        # What the least of so many workers or more would bring: some collectives of few workers cost more than of many.
        fewest = tuple(np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1] for values in wire)
        largest = tuple(np.maximum.accumulate(values, axis=1) for values in wire)
        return cls(
            space=space,
            lines=Lines(
                fixed_s=column([t.fixed_s for t in times]),
                per_sample_s=column([t.per_sample_s for t in times]),
                floor_s=column([t.floor_s for t in times]),
                most=column([np.inf if t.max_samples is None else t.max_samples for t in times]),
            ),
            workers=np.array([option.worker.workers for option in options], dtype=np.intp),
            usd_per_hour=column([option.usd_per_hour for option in options]),
            worst_usd_per_hour=column([option.worst_usd_per_hour for option in options]),
            price_log_sd=column([option.offer.price.log_sd for option in options]),
            log_sd=column([option.worker.log_sd for option in options]),
            compress_factor=column([option.worker.compress_factor for option in options]),
            evaluation_s=column([option.evaluation_s for option in options]),
            scarce_chance=column([option.scarce_chance for option in options]),
            calm_per_hour=column([option.calm_per_hour for option in options]),
            scarce_per_hour=column([option.scarce_per_hour for option in options]),
            bus_latency_s=column([option.bus.latency_s for option in options]),
            bus_s_per_byte=column([1 / option.bus.bytes_per_s for option in options]),
            link_latency_s=np.array([[option.links[name].latency_s for option in options] for name in names]),
            link_s_per_byte=np.array([[1 / option.links[name].bytes_per_s for option in options] for name in names]),
            relief=column([option.relief for option in options]),
            quota=np.array([place.get(bucket_of(option.offer), -1) for option in options], dtype=np.intp),
            vcpus=np.array([option.offer.instance_type.vcpus for option in options], dtype=np.intp),
            collective=np.array([names.index(exchange.collective) for exchange in exchanges], dtype=np.intp),
            gain=column([exchange.gain for exchange in exchanges]),
            under_backward=column([float(exchange.under_backward) for exchange in exchanges]),
            messages=wire[0],
            traffic_bytes=wire[1],
            compress_s=wire[2],
            stretch=per_workers("stretch"),
            stretch_log_sd=per_workers("stretch_log_sd"),
            share_log_sd=column([exchange.share_log_sd for exchange in exchanges]),
            fewest=(fewest[0], fewest[1], fewest[2]),
            largest=(largest[0], largest[1], largest[2]),
            batches=np.array(space.batch_sizes, dtype=np.intp),
        )

    def most_machines(self) -> Integers:
        """Of each option alone: what the number of machines, of workers, its quota and the hourly limit allow."""
        space = self.space
        most = np.minimum(space.max_machines, space.max_workers // self.workers)
        if space.max_hourly_usd is not None:
            most = np.minimum(most, np.floor(space.max_hourly_usd / self.usd_per_hour + 1e-9).astype(np.intp))
        for index, bucket in enumerate(sorted(space.quotas)):
            most = np.where(self.quota == index, np.minimum(most, space.quotas[bucket] // self.vcpus), most)
        return np.asarray(np.maximum(most, 0), dtype=np.intp)

    def allowed(self, option: Integers, count: Integers) -> Mask:
        """Rows that keep what the space allows a cluster to have."""
        space = self.space
        kept = (count.sum(axis=1) >= 1) & (count.sum(axis=1) <= space.max_machines)
        kept &= (count * self.workers[option]).sum(axis=1) <= space.max_workers
        if space.max_hourly_usd is not None:
            kept &= (count * self.usd_per_hour[option]).sum(axis=1) <= space.max_hourly_usd * (1 + 1e-9)
        for index, bucket in enumerate(sorted(space.quotas)):
            used = (count * self.vcpus[option] * (self.quota[option] == index)).sum(axis=1)
            kept &= used <= space.quotas[bucket]
        return np.asarray(kept)


def tabulate_rows(columns: Columns, rows: ClusterRows) -> tuple[ClusterRows, ClusterTable]:
    """The rows that are possible at all, and their table."""
    workers = rows.count * columns.workers[rows.option]
    batch = columns.batches[rows.batch]
    lines = columns.lines.take(rows.option)
    possible = columns.allowed(rows.option, rows.count) & feasible(lines, workers, batch)
    if not possible.all():
        rows, workers, batch, lines = rows.take(possible), workers[possible], batch[possible], lines.take(possible)
    shares = share(lines, workers, batch)
    base = shares.base.astype(np.float64)
    raised_s, base_s = lines.time_s(np.add(base, 1)), lines.time_s(base)
    computed = np.where(workers > 0, shares.raised * raised_s + (workers - shares.raised) * base_s, 0.0).sum(axis=1)
    largest = shares.base + (shares.raised > 0)
    evaluation = (columns.evaluation_s[rows.option] * largest / batch[:, None]).max(axis=1)
    wire = (columns.messages, columns.traffic_bytes, columns.compress_s)
    table = _table(columns, rows, workers.sum(axis=1), wire, shares.compute_s, evaluation)
    return rows, replace(table, mean_compute_s=computed / workers.sum(axis=1))


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Boxes of clusters: of each group at least ``least.count`` machines, and at most ``most`` (rows, groups)."""

    least: ClusterRows
    most: Integers

    def __len__(self) -> int:
        return len(self.most)

    def take(self, rows: Integers | Mask) -> Boxes:
        """The boxes at these indices, or where the mask is true."""
        return Boxes(least=self.least.take(rows), most=self.most[rows])

    @classmethod
    def concatenate(cls, parts: Sequence[Boxes]) -> Boxes:
        """The boxes of all parts, in order."""
        return cls(
            least=ClusterRows.concatenate([part.least for part in parts]),
            most=np.concatenate([part.most for part in parts]),
        )


def least_table(columns: Columns, boxes: Boxes) -> ClusterTable:
    """Columns that no cluster of each box undercuts. A group has at least one machine in all of its box, or in none."""
    rows = boxes.least
    workers = rows.count * columns.workers[rows.option]
    most_workers = boxes.most * columns.workers[rows.option]
    batch = columns.batches[rows.batch]
    compute = earliest_finish(columns.lines.take(rows.option), most_workers, batch)
    per_sample = np.where(boxes.most > 0, columns.evaluation_s[rows.option], 0.0)
    # The parts that workers evaluate add up to one, and each has a sample at least.
    rate = np.divide(most_workers, per_sample, out=np.zeros_like(per_sample), where=per_sample > 0).sum(axis=1)
    evenly = np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0)
    evaluation = np.maximum((per_sample / batch[:, None]).max(axis=1), evenly)
    # Boxes of two machines may hold larger clusters, whose links may be better.
    return _table(columns, rows, workers.sum(axis=1), columns.fewest, compute, evaluation, most=boxes.most)


def most_compute_s(columns: Columns, boxes: Boxes) -> Array:
    """When every cluster of each box has computed; `NEVER_S` where the fewest machines cannot hold the batch."""
    rows = boxes.least
    workers = rows.count * columns.workers[rows.option]
    batch = columns.batches[rows.batch]
    lines = columns.lines.take(rows.option)
    present = workers > 0
    coarsest = np.where(present, lines.per_sample_s, 0.0).max(axis=1)
    alone = np.where(present, lines.time_s(np.ones_like(lines.fixed_s)), 0.0).max(axis=1)
    latest = np.maximum(water_level(lines, workers, batch) + coarsest, alone)
    return np.asarray(np.where(feasible(lines, workers, batch) | (workers.sum(axis=1) > batch), latest, NEVER_S))


def _table(
    columns: Columns,
    rows: ClusterRows,
    workers: Integers,
    wire: tuple[Array, Array, Array],
    compute_s: Array,
    evaluation_s: Array,
    *,
    most: Integers | None = None,
) -> ClusterTable:
    """What follows from the counts, given when the slowest worker has computed."""
    option, count, exchange = rows.option, rows.count, rows.exchange
    present = count > 0
    machines = count.sum(axis=1)
    messages, traffic, compress = (values[exchange, workers] for values in wire)

    def worst(values: Array) -> Array:
        return np.asarray(np.where(present, values, 0.0).max(axis=1))

    # A ring over machines in order: one flow leaves each machine, whatever its number of workers.
    collective = columns.collective[exchange][:, None]
    alone = machines == 1
    latency = np.where(alone, worst(columns.bus_latency_s[option]), worst(columns.link_latency_s[collective, option]))
    s_per_byte = np.where(
        alone, worst(columns.bus_s_per_byte[option]), worst(columns.link_s_per_byte[collective, option])
    )
    relief = np.where(present, columns.relief[option], np.inf).min(axis=1, initial=np.inf)
    if most is None:
        s_per_byte = np.where(machines > 2, s_per_byte / relief, s_per_byte)
    else:
        larger = np.maximum(relief, np.where(machines > 2, relief, 1.0))
        s_per_byte = np.where(most.sum(axis=1) > 2, s_per_byte / larger, s_per_byte)
    chance = np.where(present, columns.scarce_chance[option], 0.0)
    # Machines on demand are not taken back, and have no chance of it.
    # Machines of a pool go together, so that they stop a job less often than as many of different pools.
    effective = np.where(present, SHOCKS.effective_machines(count), 0.0)
    calm = (effective * columns.calm_per_hour[option]).sum(axis=1)
    any_scarce = 1 - (1 - chance).prod(axis=1)
    scarce = (effective * chance * columns.scarce_per_hour[option]).sum(axis=1)
    return ClusterTable(
        machines=machines.astype(np.float64),
        workers=workers.astype(np.float64),
        batch=columns.batches[rows.batch].astype(np.float64),
        gain=columns.gain[exchange],
        stretch=columns.stretch[exchange, workers],
        stretch_log_sd=columns.stretch_log_sd[exchange, workers],
        share_log_sd=columns.share_log_sd[exchange],
        compute_s=compute_s,
        mean_compute_s=compute_s,
        compress_s=compress * worst(columns.compress_factor[option]),
        latency_s=messages * latency,
        traffic_s=traffic * s_per_byte,
        traffic_bytes=traffic,
        under_backward=columns.under_backward[exchange],
        evaluation_s=evaluation_s,
        compute_log_sd=worst(columns.log_sd[option]),
        usd_per_hour=(count * columns.usd_per_hour[option]).sum(axis=1),
        worst_usd_per_hour=(count * columns.worst_usd_per_hour[option]).sum(axis=1),
        price_log_sd=worst(columns.price_log_sd[option]),
        calm_per_hour=calm,
        scarce_per_hour=calm + np.divide(scarce, any_scarce, out=np.zeros_like(scarce), where=any_scarce > 0),
        scarce_chance=any_scarce,
    )


def uniform_rows(columns: Columns) -> ClusterRows:
    """Every cluster of one option that the space allows, in steps where clusters are large (`machine_counts`)."""
    space = columns.space
    counts = np.array(space.machine_counts, dtype=np.intp)
    option, place, batch, exchange = np.indices(
        (len(space.options), len(counts), len(space.batch_sizes), len(space.exchanges))
    ).reshape(4, -1)
    count = counts[place]
    kept = count <= columns.most_machines()[option]
    return ClusterRows(
        option=option[kept][:, None], count=count[kept][:, None], batch=batch[kept], exchange=exchange[kept]
    )
