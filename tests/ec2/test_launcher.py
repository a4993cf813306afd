"""The EC2 launcher is a peer of the others: start, poll, stop, from the run's folder alone.

A machine whose boot fails says why, and what fails before a step again and again is not rented for ever.

A run leaves an expensive pool: all of its machines or none, and whatever comes between disturbs nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetopt.backends.backend import MOST_IDLE
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.launcher import ADDRESSES_WITHIN_S, Ec2Launcher
from hetopt.backends.ec2.renter.order import (
    BOOT_FOLDER,
    ORDER_FILE,
    SEEN_FILE,
    ClusterState,
    MachineState,
    Order,
    hopeless_hosts,
    worst_usd_per_hour,
)
from hetopt.backends.ec2.renter.reconcile import ASK_AGAIN_S
from hetopt.backends.ec2.renter.request import Answer, ApiRefused, BotoEdge, Edge, Request
from hetopt.backends.host.bundle import Bundle
from hetopt.backends.host.protocol import Lease, without
from hetopt.core.budget_law import LEASE_OBJECT
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.profile import Profile
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.run_status import RunState
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import Patience, be_unkind, leftovers, ordered, plan_of, start_over
from tests.ec2.faults import Fault, Faulty, Killed
from tests.ec2.followed import Followed, Priced, end_machines, event, latest, placement_now, put


def test_the_lease_grows_while_less_is_spent_than_feared_and_ends_before_the_budget(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, order: Order, plan: Plan, patience: Patience
) -> None:
    dear = {
        zone.name: {
            name: rate.model_copy(update={"usd_per_hour": rate.worst_usd_per_hour / 2})
            for name, rate in zone.rates.items()
        }
        for zone in order.zones
    }
    zones = tuple(zone.model_copy(update={"rates": dear[zone.name]}) for zone in order.zones)
    worst = worst_usd_per_hour(order.roles, order.zones)
    # moto's clock is not ours: machines have been there since now.
    patience.now_s = time.time()
    changes = {"zones": zones, "budget_usd": worst / 2, "created_s": patience.now_s, "lifetime_s": 1800.0}
    order = order.model_copy(update=changes)
    order.save(run_dir / ORDER_FILE)
    launcher = replace(launcher, inner=Priced(cloud, {}))
    handle = launcher.start(plan.run, run_dir, {})
    began = patience.now_s
    put(cloud, order, f"events/{0:015d}.jsonl", event("run_started") + event("training_started", step=0))
    first_end = ClusterState.load(run_dir / SEEN_FILE).lease_end_s
    assert first_end is not None
    ends, stopped_s, most = [first_end], None, 0.0
    for _ in range(200):
        patience.now_s += 120
        launcher.poll(handle)
        seen = ClusterState.load(run_dir / SEEN_FILE)
        most = max(most, seen.spent_usd(patience.now_s) + order.fixed_usd)
        assert most <= order.budget_usd
        if seen.stop_wished_s is not None:
            stopped_s = stopped_s or seen.stop_wished_s
        if seen.cleared:
            break
        assert seen.lease_end_s is not None
        ends.append(seen.lease_end_s)
    assert seen.cleared
    assert leftovers(cloud) == []
    assert ends == sorted(ends)
    assert ends[-1] - began > 1.3 * order.lifetime_s, "what was not spent buys time"
    assert stopped_s is not None
    assert "budget" in str(launcher.poll(handle).reason)
    assert most > 0.9 * order.budget_usd, "nor is it stopped much too early"


def test_machines_whose_renter_was_killed_before_it_knew_them_are_paid_and_given_back(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, order: Order, plan: Plan, patience: Patience
) -> None:
    patience.now_s = time.time()
    order.model_copy(update={"created_s": patience.now_s}).save(run_dir / ORDER_FILE)
    handle = launcher.start(plan.run, run_dir, {})
    put(cloud, order, f"events/{0:015d}.jsonl", event("run_started") + event("training_started", step=0))
    known = ClusterState.load(run_dir / SEEN_FILE)
    stray, *others = known.machines
    known.model_copy(update={"machines": tuple(others)}).save(run_dir / SEEN_FILE)
    patience.now_s += ADDRESSES_WITHIN_S + 20
    launcher.poll(handle)
    seen = ClusterState.load(run_dir / SEEN_FILE)
    [found] = [machine for machine in seen.machines if machine.id == stray.id]
    assert (found.duty, found.instance_type) == ("relieved", stray.instance_type)
    assert found.usd(patience.now_s) >= stray.usd_per_hour * ADDRESSES_WITHIN_S / 3600
    patience.now_s += 60
    launcher.poll(handle)
    assert stray.id not in {left.id for left in leftovers(cloud)}
    launcher.stop(handle)


def test_a_wish_to_end_from_another_machine_stands_whatever_the_follower_does(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    """Only the bucket tells the follower: it neither grants more time over it nor replaces machines that have ended."""
    order = Order.load(run_dir / ORDER_FILE)
    order = order.model_copy(update={"lifetime_s": 1800.0})
    order.save(run_dir / ORDER_FILE)
    patience.now_s = time.time()
    handle = launcher.start(plan.run, run_dir, {})
    put(cloud, order, f"events/{0:015d}.jsonl", event("run_started") + event("training_started", step=0))
    launcher.poll(handle)
    before = ClusterState.load(run_dir / SEEN_FILE)
    assert before.lease_tag is not None
    cloud(calls.lease_call(order, before.lease_end_s or 0.0, 0.0))
    with pytest.raises(ApiRefused, match="somebody else holds this run"):
        cloud(calls.lease_call(order, time.time() + 9000, time.time() + 8000, over=before.lease_tag))
    end_machines(cloud, [before.machines[0].id])
    patience.now_s += 600
    assert launcher.poll(handle).state is not RunState.FAILED
    seen = ClusterState.load(run_dir / SEEN_FILE)
    assert seen.stop_wished_s is not None
    assert len(seen.machines) == len(before.machines), "nothing is rented for a run that is to end"
    lease = Lease.of_json(cloud(calls.get_object(order, f"{order.prefix}/{LEASE_OBJECT}"))["Body"])
    assert lease is not None
    assert lease.wishes_end
    end_machines(cloud, [machine.id for machine in before.machines])
    patience.now_s += 60
    assert launcher.poll(handle).state is RunState.STOPPED
    assert leftovers(cloud) == []


class Lossy(Followed):
    """One of them is lost."""

    def __init__(
        self, cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, spec: RunSpec, patience: Patience
    ) -> None:
        super().__init__(cloud, launcher, run_dir, spec, patience)
        self.victim = next(machine for machine in self.before.machines if machine.instance_type == "c7i.large")
        end_machines(cloud, [self.victim.id])
        self.look()


def test_survivors_go_on_and_what_was_lost_joins_when_it_has_booted(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    run = Lossy(cloud, launcher, run_dir, plan.run, patience)
    survivors = {machine.id for machine in run.before.machines} - {run.victim.id}
    alone = placement_now(cloud, run.order)
    assert alone["generation"] == run.seen.generation == 1
    assert alone["resume_from"] == "step-40"
    assert set(alone["hosts"]) == survivors, "nobody waits for a machine that is not there"
    assert sum(run.shares()) == plan.run.global_batch_size
    (new,) = {machine.id for machine in run.seen.alive} - survivors
    run.look()
    assert placement_now(cloud, run.order) == alone, "it has not booted"

    run.boots(new)
    put(cloud, run.order, "ckpt/LATEST", latest("step-60"))
    run.look()
    paused = placement_now(cloud, run.order)
    assert paused["pauses"]
    run.look()
    assert placement_now(cloud, run.order) == paused, "they have not saved their checkpoint"
    put(cloud, run.order, "ckpt/LATEST", latest("step-80"))
    run.happens("training_finished", reason="stopped")
    run.look()
    joined = placement_now(cloud, run.order)
    assert (joined["generation"], joined["resume_from"]) == (2, "step-80")
    assert "pauses" not in joined
    assert set(joined["hosts"]) == survivors | {new}
    assert joined["hosts"][new]["host"] == run.victim.host
    assert sorted(run.shares()) == sorted(worker.local_batch_size for worker in plan.run.workers)
    launcher.stop(run.handle)
    assert leftovers(cloud) == []


def test_a_run_moves_to_machines_on_demand_that_are_paid_as_such(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    """In one pause."""
    Order.load(run_dir / ORDER_FILE).model_copy(update={"move_usd": 0.3}).save(run_dir / ORDER_FILE)
    run = Followed(cloud, launcher, run_dir, plan.run, patience)
    launcher.move(run.handle, 3600.0)
    assert launcher.poll(run.handle).state is RunState.RUNNING, "it looks at once"
    waiting, before = run.seen.waiting, run.before.machines
    (stays,) = {machine.id for machine in before if machine.instance_type != "c7i.large"}
    assert len(waiting) == 3, "the fourth is on demand already"
    described = cloud(calls.addresses_call(run.order))["Reservations"]
    lifecycles = {one["InstanceId"]: one.get("InstanceLifecycle") for each in described for one in each["Instances"]}
    assert {lifecycles[machine.id] for machine in waiting} == {None}
    worst = run.order.zones[0].rates["c7i.large"].worst_usd_per_hour
    assert {machine.usd_per_hour for machine in waiting} == {worst}
    with pytest.raises(BadInput, match="cannot move"):
        launcher.move(run.handle, 3600.0)
    run.boots(*(machine.id for machine in waiting))
    run.look()
    put(cloud, run.order, "ckpt/LATEST", latest("step-80"))
    run.happens("training_finished", reason="stopped")
    run.look()
    run.happens("training_started", step=80)
    run.look()
    run.look()
    assert run.seen.has_moved
    assert {machine.id for machine in run.seen.alive} == {stays, *(machine.id for machine in waiting)}
    # What is lost from now on is asked for on demand, too.
    end_machines(cloud, [waiting[0].id])
    run.look()
    (again,) = run.seen.waiting
    assert again.on_demand
    launcher.stop(run.handle)
    assert leftovers(cloud) == []


def test_survivors_that_cannot_hold_the_batch_wait_for_what_was_lost(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    full = [worker.model_copy(update={"max_local_batch_size": worker.local_batch_size}) for worker in plan.run.workers]
    spec = plan.run.model_copy(update={"workers": tuple(full), "script": ("train.py",)})
    run = Lossy(cloud, launcher, run_dir, spec, patience)
    told = placement_now(cloud, run.order)
    assert told["generation"] == run.seen.generation == 1
    assert len(told["hosts"]) == 4
    assert run.victim.id not in told["hosts"]
    launcher.stop(run.handle)
    assert leftovers(cloud) == []


@given(st.lists(st.integers(1, 64), min_size=2, max_size=12), st.data())
def test_shares_of_those_that_are_left_are_the_batch(sizes: list[int], data: st.DataObject) -> None:
    workers = tuple(
        WorkerSpec(host=f"h{place}", type="c7i.large", local_batch_size=size) for place, size in enumerate(sizes)
    )
    spec = RunSpec(task="digits", workers=workers, stop=StopRule(max_steps=1))
    lost = data.draw(st.sets(st.sampled_from([worker.host for worker in workers]), max_size=len(workers) - 1))
    left = without(spec, lost)
    assert left.global_batch_size == spec.global_batch_size
    assert {worker.host for worker in left.workers} == {worker.host for worker in workers} - lost
    assert min(worker.local_batch_size for worker in left.workers) >= 1
    assert without(spec, ()) == spec, "who returns has its part again"


def test_a_run_that_fails_by_itself_is_not_paid_for_longer(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    patience.now_s = time.time()
    order = Order.load(run_dir / ORDER_FILE).model_copy(update={"created_s": patience.now_s})
    order.save(run_dir / ORDER_FILE)
    handle = launcher.start(plan.run, run_dir, {})
    failed = json.dumps({"event": "run_failed", "time_s": patience.now_s, "reason": "the loss is not a number."}) + "\n"
    put(cloud, order, f"events/{0:015d}.jsonl", event("run_started") + failed)
    patience.now_s += 60
    assert launcher.poll(handle).state is RunState.RUNNING, "a machine may yet turn out to be lost"
    assert leftovers(cloud)
    patience.now_s += 180
    status = launcher.poll(handle)
    assert status.state is RunState.FAILED
    assert status.reason == "the loss is not a number."
    assert leftovers(cloud) == []


def test_a_network_that_is_gone_for_a_while_ends_no_run(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    patience.now_s = time.time()
    handle = launcher.start(plan.run, run_dir, {})
    said: list[str] = []

    def gone(request: Request) -> Answer:
        raise ApiRefused(request, "EndpointConnectionError", "no route")

    offline = replace(launcher, inner=gone, tell=said.append)
    for _ in range(5):
        patience.now_s += 60
        assert offline.poll(handle).state is RunState.STARTING
    assert len(said) == 1, "it is told once"
    patience.now_s += 60
    with pytest.raises(CloudRefused, match="cannot be reached"):
        offline.look(handle)
    launcher.stop(handle)
    assert leftovers(cloud) == []


LOG = "Collecting torch\nERROR: No space left on device\nboot failed in line 42\n"


def fails_to_boot(run: Followed, machine: MachineState) -> None:
    """As the boot script does it: it leaves its log under its host's name, and shuts the machine down."""
    put(run.cloud, run.order, f"{BOOT_FOLDER}/{machine.id}.log", LOG)
    be_unkind(shut_down=[machine.id])


