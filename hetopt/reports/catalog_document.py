"""The catalogue as documents, and as JSON with units in the keys: instance types, GPUs, and all of one type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetopt.optimizer.market.catalog import Catalog, InterruptionBand, Listing, Price
from hetopt.optimizer.market.catalog_filter import RentableGpu
from hetopt.optimizer.market.instance_type import Accelerator, InstanceType
from hetopt.reports.document import Block, Column, Facts, Heading, Line, Remarks, Table, columns

UNKNOWN = "unknown"


def facts(listing: Listing) -> dict[str, Any]:
    """Return an instance type in one region as JSON, with units in the keys; a fact that is not known is null."""
    instance = listing.instance_type
    return {
        "instance_type": instance.name,
        "family": instance.family,
        "generation": instance.generation,
        "architecture": instance.architecture,
        "vcpus": instance.vcpus,
        "cores": instance.cores,
        "clock_ghz": instance.clock_ghz,
        "cpu_vendor": instance.cpu_vendor,
        "cpu_model": instance.cpu_model,
        "coremark_iterations_per_s": instance.coremark_iterations_per_s,
        "memory_gib": instance.memory_gib,
        "accelerator": _accelerator_facts(instance.accelerator) if instance.accelerator else None,
        "other_accelerators": list(instance.other_accelerators),
        "network_baseline_gbps": instance.network_baseline_gbps,
        "network_peak_gbps": instance.network_peak_gbps,
        "network_cards": instance.network_cards,
        "efa": instance.efa,
        "placement_group": instance.placement_group,
        "bare_metal": instance.bare_metal,
        "burstable": instance.burstable,
        "spot_supported": instance.spot_supported,
        "local_nvme_gb": instance.local_nvme_gb,
        "ebs_baseline_mbps": instance.ebs_baseline_mbps,
        "source": instance.source,
        **_market_facts(listing),
    }


def all_facts(catalog: Catalog, listing: Listing, everywhere: Mapping[str, Listing]) -> dict[str, Any]:
    """Return an instance type's `facts` with its source spelled out, its caveats and every region.

    Args:
        catalog: catalogue of the region that is asked for.
        listing: the type in that region.
        everywhere: the type in every region that has it, by region; empty: no region has it.
    """
    name = listing.instance_type.name
    source = catalog.sources.by_name[listing.instance_type.source]
    lowest = {region: price for region, other in everywhere.items() if (price := _lowest(other))}
    cheapest = min(lowest.values(), key=lambda price: price.usd_per_hour, default=None)
    return {
        **facts(listing),
        "region": catalog.region,
        "source": {"title": source.title, "date": source.date, "licence": source.licence, "url": source.url},
        "caveats": [{"about": caveat.about, "note": caveat.note} for caveat in catalog.caveats(name)],
        "regions": [{"region": region, **_market_facts(other)} for region, other in everywhere.items()],
        "cheapest_known": {"region": cheapest.region, **_price_facts(cheapest)} if cheapest else None,
        "regions_with_prices": list(lowest),
    }


def listing_table(catalog: Catalog, listings: Sequence[Listing], *, matching: int, coremark: bool) -> Iterator[Block]:
    """Yield a table of instance types with prices, and notes on it.

    Columns that would say nothing, or the same on each line, are left out.

    Args:
        catalog: catalogue that the types are of.
        listings: types to show, in order; there may be none.
        matching: number of types before the list was cut short.
        coremark: whether to add the CPU benchmark.
    """
    kinds = [listing.instance_type for listing in listings]
    prices = (
        [
            (Column("on demand", "number"), [_usd(listing.on_demand) for listing in listings]),
            (Column("spot", "number"), [_usd(listing.spot) for listing in listings]),
        ]
        if catalog.has_prices
        else [(Column("spot saves", "number"), [_saving(listing) for listing in listings])]
    )
    shown: list[tuple[Column, list[str]]] = [
        (Column("type", "word"), [kind.name for kind in kinds]),
        (Column("vCPU", "number", may_go=4), [str(kind.vcpus) for kind in kinds]),
        (Column("GiB", "number", may_go=2), [f"{kind.memory_gib:g}" for kind in kinds]),
        (Column("accelerator"), [_accelerators(kind) for kind in kinds]),
        (Column("Gbit/s", "number", may_go=1), [f"{kind.network_baseline_gbps:.4g}" for kind in kinds]),
        (Column("arch", "word", may_go=0), [kind.architecture or "-" for kind in kinds]),
        (Column("CoreMark", "number"), [_thousands(kind.coremark_iterations_per_s) for kind in kinds]),
        *prices,
        (Column("interr.", "number", may_go=3), [_band(listing) for listing in listings]),
    ]
    says_nothing = {
        "accelerator": all(cell == "-" for cell in shown[3][1]),
        "arch": len(set(shown[5][1])) == 1,
        "CoreMark": not coremark,
    }
    kept = [(column, cells) for column, cells in shown if not says_nothing.get(column.name, False)]
    rows = list(zip(*(cells for _, cells in kept), strict=True))
    yield Table(name="instance types", columns=[column for column, _ in kept], rows=rows)
    notes = [*price_notes([catalog], listings), *_band_notes(listings)]
    if coremark:
        notes.append("CoreMark: thousand iterations/s over all vCPUs")
    if len(listings) < matching:
        notes.append(f"{len(listings)} of {matching:,} types shown; all with `hetopt catalog list --limit 0`")
    yield from (Line(note, "soft") for note in notes)


def gpu_table(gpus: Sequence[RentableGpu], catalogs: Sequence[Catalog]) -> Iterator[Block]:
    """Yield a table of GPUs, and lines of notes below it.

    Columns are memory in GiB, rates in TFLOP/s and GB/s, and the cheapest machine that has the GPU, with the USD an
    hour of the whole machine on demand and on spot.

    Args:
        gpus: GPUs to show, in order.
        catalogs: catalogues of the regions; of several, a column names the region.
    """

    def rate(name: str, may_go: int, values: Sequence[float | None]) -> tuple[Column, list[str]]:
        return Column(name, "number", may_go), ["-" if value is None else f"{value:.4g}" for value in values]

    shown = [
        (Column("GPU"), [gpu.name for gpu in gpus]),
        (Column("GiB", "number", may_go=5), [f"{gpu.memory_gib:.0f}" for gpu in gpus]),
        rate("fp32", 0, [gpu.fp32_tflops for gpu in gpus]),
        rate("TF32", 1, [gpu.tf32_tflops for gpu in gpus]),
        rate("bf16", 3, [gpu.bf16_tflops for gpu in gpus]),
        rate("fp16", 4, [gpu.fp16_tflops for gpu in gpus]),
        rate("GB/s", 2, [gpu.bandwidth_gb_per_s for gpu in gpus]),
        (Column("cheapest type", "word"), [f"{gpu.count}: {gpu.machine.instance_type.name}" for gpu in gpus]),
        (Column("on demand", "number"), [_usd_short(gpu.machine.on_demand) for gpu in gpus]),
        (Column("spot", "number"), [_usd_short(gpu.machine.spot) for gpu in gpus]),
    ]
    if len(catalogs) > 1:
        shown.append((Column("region", "word"), [gpu.region or "-" for gpu in gpus]))
    rows = list(zip(*(cells for _, cells in shown), strict=True))
    yield Table(name="GPUs", columns=[column for column, _ in shown], rows=rows)
    yield Line("fp32 to fp16: peak TFLOP/s of one GPU, dense; GB/s: of its memory", "soft")
    yield Line("cheapest type: how many GPUs it has, and its name; prices are for all of it", "soft")
    yield from (Line(note, "soft") for note in price_notes(catalogs, [gpu.machine for gpu in gpus]))


def instance_page(catalog: Catalog, listing: Listing, everywhere: Mapping[str, Listing]) -> Iterator[Block]:
    """Yield the page of one instance type: facts, prices, regions and caveats.

    Args:
        catalog: catalogue of the region that is asked for.
        listing: the type in that region.
        everywhere: the type in every region that has it, by region; empty: no region is shown.
    """
    name = listing.instance_type.name
    yield Line(f"{name} in {catalog.region}", "strong")
    yield Facts(_facts(catalog, listing))
    yield Heading("Prices, USD an hour")
    prices = [price for price in (listing.on_demand, listing.spot) if price]
    if prices:
        yield Table(
            name="prices",
            columns=columns("market, #price, !date, source"),
            rows=[[price.market, _usd(price), price.date.isoformat(), price.source] for price in prices],
            caption="~ is an estimate, not a quote: on demand less what spot saved in a month"
            if listing.spot and listing.spot.is_estimate
            else "",
        )
    else:
        yield Line(f"none is known in {catalog.region}")
    yield Heading("Regions")
    if everywhere:
        yield from _regions(everywhere)
    yield Heading("Before you rely on this")
    yield Remarks([f"{caveat.about}: {caveat.note}" for caveat in catalog.caveats(name)])


def _regions(everywhere: Mapping[str, Listing]) -> Iterator[Block]:
    """Yield the regions, cheapest first where prices are known, then by what spot saves there."""

    def order(named: tuple[str, Listing]) -> tuple[float, float]:
        price = _lowest(named[1])
        return (price.usd_per_hour if price else math.inf, -(named[1].spot_saving or 0))

    yield Table(
        name="regions",
        columns=[
            *columns("!region, #on demand, #spot"),
            Column("spot saves", "number", may_go=1),
            Column("interr.", "number", may_go=0),
        ],
        rows=[
            [region, _usd(listing.on_demand), _usd(listing.spot), _saving(listing), _band(listing)]
            for region, listing in sorted(everywhere.items(), key=order)
        ],
    )
    yield from (Line(note, "soft") for note in _band_notes(list(everywhere.values())))


def _facts(catalog: Catalog, listing: Listing) -> dict[str, str]:
    """Return an instance type's facts in words, by name; facts that do not apply are left out."""
    instance = listing.instance_type
    source = catalog.sources.by_name[instance.source]
    cores = f" on {instance.cores} core{'s' if instance.cores > 1 else ''}" if instance.cores else ""
    clock = f", {instance.clock_ghz:g} GHz sustained" if instance.clock_ghz else ""
    processor = instance.cpu_model or instance.cpu_vendor or UNKNOWN
    peak, sustained = instance.network_peak_gbps, instance.network_baseline_gbps
    burst = f", bursts to {peak:g} for minutes" if peak and peak > sustained else ""
    coremark = f"{_thousands(instance.coremark_iterations_per_s)} thousand iterations/s over all vCPUs"
    band = listing.band
    entries = {
        "vCPUs": f"{instance.vcpus}{cores}",
        "processor": f"{processor}{clock}, {instance.architecture or 'architecture unknown'}",
        "CoreMark": coremark if instance.coremark_iterations_per_s else UNKNOWN,
        "memory": f"{instance.memory_gib:g} GiB",
        "accelerator": f"{' and '.join(instance.other_accelerators)}, not driven by torch alone"
        if instance.other_accelerators
        else "",
        **(_accelerator(instance.accelerator) if instance.accelerator else {}),
        "network": f"{sustained:g} Gbit/s sustained{burst}",
        "EFA": _yes(instance.efa),
        "placement group": _yes(instance.placement_group),
        "local disk": f"{instance.local_nvme_gb:g} GB" if instance.local_nvme_gb else "none known",
        "EBS": f"{instance.ebs_baseline_mbps:g} Mbit/s sustained" if instance.ebs_baseline_mbps else UNKNOWN,
        "bare metal": _yes(instance.bare_metal),
        "burstable CPU": _yes(instance.burstable),
        "can be spot": _yes(instance.spot_supported),
        "zones": UNKNOWN if listing.zones is None else str(listing.zones),
        "interrupted": f"{band.label} of spot machines in a month ({band.source}, {band.date})" if band else UNKNOWN,
        "source": f"{source.title}, {source.date}, {source.licence}",
    }
    return {name: value for name, value in entries.items() if value}


