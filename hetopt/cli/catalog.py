"""`hetopt catalog`: what can be rented, what it has, and what it costs according to whom."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

TABLE_ROWS = 20

app = typer.Typer(
    help="What can be rented: instance types, prices, interruption bands.", no_args_is_help=True, rich_markup_mode=None
)


class MarketOption(StrEnum):
    """Whether machines are rented on the spot market, on demand, or either way."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    ANY = "any"


class ArchitectureOption(StrEnum):
    """Processor architectures that a machine type can have."""

    X86_64 = "x86_64"
    ARM64 = "arm64"


class SortOption(StrEnum):
    """What to sort by; the names are those of `catalog_filter.quantities`."""

    PRICE = "price"
    PRICE_PER_VCPU = "price-per-vcpu"
    PRICE_PER_GPU = "price-per-gpu"
    PRICE_PER_COREMARK = "price-per-coremark"
    SPOT_SAVING = "spot-saving"
    INTERRUPTION = "interruption"
    GPUS = "gpus"
    VCPUS = "vcpus"
    MEMORY = "memory"
    NETWORK = "network"
    COREMARK = "coremark"
    NAME = "name"


REGION = typer.Option("us-east-1", "--region", "-r", help="AWS region.")
CATALOG = typer.Option(
    None, "--catalog", metavar="DIR", help="Folder of another catalogue, in the format of the bundled one."
)
JSON = typer.Option(False, "--json", help="Print JSON.")
ARCHITECTURE = typer.Option(None, "--arch", help="Processor architecture.")
FAMILY = typer.Option(None, "--family", metavar="NAME", help="Family, such as c7i; repeat for any of several.")
MARKET = typer.Option(MarketOption.ANY, "--market", help="How to rent.")
SORT = typer.Option(
    SortOption.PRICE, "--sort", metavar="KEY", help=f"Smallest first, the unknown last: {', '.join(SortOption)}."
)


@app.command("list")
def list_(
    gpu: str | None = typer.Option(None, "--gpu", metavar="NAME", help="Accelerator, such as A10G, L4 or A100-80GB."),
    gpus_min: int | None = typer.Option(None, "--gpus-min", min=1, metavar="N", help="Whole accelerators, at least."),
    vcpus_min: int | None = typer.Option(None, "--vcpus-min", min=1, metavar="N", help="vCPUs, at least."),
    vcpus_max: int | None = typer.Option(None, "--vcpus-max", min=1, metavar="N", help="vCPUs, at most."),
    memory_min: float | None = typer.Option(None, "--memory-min", metavar="GIB", help="Main memory, at least."),
    network_min: float | None = typer.Option(
        None, "--network-min", metavar="GBPS", help="Sustained network rate in Gbit/s, at least."
    ),
    arch: ArchitectureOption | None = ARCHITECTURE,
    family: list[str] | None = FAMILY,
    price_max: str | None = typer.Option(
        None, "--price-max", metavar="USD", help="Price of an hour in the chosen market (any: the lower), at most."
    ),
    market: MarketOption = MARKET,
    max_interruption: str | None = typer.Option(
        None, "--max-interruption", metavar="PERCENT", help="Share of spot machines preempted in a month, such as 10%."
    ),
    region: str = REGION,
    sort: SortOption = SORT,
    reverse: bool = typer.Option(False, "--reverse", help="Largest first."),
    limit: int | None = typer.Option(
        None, "--limit", "-n", min=0, help=f"Types to show; 0 for all. Default: {TABLE_ROWS}, with --json all."
    ),
    catalog: Path | None = CATALOG,
    json_: bool = JSON,
) -> None:
    """List instance types; filters combine.

    \b
      hetopt catalog list --gpu A10G --market spot
      hetopt catalog list --vcpus-min 16 --max-interruption 10% --sort price-per-coremark
      hetopt catalog list --gpus-min 8 --network-min 400 --sort network --reverse
    """
    import datetime

    from hetopt.api.values import names, positive
    from hetopt.cli import catalog_view, render
    from hetopt.optimizer.market import catalog_filter
    from hetopt.optimizer.market.catalog import no_prices
    from hetopt.optimizer.market.catalog_choice import catalog_in_use

    loaded = catalog_in_use(region, catalog, today=datetime.datetime.now(datetime.UTC).date()).catalog
    listings = list(loaded.listings.values())
    if not loaded.has_prices and (price_max is not None or market is MarketOption.ON_DEMAND):
        raise no_prices(loaded)
    criteria = catalog_filter.Criteria(
        accelerator=gpu,
        accelerators_min=gpus_min,
        vcpus_min=vcpus_min,
        vcpus_max=vcpus_max,
        memory_min_gib=positive(memory_min, "memory_min_gib", "GiB"),
        network_min_gbps=positive(network_min, "network_min_gbps", "Gbit/s"),
        architecture=arch.value if arch else None,
        families=tuple(name for group in family or () for name in names(group)),
        market=market.value,
        price_max_usd_per_hour=positive(price_max, "price_max_usd_per_hour", "USD an hour"),
        interruption_max=_share(max_interruption, "--max-interruption"),
    )
    filters = criteria.filters(loaded)
    quantity = catalog_filter.quantities(market.value)[sort.value]
    found = catalog_filter.sort(catalog_filter.select(listings, filters), quantity, reverse=reverse)
    wanted = limit if limit is not None else (0 if json_ else TABLE_ROWS)
    shown = found[:wanted] if wanted else found
    if json_:
        render.print_json([catalog_view.facts(listing) for listing in shown])
    elif shown:
        catalog_view.print_table(loaded, shown, matching=len(found), coremark="coremark" in sort)
    if not found:
        render.note(f"No instance type in {region} matches: {catalog_filter.why_none(listings, filters)}.")


@app.command()
def show(
    instance_type: str = typer.Argument(metavar="TYPE", help="Instance type, such as g5.xlarge."),
    region: str = REGION,
    catalog: Path | None = CATALOG,
    json_: bool = JSON,
) -> None:
    """Show all that is known of an instance type: facts, prices with date and source, every region, caveats."""
    import datetime

    from hetopt.cli import catalog_view, render
    from hetopt.optimizer.market.catalog_choice import catalog_in_use

    loaded = catalog_in_use(region, catalog, today=datetime.datetime.now(datetime.UTC).date()).catalog
    listing = loaded.listing(instance_type)
    elsewhere = [loaded.in_region(name).listings.get(instance_type) for name in loaded.regions]
    everywhere = {name: found for name, found in zip(loaded.regions, elsewhere, strict=True) if found}
    if json_:
        render.print_json(catalog_view.all_facts(loaded, listing, everywhere))
    else:
        catalog_view.print_page(loaded, listing, everywhere)


def _share(text: str | None, option: str) -> float | None:
    """'10%' or '10' as a share."""
    from hetopt.core.errors import BadInput
    from hetopt.core.quantities import PERCENT, quantity

    if text is None:
        return None
    share = quantity(text, PERCENT, option)
    if not 0 < share <= 1:
        raise BadInput(
            f"{option} must be a percentage above 0 and up to 100, got {text!r}.", hint=f"for example {option} 10%"
        )
    return share
