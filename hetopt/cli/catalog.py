"""`hetopt catalog`: what can be rented, what it has, and what it costs according to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from hetopt.cli.help_screen import OneScreen, OneScreenGroup
from hetopt.cli.options import FIRST_REGION, CatalogFolder, Json, Region, given, options

if TYPE_CHECKING:
    from hetopt.api.catalogs import Criteria

TABLE_ROWS = 20

app = typer.Typer(
    name="catalog",
    cls=OneScreenGroup,
    help="""What can be rented: instance types, prices, interruption bands.

    \b
      hetopt catalog list --gpu A10G --market spot
      hetopt catalog show g5.xlarge
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Sort = Literal[
    "price",
    "price-per-vcpu",
    "price-per-gpu",
    "price-per-coremark",
    "spot-saving",
    "interruption",
    "gpus",
    "vcpus",
    "memory",
    "network",
    "coremark",
    "name",
]
"""What to sort by; the names are those of `catalog_filter.quantities`."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which instance types are listed, and how; fields as of `Criteria`, as they are typed."""

    accelerator: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Accelerator, such as A10G, L4 or A100-80GB.")
    ] = None
    accelerators_min: Annotated[
        int | None, typer.Option("--gpus-min", min=1, metavar="N", help="Whole accelerators, at least.")
    ] = None
    vcpus_min: Annotated[int | None, typer.Option(min=1, metavar="N", help="vCPUs, at least.")] = None
    vcpus_max: Annotated[int | None, typer.Option(min=1, metavar="N", help="vCPUs, at most.")] = None
    memory_min_gib: Annotated[
        float | None, typer.Option("--memory-min", metavar="GIB", help="Main memory, at least.")
    ] = None
    network_min_gbps: Annotated[
        float | None, typer.Option("--network-min", metavar="GBPS", help="Sustained network rate in Gbit/s, at least.")
    ] = None
    architecture: Annotated[
        Literal["x86_64", "arm64"] | None, typer.Option("--arch", help="Processor architecture.")
    ] = None
    families: Annotated[
        list[str] | None,
        typer.Option("--family", metavar="NAME", help="Family, such as c7i; repeat for any of several."),
    ] = None
    price_max_usd_per_hour: Annotated[
        str | None,
        typer.Option(
            "--price-max", metavar="USD", help="Price of an hour in the chosen market (any: the lower), at most."
        ),
    ] = None
    market: Annotated[Literal["spot", "on-demand", "any"], typer.Option(help="How to rent.")] = "any"
    interruption_max: Annotated[
        str | None,
        typer.Option(
            "--max-interruption", metavar="PERCENT", help="Share of spot machines preempted in a month, such as 10%."
        ),
    ] = None
    region: Region = FIRST_REGION
    sort: Annotated[
        Sort,
        typer.Option(metavar="KEY", help=f"Smallest first, the unknown last: {', '.join(get_args(Sort))}."),
    ] = "price"
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest first.")] = False
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=0, help=f"Types to show; 0 for all. Default: {TABLE_ROWS}, with --json all."),
    ] = None
    catalog: CatalogFolder = None
    as_json: Json = False


@app.command("list", cls=OneScreen)
@options(Wanted)
def list_(asked: Wanted) -> None:
    """List instance types; filters combine.

    \b
      hetopt catalog list --gpu A10G --market spot
      hetopt catalog list --vcpus-min 16 --sort price-per-coremark
      hetopt catalog list --gpus-min 8 --sort network --reverse
    """
    from hetopt.api.catalogs import find
    from hetopt.cli import catalog_view, render

    told = find(_criteria(asked), region=asked.region, directory=asked.catalog, sort=asked.sort, reverse=asked.reverse)
    found = told.listings
    wanted = asked.limit if asked.limit is not None else (0 if asked.as_json else TABLE_ROWS)
    shown = found[:wanted] if wanted else found
    if asked.as_json:
        render.print_json([catalog_view.facts(listing) for listing in shown])
    elif shown:
        catalog_view.print_table(told.catalog, shown, matching=len(found), coremark="coremark" in asked.sort)
    if not found:
        render.note(f"No instance type in {asked.region} matches: {told.why_none}.")


def _criteria(asked: Wanted) -> Criteria:
    """What an instance type must have, from texts that were typed."""
    from hetopt.api.catalogs import Criteria
    from hetopt.api.values import names, positive

    typed = given(
        asked,
        Criteria,
        memory_min_gib=positive(asked.memory_min_gib, "memory_min_gib", "GiB"),
        network_min_gbps=positive(asked.network_min_gbps, "network_min_gbps", "Gbit/s"),
        families=tuple(name for group in asked.families or () for name in names(group, "families")),
        price_max_usd_per_hour=positive(asked.price_max_usd_per_hour, "price_max_usd_per_hour", "USD an hour"),
        interruption_max=_share(asked.interruption_max, "--max-interruption"),
    )
    return Criteria(**typed)


@app.command(cls=OneScreen)
def show(
    instance_type: Annotated[str, typer.Argument(metavar="TYPE", help="Instance type, such as g5.xlarge.")],
    region: Region = FIRST_REGION,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> None:
    """Show all that is known of an instance type: facts, prices with date and source, every region, caveats.

    \b
      hetopt catalog show g5.xlarge
    """
    from hetopt.api.catalogs import in_use
    from hetopt.cli import catalog_view, render

    loaded = in_use(region, catalog).catalog
    listing = loaded.listing(instance_type)
    elsewhere = [loaded.in_region(name).listings.get(instance_type) for name in loaded.regions]
    everywhere = {name: found for name, found in zip(loaded.regions, elsewhere, strict=True) if found}
    if as_json:
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