def _accelerator(accelerator: Accelerator) -> dict[str, str]:
    """Return an accelerator, and its peak rates as far as known (empty: none is), in words by name."""
    cuda = "CUDA" if accelerator.is_cuda else "not CUDA"
    rates = ", ".join(
        f"{rate / unit:.4g} {name}"
        for rate, unit, name in (
            (accelerator.fp32_flops_per_s, 1e12, "TFLOP/s fp32"),
            (accelerator.tf32_tensor_flops_per_s, 1e12, "TF32"),
            (accelerator.fp16_tensor_flops_per_s, 1e12, "fp16 tensor"),
            (accelerator.memory_bandwidth_bytes_per_s, 1e9, "GB/s"),
        )
        if rate is not None
    )
    model = accelerator.model
    peak = f"{rates} ({model.source}; confidence {model.confidence})" if model and rates else ""
    has = f"{_devices(accelerator)}, {accelerator.memory_gib:g} GiB each, {accelerator.manufacturer}, {cuda}"
    return {"accelerator": has, "peak of one": peak}


def price_notes(catalogs: Sequence[Catalog], listings: Sequence[Listing]) -> list[str]:
    """Return a sentence on each kind of price of some listings: its date and its source.

    Without any price in the catalogues there is one sentence, on what spot saves.

    Args:
        catalogs: catalogues that the prices are of, at least one.
        listings: instance types whose prices are shown.
    """
    where = catalogs[0].region if len(catalogs) == 1 else "the region named"
    if not any(catalog.has_prices for catalog in catalogs):
        return [f"spot saves: share of the on-demand price in {where}, which the catalogue does not have"]
    notes = []
    on_demand = [listing.on_demand for listing in listings if listing.on_demand]
    measured = [listing.spot for listing in listings if listing.spot and not listing.spot.is_estimate]
    estimated = [listing.spot for listing in listings if listing.spot and listing.spot.is_estimate]
    if on_demand:
        notes.append(f"on demand: USD an hour in {where}, {_origins(on_demand)}")
    if measured:
        notes.append(f"spot: USD an hour in {where}, {_origins(measured)}")
    if estimated:
        oldest = min(price.date for price in estimated)
        notes.append(f"spot ~: on demand less the mean saving published on {oldest}; an estimate, not a quote")
    return notes


