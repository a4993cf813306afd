"""What there is to choose from: machines that can be rented, batch sizes, and ways to exchange gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.catalog import Offer
from hetopt.optimizer.cost import scarce_probability
from hetopt.optimizer.fit import CompressorLine, FittedModel, LinkModel
from hetopt.optimizer.links import between_machines, inside_machine
from hetopt.optimizer.step_time import collective_terms
from hetopt.optimizer.transfer import ReferenceHost, Unusable, WorkerModel, worker_model
from hetopt.trainer.exchange.wire import WIRE_FORMATS, Collective, wire_format
from hetopt.trainer.spec import Compression

MAX_TYPES = 3
"""Instance types in one cluster. More are allowed by the trainer, but hardly ever pay and are hard to get together."""

BATCH_STEPS_PER_OCTAVE = 2

DENSE_COUNTS = 32


@dataclass(frozen=True, kw_only=True)
class MachineOption:
    """One way to rent one machine, with the predicted speed of its workers.

    Attributes:
        links: one hop to a neighbouring machine, by collective.
        bus: one hop between the workers of the machine.
        evaluation_s: the whole evaluation set on one of its workers.
        scarce_chance: prior probability that its pool runs dry.
    """

    offer: Offer
    worker: WorkerModel
    links: Mapping[Collective, LinkModel]
    bus: LinkModel
    evaluation_s: float
    scarce_chance: float

    @property
    def name(self) -> str:
        """The instance type's name."""
        return self.offer.instance_type.name

    @property
    def usd_per_hour(self) -> float:
        """Price of the machine."""
        return self.offer.price.usd_per_hour


