"""Speed of the network and of the compressors before the first step, measured on the group that will train.

The time t of a collective is a line through what it took with few and with many bytes:

    t = m alpha + x beta            m, x: messages in a row and bytes over the slowest link (`hetopt.core.comm.cost`)

All workers hold the same figures: what compressing takes the worker that takes longest, and what an operation takes the
one that waits least, which is how exchanges are looked at later. Nobody measures again: once training goes on, what
whole steps take is what counts (`hetopt.trainer.policies.ratio.auto`).
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetopt.core.comm.cost import LinkSpeed, Operation, Primitive, fit_alpha_beta, trainer_algorithm
from hetopt.core.comm.options import ROUNDED, Candidates, CompressTime, Option
from hetopt.core.comm.payload_bytes import Shapes, kept_elements, operations
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel, Message
from hetopt.trainer.comm.exchange import Exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Measured network between the workers: latency (s) and bandwidth (bytes/s) of the slowest link, by collective.

    Attributes:
        lines: latency and bandwidth by collective, in the order in which they were timed; not empty.
    """

    lines: Mapping[Primitive, LinkSpeed]

    @classmethod
    def of(cls, timings: Sequence[Message], workers: int) -> Network:
        """Fit latency and bandwidth of each collective to timings at two payload sizes or more, between workers.

        Args:
            timings: each collective's, at two payload sizes or more.
            workers: number of workers that took part.
        """
        kinds = dict.fromkeys(timed.primitive for timed in timings)
        return cls(lines={kind: _line([t for t in timings if t.primitive == kind], workers) for kind in kinds})

    def expected_s(self, operations: Sequence[Operation]) -> float:
        """Return the predicted network seconds of collective operations, carried out one after the other.

        A collective that was not timed counts as the first that was.
        """
        lines = [self.lines.get(operation.primitive, self.hop) for operation in operations]
        return sum(
            line.time_s(operation.terms(trainer_algorithm)) for line, operation in zip(lines, operations, strict=True)
        )

    def exchange_s(self, option: Option) -> float:
        """Return the predicted network seconds of an exchange by ``option``, summed over its buckets.

        Seconds that backward would hide are counted, too.
        """
        return option.buckets * self.expected_s(option.operations)

    @property
    def hop(self) -> LinkSpeed:
        """The latency (s) and rate (bytes/s) of the first collective that was timed, for people."""
        return next(iter(self.lines.values()))


def _line(timings: Sequence[Message], workers: int) -> LinkSpeed:
    """Return latency and rate by a fit of ``t / m = alpha + (x / m) beta``, which keeps relative errors as they are."""
    terms = [
        Operation(primitive=timed.primitive, payload_bytes=timed.payload_bytes, members=workers).terms(
            trainer_algorithm
        )
        for timed in timings
    ]
    sizes = [round(term.traffic_bytes / term.messages) for term in terms]
    return fit_alpha_beta(sizes, [timed.time_s / term.messages for timed, term in zip(timings, terms, strict=True)])


PAUSE_S = 0.004
"""Seconds of pause before each timing, as computation is in training: a link that limits its rate then lets the first
bytes pass."""

LEAST_REPEATS, MOST_REPEATS, REPEATED_S = 3, 15, 0.1
"""Fewest and most repeats of a timing, and the seconds to repeat it for: what disturbs one of a millisecond takes
several."""

LONGEST_S = 0.4
"""Seconds that one timing may take: of a larger gradient, or over a slow link, only a part is sent."""

LEAST_BYTES = 256
"""Bytes of the smallest payload, so few that only latency shows. Many links let some kilobytes pass at once before they
hold back, so a larger payload may take no longer, and a line through it would promise too much of all others."""

_STRIDE = 8
_SELECTED = (0.01, 0.001, 0.0001)  # ratios that compressors are timed at; two of them, as large as time allows
_PRIMITIVES: tuple[Primitive, ...] = ("all_reduce", "all_gather", "broadcast")


