"""Catalogues beside AWS's: GPU machines of other clouds, and machines of one's own.

Other clouds' prices are files in the columns of SkyPilot's public catalogues. A region of such a cloud is called
``lambda:us-east-1``. One's own hosts that are alike are a type, at the price that the inventory states.
"""

import datetime
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from hetopt import catalogs
from hetopt.core.artifact import Record, write_atomically
from hetopt.core.errors import BadInput
from hetopt.core.hosts import CPU, Host, alike, placeable
from hetopt.core.paths import inside, read_text
from hetopt.core.plain_text import either, known, unknown
from hetopt.optimizer.market.catalog import REGION_PRICE_LOG_SD, Catalog, Listing, Market, Price
from hetopt.optimizer.market.catalog_filter import is_called
from hetopt.optimizer.market.catalog_rows import Name, Source, read_rows, read_sources
from hetopt.optimizer.market.instance_type import Accelerator, InstanceType, known_gpus
from hetopt.optimizer.market.quota import Bucket, Quotas, own_bucket
from hetopt.optimizer.plan import AWS, OWN, UNLIKE

SOURCE = "the inventory"
_GIB_OF_A_CPU = 4.0


def owned(
    catalog: Catalog, hosts: Sequence[Host], today: datetime.date, *, measured: Collection[str] = ()
) -> tuple[Catalog, Quotas]:
    """Return the user's hosts as a catalogue, a type per kind of host, and as quotas: vCPUs of all hosts of a kind.

    A type is named after the first of its hosts (`placeable`). ``instance_types`` has rented types too, for their
    specifications; listings are of the hosts alone, at on-demand prices in the region "own".

    Args:
        catalog: catalog of what can be rented, which knows GPUs and CPUs.
        hosts: hosts of the inventory.
        today: the date of their prices.
        measured: names of hosts that the profile has steps of.

    Raises:
        BadInput: a host lacks its cost, CPUs or network rate, its GPU is not known, or it is named as a type of the
            catalogue.
    """
    listings: dict[str, Listing] = {}
    kinds = alike(hosts, measured)
    for host in (group[0] for group in placeable(hosts, measured).values()):
        if host.name in catalog.instance_types:
            raise BadInput(f"a host is called {host.name}, as a type that can be rented.", hint="rename it")
        whole = next(other.name for other in hosts if other.way == host.way)
        # From a host that is alone gradients go nowhere: any rate does.
        listings[host.name] = _listing(catalog, host, whole, today, 1000.0 if len(hosts) == 1 else None)
    types = {**catalog.instance_types, **{name: listing.instance_type for name, listing in listings.items()}}
    quotas = {own_bucket(name): len(group) * listings[name].instance_type.vcpus for name, group in kinds.items()}
    inventory = replace(catalog, cloud=OWN, region=OWN, instance_types=types, listings=listings)
    return inventory, MappingProxyType(quotas)


def _listing(catalog: Catalog, host: Host, whole: str, today: datetime.date, else_mbit: float | None) -> Listing:
    """Return a host of the inventory as a machine type, listed at its owner's price.

    Args:
        catalog: knows GPUs and CPUs.
        host: host to list; it may be a part of a machine.
        whole: name of the machine that the host is, whole or in part.
        today: the date of the price.
        else_mbit: network rate, Mbit/s, if the inventory has none; None: it must have one.

    Raises:
        BadInput: the inventory lacks the host's CPUs, network rate or cost, which the hint names, or its GPU is not
            known.
    """
    network_mbit, usd_per_hour = host.network_mbit or else_mbit, host.cost_usd_per_hour
    if host.cpus is None or network_mbit is None or usd_per_hour is None:
        needed = {
            "cpus = 8": host.cpus,
            "network_mbit = 1000": network_mbit,
            "usd_per_hour = 0.10 (or kw = 0.35 with usd_per_kwh = 0.30)": usd_per_hour,
        }
        raise BadInput(
            f"a plan needs to know the CPUs, the network and the cost of {host.name}.",
            hint=f"add {', '.join(line for line, value in needed.items() if value is None)}; "
            "`hetopt hosts check` measures CPUs and networks",
        )
    gpus = _accelerators(catalog, host)
    machine = InstanceType(
        name=host.name,
        vcpus=host.cpus,
        memory_gib=host.memory_gib or _GIB_OF_A_CPU * host.cpus,
        network_baseline_gbps=network_mbit / 1000,
        accelerator=_least(gpus),
        unlike=gpus if len(set(gpus)) > 1 else (),
        coremark_iterations_per_s=coremark_of(catalog, host.cpus),
        cloud=OWN,
        part_of=whole,
        source=SOURCE,
    )
    price = Price(usd_per_hour=usd_per_hour, market="on-demand", region=OWN, date=today, source=host.cost_in_words)
    return Listing(instance_type=machine, on_demand=price)


