"""The limit of a rehearsed link, as `tc` reads it: a token bucket, and why it and its queue have the size they have."""

from __future__ import annotations

BURST_S = 0.002
"""A link that was idle may send so long at full speed: enough that a late timer costs no throughput, and little enough
that even small messages feel the rate. Measured from 1 Mbit/s to 2 Gbit/s: a transfer takes its bytes over the rate,
plus 4 % for the headers of packets of 1500 bytes."""
_LEAST_BURST_BYTES = 3100  # two packets
QUEUE_S = 0.05
"""How much a link holds back before it drops. In a long queue the acknowledgements of one direction would wait behind
the data of the other: with 0.4 s, transfers in both directions at 5 Mbit/s took 1.3 times as long as one, with this 1.1
times."""
_LEAST_QUEUE_BYTES = 48_000
_LEAST_RATE = 8  # the kernel counts bytes


def limit(rate_bits_per_s: float) -> str:
    """The token bucket of one direction of a link, as `tc` reads it."""
    rate = max(_LEAST_RATE, round(rate_bits_per_s))
    burst = max(_LEAST_BURST_BYTES, round(rate / 8 * BURST_S))
    queue = max(_LEAST_QUEUE_BYTES, round(rate / 8 * QUEUE_S))
    return f"tbf rate {rate}bit burst {burst} limit {burst + queue}"
