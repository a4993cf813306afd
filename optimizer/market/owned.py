"""Machines of one's own as a catalogue: hosts that are alike are a type, at the price of their electricity.

Nothing else is paid for them: no volume, no address, no traffic. How fast a host is, is known as of a rented type: by
its GPU's published rates, by step samples that name it, or as so many CPUs of which nothing is known but their number.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import MappingProxyType

from hetopt.core.errors import BadInput
from hetopt.core.hosts import CPU, Host, alike
from hetopt.core.plain_text import unknown
from hetopt.optimizer.market.catalog import Catalog, Listing, Price
from hetopt.optimizer.market.catalog_filter import is_called
from hetopt.optimizer.market.instance_type import Accelerator, InstanceType, known_gpus
from hetopt.optimizer.market.quota import Quotas, own_bucket
from hetopt.optimizer.plan import OWN

SOURCE = "the inventory"
_GIB_OF_A_CPU = 4.0


def owned(
    catalog: Catalog, hosts: Sequence[Host], today: datetime.date, *, measured: Collection[str] = ()
) -> tuple[Catalog, Quotas]:
    """Return an inventory as a catalogue, whose types are named after the first of their hosts (`alike`).

    Args:
        catalog: of what can be rented, which knows GPUs and CPUs.
        hosts: of the inventory.
        today: the date of their prices.
        measured: names of hosts that the profile has steps of.

    Raises:
        BadInput: of a host something is not said that a plan needs, or it is called as a type of the catalogue is.
    """
    listings: dict[str, Listing] = {}
    kinds = alike(hosts, measured)
    for host in (group[0] for group in kinds.values()):
        if host.name in catalog.instance_types:
            raise BadInput(f"a host is called {host.name}, as a type that can be rented.", hint="rename it")
        machine = _machine(catalog, host)
        price = Price(
            usd_per_hour=_usd_per_hour(host), market="on-demand", region=OWN, date=today, source=host.cost_in_words
        )
        listings[host.name] = Listing(instance_type=machine, on_demand=price)
    types = {**catalog.instance_types, **{name: listing.instance_type for name, listing in listings.items()}}
    quotas = {own_bucket(name): len(kinds[name]) * listing.instance_type.vcpus for name, listing in listings.items()}
    inventory = replace(catalog, cloud=OWN, region=OWN, instance_types=types, listings=listings)
    return inventory, MappingProxyType(quotas)


def _usd_per_hour(host: Host) -> float:
    usd_per_hour = host.cost_usd_per_hour
    if usd_per_hour is None:
        raise BadInput(
            f"nobody said what {host.name} costs, so no plan can weigh it.",
            hint="add kw = 0.35 and usd_per_kwh = 0.30 to it, or usd_per_hour = 0.10",
        )
    return usd_per_hour


def _machine(catalog: Catalog, host: Host) -> InstanceType:
    if host.cpus is None or host.network_mbit is None:
        raise BadInput(
            f"a plan needs to know the CPUs of {host.name}, and its network.",
            hint="`hetopt hosts check hosts.toml` says what to add, with the rate between hosts; of a single one "
            "say it yourself, such as network_mbit = 1000",
        )
    gpus = _accelerators(catalog, host)
    return InstanceType(
        name=host.name,
        vcpus=host.cpus,
        memory_gib=host.memory_gib or _GIB_OF_A_CPU * host.cpus,
        network_baseline_gbps=host.network_mbit / 1000,
        accelerator=_least(gpus),
        unlike=gpus if len(set(gpus)) > 1 else (),
        coremark_iterations_per_s=coremark_of(catalog, host.cpus),
        cloud=OWN,
        source=SOURCE,
    )


def _accelerators(catalog: Catalog, host: Host) -> tuple[Accelerator, ...]:
    """Return the host's GPUs, one for each worker, by published rates.

    Raises:
        BadInput: nobody knows a GPU of that name.
    """
    gpus = []
    for name in () if CPU in host.devices else host.devices:
        try:
            gpus.append(gpu_named(catalog, name))
        except BadInput as error:
            raise BadInput(
                f"no rates of the {name} of {host.name} are known.",
                hint=f"{error.hint}; or leave the host out of this plan",
            ) from None
    return tuple(gpus)


def gpu_named(catalog: Catalog, name: str, *, memory_gib: float | None = None) -> Accelerator:
    """Return one GPU by its name, whether it is rented or owned: of several the one whose memory is nearest.

    Raises:
        BadInput: nobody knows it; the hint says what it may have been.
    """
    rented = [instance.accelerator for instance in catalog.instance_types.values()]
    known = [*(gpu for gpu in rented if gpu is not None and gpu.fraction == 1), *known_gpus()]
    alike = [gpu for gpu in known if is_called(gpu, name)]
    if not alike:
        raise unknown(name, sorted({gpu.name for gpu in known}), "GPU")
    nearest = alike[0] if memory_gib is None else min(alike, key=lambda gpu: abs(gpu.memory_gib - memory_gib))
    return replace(nearest, count=1)


def _least(gpus: Sequence[Accelerator]) -> Accelerator | None:
    """Return an accelerator that all of a machine's GPUs match or exceed, under the names of all."""
    if not gpus:
        return None
    least = min(gpus, key=lambda gpu: (gpu.fp32_flops_per_s or 0.0, gpu.memory_gib))
    names = " + ".join(dict.fromkeys(gpu.name for gpu in gpus))
    return replace(least, name=names, count=len(gpus), memory_gib=min(gpu.memory_gib for gpu in gpus))


def coremark_of(catalog: Catalog, cpus: int) -> float | None:
    """Return the CoreMark of so many CPUs of the catalogue's median type; an interval holds what is not known."""
    rated = [
        instance.coremark_iterations_per_s / instance.vcpus
        for instance in catalog.instance_types.values()
        if instance.coremark_iterations_per_s is not None and not instance.burstable
    ]
    return cpus * statistics.median(rated) if rated else None
