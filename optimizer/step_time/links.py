"""The network between workers: measured where it was, else the catalogue's sustained rate times an efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetopt.core.comm.payload_bytes import Collective
from hetopt.optimizer.fit import MEASURED_LINK_LOG_SD, FittedModel, LinkModel
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import AWS, NetworkSource
from hetopt.optimizer.step_time.device_memory import Scheme
from hetopt.optimizer.step_time.posterior import Shape
from hetopt.optimizer.step_time.step_time import sharing
from hetopt.optimizer.step_time.tiers import SampledMachine

NETWORK_LATENCY_S = 150e-6
"""One message between machines of a zone through TCP and the collective library; 50-100 us are the network's."""

NETWORK_EFFICIENCY = 0.8
"""Share of the sustained rate that a collective reaches."""

SINGLE_FLOW_BYTES_PER_S = 5e9 / 8
"""A single TCP flow between machines outside a cluster placement group (AWS EC2 user guide, network bandwidth). gloo
opens one flow between neighbours; NCCL opens several and is not bound by it."""

NETWORK_LOG_SD = 0.35
"""x / 1.8 with 90 % probability, until the collectives between rented machines are timed."""

BUS_LATENCY_S = 20e-6
BUS_BYTES_PER_S = 8e9
"""GPUs of one machine over PCIe, a conservative half of what 16 lanes of generation 3 carry."""

SWITCHED_BUS_BYTES_PER_S = 100e9
SWITCHED_FAMILIES = ("p4", "p5", "p6")
"""Families of AWS whose GPUs are joined by NVSwitch."""
SWITCHED_GPUS = ("A100", "H100", "H200", "B200", "B300")
"""By their names without PCIe: other clouds' machines of several have NVSwitch, too."""


def is_switched(instance: InstanceType) -> bool:
    """Return whether NVSwitch joins the GPUs of a machine: on AWS by family, elsewhere by GPU.

    False for CPUs, and for the user's own machines, where it is not known.
    """
    if instance.cloud == AWS:
        return instance.family.startswith(SWITCHED_FAMILIES)
    return instance.accelerator is not None and not instance.owned and instance.accelerator.name in SWITCHED_GPUS


COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links between machines of one type, by collective, with their spread and where they are known from.

    Attributes:
        links: one hop to a neighbouring machine, by collective.
        log_sd: standard deviation of the log of the seconds a byte.
        source: evidence for the links.
        relief: bandwidth between three or more machines over that between two, for which ``links`` stand.
    """

    links: Mapping[Collective, LinkModel]
    log_sd: float
    source: NetworkSource
    relief: float = 1.0


def network_of(
    model: FittedModel, instance: InstanceType, shape: Shape, sampled: SampledMachine | None = None
) -> Network:
    """Return the links between machines of a type by the best evidence: step samples, profile, then catalogue.

    Whole steps of such machines, or of their relatives, go before collectives that were timed elsewhere, and those
    before the catalogue's rate.

    Args:
        model: fits of the profile.
        instance: the machine type.
        shape: shape of the job's steps; of it only ``relief``, with step samples.
        sampled: the type as step samples predict it; None: they do not.
    """
    if sampled is not None and sampled.network is not None:
        return Network(
            links=dict.fromkeys(COLLECTIVES, sampled.network),
            log_sd=sampled.network_log_sd,
            source="samples",
            relief=shape.relief.value,
        )
    links = {name: between_machines(model, instance, name) for name in COLLECTIVES}
    if model.network_links:
        return Network(links=links, log_sd=MEASURED_LINK_LOG_SD, source="profile")
    return Network(links=links, log_sd=NETWORK_LOG_SD, source="catalogue")


def between_machines(model: FittedModel, instance: InstanceType, collective: Collective) -> LinkModel:
    """Return latency and bandwidth of one hop between two machines of a type, for a collective.

    On CPUs the rate is at most that measured between workers of one host, as the library copies and adds at that rate.
    A described job uses all network cards of a machine, a measured one what hetopt launches with.
    """
    published = instance.fabric_bytes_per_s if model.profile.is_counted else instance.network_bytes_per_s
    planned = NETWORK_EFFICIENCY * published
    if not instance.cuda_devices:
        planned = min(planned, SINGLE_FLOW_BYTES_PER_S)
        if collective in model.host_links:
            planned = min(planned, model.host_links[collective].bytes_per_s)
    measured = model.network_links.get(collective)
    if measured is None:
        return LinkModel(latency_s=NETWORK_LATENCY_S, bytes_per_s=planned)
    return LinkModel(latency_s=measured.latency_s, bytes_per_s=min(measured.bytes_per_s, planned / NETWORK_EFFICIENCY))


def shared_link(link: LinkModel, workers: int, power: float) -> LinkModel:
    """Return the hop between two workers of a machine, given that of two alone there, while all workers exchange.

    Args:
        link: hop between two workers that exchange alone.
        workers: number of workers on the machine.
        power: how far the workers share the hop: latency and bytes take ``sharing(workers, power)`` times as long.
    """
    share = float(sharing(workers, power))
    return LinkModel(latency_s=link.latency_s * share, bytes_per_s=link.bytes_per_s / share)


def inside_machine(instance: InstanceType, workers: int, power: float) -> LinkModel:
    """Return latency and bandwidth of a hop between two GPUs of a machine while all its workers exchange.

    Args:
        instance: the machine; a switch (`is_switched`) has links for each worker, so that nothing is shared.
        workers: number of workers on the machine.
        power: how far they share what is between them, see `sharing`.
    """
    if is_switched(instance):
        return LinkModel(latency_s=BUS_LATENCY_S, bytes_per_s=SWITCHED_BUS_BYTES_PER_S)
    return shared_link(LinkModel(latency_s=BUS_LATENCY_S, bytes_per_s=BUS_BYTES_PER_S), workers, power)


def gathering_s(instance: InstanceType, scheme: Scheme, weight_bytes: float) -> float:
    """Return the seconds to gather sharded weights and scatter gradients among a machine's GPUs, for a micro-batch.

    Args:
        instance: the machine.
        scheme: sharding of a replica over the machine's GPUs.
        weight_bytes: bytes of the whole replica, in the precision of its matrix products.
    """
    link = inside_machine(instance, scheme.shards, 1.0)
    return scheme.gatherings * weight_bytes * (1 - 1 / scheme.shards) / link.bytes_per_s
