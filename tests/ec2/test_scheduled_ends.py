"""Ends outside the machines: made where the account allows it, carried out by whatever keeps schedules, and removed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import boto3
import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.box import schedules
from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import calls, doctor
from hetopt.backends.ec2.renter.launcher import Ec2Launcher, read_lease
from hetopt.backends.ec2.renter.order import (
    UNPLACED_S,
    BootImage,
    Order,
    Rate,
    Role,
    Zone,
    lifetime_s,
)
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.request import Answer, ApiRefused, BotoEdge, Request, Retrying, read
from hetopt.backends.host.bundle import Bundle
from hetopt.core import budget_law
from hetopt.core.budget_law import SHUTDOWN_S
from hetopt.core.errors import BudgetStop, CloudRefused
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, Patience, Recording, be_unkind, leftovers, rent
from tests.ec2.followed import Followed, Priced, end_machines

Make = Callable[..., Order]


def client(service: str) -> Any:
    return boto3.client(service, region_name=REGION)


@pytest.fixture
def role(cloud: BotoEdge, patience: Patience) -> str:
    """As the commands of `hetopt setup` make it, of an account whose clock is the test's."""
    patience.now_s = time.time()
    iam = client("iam")
    trust = json.dumps(doctor.policy("end_trust", account=ACCOUNT))
    made = iam.create_role(RoleName=calls.END_ROLE, AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    policy = json.dumps(doctor.policy("end_policy", account=ACCOUNT))
    iam.put_role_policy(RoleName=calls.END_ROLE, PolicyName="hetopt", PolicyDocument=policy)
    return str(made)


@pytest.fixture(scope="module")
def order_of(plan: Plan) -> Callable[..., Order]:
    """An order of one machine at a price, for a budget."""

    def make(budget: float, worst: float, fixed: float, life_s: float) -> Order:
        rate = Rate(usd_per_hour=worst / 10, worst_usd_per_hour=worst, on_demand_usd_per_hour=worst)
        zone = Zone(name="z", zone_id="z", subnet_id="s", vpc_id="v", rates={"c7i.large": rate})
        host = Role(
            name="0",
            instance_types=("c7i.large",),
            hosts=("h0",),
            market="spot",
            image_kind="x86_64-cpu",
        )
        return Order(
            run_id="20261120-000000-digits-0001",
            hetopt_version="0.1.0",
            region=REGION,
            account_id=ACCOUNT,
            owner="AIDA",
            bucket=BUCKET,
            instance_profile="hetopt-node",
            volume_gb=8,
            extras_usd_per_hour=0.0,
            zones=(zone,),
            roles=(host,),
            images={"x86_64-cpu": BootImage(ami="ami-0", root_device="/dev/xvda")},
            bundle_sha256="0" * 64,
            created_s=1_800_000_000.0,
            budget_usd=budget,
            fixed_usd=fixed,
            checkpoint_s=30.0,
            lifetime_s=life_s,
        )

    return make


def states(edge: BotoEdge) -> dict[str, str]:
    answer = edge(read("ec2", "describe_instances", ""))
    return {one["InstanceId"]: one["State"]["Name"] for each in answer["Reservations"] for one in each["Instances"]}


def scheduled_s() -> dict[str, float]:
    """When the account ends machines, as its scheduler knows it, by their ids."""
    scheduler = client("scheduler")
    listed = [(one["GroupName"], one["Name"]) for one in scheduler.list_schedules()["Schedules"]]
    told = [scheduler.get_schedule(GroupName=group, Name=name) for group, name in listed]
    return {one["Name"]: schedules.at_s(one["ScheduleExpression"]) for one in told}


def test_machines_that_nothing_ends_are_ended_after_their_lease(
    cloud: BotoEdge, role: str, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    assert order.end_role == role
    seen = Recording(inner=cloud)
    rent(seen, order, plan, bundle, tmp_path, patience)
    promised = calls.launch_calls(order, {"plan.json": b""}, bundle.data)
    assert [one.operation for one in promised] == seen.operations, "the dry run prints what is done"
    names = {one["Name"] for one in client("scheduler").list_schedules()["Schedules"]}
    assert names == set(states(cloud)), "a schedule for each machine"
    be_unkind(advance_s=UNPLACED_S + 60)
    assert set(states(cloud).values()) == {"running"}, "they have their places"
    left_s = order.outside_end_s() - time.time() - UNPLACED_S - 60
    assert left_s > order.lifetime_s + SHUTDOWN_S - UNPLACED_S - 60, "the machines' own timers come first"
    be_unkind(advance_s=left_s - 60)
    assert set(states(cloud).values()) == {"running"}
    be_unkind(advance_s=120)
    assert set(states(cloud).values()) == {"terminated"}
    assert client("scheduler").list_schedules()["Schedules"] == [], "each deletes itself"


class Refuses:
    """An account that does not allow an operation, or any of a service; or a process that is gone at the first one."""

    def __init__(self, inner: Any, what: str, *, dies: bool = False) -> None:
        self.inner, self.what, self.dies, self.is_dead = inner, what, dies, False

    def __call__(self, request: Request) -> Answer:
        is_refused = self.is_dead or self.what in (request.operation, request.service)
        self.is_dead = self.dies and is_refused
        if is_refused:
            raise ApiRefused(request, "AccessDeniedException", f"is not authorized to perform: {request.api_name}")
        answer: Answer = self.inner(request)
        return answer


@pytest.mark.parametrize("operation", ["describe_instances", "update_schedule"])
def test_machines_that_are_given_no_place_are_ended_soon(
    cloud: BotoEdge,
    role: str,
    order_for: Make,
    plan: Plan,
    bundle: Bundle,
    tmp_path: Path,
    patience: Patience,
    operation: str,
) -> None:
    with pytest.raises(CloudRefused):
        rent(Refuses(cloud, operation, dies=True), order_for(), plan, bundle, tmp_path, patience)
    assert list(states(cloud).values()) == ["running"] * 4
    be_unkind(advance_s=UNPLACED_S + 60)
    assert list(states(cloud).values()) == ["terminated"] * 4


@pytest.mark.parametrize("what", ["update_schedule", "scheduler"])
def test_an_account_with_the_role_that_allows_no_ends_or_none_to_be_moved_keeps_no_machine(
    cloud: BotoEdge,
    role: str,
    order_for: Make,
    plan: Plan,
    bundle: Bundle,
    tmp_path: Path,
    patience: Patience,
    what: str,
) -> None:
    with pytest.raises(CloudRefused, match="scheduler:"):
        rent(Refuses(cloud, what), order_for(), plan, bundle, tmp_path, patience)
    assert not [one for one in leftovers(cloud) if one.kind == "instance"]


def test_whoever_follows_a_run_moves_its_ends_before_its_lease(
    cloud: BotoEdge, role: str, run_dir: Path, plan: Plan, tmp_path: Path, patience: Patience
) -> None:
    """At a tenth of the worst price the lease grows nearly as fast as time passes, look by look."""
    priced = Priced(cloud, {("us-east-1a", "c7i.large"): 0.009})
    edge = Retrying(inner=priced, sleep=patience.sleep, random=Random(0))
    launcher = Ec2Launcher(home=tmp_path, inner=edge, clock=patience.clock, sleep=patience.sleep)
    run = Followed(cloud, launcher, run_dir, plan.run, patience)
    order, first_s = run.order, run.seen.lease_end_s or 0.0
    moves, before = 0, scheduled_s()
    for _ in range(20):
        patience.now_s += 600 - 60
        run.look()
        found = read_lease(cloud, order)
        assert found is not None
        lease, ends_s = found[0], scheduled_s()
        assert len(ends_s) == 4
        for end_s in ends_s.values():
            assert lease.end_s + SHUTDOWN_S < end_s <= order.outside_end_s(lease.end_s) + 2
        moves, before = moves + (ends_s != before), ends_s
    assert lease.end_s > first_s + 20 * 250
    assert 0 < moves < 10, "not with each look: each is a call for each machine"
    # A machine that is asked for later has the deadline until it has its place.
    lost = run.seen.serving[0]
    end_machines(cloud, [lost.id])
    run.look()
    run.look()
    new = run.seen.waiting[-1]
    assert scheduled_s()[new.id] <= patience.now_s + UNPLACED_S + 1
    run.boots(*[one.id for one in run.seen.waiting])
    run.happens("training_finished", reason="stopped", step=80)
    for _ in range(8):
        run.look()
    assert new.id in [one.id for one in run.seen.serving]
    for one in run.seen.serving:
        assert scheduled_s()[one.id] > (run.seen.lease_end_s or 0.0) + SHUTDOWN_S


rates = st.floats(0.1, 300.0)


@settings(deadline=None)
@given(
    budget=st.floats(3.0, 3000.0),
    worst=rates,
    fixed=st.floats(0.0, 0.2),
    looks=st.lists(st.tuples(st.floats(10.0, 20_000.0), st.floats(0.05, 1.0)), max_size=12),
    places=st.booleans(),
)
def test_machines_that_all_hang_cost_a_quarter_more_than_the_budget_at_most(
    order_of: Callable[..., Order],
    budget: float,
    worst: float,
    fixed: float,
    looks: list[tuple[float, float]],
    places: bool,
) -> None:
    """Somebody looks at prices below the worst; then nobody does, no machine ends by itself, and all cost the worst
    until the account's scheduler has ended them, late."""
    try:
        life_s = lifetime_s(budget, fixed_usd=fixed, worst_usd_per_hour=worst)
    except BudgetStop:
        return
    order = order_of(budget, worst, fixed, life_s)
    now_s, spent, end_s = order.created_s, 0.0, order.created_s + life_s
    for gap_s, share in looks:
        gap_s = min(gap_s, max(0.0, end_s - now_s))
        now_s, spent = now_s + gap_s, spent + share * worst * gap_s / 3600
        end_s = max(end_s, budget_law.end_s(now_s, budget - fixed - spent, worst))
    outside_s = order.outside_end_s(end_s)
    assert outside_s >= end_s + SHUTDOWN_S, "healthy machines end by themselves"
    if not places:
        now_s, spent, outside_s = order.created_s, 0.0, min(order.created_s + UNPLACED_S, order.outside_end_s())
    bill = fixed + spent + worst * (outside_s + facts.SCHEDULE_LATE_S - now_s) / 3600
    assert bill <= 1.25 * budget * (1 + 1e-9)


def test_a_run_that_ends_takes_its_schedules_with_it(
    cloud: BotoEdge, role: str, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    rent(cloud, order, plan, bundle, tmp_path, patience)
    (group,) = [one for one in leftovers(cloud, order.run_id) if one.kind == "schedule-group"]
    assert (group.run_id, group.owner) == (order.run_id, order.owner), "as everything of the run"
    other = order.model_copy(update={"run_id": "20261120-000000-digits-0002"})
    cloud(calls.group_call(other))
    # Whoever removes it needs no ledger.
    Remover(edge=cloud, sleep=patience.sleep).remove_run(order.run_id)
    assert [one.run_id for one in leftovers(cloud)] == [other.run_id], "and no others'"
    Remover(edge=cloud, sleep=patience.sleep).remove_run(other.run_id)
    assert leftovers(cloud) == []
