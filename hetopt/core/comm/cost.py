"""The time of gradient exchanges: each collective as messages in a row and bytes over the slowest link.

An exchange is a sequence of collective operations (`Operation`): a dense sum is one all-reduce, AR-Topk a broadcast of
indices and an all-reduce of values. With latency alpha of one message and bandwidth bw of the slowest link, one over N
members with p payload bytes takes ``messages(N) alpha + traffic(N) p / bw`` (Hockney 1994). The coefficients depend on
the algorithm behind the collective, and are stated here once:

    algorithm                 messages     traffic         who uses it
    ring all-reduce           2 (N-1)      2 (N-1) / N     gloo, NCCL
    direct all-reduce         N/2          N-1             the trainer over gloo, for few bytes
    sliced all-reduce         2 (N-1)      2 (N-1) / N     the trainer, where sums are wider than what travels
    direct sliced all-reduce  N            2 (N-1) / N     the trainer over gloo, for few bytes
    ring all-gather           N-1          N-1             gloo, NCCL
    direct all-gather         N/2          N-1             the trainer over gloo, for very few bytes
    tree broadcast            log2 N       log2 N          gloo
    dealt broadcast           N            2 (N-1) / N     the trainer over gloo, for many bytes

(arXiv 2312.02493, Table I, but for the trainer's own.) Of the N - 1 messages of a direct form none waits for another,
but each costs its ends some work: between 4 and 8 rehearsed hosts it took half as long as so many in a row.
Numpy is loaded only by a fit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hetopt.core.memory import robust_non_negative

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Primitive = Literal["all_reduce", "all_gather", "broadcast"]
DIRECT_BYTES = 65_536
"""The most bytes that a worker may send in all for the workers to exchange a vector directly, not around the ring.

A ring of N takes 2 (N - 1) messages one after the other, however small; if everyone sends everything to everyone, there
is one to wait for. Measured with gloo between 4 and 8 rehearsed hosts (2026-11-20): a third of the ring's time at 4 kB,
still less than the ring at this bound over links of 100 Mbit/s and more. Between two processes of one machine
(2026-11-26): 0.36 to 0.45 of its time from 2.6 to 64 kB."""

DIRECTLY_GATHERED_BYTES = 16_384
"""The most bytes that a worker may send in all to gather a vector directly. The ring of a gather has half as many
messages to save, so the bound is lower than `DIRECT_BYTES`: flows that share a link finish unevenly (over 25 Mbit/s
half as much again as they would one after the other)."""

DEALT_BYTES = 65_536
"""The payload in bytes above which a vector is broadcast in parts dealt out to all instead of sent down a tree.

Between 4 and 8 rehearsed hosts of 100 Mbit/s half the tree's time at this bound, more at a quarter of it; at 1 Gbit/s
the forms break even at two to four times as much."""


def reduces_directly(payload_bytes: float, members: int) -> bool:
    """Return whether ``members`` workers sum a payload by all sending it to each other, as it is so small.

    True with 2 members or more, if no worker sends more than `DIRECT_BYTES` in all.
    """
    return members > 1 and (members - 1) * payload_bytes <= DIRECT_BYTES


def gathers_directly(payload_bytes: float, members: int) -> bool:
    """Return whether ``members`` workers gather a payload by all sending it to all, as it is so small.

    True with 3 members or more, if no worker sends more than `DIRECTLY_GATHERED_BYTES` in all.
    """
    return members > 2 and (members - 1) * payload_bytes <= DIRECTLY_GATHERED_BYTES


def deals(payload_bytes: float, members: int) -> bool:
    """Return whether a payload is so large that it is broadcast to ``members`` workers, 3 or more, in parts."""
    return members > 2 and payload_bytes > DEALT_BYTES


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The cost of a collective by its number of members, at least 1.

    Attributes:
        messages: returns the messages in a row among so many members.
        traffic: returns the bytes over the slowest link for each byte of payload.
    """

    messages: Callable[[int], float]
    traffic: Callable[[int], float]


RING_ALL_REDUCE = Algorithm(messages=lambda n: 2.0 * (n - 1), traffic=lambda n: 2 * (n - 1) / n)
DIRECT_ALL_REDUCE = Algorithm(messages=lambda n: n / 2 * (n > 1), traffic=lambda n: n - 1.0)
DIRECT_SLICED_ALL_REDUCE = Algorithm(messages=lambda n: float(n) * (n > 1), traffic=lambda n: 2 * (n - 1) / n)
RING_ALL_GATHER = Algorithm(messages=lambda n: n - 1.0, traffic=lambda n: n - 1.0)
TREE_BROADCAST = Algorithm(messages=math.log2, traffic=math.log2)
DEALT_BROADCAST = Algorithm(messages=lambda n: float(n) * (n > 1), traffic=lambda n: 2 * (n - 1) / n)


def gloo_algorithm(operation: Operation) -> Algorithm:
    """Return gloo's own algorithm of a collective operation, by its primitive alone, whatever payload and members.

    The line through a profile's measured times is of this algorithm.
    """
    rings = {"all_reduce": RING_ALL_REDUCE, "all_gather": RING_ALL_GATHER, "broadcast": TREE_BROADCAST}
    return rings[operation.primitive]


