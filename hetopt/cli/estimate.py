"""`hetopt estimate`: a first table of clusters, times and dollars from what a model counts to; nothing is measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hetopt
from hetopt.api.options import Described
from hetopt.cli import parse, render
from hetopt.cli.options import Json, with_options
from hetopt.core import plain_text
from hetopt.core.interruption import Reporter

if TYPE_CHECKING:
    from hetopt.api.planning import Estimate


@with_options(Described)
def estimate(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file: it can be rehearsed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output file that is no plan.")] = False,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """Say what training would take and cost before anything is measured.

    \b
      hetopt estimate --params 7B --method lora --samples 50k --tokens 2048
      hetopt estimate --params 110M --samples 3M --tokens 128 --budget 200
      hetopt estimate --config config.json --samples 1e6 --deadline 2d
      hetopt estimate --flops 1e18
    """

    parse.ready_to_write(output, force=force, replaces="plan")
    told = hetopt.estimate(reporter=Reporter(note=render.note), **typed)
    if output is not None:
        parse.save(output, told.plan.to_json())
    if as_json:
        render.print_json(_facts(told))
    else:
        render.whole(told.document)
        render.line("next: hetopt profile -- train.py", style="strong")
        if output is not None:
            render.line(f"or:   hetopt launch {plain_text.typed(output)} --on rehearsal --steps 200", style="strong")


def _facts(told: Estimate) -> dict[str, Any]:
    job = told.job
    return {
        "model": {
            "name": job.model.name,
            "parameters": job.model.parameters,
            "forward_flops_per_sample": job.model.forward_flops,
            "sample": job.model.sample,
        },
        "samples": job.samples,
        "batch_size": job.batch_size,
        "flops": job.flops,
        "state_bytes": job.state_bytes,
        "sample_bytes": job.sample_bytes,
        "fits": [asdict(fit) for fit in told.fits],
        "assumed": job.assumed,
        "evidence": "counted FLOPs, not measured",
        "plan": told.plan.model_dump(mode="json"),
    }
