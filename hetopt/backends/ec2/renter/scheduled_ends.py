"""An end of each machine that stands on no machine: EventBridge Scheduler terminates it.

The machine's own timer, the run's lease and whoever follows the run end it sooner. What is left for this is a machine
that none of them reaches, such as one that never ran its user data. Until it has its place, that is a deadline to boot
(`budget.UNPLACED_S`); from then on the lease's end and some slack (`budget.outside_end_s`), which whoever follows the
run moves before the lease. One schedule for each machine, as one id that EC2
does not know would spare all others of a call; all of a run in one group, which has the run's tags and is removed with
it. Schedules delete themselves when they have ended their machine, and cost nothing.

It is made where the account has the role that `hetopt setup --print-policy` names, which may end what carries a run's
tag and nothing else. Where it may not be made, that is told, and the run goes on without.
"""

from __future__ import annotations

import datetime
import json
import math

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.errors import if_there
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.request import Edge, Request, read
from hetopt.core.errors import CloudRefused

END_ROLE = "hetopt-end"
"""The role that the scheduler ends machines in; see `hetopt setup`."""

NAMED = "hetopt-"
"""So begin the names of all groups of schedules."""

_TAIL = 48
"""Of a run's name, which ends in what makes it its own; what is left of the name's length counts lives."""


def prefix_of(run_id: str) -> str:
    """So begin the groups of a run, one for each of its lives."""
    return f"{NAMED}{run_id[-_TAIL:]}."


def group_name(run_id: str, life: int) -> str:
    """Of the schedules of one life of a run."""
    return f"{prefix_of(run_id)}{life}"


def end_role(edge: Edge) -> str | None:
    """The ARN of the role that ends machines; None where the account has none, or it cannot be looked up."""
    request = read("iam", "get_role", "whether machines have an end outside", RoleName=END_ROLE)
    try:
        answer = if_there(edge, request, (facts.NO_ROLE.value,))
    except CloudRefused:
        return None
    return None if answer is None else str(answer["Role"]["Arn"])


def group_call(order: Order) -> Request:
    """Make the group of the run's schedules, which has its tags: single schedules have none."""
    return Request(
        step="schedule-group",
        service="scheduler",
        operation="create_schedule_group",
        parameters={"Name": group_name(order.run_id, order.life), "Tags": order.tags.to_aws()},
        purpose="for an end of each machine that stands on no machine",
        makes="schedule-group",
        tolerates=frozenset({facts.SCHEDULE_THERE.value}),
    )


def end_call(order: Order, instance_id: str, at_s: float, *, moves: bool = False) -> Request:
    """End a machine at a time.

    Args:
        order: of the run.
        instance_id: of the machine.
        at_s: when, in seconds since the epoch.
        moves: its schedule is there already, for another time.
    """
    assert order.end_role is not None, "without the role nothing is scheduled"
    end = datetime.datetime.fromtimestamp(math.ceil(at_s), datetime.UTC)
    unless = "whatever it does" if moves else "unless it has its place by then"
    return Request(
        step=f"end-{instance_id}{'-later' if moves else ''}",
        service="scheduler",
        operation="update_schedule" if moves else "create_schedule",
        parameters={
            "Name": instance_id,
            "GroupName": group_name(order.run_id, order.life),
            "ScheduleExpression": f"at({end:%Y-%m-%dT%H:%M:%S})",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "ActionAfterCompletion": "DELETE",
            "Target": {
                "Arn": facts.SCHEDULED_END.value,
                "RoleArn": order.end_role,
                "Input": json.dumps({"InstanceIds": [instance_id]}),
            },
        },
        purpose=f"ends {instance_id} at {end:%Y-%m-%d %H:%M} UTC, {unless}",
        tolerates=facts.GONE.value if moves else frozenset({facts.SCHEDULE_THERE.value}),
    )


def no_end_call(order: Order) -> Request:
    """Remove the schedules of a run's life, which cannot be moved."""
    return Request(
        step="no-ends",
        service="scheduler",
        operation="delete_schedule_group",
        parameters={"Name": group_name(order.run_id, order.life)},
        purpose="ends that cannot be moved would end machines that train",
        tolerates=facts.GONE.value,
    )
