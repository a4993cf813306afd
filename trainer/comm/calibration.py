"""What the network and the compressors are like before the first step, measured on the group that will train.

All workers hold the same figures: what compressing takes the worker that takes longest, and what an operation takes the
one that waits least, which is how exchanges are looked at later. Training is not a timing: what whole steps
take is what counts once there were some (`hetopt.trainer.policies.ratio.auto`).

Whether workers that share a host exchange as one is priced like any exchange, on the network as it was measured.
Where something has changed the network is measured again between periods, by a few sums.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.comm.cost import TRAINER, Operation, Primitive, Scope
from hetopt.core.comm.network_state import NetworkState
from hetopt.core.comm.options import ROUNDED, Candidates, CompressTime, Family, operations_of
from hetopt.core.comm.payload_bytes import Shapes, hierarchical_operations, kept_elements, operations
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.hierarchical import HostGroups
from hetopt.trainer.comm.network_tracker import PAUSE_S, REPEATED_BELOW_S, TIMED_EACH, Timed, measured

REPEATED_S = 0.1
"""Short timings are repeated for so long: what disturbs one of a millisecond takes several."""

LONGEST_S = 0.4
"""What one timing may take: of a larger gradient, or over a slow link, only a part is sent."""

LEAST_BYTES = 256
"""So few that only latency shows. Many links let some kilobytes pass at once before they hold back, so a larger payload
may take no longer, and a line through it would promise too much of all others."""

FELT_S = 0.01
"""A sum that takes so long, and twice as long as the smallest, tells of the rate."""

_STRIDE = 8
_MOST_TIMINGS = 16
_SELECTED = (0.01, 0.001, 0.0001)  # ratios that compressors are timed at; two of them, as large as time allows
_PRIMITIVES: tuple[Primitive, ...] = ("all_reduce", "all_gather", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """How often something is timed, after a first time that does not count.

    Attributes:
        least, most: times.
        once_from_s: what takes so long counts the first time, and is not repeated.
        counts: what becomes of the times.
    """

    least: int
    most: int
    once_from_s: float = math.inf
    counts: Callable[[Sequence[float]], float] = statistics.median


THOROUGHLY = Repeats(least=3, most=15)
ONCE = Repeats(least=1, most=1)
GLANCE = Repeats(least=0, most=0, once_from_s=0.0)
"""The first time, which counts."""

SHORTLY = Repeats(least=TIMED_EACH - 1, most=TIMED_EACH - 1, once_from_s=REPEATED_BELOW_S, counts=min)
"""The shortest, as so few cannot tell hiccups apart."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The timed collectives of a calibration, and the network that they show."""

    timings: tuple[Timed, ...]

    @property
    def network(self) -> NetworkState:
        """The network state fitted to the timings."""
        return measured(self.timings)


