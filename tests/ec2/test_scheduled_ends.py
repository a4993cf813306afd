"""Ends outside the machines: made where the account allows it, carried out by whatever keeps schedules, and removed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.box import schedules
from hetopt.backends.ec2.renter import calls, permissions, scheduled_ends
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.renting import Renter
from hetopt.backends.ec2.renter.request import Answer, Request, read
from hetopt.core.budget_law import SHUTDOWN_S
from hetopt.core.paths import RUN_PATTERN
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, REGION, Patience, Recording, be_unkind, leftovers, stack

Make = Callable[..., Order]


def client(service: str) -> Any:
    return boto3.client(service, region_name=REGION)


@pytest.fixture
def role(cloud: BotoEdge) -> str:
    """As the commands of `hetopt setup` make it."""
    iam = client("iam")
    trust = json.dumps(permissions.end_trust(account_id=ACCOUNT))
    made = iam.create_role(RoleName=scheduled_ends.END_ROLE, AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    policy = json.dumps(permissions.end_policy(account_id=ACCOUNT))
    iam.put_role_policy(RoleName=scheduled_ends.END_ROLE, PolicyName="hetopt", PolicyDocument=policy)
    return str(made)


@pytest.fixture(autouse=True)
def members_of_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an administrator types is no call of hetopt's."""
    from tests.ec2 import reviewed_members

    plain = reviewed_members.unread
    theirs = ("iam:CreateRole", "iam:PutRolePolicy", "scheduler:ListSchedules", "scheduler:GetSchedule")
    monkeypatch.setattr(reviewed_members, "unread", lambda call, told: [] if call in theirs else plain(call, told))


def rented(edge: Any, order: Order, plan: Plan, bundle: Bundle, folder: Path, patience: Patience) -> list[str]:
    """What is told while it is rented."""
    told: list[str] = []
    renter = Renter(edge=stack(edge, folder, patience), sleep=patience.sleep, tell=told.append)
    renter.rent(order, plan.run, {"plan.json": plan.to_json().encode()}, bundle.data)
    return told


def states(edge: BotoEdge) -> dict[str, str]:
    answer = edge(read("ec2", "describe_instances", ""))
    return {one["InstanceId"]: one["State"]["Name"] for each in answer["Reservations"] for one in each["Instances"]}