@dataclass(frozen=True, kw_only=True)
class ExchangeOption:
    """One way to exchange gradients, priced for every number of workers.

    Attributes:
        gain: retained gradient energy, 1 when nothing is held back.
        messages, traffic_bytes: of the collective, indexed by the number of workers (see `step_time.collective_terms`).
        compress_s: compression and decompression on the reference device, indexed by the number of workers.
    """

    compression: Compression
    collective: Collective
    gain: float
    messages: NDArray[np.float64]
    traffic_bytes: NDArray[np.float64]
    compress_s: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A point of the space: machines of which options, which batch, which exchange, as indices into the space."""

    machines: tuple[tuple[int, int], ...]
    batch: int
    exchange: int

    @classmethod
    def of(cls, counts: Iterable[tuple[int, int]], batch: int, exchange: int) -> Cluster:
        """The cluster with equal options merged, empty ones dropped and a canonical order."""
        merged: Counter[int] = Counter()
        for option, count in counts:
            merged[option] += count
        return cls(machines=tuple(sorted((o, n) for o, n in merged.items() if n > 0)), batch=batch, exchange=exchange)

    @property
    def machine_count(self) -> int:
        """Machines altogether."""
        return sum(count for _, count in self.machines)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """All of it. ``offered`` and ``excluded`` tell how the options came about."""

    options: tuple[MachineOption, ...]
    batch_sizes: tuple[int, ...]
    exchanges: tuple[ExchangeOption, ...]
    max_machines: int
    offered: int
    usable: int
    excluded: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def machine_counts(self) -> tuple[int, ...]:
        """Sizes of clusters to enumerate: each up to 32, then in steps of a tenth, as refinement fills the gaps."""
        counts = list(range(1, min(self.max_machines, DENSE_COUNTS) + 1))
        while counts[-1] < self.max_machines:
            counts.append(min(self.max_machines, counts[-1] + counts[-1] // 10))
        return tuple(counts)


def machine_options(
    model: FittedModel, offers: Sequence[Offer], host: ReferenceHost
) -> tuple[tuple[MachineOption, ...], Mapping[str, int]]:
    """The offers whose speed can be predicted, and how many were left out for which reason."""
    evaluation_s = model.profile.evaluation_s or 0.0
    found: list[MachineOption] = []
    excluded: Counter[str] = Counter()
    workers: dict[str, WorkerModel | Unusable] = {}
    for offer in offers:
        instance = offer.instance_type
        if instance.name not in workers:
            workers[instance.name] = worker_model(model, host, instance)
        worker = workers[instance.name]
        if isinstance(worker, Unusable):
            excluded[worker.reason] += 1
            continue
        found.append(
            MachineOption(
                offer=offer,
                worker=worker,
                links={
                    "all_reduce": between_machines(model, instance, "all_reduce"),
                    "all_gather": between_machines(model, instance, "all_gather"),
                },
                bus=inside_machine(instance),
                evaluation_s=evaluation_s * worker.evaluation_factor,
                scarce_chance=scarce_probability(offer.price.market, offer.band.label if offer.band else None),
            )
        )
    return tuple(found), MappingProxyType(dict(excluded))


def drop_dominated(options: Sequence[MachineOption]) -> tuple[MachineOption, ...]:
    """Leave out options that another of the same region beats or equals in every respect.

    Swapping a machine for one that dominates it never makes a cluster slower, dearer or less certain, so no point of
    the Pareto front is lost. Options with as many workers a machine are compared; the first of equals stays.
    """
    figures = np.array([_figures(option) for option in options]).reshape(len(options), -1)
    members: dict[tuple[str, int, str], list[int]] = {}
    for i, option in enumerate(options):
        members.setdefault((option.offer.price.region, option.worker.workers, option.worker.kind), []).append(i)
    kept: list[int] = []
    for group in members.values():
        position, rivals = np.array(group), figures[group]
        for i, own in zip(group, rivals, strict=True):
            better = (rivals < own).any(axis=1) | (position < i)
            if not ((rivals <= own).all(axis=1) & better).any():
                kept.append(i)
    return tuple(options[i] for i in sorted(kept))


def _figures(option: MachineOption) -> list[float]:
    """Everything that the forecast of a cluster grows with."""
    time = option.worker.time
    return [
        option.usd_per_hour,
        time.fixed_s,
        time.per_sample_s,
        time.floor_s,
        -(math.inf if time.max_samples is None else time.max_samples),
        option.worker.log_sd,
        option.worker.compress_factor,
        option.evaluation_s,
        option.scarce_chance,
        option.bus.latency_s,
        -option.bus.bytes_per_s,
        float(option.offer.price.is_estimate),
        *(value for link in option.links.values() for value in (link.latency_s, -link.bytes_per_s)),
    ]


def exchange_options(model: FittedModel, *, minimum_gain: float, max_workers: int) -> tuple[ExchangeOption, ...]:
    """Dense exchange, and each measured ratio of each measured compressor that retains at least ``minimum_gain``.

    Only ratios whose gain was measured are offered: what a smaller one would do to convergence is unknown.
    """
    parameters = model.profile.job.parameters
    found = [_exchange(Compression(), 1.0, None, parameters, max_workers)]
    for name, line in model.reference.compressors.items():
        if name not in WIRE_FORMATS or not wire_format(name).sparse:
            continue
        for point in sorted(model.profile.gain, key=lambda point: -point.ratio):
            gain = model.gain.gain(point.ratio)
            if point.ratio < 1 and gain >= minimum_gain:
                compression = Compression(name=name, ratio=point.ratio)
                found.append(_exchange(compression, gain, line, parameters, max_workers))
    return tuple(found)


def _exchange(
    compression: Compression, gain: float, line: CompressorLine | None, parameters: int, max_workers: int
) -> ExchangeOption:
    wire = wire_format(compression.name)
    payload = wire.payload_bytes(parameters, compression.ratio)
    terms = [collective_terms(wire.collective, payload, workers) for workers in range(1, max_workers + 1)]
    # Gathered payloads are unpacked one by one; a single worker with compression still compresses its own.
    compress = [0.0 if line is None else line.time_s(compression.ratio, workers) for workers in range(max_workers + 1)]
    return ExchangeOption(
        compression=compression,
        collective=wire.collective,
        gain=gain,
        messages=np.array([0.0, *(messages for messages, _ in terms)]),
        traffic_bytes=np.array([0.0, *(traffic for _, traffic in terms)]),
        compress_s=np.array(compress),
    )


def batch_ladder(smallest: int, largest: int, task_batch_size: int) -> tuple[int, ...]:
    """Global batch sizes in steps of sqrt(2) around the task's own, between the limits."""
    first = math.floor(math.log2(smallest / task_batch_size) * BATCH_STEPS_PER_OCTAVE)
    last = math.ceil(math.log2(largest / task_batch_size) * BATCH_STEPS_PER_OCTAVE)
    sizes = {round(task_batch_size * 2 ** (k / BATCH_STEPS_PER_OCTAVE)) for k in range(first, last + 1)}
    inside = sorted(size for size in sizes if smallest <= size <= largest)
    return tuple(inside) or (min(max(task_batch_size, smallest), largest),)