def measure_network(
    gradient_bytes: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    scope: Scope = "network",
) -> Calibration:
    """Time each primitive at four payloads, the largest of them the gradient's size where time allows.

    Two are large, for the rate, and the smallest shows nothing but latency. What is between tells how much passes
    before the rate is felt.

    Args:
        gradient_bytes: of the dense gradient.
        device: where gradients lie.
        group: that will exchange them; of two workers or more.
        scope: whether the group spans machines, or lies inside one.
    """
    channel = Channel(group, on=device, scope=scope)
    smallest = min(LEAST_BYTES, gradient_bytes)
    largest = _affordable_bytes(channel, smallest, gradient_bytes, device)
    large = max(smallest, largest // 4)
    payloads = sorted({smallest, round(math.sqrt(smallest * large)), large, largest})
    timings = [_timed(channel, primitive, size, device, THOROUGHLY) for size in payloads for primitive in _PRIMITIVES]
    return Calibration(timings=tuple(timings))


def measure_again(
    gradient_bytes: int, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[Timed, ...]:
    """Time the smallest sum between machines, and the first that is felt of those with more and more bytes.

    What lies between is only glanced at: training waits, a tenth of a second.

    Args:
        gradient_bytes: that none of them exceeds.
        device: where gradients lie.
        group: of two workers or more.
    """
    channel = Channel(group, on=device, scope="network")
    size = min(LEAST_BYTES, gradient_bytes)
    timings = [_timed(channel, "all_reduce", size, device, SHORTLY)]
    felt_s = max(FELT_S, 2 * timings[0].time_s)
    while timings[-1].time_s < felt_s and size < gradient_bytes:
        size = min(gradient_bytes, _STRIDE * size)
        seen = _timed(channel, "all_reduce", size, device, GLANCE)
        if seen.time_s >= felt_s or size == gradient_bytes:
            # A glance that took long is as good as another.
            is_long = seen.time_s >= REPEATED_BELOW_S
            timings.append(seen if is_long else _timed(channel, "all_reduce", size, device, SHORTLY))
    return tuple(timings)


def handed_on(timings: Sequence[Timed], source: int, *, scope: Scope = "host") -> tuple[Timed, ...]:
    """What one worker has timed with some others, on all workers of the default group.

    Args:
        timings: of this worker; only the source's count.
        source: its rank.
        scope: of the timings.
    """
    channel = Channel()
    table = [
        [
            float(_PRIMITIVES.index(t.operation.primitive)),
            t.operation.payload_bytes,
            float(t.operation.members),
            t.time_s,
        ]
        for t in timings
    ]
    rows = torch.zeros(_MOST_TIMINGS, 4, dtype=torch.float64)
    if channel.rank == source:
        rows[: len(table)] = torch.tensor(table, dtype=torch.float64)
    flat = rows.view(-1)
    channel.broadcast(flat, source)
    return tuple(
        Timed(
            operation=Operation(
                primitive=_PRIMITIVES[int(place)], payload_bytes=payload_bytes, members=int(members), scope=scope
            ),
            time_s=time_s,
        )
        for place, payload_bytes, members, time_s in flat.view(-1, 4).tolist()
        if members
    )


def _affordable_bytes(channel: Channel, smallest: int, gradient_bytes: int, device: torch.device) -> int:
    """A payload that a gather, the dearest primitive, brings in `LONGEST_S`, or the whole gradient."""
    size = smallest
    while True:
        time_s = _timed(channel, "all_gather", size, device, ONCE).time_s
        if size >= gradient_bytes or _STRIDE * time_s > LONGEST_S:
            return min(gradient_bytes, int(size * max(1.0, LONGEST_S / time_s)))
        size = min(gradient_bytes, _STRIDE * size)


def _timed(channel: Channel, primitive: Primitive, payload_bytes: int, device: torch.device, repeats: Repeats) -> Timed:
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

    times_s = _times_s(channel, primitive, run, repeats)
    return Timed(
        operation=Operation(primitive=primitive, payload_bytes=4 * numel, members=channel.workers, scope=channel.scope),
        time_s=max(1e-6, repeats.counts(times_s)),
    )


def _times_s(channel: Channel, primitive: Primitive, run: Callable[[], None], repeats: Repeats) -> list[float]:
    """Of some runs, each begun together and as long as on the worker that waited least.

    The first does not count, unless it took so long that there are no others. Of a broadcast that is the last to have
    it: the source is done at once.
    """

    def once_s() -> float:
        time.sleep(PAUSE_S)
        channel.all_reduce(torch.zeros(1))
        begun = channel.now()
        run()
        return channel.now() - begun

    def agreed_s(times_s: list[float]) -> list[float]:
        own = torch.tensor(times_s, dtype=torch.float64)
        sign = 1.0 if primitive == "broadcast" else -1.0
        own *= sign
        channel.all_reduce(own, "max")
        agreed: list[float] = (sign * own).tolist()
        return agreed

    [first_s] = agreed_s([once_s()])
    if first_s >= repeats.once_from_s:
        return [first_s]
    count = min(repeats.most, max(repeats.least, int(REPEATED_S / (PAUSE_S + first_s))))
    return agreed_s([once_s() for _ in range(count)])


def timed_candidates(candidates: Candidates, network: NetworkState, *, device: torch.device, seed: int) -> Candidates:
    """The candidates, with what a worker does itself for each of them."""
    compress = time_compressors(
        candidates.families,
        candidates.numel,
        network,
        memory=candidates.memory,
        device=device,
        shapes=candidates.shapes,
        seed=seed,
    )
    rounded_s = {
        name: time_rounded(name, candidates.numel, network, memory=candidates.memory, device=device) for name in ROUNDED
    }
    return replace(candidates, compress=compress, rounded_s=rounded_s)


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
            exchange = Exchange(compression, numel, device=device, group=group, shapes=shapes, seed=seed)
            points.append((kept_elements(numel, ratio), _slowest_s(channel, exchange, flat)))
        (few, few_s), (many, many_s) = points[-1], points[0]
        per_element_s = max(0.0, (many_s - few_s) / (many - few)) if many > few else 0.0
        found[name, collective, coding] = CompressTime(
            fixed_s=max(0.0, few_s - per_element_s * few), per_element_s=per_element_s
        )
    return found


def time_rounded(
    name: str,
    numel: int,
    network: NetworkState,
    *,
    memory: str,
    device: torch.device,
) -> float:
    """What a worker does itself to exchange everything in fewer bits; a part of a large gradient stands for all."""
    channel = Channel(on=device)
    part = numel
    while part > 1 and network.expected_s(operations(name, part, 1.0, workers=channel.workers)) > LONGEST_S:
        part //= 2
    exchange = Exchange(Compression(name=name, memory=memory), part, device=device)
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


def _slowest_s(channel: Channel, exchange: Exchange, flat: Tensor) -> float:
    """Own work in a median exchange, on the worker to which it took longest."""
    times_s = []
    for _ in range(1 + THOROUGHLY.least):
        times_s.append(exchange.run(flat.clone()).compress_s)
    slowest = torch.tensor(times_s[1:], dtype=torch.float64)
    channel.all_reduce(slowest, "max")
    return float(statistics.median(slowest.tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Which worker is where.

    Attributes:
        names: of all workers' hosts, in rank order.
    """

    names: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(set(self.names))

    @property
    def fullest(self) -> str:
        """The first of those with most workers."""
        return Counter(self.names).most_common(1)[0][0]

    @property
    def workers_per_host(self) -> int:
        """Number of workers on the host that has most."""
        return self.names.count(self.fullest)

    @property
    def are_levels(self) -> bool:
        """Whether there is both something to sum inside hosts and somebody to exchange with outside."""
        return 1 < self.count < len(self.names)


def measure_inside(hosts: Hosts, groups: HostGroups, gradient_bytes: int, *, device: torch.device) -> Calibration:
    """What collectives take inside the fullest host; all workers of all hosts take part at the same time."""
    own: Calibration | None = None
    if groups.inside is not None and hosts.names.count(groups.own) > 1:
        own = measure_network(gradient_bytes, device=device, group=groups.inside, scope="host")
    return Calibration(timings=handed_on(own.timings if own is not None else (), hosts.names.index(hosts.fullest)))


def exchange_as_one(
    compression: Compression, numel: int, hosts: Hosts, network: NetworkState, *, shapes: Shapes | None = None
) -> bool:
    """Whether the exchange is expected to be over sooner when each host's workers sum first and one of them sends."""

    def between(workers: int) -> tuple[Operation, ...]:
        return operations_of(compression, numel, workers=workers, shapes=shapes)

    flat_s = network.expected_s(between(len(hosts.names)), algorithms=TRAINER)
    levels = hierarchical_operations(between(hosts.count), numel, workers_per_host=hosts.workers_per_host)
    return network.expected_s(levels, algorithms=TRAINER) < flat_s


class NetworkProbe:
    """Of the workers that exchange between machines; the others take part in nothing, and are told.

    Args:
        gradient_bytes: of the dense gradient.
        device: where gradients lie.
        groups: of workers that exchange as one by host; None: all exchange.
    """

    def __init__(self, gradient_bytes: int, *, device: torch.device, groups: HostGroups | None) -> None:
        self._gradient_bytes = gradient_bytes
        self._device = device
        self._by_hosts = groups is not None
        self._group = None if groups is None else groups.between
        self._takes_part = groups is None or groups.between is not None

    def measure(self) -> tuple[Timed, ...]:
        """Sums as they are now; all workers of the default group must ask at the same time."""
        timings: tuple[Timed, ...] = ()
        if self._takes_part:
            timings = measure_again(self._gradient_bytes, device=self._device, group=self._group)
        # The first worker of all leads its host.
        return handed_on(timings, 0, scope="network") if self._by_hosts else timings