def test_machines_that_nothing_ends_are_ended_at_their_latest_end(
    cloud: BotoEdge, role: str, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    import time

    patience.now_s = time.time()
    order = order_for()
    assert order.end_role == role
    seen = Recording(inner=cloud)
    rented(seen, order, plan, bundle, tmp_path, patience)
    promised = calls.launch_calls(order, {"plan.json": b""}, bundle.data)
    assert [one.operation for one in promised] == seen.operations, "the dry run prints what is done"
    names = {one["Name"] for one in client("scheduler").list_schedules()["Schedules"]}
    assert names == set(states(cloud)), "a schedule for each machine"
    left_s = order.latest_end_s + SHUTDOWN_S - time.time()
    be_unkind(advance_s=left_s - 60)
    assert set(states(cloud).values()) == {"running"}, "the machines' own timers come first"
    be_unkind(advance_s=120)
    assert set(states(cloud).values()) == {"terminated"}
    assert client("scheduler").list_schedules()["Schedules"] == [], "each deletes itself"


def test_a_run_that_ends_takes_its_schedules_with_it(
    cloud: BotoEdge, role: str, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    rented(cloud, order, plan, bundle, tmp_path, patience)
    (group,) = [one for one in leftovers(cloud, order.run_id) if one.kind == "schedule-group"]
    assert (group.run_id, group.owner) == (order.run_id, order.owner), "as everything of the run"
    other = order.model_copy(update={"run_id": "20261120-000000-digits-0002"})
    cloud(scheduled_ends.group_call(other))
    # Whoever removes it needs no ledger.
    Remover(edge=cloud, sleep=patience.sleep).remove_run(order.run_id)
    assert [one.run_id for one in leftovers(cloud)] == [other.run_id], "and no others'"
    Remover(edge=cloud, sleep=patience.sleep).remove_run(other.run_id)
    assert leftovers(cloud) == []


def test_gc_finds_what_is_left_of_it(
    cloud: BotoEdge, role: str, hetopt: Callable[..., Any], order_for: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_for()
    cloud(scheduled_ends.group_call(order))
    told = json.loads(hetopt("gc", "--on", "ec2", "--region", REGION, "--all", "--remove", "--json").out)
    assert [(one["kind"], one["run"], one["removed"]) for one in told] == [("schedule-group", order.run_id, True)]
    assert leftovers(cloud) == []


class Denies:
    """An account whose policy is older than schedules."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, request: Request) -> Answer:
        if request.service == "scheduler":
            raise ApiRefused(request, "AccessDeniedException", f"is not authorized to perform: {request.api_name}")
        answer: Answer = self.inner(request)
        return answer


def test_whoever_may_not_schedule_is_told_once_and_rents_all_the_same(
    cloud: BotoEdge, role: str, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order, edge = order_for(), Denies(cloud)
    told = rented(edge, order, plan, bundle, tmp_path, patience)
    assert len([one for one in told if one.startswith("nothing outside the machines ends them: ")]) == 1
    assert set(states(cloud).values()) == {"running"}
    Remover(edge=edge, sleep=patience.sleep).remove_run(order.run_id)
    assert leftovers(cloud) == []


def test_a_role_that_the_scheduler_may_not_take_is_told(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    trust = json.dumps(permissions.trust_policy())
    client("iam").create_role(RoleName=scheduled_ends.END_ROLE, AssumeRolePolicyDocument=trust)
    told = rented(cloud, order_for(), plan, bundle, tmp_path, patience)
    assert [one for one in told if "must allow AWS EventBridge Scheduler to assume the role" in one]


def test_without_the_role_no_scheduler_is_asked(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    seen, order = Recording(inner=cloud), order_for()
    assert order.end_role is None
    rented(seen, order, plan, bundle, tmp_path, patience)
    assert "scheduler" not in {one.service for one in seen.seen}


def test_a_machine_that_joins_later_has_an_end_of_its_own(
    cloud: BotoEdge, role: str, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    rented(cloud, order, plan, bundle, tmp_path, patience)
    renter = Renter(edge=stack(cloud, tmp_path, patience), sleep=patience.sleep, tell=lambda _: None)
    lost = order.roles[0].model_copy(update={"hosts": order.roles[0].hosts[:1]})
    renter.ask(order, [lost], order.zones[0], ask=1, end_s=None)
    names = {one["Name"] for one in client("scheduler").list_schedules()["Schedules"]}
    assert names == set(states(cloud))
    assert len(names) == 5


@given(run=st.from_regex(RUN_PATTERN, fullmatch=True), life=st.integers(0, 10_000), other=st.integers(0, 10_000))
def test_names_are_what_the_scheduler_takes_and_each_life_has_its_own(run: str, life: int, other: int) -> None:
    name = scheduled_ends.group_name(run, life)
    assert re.fullmatch(r"[0-9a-zA-Z-_.]{1,64}", name)
    assert name.startswith(scheduled_ends.prefix_of(run))
    assert (name == scheduled_ends.group_name(run, other)) is (life == other)


def test_it_ends_a_machine_after_the_latest_of_its_own_timers(role: str, order_for: Make) -> None:
    """No lease sets a machine's own timer later than its latest end, and this one is later than that."""
    order = order_for()
    for factor in (0.37, 1.0, 12.3):
        longer = order.model_copy(update={"lifetime_s": order.lifetime_s * factor, "budget_usd": 5.0 * factor})
        moment = scheduled_ends.end_call(longer, "i-1").parameters["ScheduleExpression"]
        assert 0 <= schedules.at_s(moment) - (longer.latest_end_s + SHUTDOWN_S) <= 1
