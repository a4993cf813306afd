"""What a person is asked before a run starts: nothing is spent, and no risk taken, that nobody said yes to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from hetopt.cli import render
from hetopt.cli.parse import is_attended
from hetopt.core import formatting
from hetopt.core.errors import BadInput, NoFeasiblePlan

if TYPE_CHECKING:
    from hetopt.backends.backend import Prepared
    from hetopt.backends.ec2.renter.backend import Rental
    from hetopt.core.run_spec import RunSpec
    from hetopt.optimizer.plan import Plan


def confirmed(prepared: Prepared, *, yes: bool) -> Prepared:
    """The launch, once somebody has said yes to it.

    Raises:
        BadInput: it costs money, and nobody is there to say yes.
        NoFeasiblePlan: it is a risk that nobody has accepted.
    """
    if prepared.launch.on == "ec2":
        from hetopt.api.account import rental_of

        return _rented(rental_of(prepared), yes=yes)
    if prepared.connects_to and not yes and is_attended() and not typer.confirm("Start?", default=True, err=True):
        raise typer.Exit(0)
    return prepared


def _rented(rental: Rental, *, yes: bool) -> Rental:
    """Spending is confirmed: at a terminal by a person, elsewhere by --yes. A risk is one that a person must see."""
    budget = f"${rental.order.budget_usd:.2f}" + (" and a canary for $1" if rental.canary is not None else "")
    if rental.risk is not None and (yes or not is_attended()):
        raise NoFeasiblePlan(
            f"The plan is a risk: {rental.risk}.",
            hint="plan again with other limits, raise --budget, or take the risk with --accept-risk",
        )
    if yes:
        return rental
    if rental.risk is not None:
        render.note(f"RISK: {rental.risk}; else it is stopped unfinished")
    agree_to_spend(
        f"Rent it, for at most {budget}?", f"renting costs up to {budget}", hint="or look first with --dry-run"
    )
    return replace(rental, risk=None)


def agree_to_spend(question: str, costs: str, *, hint: str | None = None) -> None:
    """Ask a person, who answers no by saying nothing.

    Args:
        question: that is asked.
        costs: what is refused where nobody is there to answer.
        hint: what else there is to do than to say --yes.

    Raises:
        BadInput: nobody is there to say yes.
    """
    if not is_attended():
        raise BadInput(
            f"{costs}, and nobody is there to say yes.", hint=f"say so with --yes{f', {hint}' if hint else ''}"
        )
    if not typer.confirm(question, default=False, err=True):
        raise typer.Exit(0)


def accept_fewer(plan: Plan, spec: RunSpec, *, yes: bool) -> bool:
    """Whether to begin on fewer machines. Within what the plan stated nobody is asked; beyond it a person is.

    The slowest of those that are left computes as much longer as its local batch has grown; communication is as it was.
    """
    said = plan.chosen.prediction
    before = {worker.host: worker.local_batch_size for worker in plan.run.workers}
    growth = max(worker.local_batch_size / before[worker.host] for worker in spec.workers)
    step_s = said.step_time_s.value
    stretch = (step_s + (growth - 1) * said.compute_s) / step_s
    total_s = said.total_s.value * stretch
    render.note(
        f"{len(spec.workers)} of {len(plan.run.workers)} workers can be had: {formatting.duration(total_s)} instead of "
        f"{formatting.duration(said.total_s.value)}"
    )
    if total_s <= said.total_s.high:
        return True
    if yes or not is_attended():
        render.note(f"that is beyond the {formatting.duration(said.total_s.high)} that the plan stated at most")
        return False
    return typer.confirm("That is worse than the plan stated. Begin all the same?", default=False, err=True)
