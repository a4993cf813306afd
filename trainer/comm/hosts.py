"""Whether workers that share a host exchange as one: priced like any exchange, on the network as it was measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from hetopt.core.comm.cost import TRAINER, Operation
from hetopt.core.comm.network_state import NetworkState
from hetopt.core.comm.payload_bytes import Shapes, hierarchical_operations, operations
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.calibration import Calibration, handed_on, measure_network
from hetopt.trainer.comm.hierarchical import HostGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Which worker is where.

    Attributes:
        names: of all workers' hosts, in rank order.
    """

    names: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(set(self.names))

    @property
    def fullest(self) -> str:
        """The first of those with most workers."""
        return Counter(self.names).most_common(1)[0][0]

    @property
    def workers_per_host(self) -> int:
        """On the fullest."""
        return self.names.count(self.fullest)

    @property
    def are_levels(self) -> bool:
        """Whether there is both something to sum inside hosts and somebody to exchange with outside."""
        return 1 < self.count < len(self.names)


def measure_inside(hosts: Hosts, groups: HostGroups, gradient_bytes: int, *, device: torch.device) -> Calibration:
    """What collectives take inside the fullest host; all workers of all hosts take part at the same time."""
    own: Calibration | None = None
    if groups.inside is not None and hosts.names.count(groups.own) > 1:
        own = measure_network(gradient_bytes, device=device, group=groups.inside, scope="host")
    return Calibration(timings=handed_on(own.timings if own is not None else (), hosts.names.index(hosts.fullest)))


def exchange_as_one(
    compression: Compression, numel: int, hosts: Hosts, network: NetworkState, *, shapes: Shapes | None = None
) -> bool:
    """Whether the exchange is expected to be over sooner when each host's workers sum first and one of them sends."""

    def between(workers: int) -> tuple[Operation, ...]:
        return operations(
            compression.name,
            numel,
            compression.ratio,
            workers=workers,
            collective=compression.collective,
            bits=compression.bits,
            levels=compression.levels,
            rank=compression.rank or 1,
            coding=compression.coding or "plain",
            shapes=shapes,
        )

    flat_s = network.expected_s(between(len(hosts.names)), algorithms=TRAINER)
    levels = hierarchical_operations(between(hosts.count), numel, workers_per_host=hosts.workers_per_host)
    return network.expected_s(levels, algorithms=TRAINER) < flat_s
