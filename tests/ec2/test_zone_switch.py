"""A run leaves an expensive pool: all of its machines or none, and whatever comes between disturbs nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.ec2.protocol import Lease
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, PLAN_OBJECT, Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.request import Answer, Edge, Request
from hetopt.core.budget_law import LEASE_OBJECT, SHUTDOWN_S
from hetopt.core.errors import BadInput, BudgetStop
from hetopt.core.profile import Profile
from hetopt.core.run_status import RunState
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import Patience, leftovers, plan_of, start_over
from tests.ec2.faults import Fault, Faulty, Killed
from tests.ec2.followed import Followed, Priced, end_machines, placement_now, put

Follow = Callable[..., Followed]
NEEDED_S = 3600.0


@pytest.fixture(scope="module")
def spot_plan(profile: Profile, catalog: Catalog) -> Plan:
    return plan_of(profile, catalog, (("c7i.large", 3, "spot"), ("c7g.xlarge", 1, "spot")))


@pytest.fixture
def follow(
    cloud: BotoEdge,
    tmp_path: Path,
    order_for: Callable[..., Order],
    spot_plan: Plan,
    bundle: Bundle,
    patience: Patience,
) -> Follow:
    """Four machines on spot in the first zone of the order, which train."""
    count = iter(range(10**6))

    def begin(inner: Edge | None = None, **changes: Any) -> Followed:
        folder = tmp_path / "runs" / f"run-{next(count)}"
        folder.mkdir(parents=True)
        order = order_for(chosen=spot_plan).model_copy(update={"created_s": time.time(), **changes})
        order.save(folder / ORDER_FILE)
        spot_plan.save(folder / PLAN_OBJECT)
        (folder / BUNDLE_FILE).write_bytes(bundle.data)
        edge = inner or Priced(cloud, {})
        launcher = Ec2Launcher(home=tmp_path, inner=edge, clock=patience.clock, sleep=patience.sleep)
        return Followed(cloud, launcher, folder, spot_plan.run, patience)

    return begin


def elsewhere(run: Followed) -> str:
    return next(zone.name for zone in run.order.zones if zone.name != run.seen.zone)


def leave(run: Followed) -> str:
    zone = elsewhere(run)
    run.launcher.switch(run.handle, zone, NEEDED_S)
    assert run.launcher.poll(run.handle).state is RunState.RUNNING, "it looks at once"
    return zone


def zones_of(cloud: Edge, run: Followed, ids: set[str]) -> set[str]:
    described = cloud(calls.addresses_call(run.order))["Reservations"]
    machines = [one for each in described for one in each["Instances"]]
    return {one["Placement"]["AvailabilityZone"] for one in machines if one["InstanceId"] in ids}


def ids(machines: Any) -> set[str]:
    return {machine.id for machine in machines}


def saves(cloud: Edge, run: Followed, step: int = 80) -> None:
    """All that train stop with a checkpoint, as they were told."""
    put(cloud, run.order, "ckpt/LATEST", f"step-{step}\n")
    run.happens("training_finished", reason="stopped")


def test_all_machines_of_a_run_leave_for_another_zone_in_one_pause(cloud: BotoEdge, follow: Follow) -> None:
    run = follow()
    before, here = run.before.machines, run.seen.zone
    lease_s = run.seen.lease_end_s
    zone = leave(run)
    waiting = run.seen.waiting
    assert {(one.host, one.instance_type) for one in waiting} == {(one.host, one.instance_type) for one in before}
    assert {one.zone for one in waiting} == zones_of(cloud, run, ids(waiting)) == {zone}
    assert run.seen.lease_end_s is not None
    assert lease_s is not None
    assert run.seen.lease_end_s < lease_s, "two clusters spend a budget in less time, even if nobody looks again"
    lease = Lease.of_json(cloud(calls.get_object(run.order, f"{run.order.prefix}/{LEASE_OBJECT}"))["Body"])
    assert lease is not None
    assert lease.end_s == pytest.approx(run.seen.lease_end_s, abs=0.1)
    with pytest.raises(BadInput, match="cannot leave"):
        run.launcher.switch(run.handle, zone, NEEDED_S)
    assert run.launcher.pools(run.handle) is None, "machines come just now"

    first, *others = sorted(ids(waiting))
    run.boots(first)
    run.look()
    assert "pauses" not in placement_now(cloud, run.order), "one pause for all of them"
    assert set(placement_now(cloud, run.order)["hosts"]) == ids(before), "nobody trains across zones"
    run.boots(*others)
    run.look()
    assert placement_now(cloud, run.order)["pauses"]
    run.look()
    assert set(placement_now(cloud, run.order)["hosts"]) == ids(before), "they have not saved their checkpoint"
    assert len(run.seen.alive) == 8
    saves(cloud, run)
    run.look()
    placed = placement_now(cloud, run.order)
    assert set(placed["hosts"]) == ids(waiting)
    assert (placed["generation"], placed["resume_from"]) == (1, "step-80")
    assert "pauses" not in placed
    assert sorted(run.shares()) == [16, 16, 16, 16]
    assert (run.seen.zone, run.seen.zone_wanted) == (zone, None)
    run.happens("training_started", step=80)
    run.look()
    run.look()
    assert ids(run.seen.alive) == ids(waiting), "what was relieved is given back"
    assert {one.ending for one in run.seen.machines if not one.alive} == {"stopped by us"}
    assert run.seen.lease_end_s > lease_s - 3600, "and the lease grows again"
    with pytest.raises(BadInput, match="cannot leave"):
        run.launcher.switch(run.handle, here, NEEDED_S)

    # What is lost from now on is asked for here.
    end_machines(cloud, [first])
    run.look()
    (again,) = run.seen.waiting
    assert again.zone == zone
    assert zones_of(cloud, run, {again.id}) == {zone}
    run.launcher.stop(run.handle)
    assert leftovers(cloud) == []


def gives_up(cloud: BotoEdge, run: Followed, zone: str) -> None:
    """What stays is what was there before."""
    assert (run.seen.zone, run.seen.zone_wanted, run.seen.waiting) == (run.before.zone, None, [])
    run.look()
    assert ids(run.seen.alive) == ids(run.before.machines)
    there = {one.id for one in leftovers(cloud) if one.kind == "instance"}
    assert there == ids(run.before.machines), "what had come is given back"
    assert set(placement_now(cloud, run.order)["hosts"]) == ids(run.before.machines)
    assert "pauses" not in placement_now(cloud, run.order)
    with pytest.raises(BadInput, match="cannot leave"):
        run.launcher.switch(run.handle, zone, NEEDED_S)
    run.launcher.stop(run.handle)
    assert leftovers(cloud) == []


class HalfEmpty:
    """Has no more c7g.xlarge, and for these another reason than capacity, if need be."""

    def __init__(self, inner: Edge, code: str) -> None:
        self.inner, self.code = inner, code

    def __call__(self, request: Request) -> Answer:
        if request.operation == "describe_spot_price_history":
            return {"SpotPriceHistory": []}
        if request.operation == "create_fleet" and "c7g" in request.step and request.step.endswith("-101"):
            return {"FleetId": "fleet-0", "Errors": [{"ErrorCode": self.code}]}
        return self.inner(request)


@pytest.mark.parametrize(
    "code", ["InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded", "UnauthorizedOperation"]
)
def test_a_zone_that_has_not_all_machines_gets_none_of_the_run(cloud: BotoEdge, follow: Follow, code: str) -> None:
    run = follow(HalfEmpty(cloud, code))
    said: list[str] = []
    run.launcher = replace(run.launcher, tell=said.append)
    zone = leave(run)
    assert any("stays in" in one and zone in one for one in said)
    assert placement_now(cloud, run.order)["generation"] == 0
    gives_up(cloud, run, zone)


def test_a_new_machine_that_dies_in_the_pause_lets_the_others_go_on(cloud: BotoEdge, follow: Follow) -> None:
    run = follow()
    zone = leave(run)
    waiting = sorted(ids(run.seen.waiting))
    run.boots(*waiting)
    run.look()
    assert placement_now(cloud, run.order)["pauses"]
    saves(cloud, run)
    end_machines(cloud, waiting[:1])
    run.look()
    placed = placement_now(cloud, run.order)
    assert (placed["generation"], placed["resume_from"]) == (1, "step-80"), "they have paused, and must be told"
    run.happens("training_started", step=80)
    gives_up(cloud, run, zone)


def test_a_machine_that_is_lost_meanwhile_comes_first(cloud: BotoEdge, follow: Follow) -> None:
    run = follow()
    leave(run)
    victim = run.before.machines[0]
    run.boots(*ids(run.seen.waiting))
    end_machines(cloud, [victim.id])
    run.look()
    left = ids(run.before.machines) - {victim.id}
    assert set(placement_now(cloud, run.order)["hosts"]) == left
    assert placement_now(cloud, run.order)["generation"] == 1
    assert run.seen.zone_wanted is None
    (again,) = run.seen.waiting
    assert (again.host, again.zone) == (victim.host, run.before.zone)
    run.look()
    assert ids(run.seen.alive) == left | {again.id}, "those that had come are given back"
    run.launcher.stop(run.handle)
    assert leftovers(cloud) == []


def test_a_budget_that_does_not_pay_for_both_clusters_leaves_the_run_where_it_is(
    cloud: BotoEdge, follow: Follow
) -> None:
    run = follow()
    zone = elsewhere(run)
    hours = (run.order.budget_usd - run.order.fixed_usd) / run.order.worst_usd_per_hour()
    with pytest.raises(BudgetStop, match="stays in"):
        run.launcher.switch(run.handle, zone, 3600 * hours - 1500.0 - SHUTDOWN_S + 60.0)
    assert run.seen.zone_wanted is None
    assert run.seen.switches == {}
    for nowhere in (run.seen.zone, "us-east-9z"):
        with pytest.raises(BadInput, match="cannot leave"):
            run.launcher.switch(run.handle, nowhere, NEEDED_S)
    run.launcher.switch(run.handle, zone, 3600 * hours - 1500.0 - SHUTDOWN_S - 120.0)
    assert run.seen.zone_wanted == zone
    run.launcher.stop(run.handle)
    with pytest.raises(BadInput, match="cannot leave"):
        run.launcher.switch(run.handle, zone, NEEDED_S)
    assert leftovers(cloud) == []


def test_machines_are_billed_at_the_prices_that_are_seen_and_a_refusal_is_said_once(
    cloud: BotoEdge, follow: Follow
) -> None:
    priced = Priced(cloud, {})
    run, said = follow(priced), list[str]()
    run.launcher = replace(run.launcher, tell=said.append)
    extras, here, there = run.order.extras_usd_per_hour, run.seen.zone, elsewhere(run)

    def ten_minutes() -> float:
        for _ in range(10):
            run.look()
        return run.seen.spent_usd(run.patience.now_s)

    assert priced.asked == 0, "the order has asked for them"
    priced.prices = {(here, "c7i.large"): 0.02, (here, "c7g.xlarge"): 99.0, (there, "c7i.large"): 0.01}
    ten_minutes()
    assert priced.asked == 1
    rates = run.order.zone(here).rates
    usd = {one.host: one.usd_per_hour for one in run.seen.serving}
    assert sorted(usd.values())[:3] == [pytest.approx(0.02 + extras)] * 3
    assert max(usd.values()) == rates["c7g.xlarge"].worst_usd_per_hour, "nothing is believed beyond it"
    first = run.seen.spent_usd(run.patience.now_s)
    second = ten_minutes()
    assert second - first == pytest.approx(sum(usd.values()) / 6)
    priced.refusal = "UnauthorizedOperation"
    third = ten_minutes()
    fourth = ten_minutes()
    assert third - second == pytest.approx(fourth - third)
    assert priced.asked == 4
    assert len([one for one in said if "are taken to hold" in one]) == 1

    # What is rented later costs what was seen last.
    leave(run)
    assert {one.usd_per_hour for one in run.seen.waiting if one.instance_type == "c7i.large"} == {0.01 + extras}
    run.launcher.stop(run.handle)
    assert leftovers(cloud) == []


MOMENTS = ("killed before", "killed after")


def leaving(run: Followed, cloud: Edge) -> None:
    """A whole switch, as far as it comes."""
    leave(run)
    run.boots(*ids(run.seen.waiting))
    run.look()
    saves(cloud, run)
    run.look()
    run.happens("training_started", step=80)
    run.look()


def changing_calls(follow: Follow, cloud: BotoEdge) -> list[Fault]:
    """Where a switch changes anything: to be killed at what only looks is to be killed before what comes next."""
    run = follow()
    edge = Faulty(inner=Priced(cloud, {}), fault=None)
    whole, run.launcher = run.launcher, replace(run.launcher, inner=edge)
    leaving(run, cloud)
    whole.stop(run.handle)
    reads = ("s3:List", "s3:Get", "ec2:Describe")
    return [Fault(call=at, kind="", step=step) for at, step in enumerate(edge.steps) if not step.startswith(reads)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_whenever_the_process_is_killed_the_next_look_goes_on(
    cloud: BotoEdge, follow: Follow, moment: str, pytestconfig: pytest.Config
) -> None:
    every = 1 if pytestconfig.getoption("--slow") else 12
    faults = changing_calls(follow, cloud)
    assert {fault.step.split()[0] for fault in faults} >= {"s3:PutObject", "ec2:CreateFleet", "ec2:TerminateInstances"}
    for fault in faults[MOMENTS.index(moment) :: every]:
        start_over(cloud)
        run = follow()
        whole, killed = run.launcher, replace(fault, kind=moment)
        run.launcher = replace(whole, inner=Faulty(inner=Priced(cloud, {}), fault=killed))
        with pytest.raises(Killed):
            leaving(run, cloud)
        run.launcher = whole
        run.patience.now_s += 60
        if not run.launcher.poll(run.handle).state.is_over:
            goes_on(cloud, run, killed)
        run.launcher.stop(run.handle)
        assert leftovers(cloud) == [], killed


def goes_on(cloud: BotoEdge, run: Followed, fault: Fault) -> None:
    """All train in one zone, with all of the batch, once what was begun is done or given up."""
    for _ in range(5):
        told = placement_now(cloud, run.order)
        assert len(zones_of(cloud, run, set(told["hosts"]))) == 1, fault
        assert sum(run.shares()) == 64, fault
        run.boots(*ids(run.seen.waiting))
        if told.get("pauses"):
            saves(cloud, run, 90)
        run.patience.now_s += 60
        if run.launcher.poll(run.handle).state.is_over:
            return
        run.happens("training_started", step=90)
    run.look()
    told, seen = placement_now(cloud, run.order), run.seen
    assert "pauses" not in told, fault
    assert seen.zone_wanted is None, fault
    assert seen.paused_s is None, fault
    assert set(told["hosts"]) == ids(seen.serving) == ids(seen.alive), fault
    assert zones_of(cloud, run, ids(seen.serving)) == {seen.zone}, fault
