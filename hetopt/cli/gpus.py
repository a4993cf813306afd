"""`hetopt gpus`: the GPUs that can be rented, what one of them is, and the cheapest machine that has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetopt.cli.options import FIRST_REGION, CatalogFolder, Json, RegionOrAny, given, one_of, options

if TYPE_CHECKING:
    from hetopt.api.catalogs import RentableGpu
    from hetopt.optimizer.market.catalog import Price


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """Which GPUs are listed, and how; fields as of `hetopt.gpus`, as they are typed."""

    only: Annotated[list[str] | None, typer.Argument(metavar="[GPU]...", help="Only these, such as A10G L4.")] = None
    region: RegionOrAny = FIRST_REGION
    market: Annotated[
        str,
        typer.Option(
            autocompletion=one_of("hetopt.optimizer.market.catalog_filter:AnyMarket"),
            help="Where the cheapest machine is sought: spot, on-demand or any.",
        ),
    ] = "any"
    memory_min_gib: Annotated[
        float | None, typer.Option("--memory-min", metavar="GIB", help="Memory of one GPU, at least.")
    ] = None
    price_max_usd_per_hour: Annotated[
        str | None, typer.Option("--price-max", metavar="USD", help="Price of the machine's hour, at most.")
    ] = None
    sort: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            autocompletion=one_of("hetopt.optimizer.market.gpus:GpuSort"),
            help="Smallest first: price (of the machine), price-per-gpu, rate-per-usd (16 bits), memory, fp32, tf32, "
            "bf16, fp16, bandwidth, name.",
        ),
    ] = "price"
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest first.")] = False
    catalog: CatalogFolder = None
    as_json: Json = False


@options(Gpus)
def gpus(asked: Gpus) -> None:
    """List the GPUs that can be rented: memory, rates, and the cheapest machine that has each.

    \b
      hetopt gpus
      hetopt gpus A10G L4 --region eu-west-1
      hetopt gpus --memory-min 40 --sort rate-per-usd --reverse
    """
    import hetopt
    from hetopt.cli import render

    found = hetopt.gpus(**given(asked, hetopt.gpus))
    if asked.as_json:
        render.print_json([_facts(gpu) for gpu in found])
    elif found:
        _show(found, asked)
    if not found:
        render.note(f"No GPU in {asked.region} matches: see `hetopt gpus --region {asked.region}`.")


def _facts(gpu: RentableGpu) -> dict[str, Any]:
    """A GPU as JSON, rates in the units that their names say. What is unknown is null."""
    from hetopt.cli import catalog_view

    machine = catalog_view.facts(gpu.machine)
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


def _show(found: Sequence[RentableGpu], asked: Gpus) -> None:
    """A table of 80 columns: rates in TFLOP/s, dollars of the machine that is named."""
    from hetopt.api.catalogs import in_regions
    from hetopt.cli import catalog_view, render

    columns = {
        "GPU": [gpu.name for gpu in found],
        "GiB": [f"{gpu.memory_gib:.0f}" for gpu in found],
        "fp32": [_rate(gpu.fp32_tflops) for gpu in found],
        "TF32": [_rate(gpu.tf32_tflops) for gpu in found],
        "bf16": [_rate(gpu.bf16_tflops) for gpu in found],
        "fp16": [_rate(gpu.fp16_tflops) for gpu in found],
        "GB/s": [_rate(gpu.bandwidth_gb_per_s) for gpu in found],
        "cheapest type": [f"{gpu.count}: {gpu.machine.instance_type.name}" for gpu in found],
        "on demand": [_usd(gpu.machine.on_demand) for gpu in found],
        "spot": [_usd(gpu.machine.spot) for gpu in found],
    }
    regions = in_regions(asked.region, asked.catalog)
    if len(regions) > 1:
        columns["region"] = [gpu.region or "-" for gpu in found]
    dropped = render.fitted_table(
        columns,
        ("fp32", "TF32", "GB/s", "bf16", "fp16", "GiB"),
        words={"GPU", "cheapest type", "region"},
        fixed={"cheapest type", "region"},
        gap=1,
    )
    if dropped:
        render.line(f"left out for lack of width: {', '.join(dropped)}", style="dim")
    if "fp16" in columns:
        render.line("fp32 to fp16: peak TFLOP/s of one GPU, dense; GB/s: of its memory", style="dim")
    render.line("cheapest type: how many GPUs it has, and its name; prices are for all of it", style="dim")
    for note in catalog_view.price_notes(regions, [gpu.machine for gpu in found]):
        render.line(note, style="dim")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _usd(price: Price | None) -> str:
    """With the digits that tell prices apart."""
    if price is None:
        return "-"
    digits = 3 if price.usd_per_hour < 10 else 2
    return f"{'~' if price.is_estimate else ''}{price.usd_per_hour:.{digits}f}"