def trainer_algorithm(operation: Operation) -> Algorithm:
    """Return the algorithm by which the trainer does a collective operation over gloo, by its payload and members.

    Operations that the trainer does not do itself get gloo's own algorithm. Where another library does otherwise, the
    measured network corrects the price.
    """
    size, members = operation.payload_bytes, operation.members
    match operation.primitive:
        case "all_reduce" if operation.sliced and gathers_directly(size / members, members):
            return DIRECT_SLICED_ALL_REDUCE
        case "all_reduce" if not operation.sliced and reduces_directly(size, members):
            return DIRECT_ALL_REDUCE
        case "all_gather" if gathers_directly(size, members):
            return DIRECT_ALL_REDUCE
        case "broadcast" if deals(size, members):
            return DEALT_BROADCAST
    return gloo_algorithm(operation)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The two amounts by which the time of a collective grows.

    Attributes:
        messages: messages in a row.
        traffic_bytes: bytes over the slowest link.
    """

    messages: float
    traffic_bytes: float


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective operation of a gradient exchange: its primitive, payload and members.

    Attributes:
        primitive: name of the collective.
        payload_bytes: bytes that one member contributes; of a broadcast, what its source sends.
        members: number of members; a single one has nothing to exchange.
        sliced: whether in an all-reduce each member sums a slice of everyone's payload, and hands the sum to all.
    """

    primitive: Primitive
    payload_bytes: float
    members: int
    sliced: bool = False

    def terms(self, algorithm_of: Callable[[Operation], Algorithm] = gloo_algorithm) -> Terms:
        """Return the messages in a row and the slowest link's bytes, by the algorithm that ``algorithm_of`` picks."""
        algorithm = algorithm_of(self)
        return Terms(
            messages=algorithm.messages(self.members),
            traffic_bytes=algorithm.traffic(self.members) * self.payload_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """The speed of one network hop.

    Attributes:
        latency_s: seconds of an empty message.
        bytes_per_s: bytes a second.
    """

    latency_s: float
    bytes_per_s: float

    def time_s(self, terms: Terms) -> float:
        """Return the seconds that a collective with these terms takes over links of this speed."""
        return terms.messages * self.latency_s + terms.traffic_bytes / self.bytes_per_s


def pipelined_s(produce_s: float, exchange_s: float, buckets: int) -> float:
    """Return the seconds of producing and exchanging a gradient in equal buckets, both overlapped.

    Two stages of n equal items: the first item passes both, and from then on the slower stage sets the pace. With one
    bucket nothing overlaps.

    Args:
        produce_s: seconds of the whole backward pass, and of compression where it happens bucket by bucket.
        exchange_s: seconds of exchanging all buckets.
        buckets: number of buckets, at least 1.
    """
    first, second = produce_s / buckets, exchange_s / buckets
    return first + second + (buckets - 1) * max(first, second)


HUBER = 1.345
"""Residuals beyond this many standard deviations lose weight (95 % efficient on normal noise, Huber 1964)."""

FASTEST_BYTES_PER_S = 1e13
"""Bandwidth that no link between two workers exceeds. It stands for one that payloads of the given size could not show.
"""


def fit_alpha_beta(payload_bytes: Sequence[int], time_s: Sequence[float]) -> LinkSpeed:
    """Fit a non-negative latency and a positive bandwidth to timed payloads: ``latency_s + payload / bytes_per_s``.

    Least squares on the *relative* error: payloads span orders of magnitude, and on absolute errors the largest would
    decide alone, leaving a latency of any sign. Huber weights keep one disturbed timing from deciding. The bandwidth is
    at most `FASTEST_BYTES_PER_S`.

    Args:
        payload_bytes: at least one payload; with a single payload size everything is taken for latency.
        time_s: seconds of each payload, above 0.
    """
    import numpy as np

    payloads = np.asarray(payload_bytes, dtype=np.float64)
    times = np.asarray(time_s, dtype=np.float64)
    rows = np.stack([1 / times, payloads / times], axis=1)

    def limit(residuals: NDArray[np.float64]) -> float:
        return HUBER * max(1.4826 * float(statistics.median(residuals.tolist())), 1e-12)

    latency, slope = robust_non_negative(rows, limit).tolist()
    return LinkSpeed(latency_s=latency, bytes_per_s=1 / max(slope, 1 / FASTEST_BYTES_PER_S))


FIRST_BUCKET_BYTES = 1 << 20
"""Bytes of the first bucket that DistributedDataParallel sends as soon as it is full (its default). A smaller gradient
has nothing to send while backward still runs."""

BUCKET_BYTES = 25 << 20
"""Bytes of each later bucket (the default of DistributedDataParallel)."""

BUCKETWISE = ("fp16", "bf16", "qsgd_maxnorm", "qsgd_two_scale", "qsgd_multi_scale")
"""Compressors that do with a part what they do with the whole, and so may work under backward."""

UNDER_BACKWARD = ("identity", *BUCKETWISE)
"""Compressors that a step can send under backward. Others need the whole gradient before they select."""


def last_bucket_share(gradient_bytes: float) -> float:
    """Return the fraction of a gradient, (0, 1], in its last bucket, which is ready only when backward ends.

    Where the borders fall depends on the layers; buckets after the first are taken to be equal.
    """
    rest = gradient_bytes - FIRST_BUCKET_BYTES
    return 1.0 if rest <= 0 else rest / math.ceil(rest / BUCKET_BYTES) / gradient_bytes
