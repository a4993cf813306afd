"""The network between workers: measured where it was, else the catalogue's sustained rate times a stated efficiency."""

from __future__ import annotations

from hetopt.core.comm.payload_bytes import Collective
from hetopt.optimizer.fit import MEASURED_LINK_LOG_SD, FittedModel, LinkModel
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.step_time.step_time import sharing

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
"""Families whose GPUs are joined by NVSwitch."""


def network_log_sd(model: FittedModel) -> float:
    """How well the links between machines are known."""
    return MEASURED_LINK_LOG_SD if model.network_links else NETWORK_LOG_SD


def between_machines(model: FittedModel, instance: InstanceType, collective: Collective) -> LinkModel:
    """One hop from a machine of this type to its neighbour.

    On CPUs the library's own copying and adding, measured between workers of one host, bounds the rate as well.
    """
    planned = NETWORK_EFFICIENCY * instance.network_bytes_per_s
    if not instance.cuda_devices:
        planned = min(planned, SINGLE_FLOW_BYTES_PER_S)
        if collective in model.host_links:
            planned = min(planned, model.host_links[collective].bytes_per_s)
    measured = model.network_links.get(collective)
    if measured is None:
        return LinkModel(latency_s=NETWORK_LATENCY_S, bytes_per_s=planned)
    return LinkModel(latency_s=measured.latency_s, bytes_per_s=min(measured.bytes_per_s, planned / NETWORK_EFFICIENCY))


def in_company(link: LinkModel, workers: int, power: float) -> LinkModel:
    """A hop between two workers of a machine as it is beside all of them."""
    share = float(sharing(workers, power))
    return LinkModel(latency_s=link.latency_s * share, bytes_per_s=link.bytes_per_s / share)


def inside_machine(instance: InstanceType, workers: int, power: float) -> LinkModel:
    """One hop between the GPUs of a machine, all of which exchange. A switch has links for each of them.

    Args:
        instance: the machine.
        workers: on it.
        power: how far they share what is between them, see `sharing`.
    """
    if instance.family.startswith(SWITCHED_FAMILIES):
        return LinkModel(latency_s=BUS_LATENCY_S, bytes_per_s=SWITCHED_BUS_BYTES_PER_S)
    return in_company(LinkModel(latency_s=BUS_LATENCY_S, bytes_per_s=BUS_BYTES_PER_S), workers, power)
