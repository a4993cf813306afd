"""The collectives of arXiv 2312.02493 as its tables have them: their algorithms, and the form of AR-Topk."""

from __future__ import annotations

import math

from hetopt.core.comm.cost import Algorithm, Algorithms, Operation, dense, gathered

SCALAR_BYTES = 4

TREE_ALL_REDUCE = Algorithm(messages=lambda n: 2 * math.log2(n), traffic=lambda n: 2 * math.log2(n))
DOUBLING_ALL_GATHER = Algorithm(messages=math.log2, traffic=lambda n: n - 1.0)

PUBLISHED_RING = Algorithms(all_gather=DOUBLING_ALL_GATHER)
"""Behind the ring columns."""

PUBLISHED_TREE = Algorithms(all_reduce=TREE_ALL_REDUCE, all_gather=DOUBLING_ALL_GATHER)
"""Behind the tree columns."""


def shared_index(index_bytes: float, value_bytes: float, members: int, *, vote: bool = False) -> tuple[Operation, ...]:
    """Return the operations of AR-Topk (arXiv 2312.02493): one member's indices go to all, values at them are summed.

    ``vote``: the member is elected in every step by the energy of what it would send (VAR), which takes a gather of one
    scalar; otherwise members take turns (STAR).
    """
    election = gathered(SCALAR_BYTES, members) if vote else ()
    indices = Operation(primitive="broadcast", payload_bytes=index_bytes, members=members)
    return (*election, indices, *dense(value_bytes, members))