def _accelerators(catalog: Catalog, host: Host) -> tuple[Accelerator, ...]:
    """Return the host's GPUs, one for each worker, with their published rates; empty: it trains on its CPUs.

    Raises:
        BadInput: as of `gpu_named`; begins with the host's name.
    """
    gpus: list[Accelerator] = []
    for name in () if CPU in host.devices else host.devices:
        try:
            gpus.append(gpu_named(catalog, name))
        except BadInput as error:
            raise BadInput(f"{host.name}: {error.message}", hint=error.hint) from None
    return tuple(gpus)


def gpu_named(catalog: Catalog, name: str, *, memory_gib: float | None = None) -> Accelerator:
    """Return one whole GPU by its name, rented or owned, with count 1; rented parts of GPUs are passed over.

    Args:
        catalog: its machines' GPUs are searched beside `known_gpus`.
        name: name in any spelling (see `is_called`).
        memory_gib: memory of the GPU, of which the nearest size is taken; None: the name must have a single size.

    Raises:
        BadInput: the name is unknown (the hint has similar ones), the GPU is not NVIDIA's, or ``memory_gib`` is None
            and there are several sizes.
    """
    rented = [instance.accelerator for instance in catalog.instance_types.values()]
    known = [*(gpu for gpu in rented if gpu is not None and gpu.fraction == 1), *known_gpus()]
    alike = [gpu for gpu in known if is_called(gpu, name)]
    if not alike:
        raise unknown(name, sorted({gpu.name for gpu in known if gpu.is_cuda}), "GPU")
    if not alike[0].is_cuda:
        raise BadInput(
            f"{name} is made by {alike[0].manufacturer}, and hetopt plans for NVIDIA's GPUs and for CPUs.",
            hint='leave it out, or train on that machine\'s processors: devices = "cpu"',
        )
    sizes = sorted({gpu.memory_gib for gpu in known_gpus() if is_called(gpu, name)})
    if memory_gib is None and len(sizes) > 1:
        raise BadInput(
            f"the {alike[0].name} is made with {either(f'{size:g} GiB' for size in sizes)}.",
            hint=f"write {either(repr(f'{alike[0].name} {size:g} GiB') for size in sizes)}",
        )
    nearest = alike[0] if memory_gib is None else min(alike, key=lambda gpu: abs(gpu.memory_gib - memory_gib))
    return replace(nearest, count=1)


def _least(gpus: Sequence[Accelerator]) -> Accelerator | None:
    """Return one accelerator for all of a machine's GPUs: alike, with their count; else the least, named after all.

    None: no GPUs.
    """
    if not gpus:
        return None
    least = min(gpus, key=lambda gpu: (gpu.fp32_flops_per_s or 0.0, gpu.memory_gib))
    if len(set(gpus)) == 1:
        return replace(least, count=len(gpus))
    counted = ((f"{count} × " * (count > 1), gpu) for gpu, count in Counter(gpus).items())
    names = UNLIKE.join(f"{many}{gpu.name} {gpu.memory_gib:.0f} GiB" for many, gpu in counted)
    return replace(least, name=names, count=len(gpus), memory_gib=min(gpu.memory_gib for gpu in gpus))


def coremark_of(catalog: Catalog, cpus: int) -> float | None:
    """Return the CoreMark, iterations/s, of ``cpus`` vCPUs of the catalogue's median type; None: no type has one.

    Burstable types do not count.
    """
    rated = [
        instance.coremark_iterations_per_s / instance.vcpus
        for instance in catalog.instance_types.values()
        if instance.coremark_iterations_per_s is not None and not instance.burstable
    ]
    return cpus * statistics.median(rated) if rated else None


BUNDLED_CLOUDS = catalogs.FOLDER / "clouds"

ANY_CLOUD = "any"

NETWORK_GBPS = 10.0
"""Network rate of a machine of a cloud beside AWS, Gbit/s, as their files say nothing: what such clouds give an
ordinary machine, if not a cluster."""

GPUS_OBTAINABLE = 8
"""GPUs of one type that are taken to be obtainable at once, where nothing says what an account may rent: one machine of
eight, as on AWS."""

MACHINES_OBTAINABLE = 16
"""Machines of one type that are taken to be obtainable at once, where nothing says what an account may rent: more are
seldom free together, and the slowest of them to start holds up the others."""

