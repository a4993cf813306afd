"""What there is to choose from: machines that can be rented, batch sizes, and ways to exchange gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.overlap import UNDER_BACKWARD
from hetopt.core.comm.payload_bytes import Collective, wire_format
from hetopt.core.run_spec import Compression
from hetopt.core.synchronization import Synchronization
from hetopt.optimizer.cost.observed_preemptions import ObservedPreemptions, pool_belief
from hetopt.optimizer.cost.preemption_rate import PreemptionRatePosterior
from hetopt.optimizer.fit import CompressorLine, FittedModel, LinkModel, times_as_long
from hetopt.optimizer.market.catalog import Offer
from hetopt.optimizer.market.quota import Quotas
from hetopt.optimizer.plan import Watched
from hetopt.optimizer.step_time.links import between_machines, inside_machine
from hetopt.optimizer.step_time.local_options import LocalOption
from hetopt.optimizer.step_time.sampled import SampledMachine, SampledMachines
from hetopt.optimizer.step_time.shape import Shape
from hetopt.optimizer.step_time.step_time import collective_terms
from hetopt.optimizer.step_time.transfer import ReferenceHost, Unusable, WorkerModel, worker_model

MAX_TYPES = 3
"""Instance types in one cluster. More are allowed by the trainer, but hardly ever pay and are hard to get together."""

BATCH_STEPS_PER_OCTAVE = 2

DENSE_COUNTS = 32

NEVER_BYTES = 1e21
"""Over one link in one step: more than anyone would wait for; finite, so that arithmetic stays so."""


@dataclass(frozen=True, kw_only=True)
class MachineOption:
    """One way to rent one machine, with the predicted speed of its workers.

    Attributes:
        links: one hop to a neighbouring machine, by collective.
        bus: one hop between the workers of the machine.
        relief: bandwidth of those links between three or more machines over that between two, for which they stand.
        evaluation_s: the whole evaluation set on one of its workers.
        belief: of its pool's hazard; absent on demand.
        watched: what that rests on beside the prior; absent where nothing was seen of the pool.
    """

    offer: Offer
    worker: WorkerModel
    links: Mapping[Collective, LinkModel]
    bus: LinkModel
    evaluation_s: float
    belief: PreemptionRatePosterior | None = None
    watched: Watched | None = None
    relief: float = 1.0

    @property
    def name(self) -> str:
        """Name of the instance type."""
        return self.offer.instance_type.name

    @property
    def usd_per_hour(self) -> float:
        """Price of one machine, USD an hour."""
        return self.offer.price.usd_per_hour

    @property
    def worst_usd_per_hour(self) -> float:
        """The most that it may come to cost."""
        return self.offer.worst_usd_per_hour

    @property
    def scarce_chance(self) -> float:
        """Probability that its pool runs dry; machines on demand are not taken back."""
        return 0.0 if self.belief is None else self.belief.scarce_chance

    @property
    def calm_per_hour(self) -> float:
        """Losses of a machine an hour, if its pool is not scarce."""
        return 0.0 if self.belief is None else self.belief.calm.mean_per_hour

    @property
    def scarce_per_hour(self) -> float:
        """The mean of them if it is."""
        return 0.0 if self.belief is None else self.belief.scarce.mean_per_hour


@dataclass(frozen=True, kw_only=True)
class ExchangeOption:
    """One way to bring together what workers learn, priced for every number of them.

    Attributes:
        gain: retained gradient energy, 1 when nothing is held back.
        sync: whether gradients are summed in every step, or parameters averaged after some; what is sent is then the
            mean over all steps.
        stretch, stretch_log_sd: steps over those of summing gradients in every step, and the spread of its log, indexed
            by the number of workers.
        share_log_sd: spread of the log of how often workers communicate.
        messages, traffic_bytes: of the collective, indexed by the number of workers (see `step_time.collective_terms`).
        compress_s: compression and decompression on the reference device, indexed by the number of workers.
    """

    compression: Compression
    collective: Collective
    gain: float
    messages: NDArray[np.float64]
    traffic_bytes: NDArray[np.float64]
    compress_s: NDArray[np.float64]
    stretch: NDArray[np.float64]
    stretch_log_sd: NDArray[np.float64]
    share_log_sd: float = 0.0
    sync: Synchronization = field(default_factory=Synchronization)

    @property
    def under_backward(self) -> bool:
        """Whether it runs beside the backward pass; averages of parameters are made after the step."""
        return self.compression.name in UNDER_BACKWARD and not self.sync.is_local


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
        """Machines of all types in the cluster."""
        return sum(count for _, count in self.machines)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """All of it. ``offered`` and ``excluded`` tell how the options came about.

    Attributes:
        max_machines, max_workers: of one cluster.
        max_hourly_usd: of the machines of one cluster together; absent: no limit.
        quotas: vCPUs that may run at once.
    """

    options: tuple[MachineOption, ...]
    batch_sizes: tuple[int, ...]
    exchanges: tuple[ExchangeOption, ...]
    max_machines: int
    offered: int
    usable: int
    excluded: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    max_workers: int = 256
    max_hourly_usd: float | None = None
    quotas: Quotas = field(default_factory=lambda: MappingProxyType({}))

    @property
    def machine_counts(self) -> tuple[int, ...]:
        """Sizes of clusters to enumerate: each up to 32, then in steps of a tenth, as refinement fills the gaps."""
        counts = list(range(1, min(self.max_machines, DENSE_COUNTS) + 1))
        while counts[-1] < self.max_machines:
            counts.append(min(self.max_machines, counts[-1] + counts[-1] // 10))
        return tuple(counts)


def machine_options(
    model: FittedModel,
    offers: Sequence[Offer],
    host: ReferenceHost,
    shape: Shape,
    sampled: SampledMachines | None = None,
    observed: ObservedPreemptions | None = None,
    zone: str | None = None,
) -> tuple[tuple[MachineOption, ...], Mapping[str, int]]:
    """The offers whose speed can be predicted, and how many were left out for which reason.

    Args:
        model: what the profile says.
        offers: to choose from.
        host: how the profiled machine was placed among the catalogue's.
        shape: what steps have in common.
        sampled: what step samples say of machines.
        observed: what was seen of spot pools; absent: the prior alone is believed.
        zone: where machines are wanted; absent: anywhere in the region, so that all its zones tell of them.
    """
    known: dict[str, SampledMachine | None] = {}
    evaluation_s = model.profile.evaluation_s or 0.0
    found: list[MachineOption] = []
    excluded: Counter[str] = Counter()
    workers: dict[str, WorkerModel | Unusable] = {}
    for offer in offers:
        instance = offer.instance_type
        if instance.name not in workers:
            known[instance.name] = None if sampled is None else sampled.machine(instance.name)
            workers[instance.name] = _as_sampled(
                _in_company(worker_model(model, host, instance), model, shape),
                known[instance.name],
                shape,
                model.reference.largest_measured,
            )
        worker = workers[instance.name]
        if isinstance(worker, Unusable):
            excluded[worker.reason] += 1
            continue
        seen = known[instance.name]
        network = None if seen is None else seen.network
        spot, watched = offer.price.market == "spot", None
        if spot and observed is not None:
            watched = observed.watched(instance.name, offer.price.region, zone=zone)
        found.append(
            MachineOption(
                offer=offer,
                worker=worker,
                links={
                    "all_reduce": network or between_machines(model, instance, "all_reduce"),
                    "all_gather": network or between_machines(model, instance, "all_gather"),
                },
                bus=(seen.bus if seen is not None else None) or inside_machine(instance),
                relief=1.0 if network is None else shape.relief.value,
                evaluation_s=evaluation_s * worker.evaluation_factor,
                belief=pool_belief(offer.band.label if offer.band else None, watched) if spot else None,
                watched=watched,
            )
        )
    return tuple(found), MappingProxyType(dict(excluded))


def _in_company(worker: WorkerModel | Unusable, model: FittedModel, shape: Shape) -> WorkerModel | Unusable:
    """The worker beside all others of its machine, where only fewer at a time were measured."""
    if isinstance(worker, Unusable) or worker.evidence == "measured":
        return worker
    reference = model.reference.device
    # Workers of a divided CPU host are not many on one machine, but parts of it.
    measured = reference.workers_per_host if reference.kind == "cuda" else 1
    if worker.workers == measured:
        return worker
    factor = shape.crowded(worker.workers) / shape.crowded(measured)
    time = worker.time
    return replace(
        worker,
        time=replace(
            time,
            fixed_s=factor * time.fixed_s,
            per_sample_s=factor * time.per_sample_s,
            floor_s=factor * time.floor_s,
        ),
        log_sd=math.hypot(worker.log_sd, abs(shape.crowded_log_sd(worker.workers) - shape.crowded_log_sd(measured))),
        evaluation_factor=factor * worker.evaluation_factor,
        compress_factor=factor * worker.compress_factor,
    )


def _as_sampled(
    worker: WorkerModel | Unusable, seen: SampledMachine | None, shape: Shape, samples: int
) -> WorkerModel | Unusable:
    """The worker as step samples know it, or their relative, where that is known better than by the profile alone.

    What it takes beside steps, it takes as much longer as a step of so many samples.
    """
    if isinstance(worker, Unusable) or seen is None or worker.evidence == "measured" or seen.log_sd > worker.log_sd:
        return worker
    crowd = shape.crowded(worker.workers)
    time = replace(worker.time, fixed_s=crowd * seen.fixed_s, per_sample_s=crowd * seen.per_sample_s, floor_s=0.0)
    slower = times_as_long(time.time_s, worker.time.time_s, samples)
    return replace(
        worker,
        time=time,
        log_sd=math.hypot(seen.log_sd, shape.crowded_log_sd(worker.workers)),
        evidence=seen.evidence,
        evaluation_factor=slower * worker.evaluation_factor,
        compress_factor=slower * worker.compress_factor,
    )


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
        option.worst_usd_per_hour,
        time.fixed_s,
        time.per_sample_s,
        time.floor_s,
        -(math.inf if time.max_samples is None else time.max_samples),
        option.worker.log_sd,
        option.worker.compress_factor,
        option.evaluation_s,
        option.scarce_chance,
        option.calm_per_hour,
        option.scarce_per_hour,
        -option.relief,
        option.bus.latency_s,
        -option.bus.bytes_per_s,
        option.offer.price.log_sd,
        *(value for link in option.links.values() for value in (link.latency_s, -link.bytes_per_s)),
    ]


def exchange_options(
    model: FittedModel, *, minimum_gain: float, max_workers: int, local: Sequence[LocalOption] = ()
) -> tuple[ExchangeOption, ...]:
    """Dense exchange, and each measured ratio of each measured compressor that retains at least ``minimum_gain``.

    Only ratios whose gain was measured are offered, and none that a pilot has shown to miss the target; besides, the
    given ways to average parameters now and then.
    """
    parameters, gate = model.profile.job.parameters, model.convergence.gate
    found = [_exchange(Compression(), 1.0, None, parameters, max_workers)]
    for name, line in model.reference.compressors.items():
        if name not in METHODS or not wire_format(name).sparse:
            continue
        for point in sorted(model.profile.gain, key=lambda point: -point.ratio):
            gain = model.gain.gain(point.ratio)
            refused = gate.objection(scheme=name, ratio=point.ratio, gain=gain) is not None
            if point.ratio < 1 and gain >= minimum_gain and not refused:
                compression = Compression(name=name, ratio=point.ratio)
                found.append(_exchange(compression, gain, line, parameters, max_workers))
    found += [local_exchange(option, parameters, max_workers) for option in local]
    return tuple(found)


def local_exchange(option: LocalOption, parameters: int, max_workers: int) -> ExchangeOption:
    """What averaging all parameters comes to in the mean over steps; nothing for which no pilot speaks."""
    whole = _exchange(Compression(), 1.0, None, parameters, max_workers)
    workers = np.arange(max_workers + 1)
    counted = np.maximum(workers, 1).astype(np.float64)
    share = option.told.share
    return replace(
        whole,
        sync=option.sync,
        messages=share * whole.messages,
        traffic_bytes=np.where(workers > option.most_workers, NEVER_BYTES, share * whole.traffic_bytes),
        stretch=option.stretch(counted),
        stretch_log_sd=option.stretch_log_sd(counted),
        share_log_sd=option.told.log_sd,
    )


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
        stretch=np.ones(max_workers + 1),
        stretch_log_sd=np.zeros(max_workers + 1),
    )


def batch_ladder(smallest: int, largest: int, task_batch_size: int) -> tuple[int, ...]:
    """Global batch sizes in steps of sqrt(2) around the task's own, between the limits."""
    first = math.floor(math.log2(smallest / task_batch_size) * BATCH_STEPS_PER_OCTAVE)
    last = math.ceil(math.log2(largest / task_batch_size) * BATCH_STEPS_PER_OCTAVE)
    sizes = {round(task_batch_size * 2 ** (k / BATCH_STEPS_PER_OCTAVE)) for k in range(first, last + 1)}
    inside = sorted(size for size in sizes if smallest <= size <= largest)
    return tuple(inside) or (min(max(task_batch_size, smallest), largest),)