def machine(host: str, name: str, ended: str | None, beat: bool, stepped: bool = False, life: int = 0) -> MachineState:
    return MachineState(
        id=f"i-{host}",
        host=host,
        instance_type=name,
        state="running" if ended is None else "terminated",
        since_s=10.0,
        life=life,
        until_s=None if ended is None else 210.0,
        ending=ended,
        heartbeat_s=70.0 if beat else None,
        has_stepped=stepped,
        usd_per_hour=1.0,
        extras_usd_per_hour=0.1,
    )


def test_a_host_whose_machines_fail_before_a_step_is_given_up(
    cloud: BotoEdge, run_dir: Path, plan: Plan, patience: Patience, tmp_path: Path
) -> None:
    told: list[str] = []
    launcher = Ec2Launcher(
        home=tmp_path, inner=cloud, tell=told.append, clock=patience.clock, sleep=patience.sleep, patience_s=3.0
    )
    run = Followed(cloud, launcher, run_dir, plan.run, patience)
    run.boots(*(one.id for one in run.before.machines))
    run.look()
    lost = next(one for one in run.seen.machines if one.instance_type == "c7g.xlarge")
    be_unkind(shut_down=[lost.id])  # it had booted, and no step was done with it
    run.look()
    asked = [run.seen.machines[-1]]
    assert asked[0].host == lost.host
    for _ in range(4):
        fails_to_boot(run, run.seen.machines[-1])
        patience.now_s += ASK_AGAIN_S
        run.look()
        if run.seen.machines[-1] is not asked[-1] and run.seen.machines[-1].id != asked[-1].id:
            asked.append(run.seen.machines[-1])
    assert len(asked) == MOST_IDLE - 1, "each try costs minutes of a machine"
    assert run.seen.given_up == (lost.host,)
    (words,) = [line for line in told if "no machine is rented" in line]
    assert f"{lost.host} (c7g.xlarge) ended before it had booted" in words
    assert "ERROR: No space left on device | boot failed in line 42" in words
    assert sum(run.shares()) == plan.run.global_batch_size, "the others go on with all of it"
    launcher.stop(run.handle)
    assert leftovers(cloud) == []


