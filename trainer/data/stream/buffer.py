"""What becomes of samples that arrived and were not taken yet, as arithmetic on their running numbers.

A stream of rate S whose worker takes b samples every t seconds holds, after T steps (arXiv 2301.08897, eq. 4):
``(t S - b) T`` samples where all wait (persistence), at most b where only a batch of the newest does (truncation), and
at most ``max(S a, b)`` where those younger than ``a`` do (bounded age). Samples that a batch still lacks to be full are
never dropped: a stream that is slower than its worker loses none under any policy.
"""

from __future__ import annotations

from hetopt.core.stream import BufferPolicy


def first_kept(policy: BufferPolicy, *, taken: int, arrived: int, aged: int, count: int) -> int:
    """The number of the first sample that is still there when ``count`` are to be taken.

    Args:
        policy: of the buffer.
        taken: samples that were taken or dropped before: the oldest that waits has this number.
        arrived: samples that have arrived.
        aged: those of them that are too old.
        count: of the batch.
    """
    newest = max(taken, arrived - count)
    match policy:
        case "persistence":
            return taken
        case "truncation":
            return newest
        case "bounded_age":
            return min(newest, max(taken, aged))


def held(policy: BufferPolicy, *, taken: int, arrived: int, aged: int, count: int) -> int:
    """Samples that wait, where batches have ``count``."""
    return arrived - first_kept(policy, taken=taken, arrived=arrived, aged=aged, count=count)
