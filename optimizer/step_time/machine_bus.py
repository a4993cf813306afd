"""The links between the GPUs of one machine, PCIe or NVSwitch, and the time to gather a model that they share."""

from __future__ import annotations

from hetopt.optimizer.fit import LinkModel
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import AWS
from hetopt.optimizer.step_time.device_memory import Scheme
from hetopt.optimizer.step_time.step_time import sharing

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


def shared_link(link: LinkModel, workers: int, power: float) -> LinkModel:
    """Return a hop between two workers of a machine, slowed because all its ``workers`` exchange at once."""
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

    Weights are gathered before forward and, unless they stay until then, before backward; gradients are scattered once
    (Zhao et al. 2023, "PyTorch FSDP", section 3.2).

    Args:
        instance: the machine.
        scheme: by which they share the replica.
        weight_bytes: of the replica, as it is multiplied with.
    """
    link = inside_machine(instance, scheme.shards, 1.0)
    return (
        {"none": 0, "grads": 2, "full": 3, "auto": 3}[scheme.shard]
        * weight_bytes
        * (1 - 1 / scheme.shards)
        / link.bytes_per_s
    )