_WITH_GRACE = ("GH", "GB")
"""GPUs that share a board with NVIDIA's Grace, an Arm processor."""
_MEMORY = re.compile(r"sizeinmib\W*(\d{3,7})", re.IGNORECASE)


class CloudRow(Record):
    """One line of a cloud's price file: a machine type in a region, in the columns of SkyPilot's catalogues.

    ``gpus`` is the number of GPUs; prices are USD an hour of the whole machine (None: the file has none). ``gpu_facts``
    is the cloud's own text on the GPU; empty: none.
    """

    name: Name = Field(alias="InstanceType")
    gpu: Name = Field(alias="AcceleratorName")
    gpus: Annotated[float, Field(ge=1, le=1024)] = Field(alias="AcceleratorCount")
    vcpus: PositiveFloat = Field(alias="vCPUs")
    memory_gib: PositiveFloat = Field(alias="MemoryGiB")
    region: Name = Field(alias="Region")
    on_demand_usd_per_hour: PositiveFloat | None = Field(default=None, alias="Price")
    spot_usd_per_hour: PositiveFloat | None = Field(default=None, alias="SpotPrice")
    gpu_facts: str = Field(default="", alias="GpuInfo")
    currency: Literal["USD"] = Field(default="USD", alias="Currency")


COLUMNS = tuple(str(field.alias) for field in CloudRow.model_fields.values())
_FILE_HINT = "correct the file: its columns are those of SkyPilot's vms.csv, and its prices are in USD"
_REQUIRED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "Region", "Price")


def clouds(home: Path) -> dict[str, Path]:
    """Return the path of each non-AWS cloud's price file by the cloud's name: imported in ``home``, else bundled.

    ``home`` is the folder of imported files, and need not exist.
    """
    folders = (BUNDLED_CLOUDS, home)
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.csv"))}


def cloud_catalogs(cloud: str, base: Catalog, home: Path) -> tuple[Catalog, ...]:
    """Return a catalogue for each region of a non-AWS cloud, or of all such clouds (`ANY_CLOUD`), sorted by region.

    Args:
        cloud: its name, or `ANY_CLOUD`: all but AWS; not "aws".
        base: AWS's catalogue, which knows the GPUs, and the types that machines are compared by.
        home: folder of imported files.

    Raises:
        BadInput: there is no such cloud beside AWS, or a price file cannot be used or has no machine with a known GPU.
    """
    files = clouds(home)
    names = [*files, AWS, ANY_CLOUD]
    hint = (
        f"choose one of: {', '.join(names)}; or bring its prices, a vms.csv of SkyPilot's catalogues: "
        f"`hetopt catalog import FILE --cloud {cloud}`"
    )
    chosen = sorted(files) if cloud == ANY_CLOUD else [known(cloud, [*files, ANY_CLOUD], "cloud", hint=hint)]
    return tuple(catalog for name in chosen for catalog in _read(name, files[name], base)[0])


def import_cloud(file: Path, cloud: str, base: Catalog, home: Path) -> tuple[tuple[Catalog, ...], tuple[str, ...]]:
    """Copy a cloud's price file to folder ``home`` if it can be read; return its catalogues, and names of unknown GPUs.

    ``home`` is made if it is missing, and an earlier file of that cloud is replaced. Machines of GPUs that are unknown,
    or not NVIDIA's, are left out.

    Args:
        file: file with the columns of SkyPilot's vms.csv.
        cloud: name of the cloud from now on.
        base: AWS's catalogue, which knows the GPUs.
        home: folder of imported files.

    Raises:
        BadInput: the file cannot be used or written, or the cloud cannot be called so: small letters, digits and
            hyphens, and neither "aws" nor "any".
    """
    if cloud in (AWS, ANY_CLOUD) or not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", cloud):
        raise BadInput(
            f"`cloud` must be a name in small letters other than {AWS} and {ANY_CLOUD}, got {cloud!r}.",
            hint='for example `cloud="lambda"`',
        )
    text = read_text(file, hint="name a vms.csv of SkyPilot's public catalogues, or a file with its columns")
    imported = _read(cloud, file, base)
    home.mkdir(parents=True, exist_ok=True)
    write_atomically(inside(home, f"{cloud}.csv", what="cloud"), text)
    return imported


