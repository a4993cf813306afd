"""One's own machines with rented ones beside them: what the best such cluster would take and cost.

A ring over machines of both crosses the internet once in each direction, so no hop of it is faster than that way:

    hop     seconds a byte and a message: the longer of the machines' own and the way's
    bill    every machine by the hour, of the rented ones volume and address as well, and the bytes that leave the
            provider at its price of traffic to the internet, without the free part that other runs may have used up

It is a what-if: rented machines are launched into a private network of their own, which one's machines are not in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hetopt.core.formatting import cluster as cluster_words
from hetopt.core.formatting import duration, usd
from hetopt.optimizer.cost.bill import BYTES_PER_GB, beside_usd_per_hour, billed_hours
from hetopt.optimizer.fit import LinkModel
from hetopt.optimizer.recommendation.recommend import SearchProblem
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import Forecast, forecast
from hetopt.optimizer.search.objective import Limits, choose
from hetopt.optimizer.search.pool import CHUNK
from hetopt.optimizer.search.search_space import Cluster, MachineOption, SearchSpace

Array = NDArray[np.float64]

WAY_LATENCY_S = 0.02
"""Of a message over the internet to a near region: half of a round trip of 40 ms."""

FASTEST = 6
"""Of kinds of one's own machines so many, the fastest, are put together with rented ones, alone and by twos."""

MOST_BESIDE = 8
"""Rented machines beside one's own: all of them wait for the way between at every step."""


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """A cluster of one's own and rented machines.

    Attributes:
        own, rented: its machines, in words.
        score: as of `Limits.expected_score`.
        leaving_usd: part of the cost that is paid for what leaves the provider.
        safe: whether it keeps the limits with the probability `SURE`.
    """

    own: str
    rented: str
    total_s: float
    cost_usd: float
    leaving_usd: float
    score: float
    safe: bool

    @property
    def in_words(self) -> str:
        """'1 × g6.xlarge spot beside 1 × tower makes it 2 h for $1.40'."""
        leaving = f", {usd(self.leaving_usd)} of it for traffic" if self.leaving_usd >= 0.01 * self.cost_usd else ""
        return f"{self.rented} beside {self.own} makes it {duration(self.total_s)} for {usd(self.cost_usd)}{leaving}"


def best_mixed(own: SearchProblem, rented: SearchProblem, limits: Limits, way_bytes_per_s: float) -> Mixed | None:
    """The best cluster that has machines of both; None where none keeps the limits even at its median.

    Args:
        own: what is to be known of one's own machines.
        rented: of what can be rented, for the same job, batch sizes and exchanges.
        limits: what must be kept, and what is wanted.
        way_bytes_per_s: between the two, the slower direction.
    """
    way = LinkModel(latency_s=WAY_LATENCY_S, bytes_per_s=way_bytes_per_s)
    mine = tuple(_over(option, way) for option in own.space.options)
    space = replace(
        rented.space,
        options=(*mine, *rented.space.options),
        quotas={**rented.space.quotas, **own.space.quotas},
        open_hours=own.space.open_hours,
    )
    job = replace(rented.job, slots_s=own.job.slots_s)
    columns = Columns(space)
    parts: list[tuple[ClusterRows, Forecast, Array]] = []
    for rows in _rows(space, columns, len(mine)):
        possible, table = tabulate_rows(columns, rows, job)
        if not len(possible):
            continue
        found = forecast(table, job)
        leaving = found.steps * table.traffic_bytes / BYTES_PER_GB * job.billing.internet_out_usd_per_gb.value
        # The forecast has a volume and an address for each machine; one's own have none of the provider's.
        own_machines = np.where(possible.option < len(mine), possible.count, 0).sum(axis=1)
        spared = own_machines * beside_usd_per_hour(job.billing, found.disk_gb)
        at_work_s = found.startup_s + found.work_s + found.interruption_s
        more = leaving - spared * billed_hours(at_work_s, job.billing)
        costs = {name: getattr(found, name) + more for name in ("cost_usd", "cost_low_usd", "cost_high_usd")}
        parts.append((possible, replace(found, **costs), leaving))
    if not parts:
        return None
    rows = ClusterRows.concatenate([rows for rows, _, _ in parts])
    found = Forecast.concatenate([one for _, one, _ in parts])
    row, safe = choose(found, limits)
    if row is None:
        return None
    machines = rows.cluster(row).machines
    return Mixed(
        own=_in_words(space, [(option, count) for option, count in machines if option < len(mine)]),
        rented=_in_words(space, [(option, count) for option, count in machines if option >= len(mine)]),
        total_s=float(found.total_s[row]),
        cost_usd=float(found.cost_usd[row]),
        leaving_usd=float(np.concatenate([one for _, _, one in parts])[row]),
        score=float(limits.expected_score(found)[row]),
        safe=safe,
    )


def _over(option: MachineOption, way: LinkModel) -> MachineOption:
    """A machine whose hops lead over the way; of a ring that has it, each waits for the slowest hop."""
    links = {
        name: LinkModel(
            latency_s=max(link.latency_s, way.latency_s), bytes_per_s=min(link.bytes_per_s, way.bytes_per_s)
        )
        for name, link in option.network.links.items()
    }
    return replace(option, network=replace(option.network, links=links, relief=1.0))


def _rows(space: SearchSpace, columns: Columns, mine: int) -> Iterator[ClusterRows]:
    """Every cluster that is looked at, some at a time, with the first exchange."""
    most = columns.most_machines()
    chunk: list[Cluster] = []
    for precision in space.precisions:
        here = [index for index, option in enumerate(space.options) if option.precision == precision]
        fastest = sorted((one for one in here if one < mine and most[one]), key=lambda one: _slowness(space, one))
        sets: list[tuple[tuple[int, int], ...]]
        sets = [((one, count),) for one in fastest[:FASTEST] for count in range(1, int(most[one]) + 1)]
        sets += [
            ((one, int(most[one])), (other, int(most[other]))) for one, other in combinations(fastest[:FASTEST], 2)
        ]
        for own in sets:
            for option in (one for one in here if one >= mine):
                for count in range(1, min(MOST_BESIDE, int(most[option])) + 1):
                    machines = (*sorted(own), (option, count))
                    chunk += [
                        Cluster(machines=machines, batch=batch, exchange=0) for batch in range(len(space.batch_sizes))
                    ]
                if len(chunk) >= CHUNK:
                    yield ClusterRows.of(chunk)
                    chunk = []
    if chunk:
        yield ClusterRows.of(chunk)


def _slowness(space: SearchSpace, option: int) -> float:
    """Seconds a sample of all workers of a machine together."""
    worker = space.options[option].worker
    return worker.time.per_sample_s / worker.workers


def _in_words(space: SearchSpace, machines: Sequence[tuple[int, int]]) -> str:
    return cluster_words((count, space.options[option].offer.in_words) for option, count in machines)