def test_a_run_whose_machines_all_fail_to_boot_says_why(
    cloud: BotoEdge, run_dir: Path, plan: Plan, patience: Patience, tmp_path: Path
) -> None:
    launcher = Ec2Launcher(home=tmp_path, inner=cloud, clock=patience.clock, sleep=patience.sleep, patience_s=3.0)
    handle = launcher.start(plan.run, run_dir, {})
    order, seen = Order.load(run_dir / ORDER_FILE), ClusterState.load(run_dir / SEEN_FILE)
    for one in seen.machines:
        name = f"{BOOT_FOLDER}/{one.id}.log"
        put(cloud, order, name, LOG)
    be_unkind(shut_down=[one.id for one in seen.machines])
    patience.now_s += 120
    status = launcher.poll(handle)
    assert status.state is RunState.FAILED
    assert "ended before it had booted; the newest boot log ends" in str(status.reason)
    assert "No space left on device" in str(status.reason)
    assert ClusterState.load(run_dir / SEEN_FILE).cleared
    assert leftovers(cloud) == []


@given(
    machines=st.lists(
        st.builds(
            machine,
            host=st.sampled_from(["c7i.large-spot-0", "c7i.large-spot-1", "c7g.xlarge-on-demand-0"]),
            name=st.sampled_from(["c7i.large", "c7g.xlarge"]),
            ended=st.sampled_from([None, "finished", "unknown", "interrupted", "stopped by us"]),
            beat=st.booleans(),
            stepped=st.booleans(),
            life=st.sampled_from([0, 1]),
        ),
        max_size=6,
    )
)
def test_only_failures_before_a_step_count_and_only_of_this_life(machines: list[MachineState]) -> None:
    class Ordered:
        life = 1
        roles = ()

    hosts = sorted({one.host for one in machines})
    order: Order = Ordered()  # type: ignore[assignment]  # all that is asked of it here
    given_up = hopeless_hosts(order, ClusterState(time_s=500.0, machines=tuple(machines)), hosts)
    for host in hosts:
        mine = [one for one in machines if one.host == host]
        failures = [
            one
            for one in mine
            if one.ending in ("finished", "unknown") and not one.has_stepped and one.life == Ordered.life
        ]
        assert (host in given_up) == (len(failures) >= MOST_IDLE)


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
    """Four machines on spot, which train, with enough kept back for machines on demand."""
    count = iter(range(10**6))

    def begin(inner: Edge | None = None, **changes: Any) -> Followed:
        order = order_for(chosen=spot_plan).model_copy(update={"created_s": time.time(), "move_usd": 0.3, **changes})
        folder = ordered(tmp_path / "runs" / f"run-{next(count)}", order, spot_plan, bundle)
        edge = inner or Priced(cloud, {})
        launcher = Ec2Launcher(home=tmp_path, inner=edge, clock=patience.clock, sleep=patience.sleep)
        return Followed(cloud, launcher, folder, spot_plan.run, patience)

    return begin


