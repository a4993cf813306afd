"""Clouds beside AWS: their GPU machines and prices, by files in the columns of SkyPilot's public catalogues.

A region of such a cloud is called ``lambda:us-east-1``. hetopt plans for its machines and does not rent them.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, PositiveFloat

from hetopt import catalogs
from hetopt.core.artifact import Record, write_atomically
from hetopt.core.errors import BadInput
from hetopt.core.paths import inside, read_text
from hetopt.core.plain_text import known
from hetopt.optimizer.market.catalog import REGION_PRICE_LOG_SD, Catalog, Listing, Market, Price
from hetopt.optimizer.market.catalog_rows import Name, Source, read_rows, read_sources
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.market.owned import coremark_of, gpu_named
from hetopt.optimizer.market.quota import Bucket, own_bucket
from hetopt.optimizer.plan import AWS

BUNDLED_CLOUDS = Path(next(iter(catalogs.__path__))) / "clouds"

ANY_CLOUD = "any"

NETWORK_GBPS = 10.0
"""Between machines, where files of clouds say nothing: what such clouds give an ordinary machine, if not a cluster."""

GPUS_OBTAINABLE = 8
"""Of a type at once, where nothing says what an account may rent: one machine of eight, as on AWS."""

_WITH_GRACE = ("GH", "GB")
"""GPUs that share a board with NVIDIA's Grace, an Arm processor."""
_MEMORY = re.compile(r"sizeinmib\W*(\d{3,7})", re.IGNORECASE)
_MIB_PER_GIB = 1024


class CloudRow(Record):
    """A machine type in a region, as a line of a cloud's file has it."""

    name: Name = Field(alias="InstanceType")
    gpu: Name = Field(alias="AcceleratorName")
    gpus: Annotated[float, Field(ge=1, le=1024)] = Field(alias="AcceleratorCount")
    vcpus: PositiveFloat = Field(alias="vCPUs")
    memory_gib: PositiveFloat = Field(alias="MemoryGiB")
    region: Name = Field(alias="Region")
    on_demand_usd_per_hour: PositiveFloat | None = Field(default=None, alias="Price")
    spot_usd_per_hour: PositiveFloat | None = Field(default=None, alias="SpotPrice")
    gpu_facts: str = Field(default="", alias="GpuInfo")


COLUMNS = tuple(str(field.alias) for field in CloudRow.model_fields.values())
_REQUIRED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "Region", "Price")


def clouds(home: Path) -> dict[str, Path]:
    """Return the file of each cloud beside AWS by its name: imported below ``home``, else bundled."""
    folders = (BUNDLED_CLOUDS, home)
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.csv"))}


def cloud_catalogs(cloud: str, base: Catalog, home: Path) -> tuple[Catalog, ...]:
    """Return the catalogue of each region of a cloud.

    Args:
        cloud: its name, or `ANY_CLOUD`: all but AWS.
        base: knows the GPUs, and the types that machines are compared by.
        home: of imported files.

    Raises:
        BadInput: no such cloud, or its file cannot be used.
    """
    files = clouds(home)
    chosen = sorted(files) if cloud == ANY_CLOUD else [known(cloud, [*files, AWS, ANY_CLOUD], "cloud")]
    return tuple(catalog for name in chosen for catalog in _read(name, files[name], base)[0])


def import_cloud(file: Path, cloud: str, base: Catalog, home: Path) -> tuple[tuple[Catalog, ...], tuple[str, ...]]:
    """Keep a price file of a cloud under the cloud's name, once it could be read.

    Returns:
        The catalogue of each region, and the GPUs that hetopt does not know, whose machines were left out.

    Raises:
        BadInput: the file cannot be used, or the cloud cannot be called so.
    """
    if cloud in (AWS, ANY_CLOUD) or not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", cloud):
        raise BadInput(
            f"`cloud` must be a name in small letters other than {AWS} and {ANY_CLOUD}, got {cloud!r}.",
            hint='for example `cloud="lambda"`',
        )
    imported = _read(cloud, file, base)
    home.mkdir(parents=True, exist_ok=True)
    write_atomically(inside(home, f"{cloud}.csv", what="cloud"), read_text(file))
    return imported


def obtainable_gpus(found: Iterable[Catalog]) -> Mapping[Bucket, int]:
    """Return the vCPUs of each type of clouds beside AWS that an account may count on (`GPUS_OBTAINABLE`)."""
    others = (catalog.listings.values() for catalog in found if catalog.cloud != AWS)
    types = [listing.instance_type for listings in others for listing in listings]
    return {
        own_bucket(instance.name): max(1, GPUS_OBTAINABLE // instance.cuda_devices) * instance.vcpus
        for instance in types
    }


def _read(cloud: str, path: Path, base: Catalog) -> tuple[tuple[Catalog, ...], tuple[str, ...]]:
    source, coremark_of_a_cpu = _source(cloud, path), coremark_of(base, 1)
    machines: dict[str, InstanceType | None] = {}
    listings: dict[str, dict[str, Listing]] = {}
    unknown_gpus: dict[str, None] = {}
    make = CloudRow.model_validate
    filled = {"InstanceType", "AcceleratorName"}  # other lines are CPUs, and GPUs that are added to any machine
    for _, row in read_rows(path, make, columns=COLUMNS, required=_REQUIRED, others=True, filled=filled):
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
    if path.parent == BUNDLED_CLOUDS:
        return read_sources(BUNDLED_CLOUDS / "sources.json").by_name[cloud]
    day = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date()
    return Source(title=f"your file of {cloud}", date=day.isoformat(), licence="your own")


def _machine(base: Catalog, row: CloudRow, cloud: str, coremark_of_a_cpu: float | None) -> InstanceType | None:
    """Return the machine of a line; None where nobody knows its GPU."""
    memory = _MEMORY.search(row.gpu_facts)
    try:
        gpu = gpu_named(base, row.gpu, memory_gib=int(memory.group(1)) / _MIB_PER_GIB if memory else None)
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
    """Return the cheapest of a region's zones."""

    def price(market: Market, usd: float | None, log_sd: float) -> Price | None:
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
