"""What the network and the compressors are like before the first step, measured on the group that will train.

Each figure is that of the worker that took longest, so all workers hold the same ones. Training is not a timing: the
first looks at real exchanges correct what is measured here (`hetopt.trainer.exchange.network_tracker`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.trainer.exchange.channel import DIRECT_BYTES, Channel
from hetopt.trainer.exchange.cost import Operation, Primitive
from hetopt.trainer.exchange.exchange import make_exchange
from hetopt.trainer.exchange.menu import NARROW, CompressTime, Family
from hetopt.trainer.exchange.network_state import NetworkState
from hetopt.trainer.exchange.network_tracker import Timed, measured
from hetopt.trainer.exchange.stats import LookingExchange
from hetopt.trainer.exchange.wire import Shapes, kept_elements, operations
from hetopt.trainer.spec import Compression

REPEATS = 3
LONGEST_S = 0.4
"""What one timing may take: of a larger gradient, or over a slow link, only a part is sent."""

LEAST_BYTES = 4096
_SELECTED = (0.01, 0.001, 0.0001)  # ratios that compressors are timed at; two of them, as large as time allows
_PRIMITIVES: tuple[Primitive, ...] = ("all_reduce", "all_gather", "broadcast")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured."""

    timings: tuple[Timed, ...]

    @property
    def network(self) -> NetworkState:
        """Fitted to the timings."""
        return measured(self.timings)


