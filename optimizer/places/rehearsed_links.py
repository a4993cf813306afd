"""What an exchange takes in a miniature: the links of the box, and processors that are not there at once.

The bytes of a message travel while the workers that wait for them are being woken: where bytes take long, waking hardly
shows, and where they take no time, a message takes as long as waking does. So it takes less than the sum of both:

    (latency^p + (bytes / rate)^p)^(1/p)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetopt.optimizer.fit import LinkModel

BOX_BITS_PER_S = 1e9
"""Fastest link that is imitated. Beyond it the processors that carry the packets are the bottleneck, not the limit."""

BOX_EFFICIENCY = 0.94
"""Share of a limited link that a collective reaches. Headers take 4 %; ring all-reduces of 0.4 MB reached 0.95 of links
of 25 and 100 Mbit/s, one of 10 MB over four hosts at 100 Mbit/s 0.91 (2-core virtual machine, gloo, 2026-11)."""

BOX_LATENCY_S, CROWDED_LATENCY_S = 1.2e-3, 0.55e-3
"""One message between hosts, and what is added for each worker that a processor has: waking workers up, nearly all of
it. Beside training, on two processors, a message took 2.3 ms among four workers and 3.5 ms among eight (Top-k of 0.4 MB
at 1 %, 400 Mbit/s); one of a ring of 0.4 MB took 34, 8.9 and 2.4 to 3.1 ms among four at 25, 100 and 400 Mbit/s, and
17.4, 5.2 and 3.2 ms among eight, whose messages are half as large."""

BESIDE_BYTES = 3.0
"""The power p; the same measurements."""

IN_TRAINING = 1.6
"""Processor time of an exchange in training over what compressing was timed to take by itself, where nothing else had
left the cache: 2.8, 5.0 and 2.6 ms beyond a dense exchange's against 2.1, 2.9 and 1.4 (int8, int4, Top-k 1 %; 98,000
parameters, 3 workers)."""


@dataclass(frozen=True, kw_only=True)
class BoxLink(LinkModel):
    """A limited link between hosts of a miniature."""

    def time_s(self, messages: float, traffic_bytes: float) -> float:
        """Seconds of a primitive: its messages one after the other, each with its part of the bytes."""
        if messages <= 0:
            return 0.0
        waking_s, bytes_s = self.latency_s, traffic_bytes / messages / self.bytes_per_s
        return messages * math.pow(waking_s**BESIDE_BYTES + bytes_s**BESIDE_BYTES, 1 / BESIDE_BYTES)


def box_link(rate_bits_per_s: float, workers_per_processor: float) -> BoxLink:
    """One of them.

    Args:
        rate_bits_per_s: of the slowest host of the group.
        workers_per_processor: that have to be woken.
    """
    return BoxLink(
        latency_s=BOX_LATENCY_S + CROWDED_LATENCY_S * workers_per_processor,
        bytes_per_s=BOX_EFFICIENCY * min(rate_bits_per_s, BOX_BITS_PER_S) / 8,
    )
