"""What a launch computes in, where that is pinned: as planned, predicted anew on this machine, or refused.

A plan's machines, batch sizes and budget are those of its precision. Where nothing is rented and nobody's machines are
chosen by it (`local`, `rehearsal`), another precision that the profile has steps of is predicted anew.
"""

from __future__ import annotations

from typing import get_args

from hetopt.core.errors import BadInput, setting
from hetopt.core.names import known
from hetopt.core.precision import Precision
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.plan import Plan

PRECISIONS = get_args(Precision)

PREDICTED_ANEW: tuple[Place, ...] = ("local", "rehearsal")


def in_precision(plan: Plan, asked: str | None, on: Place) -> tuple[Plan, tuple[str, ...]]:
    """The plan in the precision that was asked for, and what to know of that.

    Args:
        plan: as it is to be run otherwise.
        asked: one of `PRECISIONS`; None: as planned.
        on: the backend.

    Raises:
        BadInput: it is none, was not measured, does not go with the rest, or the plan is for machines of another.
    """
    if asked is None:
        return plan, ()
    precision = known(asked.strip(), PRECISIONS, "precision")
    planned = plan.run.precision
    if precision == planned:
        return plan, ()
    told = setting("precision", precision)
    if on not in PREDICTED_ANEW:
        raise BadInput(
            f"{told} contradicts the plan, whose machines, batch sizes and costs are for {planned}.",
            hint=f"leave it out, or plan again with {told}",
        )
    if precision not in plan.profile.precisions:
        raise BadInput(
            f"{told} was not measured: the profile has steps in {', '.join(plan.profile.precisions)}.",
            hint=f"hetopt profile TASK --precision {precision}, on a machine that has it",
        )
    if precision == "fp16" and plan.run.is_local:
        raise BadInput(
            "fp16 needs gradients to be summed in every step, as workers agree on its loss scale there.",
            hint=f"choose {setting('precision', 'bf16')}, or {setting('sync', 'bsp')}",
        )
    run = plan.run.model_copy(update={"precision": precision})
    note = f"The plan computes in {planned}, this run in {precision} as asked: the prediction is for that."
    return plan.model_copy(update={"run": run}), (note,)
