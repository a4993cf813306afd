"""How the catalogue is told: as JSON with units in the keys, as a table, and as one instance type's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetopt.cli import render

if TYPE_CHECKING:
    from hetopt.optimizer.market.catalog import Catalog, InterruptionBand, Listing, Price
    from hetopt.optimizer.market.instance_type import Accelerator, InstanceType

UNKNOWN = "unknown"


def facts(listing: Listing) -> dict[str, Any]:
    """An instance type in one region, as JSON. What is unknown is null."""
    found = listing.instance_type
    return {
        "instance_type": found.name,
        "family": found.family,
        "generation": found.generation,
        "architecture": found.architecture,
        "vcpus": found.vcpus,
        "cores": found.cores,
        "clock_ghz": found.clock_ghz,
        "cpu_vendor": found.cpu_vendor,
        "cpu_model": found.cpu_model,
        "coremark_iterations_per_s": found.coremark_iterations_per_s,
        "memory_gib": found.memory_gib,
        "accelerator": _accelerator_facts(found.accelerator) if found.accelerator else None,
        "other_accelerators": list(found.other_accelerators),
        "network_baseline_gbps": found.network_baseline_gbps,
        "network_peak_gbps": found.network_peak_gbps,
        "network_cards": found.network_cards,
        "efa": found.efa,
        "placement_group": found.placement_group,
        "bare_metal": found.bare_metal,
        "burstable": found.burstable,
        "spot_supported": found.spot_supported,
        "local_nvme_gb": found.local_nvme_gb,
        "ebs_baseline_mbps": found.ebs_baseline_mbps,
        "source": found.source,
        **_market_facts(listing),
    }


def all_facts(catalog: Catalog, listing: Listing, everywhere: Mapping[str, Listing]) -> dict[str, Any]:
    """`facts`, with the source spelled out, the caveats and every region."""
    name = listing.instance_type.name
    source = catalog.sources.by_name[listing.instance_type.source]
    cheapest = _cheapest(everywhere)
    return {
        **facts(listing),
        "region": catalog.region,
        "source": {"title": source.title, "date": source.date, "licence": source.licence, "url": source.url},
        "caveats": [{"about": caveat.about, "note": caveat.note} for caveat in catalog.caveats(name)],
        "regions": [{"region": region, **_market_facts(other)} for region, other in everywhere.items()],
        "cheapest_known": {"region": cheapest.region, **_price_facts(cheapest)} if cheapest else None,
        "regions_with_prices": [region for region, other in everywhere.items() if _lowest(other)],
    }


def print_table(catalog: Catalog, listings: Sequence[Listing], *, matching: int, coremark: bool) -> None:
    """A line for each listing; ``matching`` is how many there were before the table was cut.

    Columns that would say nothing, or the same on each line, are left out. ``coremark`` adds the CPU benchmark.
    """
    accelerators = any(one.instance_type.accelerator or one.instance_type.other_accelerators for one in listings)
    architectures = len({one.instance_type.architecture for one in listings}) > 1
    columns = {
        "type": [one.instance_type.name for one in listings],
        "vCPU": [str(one.instance_type.vcpus) for one in listings],
        "GiB": [f"{one.instance_type.memory_gib:g}" for one in listings],
    }
    if accelerators:
        columns["accelerator"] = [_accelerators(one.instance_type) for one in listings]
    columns["Gbit/s"] = [f"{one.instance_type.network_baseline_gbps:.4g}" for one in listings]
    if architectures:
        columns["arch"] = [one.instance_type.architecture or "-" for one in listings]
    if coremark:
        columns["CoreMark"] = [_thousands(one.instance_type.coremark_iterations_per_s) for one in listings]
    if catalog.has_prices:
        columns["on demand"] = [_usd(one.on_demand) for one in listings]
        columns["spot"] = [_usd(one.spot) for one in listings]
    else:
        columns["spot saves"] = [_saving(one) for one in listings]
    columns["interr."] = [one.band.label if one.band else "-" for one in listings]
    dropped = render.fitted_table(
        columns,
        ("arch", "Gbit/s", "GiB", "interr.", "vCPU"),
        words={"type", "accelerator", "arch"},
        fixed={"type"},
        folding="accelerator",
    )
    for line in _footnotes(catalog, listings, matching, coremark=coremark):
        render.line(line, style="dim")
    if dropped:
        render.line(f"left out for lack of width: {', '.join(dropped)}", style="dim")


def print_page(catalog: Catalog, listing: Listing, everywhere: Mapping[str, Listing]) -> None:
    """All that is known of one instance type."""
    found = listing.instance_type
    render.line(f"{found.name} in {catalog.region}", style="bold")
    render.table(("fact", "value"), _fact_rows(catalog, listing))
    render.heading("Prices, USD an hour")
    prices = [price for price in (listing.on_demand, listing.spot) if price]
    if prices:
        render.table(
            ["market", "price", "date", "source"],
            [[price.market, _usd(price), price.date.isoformat(), price.source] for price in prices],
            numbers={"price"},
            fixed={"date"},
            caption="~ is an estimate from a monthly regional mean, not a quote" if listing.spot else None,
        )
    else:
        render.line(f"none is known in {catalog.region}")
    if everywhere:
        _print_regions(everywhere)
    if caveats := catalog.caveats(found.name):
        render.heading("Before you rely on this")
        for caveat in caveats:
            render.bullet(f"{caveat.about}: {caveat.note}")


def _print_regions(everywhere: Mapping[str, Listing]) -> None:
    """The regions, cheapest first where prices are known, then by what spot saves there."""
    render.heading("Regions")
    inf = float("inf")

    def order(one: Listing) -> tuple[float, float]:
        price = _lowest(one)
        return (price.usd_per_hour if price else inf, -(one.spot_saving or 0))

    ordered = sorted(everywhere.items(), key=lambda pair: order(pair[1]))
    columns = {
        "region": [region for region, _ in ordered],
        "on demand": [_usd(one.on_demand) for _, one in ordered],
        "spot": [_usd(one.spot) for _, one in ordered],
        "spot saves": [_saving(one) for _, one in ordered],
        "interr.": [one.band.label if one.band else "-" for _, one in ordered],
    }
    render.fitted_table(columns, ("interr.", "spot saves"), words={"region"}, fixed={"region"})
    if bands := [one.band for one in everywhere.values() if one.band]:
        render.line(_band_note(bands), style="dim")
    priced = [region for region, one in everywhere.items() if _lowest(one)]
    cheapest = _cheapest(everywhere)
    if cheapest is not None and len(priced) > 1:
        render.line(
            f"Cheapest of the {len(priced)} regions with prices: {cheapest.region}, {_usd(cheapest)} {cheapest.market}."
        )
    elif len(everywhere) > 1:
        where = f"only in {priced[0]}" if priced else "in none of them"
        render.line(
            f"Which region is cheapest cannot be said: prices are known {where}, and a saving is a share of its own "
            "region's on-demand price."
        )


def _fact_rows(catalog: Catalog, listing: Listing) -> list[list[str]]:
    found = listing.instance_type
    source = catalog.sources.by_name[found.source]
    cores = f" on {found.cores} core{'s' if found.cores > 1 else ''}" if found.cores else ""
    clock = f", {found.clock_ghz:g} GHz sustained" if found.clock_ghz else ""
    processor = found.cpu_model or found.cpu_vendor or UNKNOWN
    peak = found.network_peak_gbps
    burst = f", bursts to {peak:g} for minutes" if peak and peak > found.network_baseline_gbps else ""
    rows = [
        ["vCPUs", f"{found.vcpus}{cores}"],
        ["processor", f"{processor}{clock}, {found.architecture or 'architecture unknown'}"],
        ["CoreMark", f"{_thousands(found.coremark_iterations_per_s)} thousand iterations/s over all vCPUs"]
        if found.coremark_iterations_per_s
        else ["CoreMark", UNKNOWN],
        ["memory", f"{found.memory_gib:g} GiB"],
    ]
    if found.accelerator:
        rows += _accelerator_rows(found.accelerator)
    elif found.other_accelerators:
        rows.append(["accelerator", f"{' and '.join(found.other_accelerators)}, not driven by torch alone"])
    rows += [
        ["network", f"{found.network_baseline_gbps:g} Gbit/s sustained{burst}"],
        ["EFA", _yes(found.efa)],
        ["placement group", _yes(found.placement_group)],
        ["local disk", f"{found.local_nvme_gb:g} GB" if found.local_nvme_gb else "none known"],
        ["EBS", f"{found.ebs_baseline_mbps:g} Mbit/s sustained" if found.ebs_baseline_mbps else UNKNOWN],
        ["bare metal", _yes(found.bare_metal)],
        ["burstable CPU", _yes(found.burstable)],
        ["can be spot", _yes(found.spot_supported)],
        ["zones", UNKNOWN if listing.zones is None else str(listing.zones)],
        ["interrupted", _band_text(listing.band)],
        ["source", f"{source.title}, {source.date}, {source.licence}"],
    ]
    return rows


def _accelerator_rows(accelerator: Accelerator) -> list[list[str]]:
    cuda = "CUDA" if accelerator.is_cuda else "not CUDA"
    rows = [
        [
            "accelerator",
            f"{_devices(accelerator)}, {accelerator.memory_gib:g} GiB each, {accelerator.manufacturer}, {cuda}",
        ]
    ]
    rates = [
        f"{rate / unit:.4g} {name}"
        for rate, unit, name in (
            (accelerator.fp32_flops_per_s, 1e12, "TFLOP/s fp32"),
            (accelerator.tf32_tensor_flops_per_s, 1e12, "TF32"),
            (accelerator.fp16_tensor_flops_per_s, 1e12, "fp16 tensor"),
            (accelerator.memory_bandwidth_bytes_per_s, 1e9, "GB/s"),
        )
        if rate is not None
    ]
    if accelerator.model and rates:
        rows.append(
            [
                "peak of one",
                f"{', '.join(rates)} ({accelerator.model.source}; confidence {accelerator.model.confidence})",
            ]
        )
    return rows


def price_notes(catalogs: Sequence[Catalog], listings: Sequence[Listing]) -> list[str]:
    """What the prices of some listings of these catalogues are, of when, and according to whom."""
    where = catalogs[0].region if len(catalogs) == 1 else "the region named"
    if not any(catalog.has_prices for catalog in catalogs):
        return [f"spot saves: share of the on-demand price in {where}, which the catalogue does not have"]
    notes = []
    on_demand = [one.on_demand for one in listings if one.on_demand]
    measured = [one.spot for one in listings if one.spot and not one.spot.is_estimate]
    estimated = [one.spot for one in listings if one.spot and one.spot.is_estimate]
    if on_demand:
        notes.append(f"on demand: USD an hour in {where}, {_origins(on_demand)}")
    if measured:
        notes.append(f"spot: USD an hour in {where}, {_origins(measured)}")
    if estimated:
        oldest = min(price.date for price in estimated)
        notes.append(f"spot ~: on demand less the mean saving published on {oldest}; an estimate, not a quote")
    return notes


def _footnotes(catalog: Catalog, listings: Sequence[Listing], matching: int, *, coremark: bool) -> list[str]:
    """Where the figures of the table come from, and how much of the answer it is."""
    notes = price_notes([catalog], listings)
    if bands := [one.band for one in listings if one.band]:
        notes.append(_band_note(bands))
    if coremark:
        notes.append("CoreMark: thousand iterations/s over all vCPUs")
    if len(listings) < matching:
        notes.append(f"{len(listings)} of {matching:,} types shown; --limit 0 shows all")
    return notes


def _band_note(bands: Sequence[InterruptionBand]) -> str:
    return f"interr.: share of spot machines preempted in a month, {_origins(bands)}"


def _origins(figures: Sequence[Price | InterruptionBand]) -> str:
    return "; ".join(sorted({f"{figure.source}, {figure.date}" for figure in figures}))


def _lowest(listing: Listing) -> Price | None:
    prices = [price for price in (listing.spot, listing.on_demand) if price]
    return min(prices, key=lambda price: price.usd_per_hour, default=None)


def _cheapest(everywhere: Mapping[str, Listing]) -> Price | None:
    prices = [price for price in map(_lowest, everywhere.values()) if price]
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


def _accelerators(found: InstanceType) -> str:
    """'4x A10G 22G', '1/8 L4 3G'."""
    if found.accelerator:
        return f"{_devices(found.accelerator)} {found.accelerator.memory_gib:.0f}G"
    return ", ".join(found.other_accelerators) or "-"


def _devices(accelerator: Accelerator) -> str:
    part = accelerator.fraction
    return f"{accelerator.count}{'x' if part == 1 else f'/{1 / part:g}'} {accelerator.name}"


def _usd(price: Price | None) -> str:
    return "-" if price is None else f"{'~' if price.is_estimate else ''}{price.usd_per_hour:.4f}"


def _saving(listing: Listing) -> str:
    return "-" if listing.spot_saving is None else f"{listing.spot_saving * 100:.0f} %"


def _band_text(band: InterruptionBand | None) -> str:
    return f"{band.label} of spot machines in a month ({band.source}, {band.date})" if band else UNKNOWN


def _thousands(value: float | None) -> str:
    return "-" if value is None else f"{value / 1000:,.1f}"


def _yes(flag: bool | None) -> str:
    return UNKNOWN if flag is None else "yes" if flag else "no"
