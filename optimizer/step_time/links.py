"""The network between machines: measured where it was, else the catalogue's sustained rate times an efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetopt.core.comm.payload_bytes import Collective
from hetopt.optimizer.fit import MEASURED_LINK_LOG_SD, FittedModel, LinkModel
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import NetworkSource
from hetopt.optimizer.step_time.posterior import Shape
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
