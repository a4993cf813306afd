"""`hetopt recommend`: the best plan for the money, its alternatives, and why it won."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import hetopt
from hetopt.api.options import Search
from hetopt.cli import parse, render
from hetopt.cli.options import Explain, with_options
from hetopt.cli.show import refuse_a_risk, show_plan


@with_options(Search)
def recommend(
    profile: Annotated[Path, typer.Argument(help="Profile made by `hetopt profile`, or one that ships: bert-base.")],
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
    refuse_a_risk(plan)
