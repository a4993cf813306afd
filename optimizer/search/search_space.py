"""The search space: machines that can be rented, batch sizes, and gradient exchanges to choose from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from hetopt.core.memory import ALONE, ExchangeMemory, Precision
from hetopt.optimizer.convergence.convergence import PrecisionLoss
from hetopt.optimizer.cost.preemption_rate import NEVER_LOST, ObservedPreemptions, PreemptionRatePosterior
from hetopt.optimizer.cost.provisioning import Payload, disk_gb, startup_s
from hetopt.optimizer.fit import FittedModel, LinkModel, times_as_long
from hetopt.optimizer.market.catalog import Offer
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.market.quota import Quotas, bucket_of
from hetopt.optimizer.plan import ObservedLosses
from hetopt.optimizer.search.exchange_menu import ExchangeOption
from hetopt.optimizer.search.open_hours import OpenHours
from hetopt.optimizer.search.pareto import undominated
from hetopt.optimizer.step_time.device_memory import REPLICATED, Scheme
from hetopt.optimizer.step_time.links import Network, network_of
from hetopt.optimizer.step_time.machine_bus import inside_machine, is_switched, shared_link
from hetopt.optimizer.step_time.posterior import Shape
from hetopt.optimizer.step_time.priors import switched_contention
from hetopt.optimizer.step_time.tiers import SampledMachine, SampledMachines
from hetopt.optimizer.step_time.transfer import (
    ReferenceHost,
    Unusable,
    WorkerModel,
    no_units,
    worker_model,
    worker_of,
)

MAX_TYPES = 3
"""Most instance types in one cluster. More are allowed by the trainer, but hardly ever pay and are hard to get
together."""

DENSE_COUNTS = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class MachineOption:
    """One offer of a machine in one precision: price, predicted worker speed, network, start-up, preemption rate.

    Options compare by identity: comparing a million pairs by their fields took a sixth of a recommendation.

    Attributes:
        offer: type, price and market of the machine.
        worker: one of the machine's workers: time of a step by samples, and memory.
        network: links to neighbouring machines.
        bus: one hop between the workers of the machine while all of them exchange.
        evaluation_s: seconds of the whole evaluation set on one worker.
        startup_s: seconds from the request to the first step.
        disk_gb: size of the machine's disk.
        belief: posterior of the preemption rate of the machine's spot pool; None: on demand.
        watched: observed losses of the pool, which ``belief`` includes; None: none were observed.
        precision: number format that workers compute in, one for all machines of a cluster.
        stretch: steps in this precision over steps in the profile's first.
        stretch_log_sd: standard deviation of the log of ``stretch``.
    """

    offer: Offer
    worker: WorkerModel
    network: Network
    bus: LinkModel
    evaluation_s: float
    startup_s: float
    disk_gb: int
    belief: PreemptionRatePosterior | None = None
    watched: ObservedLosses | None = None
    precision: Precision = "fp32"
    stretch: float = 1.0
    stretch_log_sd: float = 0.0

    @property
    def way(self) -> tuple[Precision, Scheme]:
        """The precision and the memory scheme, which all machines of a cluster have in common."""
        return self.precision, REPLICATED if self.worker.room is None else self.worker.room.scheme

    @property
    def name(self) -> str:
        """Name of the instance type."""
        return self.offer.instance_type.name

    @property
    def usd_per_hour(self) -> float:
        """Price of one machine, USD an hour."""
        return self.offer.price.usd_per_hour

    @property
    def losses(self) -> PreemptionRatePosterior:
        """The believed preemption rate of the machine's pool; on demand a rate of zero."""
        return self.belief or NEVER_LOST


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Cluster as indices into a search space: pairs of machine option and count, one batch size, one exchange.

    Attributes:
        machines: (index of the machine option, number of machines) of each group, sorted by option.
        batch: index of the global batch size.
        exchange: index of the gradient exchange.
    """

    machines: tuple[tuple[int, int], ...]
    batch: int
    exchange: int

    @classmethod
    def of(cls, counts: Iterable[tuple[int, int]], batch: int, exchange: int) -> Cluster:
        """Return the cluster of (option index, machines) pairs, merged and sorted, without counts below 1."""
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
    """Machine options, global batch sizes, gradient exchanges and limits that a search chooses a cluster within.

    Attributes:
        options: machines to choose from, none beaten by another in every respect.
        batch_sizes: global batch sizes, samples, ascending.
        exchanges: ways to sum gradients or average parameters.
        max_machines: most machines of one cluster.
        offered: number of offers that the request allows.
        usable: number of those offers that have a predictable speed.
        excluded: number of offers left out, by reason.
        max_workers: most workers of one cluster.
        max_hourly_usd: most USD an hour of the machines of one cluster together; None: no limit.
        quotas: vCPUs that may run at once, by bucket; a bucket that is missing has no limit.
        open_hours: when machines may be used; None: always.
        beaten: options left out of ``options`` because another beats them; they replace it where it cannot be had.
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
    open_hours: OpenHours | None = None
    beaten: tuple[MachineOption, ...] = ()

    @property
    def ways(self) -> tuple[tuple[Precision, Scheme], ...]:
        """Pairs of precision and memory scheme that clusters may have, each once."""
        return tuple(dict.fromkeys(option.way for option in self.options))

    @property
    def machine_counts(self) -> tuple[int, ...]:
        """Numbers of machines to enumerate, ascending: each up to 32, then in steps of a tenth; `search` fills gaps."""
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
    payload: Payload | None = None,
    exchange: ExchangeMemory = ALONE,
    precision: Precision | None = None,
    loss: PrecisionLoss | None = None,
) -> tuple[tuple[MachineOption, ...], Mapping[str, int]]:
    """Return a `MachineOption` per offer whose speed can be predicted, and the number of offers left out by reason.

    Args:
        model: fits of the profile.
        offers: machines to choose from; options keep their order.
        host: the profiled machine as the catalogue rates it.
        shape: parameters that steps share on all machines.
        sampled: machines as step samples predict them; None: there are no samples.
        observed: observed losses of spot pools; None: rates are the prior's.
        zone: zone whose observed losses count; None: all zones of an offer's region.
        payload: bytes that a run brings to its machines; None: hardly any.
        exchange: memory of the exchange that takes most of a worker's device.
        precision: number format that workers compute in; None: the profile's first.
        loss: factor of ``precision`` on the number of steps; None: 1.
    """
    precision, loss = precision or model.precision, loss or PrecisionLoss()
    payload = payload or Payload()
    evaluation_s = model.profile.evaluation_s or 0.0
    usable: list[MachineOption] = []
    excluded: Counter[str] = Counter()
    only_sampled = precision != model.precision
    like = partial(worker_model, model, host, exchange=exchange)
    known: dict[str, MachineOption | Unusable] = {}
    for offer in offers:
        instance = offer.instance_type
        if instance.name not in known:
            try:
                seen = None if sampled is None else sampled.machine(instance.name, precision)
                alone = _slowed_by_neighbours(worker_of(instance, like), model, shape, instance)
                if only_sampled and (lacking := no_units(instance, precision)):
                    raise Unusable(lacking)
                samples = model.reference.largest_measured
                worker = _as_sampled(alone, seen, shape, samples, only_sampled=only_sampled)
                known[instance.name] = MachineOption(
                    offer=offer,
                    worker=worker,
                    network=network_of(model, instance, shape, seen),
                    bus=inside_machine(instance, worker.workers, shape.host_sharing.value)
                    if seen is None or seen.bus is None
                    else shared_link(seen.bus, worker.workers, shape.host_sharing.value),
                    precision=precision,
                    stretch=loss.stretch,
                    stretch_log_sd=loss.log_sd,
                    evaluation_s=evaluation_s * worker.evaluation_factor,
                    startup_s=startup_s(instance, payload),
                    disk_gb=disk_gb(instance, payload),
                )
            except Unusable as refused:
                known[instance.name] = refused
        outcome = known[instance.name]
        if isinstance(outcome, Unusable):
            excluded[str(outcome)] += 1
            continue
        spot, watched = offer.price.market == "spot", None
        band = offer.band.label if offer.band else None
        if spot and observed is not None:
            watched = observed.watched(instance.name, offer.price.region, zone=zone)
        belief = PreemptionRatePosterior.prior(band).seeing(watched) if spot else None
        usable.append(replace(outcome, offer=offer, belief=belief, watched=watched))
    return tuple(usable), MappingProxyType(dict(excluded))