def _band_notes(listings: Sequence[Listing]) -> list[str]:
    bands = [listing.band for listing in listings if listing.band]
    return [f"interr.: share of spot machines preempted in a month, {_origins(bands)}"] if bands else []


def _band(listing: Listing) -> str:
    return listing.band.label if listing.band else "-"


def _origins(figures: Sequence[Price | InterruptionBand]) -> str:
    return "; ".join(sorted({f"{figure.source}, {figure.date}" for figure in figures}))


def _lowest(listing: Listing) -> Price | None:
    prices = [price for price in (listing.spot, listing.on_demand) if price]
    return min(prices, key=lambda price: price.usd_per_hour, default=None)


def _market_facts(listing: Listing) -> dict[str, Any]:
    band = listing.band
    return {
        "zones": listing.zones,
        "prices": [_price_facts(price) for price in (listing.on_demand, listing.spot) if price],
        "spot_saving_percent": None if listing.spot_saving is None else round(listing.spot_saving * 100, 6),
        "interruption_band": {"label": band.label, "date": band.date.isoformat(), "source": band.source}
        if band
        else None,
    }


def _price_facts(price: Price) -> dict[str, Any]:
    return {
        "usd_per_hour": price.usd_per_hour,
        "market": price.market,
        "region": price.region,
        "date": price.date.isoformat(),
        "source": price.source,
        "is_estimate": price.is_estimate,
    }


