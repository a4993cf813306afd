"""`hetopt recommend`: the best plan for the money, its alternatives, and why it won."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hetopt
from hetopt.api.options import Described, Search
from hetopt.cli import parse, render
from hetopt.cli.options import Explain, Json, with_options
from hetopt.cli.show import show_plan
from hetopt.core import plain_text
from hetopt.core.errors import NoFeasiblePlan
from hetopt.core.interruption import Reporter
from hetopt.reports.document import Line
from hetopt.reports.plan_document import details, next_commands

if TYPE_CHECKING:
    from hetopt.api.planning import Estimate
    from hetopt.optimizer.plan import Plan


@with_options(Search)
def recommend(
    profile: Annotated[
        Path, typer.Argument(help="Profile made by `hetopt profile`, or one that ships: resnet20-cifar10.")
    ],
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the plan as an HTML page: Pareto front, costs, local batch sizes.",
        ),
    ] = None,
    explain: Explain = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this JSON file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output file that is no plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    **typed: Any,
) -> None:
    """Find the best cluster for a profiled job: machines, batch sizes and compression.

    Works offline, from the bundled catalogue, without credentials.

    \b
      hetopt recommend profile.json --budget 2 -o plan.json
      hetopt recommend profile.json --deadline 6h --epochs 100 --json
      hetopt recommend profile.json --budget 20 --gpus L4,A10G --quota g=32
    \f
    Shows the cheapest, the balanced and the fastest plan that keep the limits, the safest (on demand), and this
    machine; the balanced one is written unless --objective names another. --explain shows all there is to it.
    A plan that keeps them with less than the probability that is asked for (0.9) is shown and written, and is no
    success: exit code 3, unless --accept-risk is given.
    """
    from hetopt.reports import html
    from hetopt.reports.plan_document import page

    parse.ready_to_write(output, force=force, replaces="plan")
    parse.ready_to_write(report, force=force, replaces="hetopt plan")
    with render.progress("searching") as reporter:
        plan = hetopt.recommend(profile, reporter=reporter, **typed)
    if report is not None:
        parse.save(report, html.page(page(plan)))
    if output is not None:
        parse.save(output, plan.to_json())
    show_plan(plan, output, as_json=as_json, explain=explain, inventory=typed.get("inventory"))
    _refuse_a_risk(plan)


def _refuse_a_risk(plan: Plan) -> None:
    """Raise an error for a plan that keeps its limits less probably than was asked for.

    Raises:
        NoFeasiblePlan: it is not, and nobody has accepted that.
    """

    seen = plan.insight
    if plan.risk is None or seen is None or seen.risk_accepted:
        return
    raise NoFeasiblePlan(
        f"This is the best of the likeliest plans, but {plan.risk}.",
        hint=", or ".join([*seen.remedies, "take the risk with --accept-risk"]),
    )


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
    _refuse_a_risk(estimated.plan)


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
