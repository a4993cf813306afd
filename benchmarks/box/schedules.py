"""EventBridge Scheduler, as far as ends of machines go: moto keeps schedules, and never does what they are to.

What is refused, and when: EventBridge Scheduler user guide, 'Setting up the execution role' (a role that the scheduler
may not take is refused when the schedule is made) and 'Using universal targets'; API reference, DeleteScheduleGroup
(read 2026-11-27).
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.scheduler.exceptions import ScheduleGroupNotFound, ValidationException
from moto.scheduler.models import EventBridgeSchedulerBackend, Schedule, scheduler_backends

SCHEDULER = "scheduler.amazonaws.com"
ENDS_MACHINES = "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"


def teach() -> None:
    """Patch this process's moto to refuse what the scheduler refuses."""
    plain_create = EventBridgeSchedulerBackend.create_schedule
    plain_group = EventBridgeSchedulerBackend.create_schedule_group
    plain_delete = EventBridgeSchedulerBackend.delete_schedule_group

    def create_schedule(self: EventBridgeSchedulerBackend, *given: Any, **named: Any) -> Schedule:
        """Create a schedule; raise as the service does where its group or role is missing."""
        if named["group_name"] not in self.schedule_groups:
            raise ScheduleGroupNotFound(named["group_name"])
        if _role(named["target"]["RoleArn"]) is None:
            raise ValidationException(
                "The execution role you provide must allow AWS EventBridge Scheduler to assume the role."
            )
        return plain_create(self, *given, **named)

    def create_schedule_group(self: EventBridgeSchedulerBackend, name: str, tags: list[dict[str, str]]) -> Any:
        """Create a schedule group; raise as the service does where there is one of this name."""
        if name in self.schedule_groups:
            raise JsonRESTError("ConflictException", f"Schedule group {name} already exists.")
        return plain_group(self, name, tags)

    def delete_schedule_group(self: EventBridgeSchedulerBackend, name: str | None) -> None:
        """Delete a schedule group; raise as the service does where there is none of this name."""
        if name not in self.schedule_groups:
            raise ScheduleGroupNotFound(str(name))
        plain_delete(self, name)

    EventBridgeSchedulerBackend.create_schedule = create_schedule  # type: ignore[method-assign]
    EventBridgeSchedulerBackend.create_schedule_group = create_schedule_group  # type: ignore[method-assign]
    EventBridgeSchedulerBackend.delete_schedule_group = delete_schedule_group  # type: ignore[method-assign]


def carry_out(now_s: float) -> list[str]:
    """End the machines of schedules that are due; return their ids."""
    ended: list[str] = []
    for region, backend in scheduler_backends[DEFAULT_ACCOUNT_ID].items():
        for group in backend.schedule_groups.values():
            for schedule in list(group.schedules.values()):
                if at_s(schedule.schedule_expression) <= now_s:
                    ended += _end(str(region), schedule)
                    if schedule.action_after_completion == "DELETE":
                        group.delete_schedule(schedule.name)
    return ended


def _end(region: str, schedule: Schedule) -> list[str]:
    """End the machines of a schedule that its role may end, which carry the tag of a run; return their ids.

    None ends where the role may not, or one machine carries no such tag; machines that no longer exist do not count.
    """
    assert schedule.target["Arn"] == ENDS_MACHINES
    machines = ec2_backends[DEFAULT_ACCOUNT_ID][region]
    there = {machine.id: machine for machine in machines.all_instances()}
    ids = [id_ for id_ in json.loads(schedule.target["Input"])["InstanceIds"] if id_ in there]
    policy = json.dumps(_role(schedule.target["RoleArn"]).policies)
    tagged = [id_ for id_ in ids if any(tag["key"] == "hetopt:run-id" for tag in there[id_].get_tags())]
    if "ec2:TerminateInstances" not in policy or tagged != ids or not ids:
        return []
    machines.terminate_instances(ids)
    return ids


def _role(arn: str) -> Any:
    """Return a role that the scheduler may take; None where there is none."""
    roles = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].roles.values()
    return next(
        (role for role in roles if role.arn == arn and SCHEDULER in str(role.assume_role_policy_document)), None
    )


def at_s(expression: str) -> float:
    """Return when a one-time schedule is due, in seconds since the epoch; in UTC where no time zone is named."""
    moment = datetime.datetime.strptime(expression, "at(%Y-%m-%dT%H:%M:%S)")
    return moment.replace(tzinfo=datetime.UTC).timestamp()