def _slowed_by_neighbours(worker: WorkerModel, model: FittedModel, shape: Shape, instance: InstanceType) -> WorkerModel:
    """Return the worker as it computes beside all others of its machine: slower and less sure, by `Shape.crowded`.

    Unchanged if measured on this type, or if as many workers of a machine were measured.
    """
    if worker.evidence == "measured":
        return worker
    reference = model.reference.device
    # Workers of a divided CPU host are not many on one machine, but parts of it.
    measured = reference.workers_per_host if reference.kind == "cuda" else 1
    if worker.workers == measured:
        return worker
    if model.profile.is_counted and is_switched(instance):  # how far those slow each other, public jobs tell
        shape = replace(shape, contention=replace(shape.contention, value=switched_contention()))
    beside_log_sd = abs(shape.crowded_log_sd(worker.workers) - shape.crowded_log_sd(measured))
    factor = shape.crowded(worker.workers) / shape.crowded(measured)
    return worker.slower(factor, math.hypot(worker.log_sd, beside_log_sd))


def _as_sampled(
    worker: WorkerModel, seen: SampledMachine | None, shape: Shape, samples: int, *, only_sampled: bool
) -> WorkerModel:
    """Return the worker with compute times by step samples, where these are surer than the profile; else unchanged.

    Evaluating and compressing change by the same factor as a step of ``samples`` samples.

    Args:
        worker: predicted by the profile.
        seen: the machine type predicted by step samples; None: they say nothing of the type.
        shape: parameters that steps share on all machines.
        samples: local batch size at which both predictions are compared.
        only_sampled: whether the profile lacks the precision, so that only step samples count.

    Raises:
        Unusable: ``only_sampled``, and no sample is of the machine or its like.
    """
    if only_sampled:
        if seen is None or (worker.kind == "cpu" and seen.evidence == "extrapolated"):
            raise Unusable("no step was measured in that precision on its like")
    elif seen is None or worker.evidence == "measured" or seen.log_sd > worker.log_sd:
        return worker
    crowd = shape.crowded(worker.workers)
    fixed_s = crowd * seen.fixed_s
    time = replace(
        worker.time,
        fixed_s=fixed_s,
        per_sample_s=crowd * seen.per_sample_s,
        floor_s=0.0,
        once_s=min(worker.time.once_s, fixed_s),
    )
    slower = times_as_long(time.time_s, worker.time.time_s, samples)
    return replace(
        worker,
        time=time,
        log_sd=math.hypot(seen.log_sd, shape.crowded_log_sd(worker.workers)),
        evidence=seen.evidence,
        evaluation_factor=slower * worker.evaluation_factor,
        compress_factor=slower * worker.compress_factor,
    )