def measure_network(
    gradient_bytes: int,
    *,
    device: torch.device,
) -> tuple[Message, ...]:
    """Time each collective at up to four payload sizes, for the worker that waits least; all workers must call it.

    Times are of the worker that waited least; of a broadcast, of the last to have it.

    Two are large, for the rate, and the smallest shows nothing but latency. What is between tells how much passes
    before the rate is felt.

    Args:
        gradient_bytes: bytes of the dense gradient, the largest payload that is tried.
        device: device where gradients lie.

    Returns:
        One message for each payload size and collective, sizes ascending; the same on all workers.
    """
    channel = Channel(on=device)
    smallest = min(LEAST_BYTES, gradient_bytes)
    largest = _affordable_bytes(channel, smallest, gradient_bytes, device)
    large = max(smallest, largest // 4)
    payloads = sorted({smallest, round(math.sqrt(smallest * large)), large, largest})
    return tuple(_timed(channel, primitive, size, device) for size in payloads for primitive in _PRIMITIVES)


def _affordable_bytes(channel: Channel, smallest: int, gradient_bytes: int, device: torch.device) -> int:
    """Return the largest payload in bytes, at most the gradient, whose all-gather takes `LONGEST_S` s, by timed trials.

    All workers must call it.
    """
    size = smallest
    while True:
        time_s = _timed(channel, "all_gather", size, device, once=True).time_s
        if size >= gradient_bytes or _STRIDE * time_s > LONGEST_S:
            return min(gradient_bytes, int(size * max(1.0, LONGEST_S / time_s)))
        size = min(gradient_bytes, _STRIDE * size)


def _timed(
    channel: Channel, primitive: Primitive, payload_bytes: int, device: torch.device, *, once: bool = False
) -> Message:
    """Time a primitive: the median of some runs, each begun together, after one run that does not count."""
    numel = max(1, payload_bytes // 4)
    payload = torch.ones(numel, device=device)
    out = torch.empty(channel.workers * numel, device=device) if primitive == "all_gather" else payload
    run: dict[Primitive, Callable[[], object]] = {
        "all_reduce": lambda: channel.all_reduce(payload),
        "all_gather": lambda: channel.all_gather(payload, out),
        "broadcast": lambda: channel.broadcast(payload, 0),
    }

    def agreed_times_s(count: int) -> list[float]:
        """Return the seconds of ``count`` runs, each that of the quickest worker; of a broadcast of the slowest one."""
        times_s = []
        for _ in range(count):
            time.sleep(PAUSE_S)
            channel.all_reduce(torch.zeros(1))
            run[primitive]()
            times_s.append(channel.messages[-1].time_s)
        sign = 1.0 if primitive == "broadcast" else -1.0
        signed_s = torch.tensor(times_s, dtype=torch.float64) * sign
        channel.all_reduce(signed_s, "max")
        return [sign * time_s for time_s in signed_s.tolist()]

    [first_s] = agreed_times_s(1)
    repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(REPEATED_S / (PAUSE_S + first_s))))
    time_s = statistics.median(agreed_times_s(1 if once else repeats))
    return Message(primitive=primitive, payload_bytes=4 * numel, time_s=max(1e-6, time_s))


def timed_candidates(candidates: Candidates, network: Network, *, device: torch.device, seed: int) -> Candidates:
    """Return the candidates with measured seconds of compressing, on the slowest worker; all must call it.

    Compressors that select elements are timed at two ratios on a made-up gradient: selecting takes as long for few
    elements as for many, packing and adding them does not. Low precision is timed on a part of the gradient.

    Args:
        candidates: exchanges to choose among, whose seconds are not known yet.
        network: measured speed, by which ratios and the part to time on are chosen so that no trial takes long.
        device: device where gradients lie.
        seed: seed of all randomness, the same on every worker.

    Returns:
        A copy with ``compress`` and ``rounded_s`` filled in, the same on all workers.
    """
    channel, numel = Channel(on=device), candidates.numel
    generator = torch.Generator(device).manual_seed(channel.rank)
    gradient = torch.randn(numel, device=device, generator=generator).pow_(3)  # with the heavy tails of a gradient

    def slowest_s(part: int, **compression: Any) -> float:
        """Return the slowest worker's median seconds of compressing ``part`` elements, without the first time."""
        asked = Compression(memory=candidates.memory, **compression)
        exchange = Exchange(asked, part, device=device, shapes=candidates.shapes, seed=seed)
        times_s = [exchange.run(gradient[:part].clone()).compress_s for _ in range(1 + LEAST_REPEATS)]
        slowest = torch.tensor(times_s[1:], dtype=torch.float64)
        channel.all_reduce(slowest, "max")
        return float(statistics.median(slowest.tolist()))

    compress, rounded_s = {}, {}
    for name, collective, coding in candidates.families:
        ratios = _ratios(name, collective, coding, numel, channel.workers, network, candidates.shapes)
        coded = None if coding == "plain" else coding
        (many, many_s), (few, few_s) = (
            (kept_elements(numel, ratio), slowest_s(numel, name=name, ratio=ratio, collective=collective, coding=coded))
            for ratio in ratios
        )
        per_element_s = max(0.0, (many_s - few_s) / (many - few)) if many > few else 0.0
        fixed_s = max(0.0, few_s - per_element_s * few)
        compress[name, collective, coding] = CompressTime(fixed_s=fixed_s, per_element_s=per_element_s)
    for name in ROUNDED:
        part = numel
        while part > 1 and network.expected_s(operations(name, part, 1.0, workers=channel.workers)) > LONGEST_S:
            part //= 2
        rounded_s[name] = slowest_s(part, name=name) * numel / part
    return replace(candidates, compress=compress, rounded_s=rounded_s)


def _ratios(
    name: str, collective: str, coding: str, numel: int, workers: int, network: Network, shapes: Shapes | None
) -> tuple[float, float]:
    """Return two successive ratios of `_SELECTED` to time a compressor at, the larger first.

    They are the first two of which an exchange at the larger is expected to take at most half of `LONGEST_S`, else the
    last two.
    """
    for large, small in itertools.pairwise(_SELECTED):
        parts = operations(name, numel, large, workers=workers, collective=collective, coding=coding, shapes=shapes)
        if network.expected_s(parts) <= LONGEST_S / 2:
            return large, small
    return _SELECTED[-2], _SELECTED[-1]
