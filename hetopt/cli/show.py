"""`hetopt show` and `hetopt compare`: plans and profiles that were written, read again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import hetopt
from hetopt.cli import render, terminal
from hetopt.cli.options import Explain
from hetopt.core.artifact import kind_in
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.plain_text import typed


def show(
    plan: Annotated[Path, typer.Argument(help="Plan made by `hetopt recommend`, or profile by `hetopt profile`.")],
    explain: Explain = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show a plan or a profile as it was shown when it was made.

    \b
      hetopt show plan.json
      hetopt show plan.json --explain
      hetopt show profile.json
    """
    if kind_in(plan) == hetopt.Profile.KIND:
        show_profile(hetopt.Profile.load(plan), plan, as_json=as_json)
    else:
        show_plan(hetopt.Plan.load(plan), plan, as_json=as_json, explain=explain)


def show_plan(
    plan: hetopt.Plan, path: Path | None, *, as_json: bool, explain: bool, inventory: Path | None = None
) -> None:
    """Print a plan as a document or as JSON.

    Args:
        plan: plan to print.
        path: file that the plan was written to; None: it was not written.
        as_json: whether to print JSON, and nothing else.
        explain: whether to show all there is to it.
        inventory: file of hosts that the plan is for; None: there is none.
    """
    from hetopt.reports.plan_document import answer, details

    if as_json:
        terminal.write(plan.to_json())
        return
    render.answer(answer(plan, plan_file=path, inventory=inventory), explain=explain)
    if explain:
        render.show(details(plan))
        render.note(f"searched {plan.searched}")


def show_profile(measured: hetopt.Profile, path: Path | None, inventory: Path | None = None, *, as_json: bool) -> None:
    """Print a profile, with remarks and the command to go on with; or, ``as_json``, the profile alone.

    Args:
        measured: profile to print.
        path: its file; None: it is not kept, and no command is shown.
        inventory: file of hosts that it is to be planned for; None: none was given.
        as_json: whether to print JSON, and nothing else.
    """
    from hetopt.reports import profile_document

    if as_json:
        terminal.write(measured.to_json())
        return
    render.show(profile_document.page(measured).blocks)
    if path is not None:
        # Nothing says how long a script trains, or a task whose target no pilot run reached.
        job, is_reached = measured.job, any(pilot.steps_to_target for pilot in measured.pilots)
        is_open = bool(job.script) or (job.usual_epochs is None and not is_reached)
        length, meant = (
            (f" --{'epochs' if job.counts_epochs or not job.script else 'steps'} N", "  # N: as many as it trains")
            if is_open
            else ("", "")
        )
        inventory_option = "" if inventory is None else f" --inventory {typed(inventory)}"
        command = f"hetopt recommend {typed(path)} --budget 5{length}{inventory_option} -o plan.json"
        render.line(f"next: {command}{meant}", style="strong")


def refuse_a_risk(plan: hetopt.Plan) -> None:
    """Refuse a plan that keeps its limits less probably than was asked for.

    Raises:
        NoFeasiblePlan: the plan does, and nobody has accepted that.
    """
    if plan.risk is None or plan.insight is None or plan.insight.risk_accepted:
        return
    raise NoFeasiblePlan(
        f"This is the best of the likeliest plans, but {plan.risk}.",
        hint=", or ".join([*plan.insight.remedies, "take the risk with --accept-risk"]),
    )


def compare(
    plans: Annotated[list[Path], typer.Argument(help="Two plans or more, made by `hetopt recommend`.")],
) -> None:
    """Compare plans: what differs, and what each gains or loses against the first.

    \b
      hetopt compare plan.json large.json
    """
    from hetopt.reports.comparison_document import comparison

    if len(set(plans)) < 2:
        raise BadInput("compare takes two plans or more.", hint="hetopt compare a.json b.json")
    alike = len({path.stem for path in plans}) < len(plans)
    render.show(comparison({str(path) if alike else path.stem: hetopt.Plan.load(path) for path in plans}))
