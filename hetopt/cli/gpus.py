"""`hetopt gpus`: the GPUs that can be rented, what one of them is, and the cheapest machine that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import hetopt
from hetopt.api.options import Gpus
from hetopt.cli import render
from hetopt.cli.options import Json, with_options

if TYPE_CHECKING:
    from hetopt.api.catalogs import RentableGpu


@with_options(Gpus)
def gpus(
    only: Annotated[list[str] | None, typer.Argument(metavar="[GPU]...", help="Only these, such as A10G L4.")] = None,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """List the GPUs that can be rented: memory, rates, and the cheapest machine that has each.

    \b
      hetopt gpus
      hetopt gpus A10G L4 --region eu-west-1
      hetopt gpus --sort rate-per-usd --reverse
    """
    from hetopt.api.catalogs import in_regions
    from hetopt.reports.catalog_document import gpu_table

    asked, found = Gpus(**typed), hetopt.gpus(only or (), **typed)
    if as_json:
        render.print_json([_facts(gpu) for gpu in found])
    elif found:
        render.show(gpu_table(found, [one.catalog for one in in_regions(asked.region, asked.catalog)]))
    if not found:
        render.note(f"No GPU in {asked.region} matches: see `hetopt gpus --region {asked.region}`.")


def _facts(gpu: RentableGpu) -> dict[str, Any]:
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