def obtainable_gpus(searched: Iterable[Catalog]) -> Mapping[Bucket, int]:
    """Return assumed vCPU quotas of the types of non-AWS catalogues, by bucket: 8 GPUs of a type, or one machine."""
    others = (catalog.listings.values() for catalog in searched if catalog.cloud != AWS)
    types = [listing.instance_type for listings in others for listing in listings]
    return {
        own_bucket(instance.name): max(1, GPUS_OBTAINABLE // max(1, instance.cuda_devices)) * instance.vcpus
        for instance in types
    }


def _read(cloud: str, path: Path, base: Catalog) -> tuple[tuple[Catalog, ...], tuple[str, ...]]:
    """Return a catalogue for each region of a cloud's price file, and the names of GPUs that hetopt does not know.

    Lines without a GPU, and machines of an unknown GPU, are left out.

    Raises:
        BadInput: the file cannot be used, or no machine is left.
    """
    source, coremark_of_a_cpu = _source(cloud, path), coremark_of(base, 1)
    machines: dict[str, InstanceType | None] = {}
    listings: dict[str, dict[str, Listing]] = {}
    unknown_gpus: dict[str, None] = {}
    filled = {"InstanceType", "AcceleratorName"}  # other lines are CPUs, and GPUs that are added to any machine
    for _, row in read_rows(
        path, CloudRow.model_validate, columns=COLUMNS, required=_REQUIRED, others=True, filled=filled, hint=_FILE_HINT
    ):
        if row.name not in machines:
            machines[row.name] = _machine(base, row, cloud, coremark_of_a_cpu)
        machine = machines[row.name]
        if machine is None:
            unknown_gpus[row.gpu] = None
            continue
        here = listings.setdefault(row.region, {})
        here[row.name] = _cheaper(here.get(row.name), machine, row, f"{cloud}:{row.region}", source)
    if not listings:
        names = f" ({', '.join(unknown_gpus)})" if unknown_gpus else ""
        raise BadInput(
            f"{path} has no machine with a GPU that hetopt knows{names}.",
            hint="`hetopt gpus` lists those that it knows",
        )
    known_machines = {name: machine for name, machine in machines.items() if machine is not None}
    types = MappingProxyType({**base.instance_types, **known_machines})
    regions = tuple(f"{cloud}:{region}" for region in sorted(listings))
    sources = base.sources.model_copy(update={"by_name": {**base.sources.by_name, cloud: source}})
    by_region = (
        replace(
            base,
            cloud=cloud,
            region=f"{cloud}:{region}",
            regions=regions,
            instance_types=types,
            listings=here,
            sources=sources,
        )
        for region, here in sorted(listings.items())
    )
    return tuple(by_region), tuple(unknown_gpus)


def _source(cloud: str, path: Path) -> Source:
    """Return the source of a cloud's prices: the bundled one, or the user's file with the day of its last change."""
    if path.parent == BUNDLED_CLOUDS:
        return read_sources(BUNDLED_CLOUDS / "sources.json").by_name[cloud]
    day = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date()
    return Source(title=f"your file of {cloud}", date=day.isoformat(), licence="your own")


def _machine(base: Catalog, row: CloudRow, cloud: str, coremark_of_a_cpu: float | None) -> InstanceType | None:
    """Return the machine type of a line; None: hetopt does not know its GPU."""
    memory = _MEMORY.search(row.gpu_facts)
    try:
        gpu = gpu_named(base, row.gpu, memory_gib=int(memory.group(1)) / 2**10 if memory else 0.0)
    except BadInput:
        return None
    vcpus = max(1, int(row.vcpus))
    return InstanceType(
        name=row.name,
        vcpus=vcpus,
        memory_gib=row.memory_gib,
        network_baseline_gbps=NETWORK_GBPS,
        accelerator=replace(gpu, count=int(row.gpus)),
        coremark_iterations_per_s=None if coremark_of_a_cpu is None else vcpus * coremark_of_a_cpu,
        architecture="arm64" if gpu.name.startswith(_WITH_GRACE) else "x86_64",
        cloud=cloud,
        source=cloud,
    )


def _cheaper(before: Listing | None, machine: InstanceType, row: CloudRow, region: str, source: Source) -> Listing:
    """Return the listing of a machine in a region, each market at the lower price of ``before`` and the row."""

    def price(market: Market, usd: float | None, log_sd: float) -> Price | None:
        """Return the lower of the price in ``before`` and ``usd``; None: neither is known."""
        known_before = None if before is None else before.price(market)
        if usd is None or (known_before is not None and known_before.usd_per_hour <= usd):
            return known_before
        return Price(
            usd_per_hour=usd, market=market, region=region, date=source.day, source=source.title, log_sd=log_sd
        )

    return Listing(
        instance_type=machine,
        on_demand=price("on-demand", row.on_demand_usd_per_hour, 0.0),
        spot=price("spot", row.spot_usd_per_hour, REGION_PRICE_LOG_SD),
    )
