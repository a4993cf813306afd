"""The collectives of arXiv 2312.02493 as its tables have them: their algorithms, and the form of AR-Topk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from hetopt.core.comm.cost import Algorithm, LinkSpeed, Operation, gloo_algorithm

SCALAR_BYTES = 4

TREE_ALL_REDUCE = Algorithm(messages=lambda n: 2 * math.log2(n), traffic=lambda n: 2 * math.log2(n))
DOUBLING_ALL_GATHER = Algorithm(messages=math.log2, traffic=lambda n: n - 1.0)


def published_ring(operation: Operation) -> Algorithm:
    """Return the algorithm behind an operation of the ring columns."""
    return DOUBLING_ALL_GATHER if operation.primitive == "all_gather" else gloo_algorithm(operation)


def published_tree(operation: Operation) -> Algorithm:
    """Return the algorithm behind an operation of the tree columns."""
    return TREE_ALL_REDUCE if operation.primitive == "all_reduce" else published_ring(operation)


def time_s(
    operations: Iterable[Operation],
    network: LinkSpeed,
    *,
    algorithms: Callable[[Operation], Algorithm] = gloo_algorithm,
) -> float:
    """Return seconds of an exchange, its operations one after the other, when no member has to wait for another."""
    return sum(network.time_s(operation.terms(algorithms)) for operation in operations)


def dense(payload_bytes: float, members: int) -> tuple[Operation, ...]:
    """Return everything, summed on the way."""
    return (Operation(primitive="all_reduce", payload_bytes=payload_bytes, members=members),)


def gathered(payload_bytes: float, members: int) -> tuple[Operation, ...]:
    """Return every member receives every payload."""
    return (Operation(primitive="all_gather", payload_bytes=payload_bytes, members=members),)


def shared_index(index_bytes: float, value_bytes: float, members: int, *, vote: bool = False) -> tuple[Operation, ...]:
    """Return the operations of AR-Topk (arXiv 2312.02493): one member's indices go to all, values at them are summed.

    ``vote``: the member is elected in every step by the energy of what it would send (VAR), which takes a gather of one
    scalar; otherwise members take turns (STAR).
    """
    election = gathered(SCALAR_BYTES, members) if vote else ()
    indices = Operation(primitive="broadcast", payload_bytes=index_bytes, members=members)
    return (*election, indices, *dense(value_bytes, members))