def _accelerator_facts(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "name": accelerator.name,
        "manufacturer": accelerator.manufacturer,
        "count": accelerator.count,
        "fraction": accelerator.fraction,
        "memory_gib": accelerator.memory_gib,
        "is_cuda": accelerator.is_cuda,
        "fp32_flops_per_s": accelerator.fp32_flops_per_s,
        "tf32_tensor_flops_per_s": accelerator.tf32_tensor_flops_per_s,
        "fp16_tensor_flops_per_s": accelerator.fp16_tensor_flops_per_s,
        "memory_bandwidth_bytes_per_s": accelerator.memory_bandwidth_bytes_per_s,
        "rates_source": accelerator.model.source if accelerator.model else None,
        "rates_confidence": accelerator.model.confidence if accelerator.model else None,
    }


def _accelerators(instance: InstanceType) -> str:
    """Return an instance's accelerators in short, as in '4x A10G 22G' or '1/8 L4 3G'."""
    if instance.accelerator:
        return f"{_devices(instance.accelerator)} {instance.accelerator.memory_gib:.0f}G"
    return ", ".join(instance.other_accelerators) or "-"


def _devices(accelerator: Accelerator) -> str:
    part = accelerator.fraction
    return f"{accelerator.count}{'x' if part == 1 else f'/{1 / part:g}'} {accelerator.name}"


def _usd(price: Price | None, digits: int = 4) -> str:
    return "-" if price is None else f"{'~' if price.is_estimate else ''}{price.usd_per_hour:.{digits}f}"


def _saving(listing: Listing) -> str:
    return "-" if listing.spot_saving is None else f"{listing.spot_saving * 100:.0f} %"


def _usd_short(price: Price | None) -> str:
    """Return a price with the digits that tell prices apart."""
    return _usd(price, 3 if price is None or price.usd_per_hour < 10 else 2)


def _thousands(value: float | None) -> str:
    return "-" if value is None else f"{value / 1000:,.1f}"


def _yes(flag: bool | None) -> str:
    return UNKNOWN if flag is None else "yes" if flag else "no"
