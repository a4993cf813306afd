"""`hetopt catalog`: what can be rented, what it has, and what it costs according to whom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hetopt
from hetopt.api.options import REGION, Gpus, Listed
from hetopt.cli import render
from hetopt.cli.help_screen import OneScreen, OneScreenGroup
from hetopt.cli.options import CatalogFolder, Json, Region, with_options
from hetopt.core.formatting import counted

if TYPE_CHECKING:
    from hetopt.api.catalog_refreshing import OwnCatalog
    from hetopt.api.catalogs import RentableGpu

TABLE_ROWS = 20

app = typer.Typer(
    name="catalog",
    cls=OneScreenGroup,
    help="""What can be rented: instance types, prices, interruption bands.

    \b
      hetopt catalog list --gpus A10G --market spot
      hetopt catalog show g5.xlarge
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("list", cls=OneScreen)
@with_options(Listed)
def list_(
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=0, help=f"Types to show; 0 for all. Default: {TABLE_ROWS}, with --json all."),
    ] = None,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """List instance types; filters combine.

    \b
      hetopt catalog list --gpus A10G --market spot
      hetopt catalog list --gpus none --sort price-per-coremark
      hetopt catalog list --gpus any:8+ --sort network --reverse
    """
    from hetopt.api.catalogs import find
    from hetopt.reports import catalog_document

    found = find(**typed)
    wanted = limit if limit is not None else (0 if as_json else TABLE_ROWS)
    shown = found.listings[:wanted] if wanted else found.listings
    if as_json:
        render.print_json([catalog_document.facts(listing) for listing in shown])
    elif shown:
        by_coremark = "coremark" in typed.get("sort", "")
        render.show(
            catalog_document.listing_table(found.catalog, shown, matching=len(found.listings), coremark=by_coremark)
        )
    if not found.listings:
        render.note(f"No instance type in {typed.get('region', REGION)} matches: {found.why_none}.")


@app.command(cls=OneScreen)
def show(
    instance_type: Annotated[str, typer.Argument(metavar="TYPE", help="Instance type, such as g5.xlarge.")],
    region: Region = REGION,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> None:
    """Show all that is known of an instance type: facts, prices with date and source, every region, caveats.

    \b
      hetopt catalog show g5.xlarge
    """
    from hetopt.api.catalogs import in_use
    from hetopt.reports import catalog_document

    loaded = in_use(region, catalog)
    listing = loaded.listing(instance_type)
    elsewhere = [loaded.in_region(name).listings.get(instance_type) for name in loaded.regions]
    everywhere = {name: offered for name, offered in zip(loaded.regions, elsewhere, strict=True) if offered}
    if as_json:
        render.print_json(catalog_document.all_facts(loaded, listing, everywhere))
    else:
        render.show(catalog_document.instance_page(loaded, listing, everywhere))


@app.command(cls=OneScreen)
def refresh(
    region: Annotated[
        str,
        typer.Option("--region", "-r", help="AWS region; all: every one."),
    ] = REGION,
    as_json: Json = False,
) -> None:
    """Read today's prices of a region into a catalogue of your own; no account is needed, nothing is rented.

    What AWS publishes is read: the price list (70 to 300 MB a region), spot prices and the Spot Advisor's data. It is
    kept under ~/.hetopt/catalogs by region and day, and used from then on.

    \b
      hetopt catalog refresh --region eu-west-1
      hetopt catalog refresh --region all
    """
    from hetopt.api import catalog_refreshing

    with render.progress("reading prices") as reporter:
        catalogs = catalog_refreshing.refresh(region, reporter=reporter)
    if as_json:
        facts = [_facts(catalog) for catalog in catalogs]
        render.print_json(facts if len(facts) > 1 else facts[0])
        return
    for catalog in catalogs:
        counts = catalog.contents
        render.note(
            f"{catalog.region}: {counts.types:,} types, {counts.on_demand:,} prices on demand, {counts.spot:,} on spot,"
            f" of {catalog.day}, in {catalog.folder}."
        )
        if counts.left_out:
            render.note(f"{len(counts.left_out)} left out or changed (--json names all)")


@app.command("import", cls=OneScreen)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A cloud's vms.csv of SkyPilot's public catalogues.")],
    cloud: Annotated[str, typer.Option("--cloud", metavar="NAME", help="What the cloud is to be called here.")],
) -> None:
    """Keep the machines and prices of another cloud, so that `--cloud NAME` plans for them.

    Read are the columns InstanceType, AcceleratorName, AcceleratorCount, vCPUs, MemoryGiB, Region, Price, SpotPrice (in
    USD an hour) and GpuInfo; other columns, and machines without a GPU, are passed over.

    \b
      hetopt catalog import vms.csv --cloud runpod
      hetopt estimate --params 7B --samples 50k --method lora --cloud lambda
    """
    from hetopt.api.catalogs import import_cloud

    facts = import_cloud(file, cloud)
    left_out = "; left out, as no rates are known: " * bool(facts["unknown_gpus"]) + ", ".join(facts["unknown_gpus"])
    render.note(f"{cloud}: {counted(facts['types'], 'type')} in {counted(facts['regions'], 'region')}{left_out}")


def _facts(catalog: OwnCatalog) -> dict[str, Any]:
    return {
        "region": catalog.region,
        "folder": str(catalog.folder),
        "date": catalog.day.isoformat(),
        "types": catalog.contents.types,
        "on_demand_prices": catalog.contents.on_demand,
        "spot_prices": catalog.contents.spot,
        "left_out": list(catalog.contents.left_out),
    }


@with_options(Gpus)
def gpus(
    only: Annotated[list[str] | None, typer.Argument(metavar="[GPU]...", help="Only these, such as A10G L4.")] = None,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """List the GPUs that can be rented: memory, TFLOP/s, GB/s, and the cheapest machine that has each.

    \b
      hetopt gpus
      hetopt gpus A10G L4 --region eu-west-1
      hetopt gpus --sort rate-per-usd --reverse
    """
    from hetopt.api.catalogs import in_regions
    from hetopt.reports.catalog_document import gpu_table

    asked, rentable = Gpus(**typed), hetopt.gpus(only or (), **typed)
    if as_json:
        render.print_json([_gpu_facts(gpu) for gpu in rentable])
    elif rentable:
        render.show(gpu_table(rentable, in_regions(asked)))
    if not rentable:
        render.note(f"No GPU in {asked.region} matches: see `hetopt gpus --region {asked.region}`.")


def _gpu_facts(gpu: RentableGpu) -> dict[str, Any]:
    """Return a GPU as JSON, rates in the units that their names say. What is unknown is null."""
    from hetopt.reports import catalog_document

    machine = catalog_document.facts(gpu.machine)
    return {
        "gpu": gpu.name,
        "memory_gib": gpu.memory_gib,
        "compute_capability": gpu.compute_capability,
        "fp32_tflops": gpu.fp32_tflops,
        "tf32_tflops": gpu.tf32_tflops,
        "bf16_tflops": gpu.bf16_tflops,
        "fp16_tflops": gpu.fp16_tflops,
        "bandwidth_gb_per_s": gpu.bandwidth_gb_per_s,
        "rates_source": gpu.source,
        "cheapest_type": {
            "instance_type": gpu.machine.instance_type.name,
            "gpus": gpu.count,
            "prices": machine["prices"],
            "spot_saving_percent": machine["spot_saving_percent"],
            "interruption_band": machine["interruption_band"],
        },
    }
