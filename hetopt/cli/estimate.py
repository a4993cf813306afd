"""`hetopt estimate`: what training would take and cost, from a description of the job alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hetopt
from hetopt.api.options import Described
from hetopt.cli import parse, render
from hetopt.cli.options import Explain, Json, with_options
from hetopt.cli.show import refuse_a_risk
from hetopt.core import plain_text
from hetopt.core.interruption import Reporter
from hetopt.reports.document import Line
from hetopt.reports.plan_document import details, next_commands

if TYPE_CHECKING:
    from hetopt.api.planning import Estimate


@with_options(Described)
def estimate(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file: it can be rehearsed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output file that is no plan.")] = False,
    explain: Explain = False,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """Say what training would take and cost before anything is measured.

    \b
      hetopt estimate --params 7B --method lora --samples 50k --tokens 2048
      hetopt estimate --params 110M --samples 3M --tokens 128 --budget 200
      hetopt estimate --config config.json --samples 1e6 --deadline 2d
      hetopt estimate --flops 1e18
    \f
    A plan that keeps its limits with a probability below 0.9 is shown and written, and is no success: exit code 3,
    unless --accept-risk is given.
    """

    parse.ready_to_write(output, force=force, replaces="plan")
    estimated = hetopt.estimate(reporter=Reporter(note=render.note), **typed)
    if output is not None:
        parse.save(output, estimated.plan.to_json())
    if as_json:
        render.print_json(_facts(estimated))
    else:
        commands = [Line(f"next: {next_commands(estimated.plan, 'plan.json')[0]}", "strong", is_copied=True)]
        if output is not None:
            commands.append(
                Line(
                    f"or:   hetopt launch {plain_text.typed(output)} --on rehearsal --steps 200",
                    "strong",
                    is_copied=True,
                )
            )
        render.answer([*estimated.document.under_title, *commands], explain=explain)
        render.show(details(estimated.plan) if explain else [])
    refuse_a_risk(estimated.plan)


def _facts(estimated: Estimate) -> dict[str, Any]:
    job = estimated.job
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
        "state_bytes": job.memory.kept_bytes,
        "sample_bytes": job.sample_bytes,
        "fits": [asdict(fit) for fit in estimated.fits],
        "assumed": job.assumed,
        "evidence": "counted FLOPs, not measured",
        "plan": estimated.plan.model_dump(mode="json"),
    }