def ids(machines: Any) -> set[str]:
    return {machine.id for machine in machines}


def saves(cloud: Edge, run: Followed, step: int = 80) -> None:
    """All that train stop with a checkpoint, as they were told."""
    put(cloud, run.order, "ckpt/LATEST", latest(f"step-{step}"))
    run.happens("training_finished", reason="stopped")


MOMENTS = ("killed before", "killed after")


def moving(run: Followed, cloud: Edge) -> None:
    """A whole move to machines on demand, as far as it comes."""
    run.launcher.move(run.handle, NEEDED_S)
    run.launcher.poll(run.handle)
    run.boots(*ids(run.seen.waiting))
    run.look()
    saves(cloud, run)
    run.look()
    run.happens("training_started", step=80)
    run.look()


@pytest.fixture(scope="module")
def changing() -> list[Fault]:
    """Where a move changes anything, once it was seen: it is the same for both moments."""
    return []


def changing_calls(follow: Follow, cloud: BotoEdge) -> list[Fault]:
    """Where a move changes anything: to be killed at what only looks is to be killed before what comes next."""
    run = follow()
    edge = Faulty(inner=Priced(cloud, {}), fault=None)
    whole, run.launcher = run.launcher, replace(run.launcher, inner=edge)
    moving(run, cloud)
    whole.stop(run.handle)
    reads = ("s3:List", "s3:Get", "ec2:Describe")
    return [Fault(call=at, kind="", step=step) for at, step in enumerate(edge.steps) if not step.startswith(reads)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_whenever_the_process_is_killed_the_next_look_goes_on(
    cloud: BotoEdge, follow: Follow, changing: list[Fault], moment: str, pytestconfig: pytest.Config
) -> None:
    every = 1 if pytestconfig.getoption("--slow") else 18
    if not changing:
        changing += changing_calls(follow, cloud)
    seen = {fault.step.split()[0] for fault in changing}
    assert seen >= {"s3:PutObject", "ec2:CreateFleet", "ec2:TerminateInstances"}
    for fault in changing[MOMENTS.index(moment) :: every]:
        start_over(cloud)
        run = follow()
        whole, killed = run.launcher, replace(fault, kind=moment)
        run.launcher = replace(whole, inner=Faulty(inner=Priced(cloud, {}), fault=killed))
        with pytest.raises(Killed):
            moving(run, cloud)
        run.launcher = whole
        run.patience.now_s += 60
        if not run.launcher.poll(run.handle).state.is_over:
            goes_on(cloud, run, killed)
        run.launcher.stop(run.handle)
        assert leftovers(cloud) == [], killed


def goes_on(cloud: BotoEdge, run: Followed, fault: Fault) -> None:
    """All train, with all of the batch, once what was begun is done or given up."""
    for _ in range(9):  # an ask that nobody heard of is repeated after five minutes
        told = placement_now(cloud, run.order)
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
    assert seen.paused_s is None, fault
    assert set(told["hosts"]) == ids(seen.serving) == ids(seen.alive), fault
