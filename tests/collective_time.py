"""The alpha-beta model of one collective, which models of whole exchanges are held against."""

from __future__ import annotations

from hetopt.core.comm.cost import Operation
from hetopt.core.comm.payload_bytes import Collective


def collective_time_s(
    collective: Collective, payload_bytes: float, workers: int, latency_s: float, bytes_per_s: float
) -> float:
    """Time of one collective in the alpha-beta model, in seconds, when no worker has to wait for another.

    With N workers, p bytes contributed by each, latency alpha a message and bandwidth bw of the slowest link:

        ring all-reduce   2 (N-1) alpha + 2 (N-1)/N p / bw
        ring all-gather     (N-1) alpha +   (N-1)   p / bw

    (arXiv 2312.02493, Table I, whose all-gather pays log2 N latencies; gloo and NCCL gather in a ring of N-1 messages.)

    Args:
        collective: which one.
        payload_bytes: what one worker contributes, see `wire_bytes`.
        workers: participants; a single worker exchanges nothing and takes no time.
        latency_s: time of one empty message between neighbours.
        bytes_per_s: bandwidth of the slowest link between neighbours.
    """
    if payload_bytes < 0 or workers < 1 or latency_s < 0 or not bytes_per_s > 0:
        raise ValueError(
            "a collective needs payload_bytes >= 0, workers >= 1, latency_s >= 0 and bytes_per_s > 0, not "
            f"{payload_bytes}, {workers}, {latency_s}, {bytes_per_s}"
        )
    terms = Operation(primitive=collective, payload_bytes=payload_bytes, members=workers).terms()
    return terms.messages * latency_s + terms.traffic_bytes / bytes_per_s
