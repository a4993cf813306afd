"""One cluster at a time, written out: what the columns of `cluster_rows` must come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from hetopt.core.batch_partition import Shares, solve_shares
from hetopt.core.errors import BadInput
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.cost.preemption_rate import effective_machines
from hetopt.optimizer.search.forecast import ClusterTable, JobModel, steps_of
from hetopt.optimizer.search.objective import NEAR
from hetopt.optimizer.search.search_space import Cluster, MachineOption, SearchSpace
from hetopt.optimizer.step_time.step_time import slower


def tabulate(space: SearchSpace, clusters: Sequence[Cluster]) -> tuple[tuple[Cluster, ...], ClusterTable]:
    """The clusters that are possible at all, and their table."""
    possible: list[Cluster] = []
    rows: list[tuple[float, ...]] = []
    for cluster in clusters:
        if not cluster.machines or cluster.machine_count > space.max_machines:
            continue
        try:
            shares = solve_shares(
                [
                    space.options[index].worker.time
                    for index, count in cluster.machines
                    for _ in range(count * space.options[index].worker.workers)
                ],
                space.batch_sizes[cluster.batch],
            )
        except BadInput:
            continue
        possible.append(cluster)
        rows.append(_row(space, cluster, shares))
    names = [field.name for field in fields(ClusterTable) if field.name != "open_parts"]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(names)).T
    always = np.ones((len(rows), 1))
    return tuple(possible), ClusterTable(**dict(zip(names, columns, strict=True)), open_parts=always)


def suited(space: SearchSpace, job: JobModel, clusters: Sequence[Cluster]) -> tuple[Cluster, ...]:
    """Each cluster once, with the exchange that it ends soonest with at the upper end of what is not known of that.

    Whole sums (the first of the space) stay where nothing beats them by what makes plans differ; inside one machine
    nothing is compressed.
    """
    once = list(dict.fromkeys(replace(cluster, exchange=0) for cluster in clusters))
    every = [replace(cluster, exchange=e) for cluster in once for e in range(len(space.exchanges))]
    possible, table = tabulate(space, every)
    seldom = np.exp(Z90 * table.share_log_sd)
    slow = replace(
        table,
        compress_s=table.compress_s * np.exp(Z90 * table.compress_log_sd),
        latency_s=table.latency_s * seldom,
        traffic_s=table.traffic_s * seldom,
    )
    whole = np.ones_like(table.gain)
    held_sd = np.sqrt(job.steps.log_sd(table.batch, table.gain) ** 2 - job.steps.log_sd(table.batch, whole) ** 2)
    steps = job.steps.steps(table.batch, table.gain) * table.stretch
    work_s = steps_of(slow, job.shape).time_s * steps * np.exp(Z90 * np.hypot(held_sd, table.stretch_log_sd))
    best: dict[Cluster, tuple[float, Cluster]] = {}
    for cluster, takes_s, workers in zip(possible, work_s.tolist(), table.workers.astype(int), strict=True):
        exchange = space.exchanges[cluster.exchange]
        takes_s = cluster_startup_s(space, cluster) + takes_s * exchange.lost_progress[workers]
        if not exchange.is_plain:
            takes_s *= NEAR
            if cluster.machine_count == 1 and not exchange.sync.is_local:
                continue
        key = replace(cluster, exchange=0)
        if key not in best or takes_s < best[key][0]:
            best[key] = takes_s, cluster
    return tuple(cluster for _, cluster in best.values())


def cluster_startup_s(space: SearchSpace, cluster: Cluster) -> float:
    """Until the last of its machines is there."""
    return max(space.options[option].startup_s for option, _ in cluster.machines)


def _row(space: SearchSpace, cluster: Cluster, shares: Shares) -> tuple[float, ...]:
    exchange = space.exchanges[cluster.exchange]
    machines = cluster.machine_count
    sizes = list(shares.local_batch_sizes)
    workers = len(sizes)
    batch = space.batch_sizes[cluster.batch]
    computed = 0.0
    evaluation_s = 0.0
    groups: list[tuple[MachineOption, int]] = []
    for index, count in cluster.machines:
        option = space.options[index]
        own, sizes = sizes[: count * option.worker.workers], sizes[count * option.worker.workers :]
        computed += sum(map(option.worker.time.time_s, own))
        # Each worker evaluates in proportion to its share of the batch; the slowest part decides.
        evaluation_s = max(evaluation_s, option.evaluation_s * max(own) / batch)
        groups.append((option, count))
    latency = s_per_byte = 0.0
    if machines > 1:
        # A ring over machines in order: one flow leaves each machine, whatever its number of workers.
        links = [option.network.links[exchange.collective] for option, _ in groups]
        latency, s_per_byte = max(link.latency_s for link in links), max(1 / link.bytes_per_s for link in links)
        if machines > 2:
            s_per_byte /= min(option.network.relief for option, _ in groups)
    full = [option.bus for option, _ in groups if option.worker.workers > 1]
    if full:
        latency = float(slower(latency, max(bus.latency_s for bus in full)))
        s_per_byte = float(slower(s_per_byte, max(1 / bus.bytes_per_s for bus in full)))
    calm_chance, scarce = 1.0, 0.0
    calm = 0.0
    for option, count in groups:
        if option.belief is None:
            continue
        effective = float(effective_machines(count))
        calm_chance *= 1 - option.belief.scarce_chance
        calm += effective * option.belief.calm.mean_per_hour
        scarce += effective * option.belief.scarce_chance * option.belief.scarce.mean_per_hour
    scarce_chance = 1 - calm_chance
    return (
        machines,
        workers,
        batch,
        exchange.gain,
        exchange.stretch[workers],
        exchange.stretch_log_sd[workers],
        exchange.share_log_sd,
        shares.compute_s,
        computed / workers,
        exchange.compress_s[workers] * max(option.worker.compress_factor for option, _ in groups),
        exchange.compress_log_sd,
        exchange.messages[workers] * latency,
        exchange.traffic_bytes[workers] * s_per_byte,
        exchange.traffic_bytes[workers],
        # Buckets are rounded beside the backward pass by a thread of the CPU; whole ones travel so from a GPU too.
        float(exchange.under_backward and (exchange.is_plain or all(o.worker.kind == "cpu" for o, _ in groups))),
        evaluation_s,
        max(option.worker.log_sd for option, _ in groups),
        max(option.network.log_sd for option, _ in groups),
        sum(option.usd_per_hour * count for option, count in groups),
        sum(option.offer.worst_usd_per_hour * count for option, count in groups),
        max(option.offer.price.log_sd for option, _ in groups),
        calm,
        calm + (scarce / scarce_chance if scarce_chance > 0 else 0.0),
        scarce_chance,
        max(option.startup_s for option, _ in groups),
        sum(count * option.losses.missing for option, count in groups) / machines,
        max(option.disk_gb for option, _ in groups),
    )