def measure_network(
    gradient_bytes: int, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> Calibration:
    """Time each primitive at three payloads, the largest of them near the gradient's size where time allows.

    Args:
        gradient_bytes: of the dense gradient.
        device: where gradients lie.
        group: that will exchange them; of two workers or more.
    """
    channel = Channel(group, on=device)
    # Small sums do not go around the ring: a line through them would not lead to the large ones.
    around = DIRECT_BYTES // (channel.workers - 1) * 2 if channel.workers > 2 else 0
    smallest = min(max(LEAST_BYTES, around), max(LEAST_BYTES, gradient_bytes))
    timings = [_timed(channel, primitive, smallest, device) for primitive in _PRIMITIVES]
    for part in (0.5, 1.0):
        # Geometrically between the smallest and the largest, which what is known so far says is affordable.
        network = measured(timings) if len(timings) > len(_PRIMITIVES) else None
        largest = min(gradient_bytes, _affordable_bytes(timings, network, channel.workers))
        payload_bytes = int(smallest * (max(largest, smallest) / smallest) ** part)
        if payload_bytes > smallest:
            timings += [_timed(channel, primitive, payload_bytes, device) for primitive in _PRIMITIVES]
    return Calibration(timings=tuple(timings))


def _affordable_bytes(timings: list[Timed], network: NetworkState | None, workers: int) -> int:
    """A payload that a gather, the dearest primitive, brings in `LONGEST_S`."""
    gathers = [t for t in timings if t.operation.primitive == "all_gather"]
    last = gathers[-1]
    if network is None:
        # As if there were no latency: too careful, and the next look knows better.
        return int(last.operation.payload_bytes * LONGEST_S / last.time_s)
    base = Operation(primitive="all_gather", payload_bytes=0, members=workers)
    more = Operation(primitive="all_gather", payload_bytes=1e6, members=workers)
    empty_s = network.expected_s([base])
    byte_s = (network.expected_s([more]) - empty_s) / 1e6
    return int(max(last.operation.payload_bytes, (LONGEST_S - empty_s) / byte_s))


def _timed(channel: Channel, primitive: Primitive, payload_bytes: int, device: torch.device) -> Timed:
    numel = max(1, payload_bytes // 4)
    payload = torch.ones(numel, device=device)
    out = torch.empty(channel.workers * numel, device=device) if primitive == "all_gather" else payload

    def run() -> None:
        match primitive:
            case "all_gather":
                channel.all_gather(payload, out)
            case "broadcast":
                channel.broadcast(payload, 0)
            case _:
                channel.all_reduce(payload)

    return Timed(
        operation=Operation(primitive=primitive, payload_bytes=4 * numel, members=channel.workers),
        time_s=max(1e-6, _median_s(channel, run)),
    )


def _median_s(channel: Channel, run: Callable[[], None]) -> float:
    """Of a few runs, each begun together and as long as on the worker that took longest; the first does not count."""
    times_s = []
    for _ in range(1 + REPEATS):
        channel.all_reduce(torch.zeros(1))
        begun = channel.now()
        run()
        times_s.append(channel.now() - begun)
    slowest = torch.tensor(times_s[1:], dtype=torch.float64)
    channel.all_reduce(slowest, "max")
    return float(statistics.median(slowest.tolist()))


def time_compressors(
    families: Iterable[Family],
    numel: int,
    network: NetworkState,
    *,
    memory: str,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    shapes: Shapes | None = None,
    seed: int = 0,
) -> dict[Family, CompressTime]:
    """What a worker does itself in an exchange of each family, beside the network.

    Two real exchanges of a made-up gradient tell it, few elements and more: selecting takes as long for few as for
    many, packing them and adding up what arrives does not.

    Args:
        families: compressor, collective, coding.
        numel: elements of the gradient.
        network: so far; nothing is tried that would take long on it.
        memory: of the run.
        device: where gradients lie.
        group: that will exchange them.
        shapes: of the parameters, for compressors that ask for them.
        seed: of all randomness.
    """
    channel = Channel(group, on=device)
    flat = made_up_gradient(numel, device, channel.rank)
    found = {}
    for name, collective, coding in families:
        points = []
        for ratio in _ratios(name, collective, coding, numel, channel.workers, network, shapes):
            compression = Compression(
                name=name,
                ratio=ratio,
                collective=collective,
                memory=memory,
                coding=None if coding == "plain" else coding,
            )
            exchange = make_exchange(compression, numel, device=device, group=group, shapes=shapes, seed=seed)
            points.append((kept_elements(numel, ratio), _slowest_s(channel, exchange, flat)))
        (few, few_s), (many, many_s) = points[-1], points[0]
        per_element_s = max(0.0, (many_s - few_s) / (many - few)) if many > few else 0.0
        found[name, collective, coding] = CompressTime(
            fixed_s=max(0.0, few_s - per_element_s * few), per_element_s=per_element_s
        )
    return found


def time_narrow(
    numel: int, network: NetworkState, *, memory: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """What a worker does itself to exchange everything in bf16; a part of a large gradient stands for all of it."""
    channel = Channel(group, on=device)
    part = numel
    while part > 1 and network.expected_s(operations(NARROW, part, 1.0, workers=channel.workers)) > LONGEST_S:
        part //= 2
    exchange = make_exchange(Compression(name=NARROW, memory=memory), part, device=device, group=group)
    return _slowest_s(channel, exchange, made_up_gradient(part, device, channel.rank)) * numel / part


def made_up_gradient(numel: int, device: torch.device, seed: int) -> Tensor:
    """A vector with the heavy tails of a gradient."""
    return torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(seed)).pow_(3)


def _ratios(
    name: str, collective: str, coding: str, numel: int, workers: int, network: NetworkState, shapes: Shapes | None
) -> tuple[float, float]:
    """Two neighbours of `_SELECTED`, the largest that do not take long."""
    for large, small in itertools.pairwise(_SELECTED):
        parts = operations(name, numel, large, workers=workers, collective=collective, coding=coding, shapes=shapes)
        if network.expected_s(parts) <= LONGEST_S / 2:
            return large, small
    return _SELECTED[-2], _SELECTED[-1]


def _slowest_s(channel: Channel, exchange: LookingExchange, flat: Tensor) -> float:
    """Own work in a median exchange, on the worker to which it took longest."""
    times_s = []
    for _ in range(1 + REPEATS):
        times_s.append(exchange.run(flat.clone()).compress_s)
    slowest = torch.tensor(times_s[1:], dtype=torch.float64)
    channel.all_reduce(slowest, "max")
    return float(statistics.median(slowest.tolist()))