def drop_slower_precisions(options: Sequence[MachineOption]) -> tuple[MachineOption, ...]:
    """Return the options of precisions that no other precision equals or beats on every offer, in every figure.

    A cluster whose machines all change to the better precision is no slower, dearer or less certain. Of equals the
    first stays.
    """
    figures: dict[Precision, dict[int, list[float]]] = {}
    for option in options:
        values = [*_figures(option), option.stretch, option.stretch_log_sd]
        figures.setdefault(option.precision, {})[id(option.offer)] = values
    kept = list(figures)
    for precision in reversed(list(figures)):
        others = [figures[other] for other in kept if other != precision]
        if any(_is_beaten(figures[precision], other) for other in others):
            kept.remove(precision)
    return tuple(option for option in options if option.precision in kept)


def _is_beaten(figures: Mapping[int, Sequence[float]], other: Mapping[int, Sequence[float]]) -> bool:
    """Return whether ``other`` has all offers of ``figures``, each with no larger figures but for rounding errors.

    Arguments are the figures of a precision's options, by the id of the offer.
    """
    return all(
        offer in other
        and bool(np.all(np.less_equal(other[offer], values) | np.isclose(other[offer], values, rtol=1e-9, atol=0)))
        for offer, values in figures.items()
    )


def drop_dominated(options: Sequence[MachineOption], quotas: Quotas) -> tuple[MachineOption, ...]:
    """Return the options that no other of the same region, quota, worker count and precision equals or beats.

    Swapping a machine for one that dominates it never makes a cluster slower, dearer or less certain, so no point of
    the Pareto front is lost. Options of one memory scheme alone are compared. The first of equals stays.
    """
    kinds: list[tuple[object, ...]] = []
    for option in options:
        bucket, place = bucket_of(option.offer), option.offer.price.region
        limit = (bucket, option.offer.instance_type.vcpus) if bucket in quotas else None
        kinds.append((place, limit, option.worker.workers, option.worker.kind, option.way))
    figures = np.array([_figures(option) for option in options]).reshape(len(options), -1)
    return tuple(options[row] for row in undominated(figures, kinds))


def _figures(option: MachineOption) -> list[float]:
    """Return the figures of an option that a cluster's forecast grows with, those that lower it negated."""
    time, room = option.worker.time, option.worker.room
    return [
        option.usd_per_hour,
        option.offer.worst_usd_per_hour,
        time.fixed_s,
        time.per_sample_s,
        time.floor_s,
        -(math.inf if time.max_samples is None else time.max_samples),
        -(math.inf if time.micro_batch is None else time.micro_batch),
        0.0 if time.micro_batch is None else time.fixed_s - time.once_s,
        0.0 if time.micro_batch is None else max(0.0, time.floor_s - time.once_s),
        -(math.inf if room is None or room.free_bytes is None else room.free_bytes),
        option.worker.log_sd,
        option.worker.compress_factor,
        option.evaluation_s,
        option.startup_s,
        option.disk_gb,
        option.losses.scarce_chance,
        option.losses.calm.mean_per_hour,
        option.losses.scarce.mean_per_hour,
        option.losses.missing,
        option.network.log_sd,
        -option.network.relief,
        option.bus.latency_s,
        -option.bus.bytes_per_s,
        option.offer.price.log_sd,
        *(value for link in option.network.links.values() for value in (link.latency_s, -link.bytes_per_s)),
    ]


def batch_ladder(smallest: int, largest: int, task_batch_size: int) -> tuple[int, ...]:
    """Return global batch sizes from ``smallest`` to ``largest``, ascending: the task's own times 2^k and 1.5 * 2^k.

    If none lies between, returns the one size between them that is nearest to the task's own.
    """
    first, last = (math.floor(math.log2(limit / task_batch_size)) for limit in (smallest, largest))
    sizes = {round(task_batch_size * part * 2.0**k) for k in range(first, last + 1) for part in (1, 1.5)}
    inside = sorted(size for size in sizes if smallest <= size <= largest)
    return tuple(inside) or (min(max(task_batch_size, smallest), largest),)
