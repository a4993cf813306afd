"""What an exchange takes in a miniature: the links of the box, and processors that are not there at once.

The bytes of a message travel while the workers that wait for them are being woken: where bytes take long, waking hardly
shows, and where they take no time, a message takes as long as waking does. So it takes less than the sum of both:

    (waking^p + sending^p)^(1/p)

A ring all-reduce has two messages on their way at any time: waking for one overlaps with the other, and links never
rest. Whatever else is sent goes one after the other: while workers are woken the link rests, and saves up some time in
which it then sends at full speed (`hetopt.backends.emulation.iproute`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetopt.backends.emulation.iproute import BURST_S
from hetopt.core.comm.cost import Primitive
from hetopt.optimizer.fit import LinkModel

BOX_BITS_PER_S = 1e9
"""Fastest link that is imitated. Beyond it the processors that carry the packets are the bottleneck, not the limit."""

BOX_EFFICIENCY = 0.94
"""Share of a limited link that a collective reaches. Headers take 4 %; ring all-reduces of 0.4 MB reached 0.95 of links
of 25 and 100 Mbit/s, one of 10 MB over four hosts at 100 Mbit/s 0.91 (2-core virtual machine, gloo, 2026-11)."""

WAKING_S, CROWDED_WAKING_S = 1.2e-3, 0.55e-3
"""One message between hosts, and what is added for each worker that a processor has. Beside training, on two
processors, each of the messages that gather a Top-k of 0.4 MB at 1 % took 2.1 to 2.9 ms among four workers and 3.3 to
3.7 ms among eight, at 25 as at 400 Mbit/s. The same was found where processors compute twice as fast (yardsticks of
1.45 and 0.7 ms): a worker waits for the turn that the kernel gives it, and turns last as long on any machine."""

RING_WAKING = 0.58
"""The same in a ring all-reduce: of 0.4 MB, at 25, 100 and 400 Mbit/s, its messages took 34, 8.9 and 2.3 to 3.1 ms with
four workers, and 17.4, 5.2 and 2.0 to 3.2 ms with eight, whose messages are half as large."""

BESIDE_BYTES = 1.5
"""The power p; the same measurements."""

WAKING_LOG_SD, SENDING_LOG_SD = 0.15, 0.025
"""How well both are known: what of an exchange is waking was up to a sixth longer or shorter than foreseen, while rates
are kept to the percent."""

STEERED, STEERED_LOG_SD = 1.05, 0.25
"""An exchange that `auto` chooses on the way, trials and looks included, over the one that promises most, and how well
that is known: nine rehearsals of four and eight hosts at 25 to 400 Mbit/s took 0.94 to 1.34 of it, in the median 1.04.
Three more of four hosts at 25 Mbit/s took 0.6: a trial had allowed them to send less."""

IN_TRAINING = 1.6
"""Processor time of an exchange in training over what compressing was timed to take by itself, where nothing else had
left the cache: 2.8, 5.0 and 2.6 ms beyond a dense exchange's against 2.1, 2.9 and 1.4 (int8, int4, Top-k 1 %; 98,000
parameters, 3 workers)."""


@dataclass(frozen=True, kw_only=True)
class BoxLink(LinkModel):
    """A limited link between hosts of a miniature; ``latency_s`` is that of waking.

    Attributes:
        saved_s: of sending at the limited rate, which a link that rests before each message saves up.
    """

    saved_s: float

    def time_s(self, messages: float, traffic_bytes: float) -> float:
        """Seconds of a primitive: its messages one after the other, each with its part of the bytes."""
        if messages <= 0:
            return 0.0
        waking, sending = self._powers(messages, traffic_bytes)
        return messages * math.pow(waking + sending, 1 / BESIDE_BYTES)

    def sd_s(self, messages: float, traffic_bytes: float) -> float:
        """Standard deviation of that time: of waking, and of sending."""
        if messages <= 0:
            return 0.0
        waking, sending = self._powers(messages, traffic_bytes)
        parts = math.hypot(waking * WAKING_LOG_SD, sending * SENDING_LOG_SD) / (waking + sending)
        return parts * self.time_s(messages, traffic_bytes)

    def _powers(self, messages: float, traffic_bytes: float) -> tuple[float, float]:
        """Waking and sending of a message, to the power p."""
        sending_s = max(0.0, traffic_bytes / messages / self.bytes_per_s - self.saved_s)
        return self.latency_s**BESIDE_BYTES, sending_s**BESIDE_BYTES


def box_link(primitive: Primitive, rate_bits_per_s: float, workers_per_processor: float) -> BoxLink:
    """What a primitive finds one of them to be.

    Args:
        primitive: ``all_reduce`` has two messages on their way at any time.
        rate_bits_per_s: of the slowest host of the group.
        workers_per_processor: that have to be woken.
    """
    waking_s = WAKING_S + CROWDED_WAKING_S * workers_per_processor
    ring = primitive == "all_reduce"
    return BoxLink(
        latency_s=RING_WAKING * waking_s if ring else waking_s,
        bytes_per_s=BOX_EFFICIENCY * min(rate_bits_per_s, BOX_BITS_PER_S) / 8,
        saved_s=0.0 if ring else min(BURST_S, waking_s),
    )
