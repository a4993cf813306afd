"""One cluster at a time, written out: what the columns of `cluster_rows` must come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from hetopt.core.batch_partition import GroupShares
from hetopt.core.errors import BadInput
from hetopt.optimizer.cost.preemption_rate import SHOCKS
from hetopt.optimizer.search.forecast import ClusterTable, shares_of
from hetopt.optimizer.search.search_space import Cluster, MachineOption, SearchSpace


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
        if machines > 2:
            bandwidth *= min(option.relief for option, _ in groups)
    calm_chance, scarce = 1.0, 0.0
    calm = 0.0
    for option, count in groups:
        if option.belief is None:
            continue
        effective = float(SHOCKS.effective_machines(count))
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
        exchange.messages[workers] * latency,
        exchange.traffic_bytes[workers] / bandwidth,
        exchange.traffic_bytes[workers],
        float(exchange.under_backward),
        evaluation_s,
        max(option.worker.log_sd for option, _ in groups),
        sum(option.usd_per_hour * count for option, count in groups),
        sum(option.worst_usd_per_hour * count for option, count in groups),
        max(option.offer.price.log_sd for option, _ in groups),
        calm,
        calm + (scarce / scarce_chance if scarce_chance > 0 else 0.0),
        scarce_chance,
    )
