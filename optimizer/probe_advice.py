"""Whether a plan may be paid for: nobody should rent machines by a guess that one short measurement would replace."""

from __future__ import annotations

from hetopt.core.errors import BadInput
from hetopt.optimizer.plan import Plan


def unprobed_types(plan: Plan) -> tuple[str, ...]:
    """Machine types of the chosen cluster whose speed is extrapolated from another family, in order."""
    return tuple(dict.fromkeys(group.instance_type for group in plan.chosen.groups if group.evidence == "extrapolated"))


def check_probed(plan: Plan, *, unprobed: bool) -> None:
    """Refuse to rent machine types on which no step was ever measured, nor on one of their family.

    Args:
        plan: to be launched for real.
        unprobed: the user wants it so.

    Raises:
        BadInput: such a type is in the plan.
    """
    types = unprobed_types(plan)
    if types and not unprobed:
        told = plan.chosen.prediction.step_time_s
        raise BadInput(
            f"No step was ever measured on {', '.join(types)} or a relative: the step time is a guess "
            f"(× or ÷ {told.high / told.value:.2f} with 90 % probability), and with it the cost.",
            hint="measure there (`hetopt profile TASK --explore --on ec2 --probe-budget 0.50 "
            f"--types {','.join(types)}`, on a machine of your own with `hetopt profile TASK --type {types[0]}`, or "
            "import samples with `hetopt profile --from-samples FILE`) and plan again, or launch with `unprobed=True`",
        )
