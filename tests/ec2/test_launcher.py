"""The EC2 launcher is a peer of the others: start, poll, stop, from the run's folder alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ec2.protocol import Lease, placement_of
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
from hetopt.backends.ec2.renter.edge import BotoEdge, known_regions
from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, PLAN_OBJECT, Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.placement import shared, without
from hetopt.backends.ec2.renter.request import Answer, ApiRefused, Request
from hetopt.core.budget_law import LEASE_OBJECT, SHUTDOWN_S
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.run_status import RunState
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import REGION, Patience, Recording, leftovers
from tests.ec2.followed import Followed, Priced, end_machines, event, placement_now, put

Make = Callable[..., Order]


@pytest.fixture
def run_dir(tmp_path: Path, order_for: Make, plan: Plan, bundle: Bundle) -> Path:
    folder = tmp_path / "runs" / "a-run"
    folder.mkdir(parents=True)
    order_for().save(folder / ORDER_FILE)
    plan.save(folder / PLAN_OBJECT)
    (folder / BUNDLE_FILE).write_bytes(bundle.data)
    return folder


@pytest.fixture
def launcher(cloud: BotoEdge, tmp_path: Path, patience: Patience) -> Ec2Launcher:
    return Ec2Launcher(home=tmp_path, inner=Recording(inner=cloud), clock=patience.clock, sleep=patience.sleep)


def test_a_run_is_started_followed_and_stopped(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience, tmp_path: Path
) -> None:
    order = Order.load(run_dir / ORDER_FILE)
    handle = launcher.start(plan.run, run_dir, {})
    assert known_regions(tmp_path) == [REGION]
    assert launcher.poll(handle).state is RunState.STARTING
    body = cloud(calls.get_object(order, f"{order.prefix}/placement.json"))["Body"]
    machines = ClusterState.load(run_dir / SEEN_FILE).machines
    places = [placement_of(body, machine.id) for machine in machines]
    assert sum(place is not None and place.leads for place in places) == 1
    assert placement_of(body, "i-of-somebody-else") is None
    # What the machines write arrives in the folder, in pieces, once.
    first, second = event("run_started"), event("training_started", step=0)
    put(cloud, order, f"events/{0:015d}.jsonl", first)
    patience.now_s += 60
    launcher.poll(handle)
    put(cloud, order, f"events/{len(first):015d}.jsonl", second)
    put(cloud, order, "log/h0/worker.log", "hello\n")
    patience.now_s += 60
    assert launcher.poll(handle).state is RunState.RUNNING
    assert (run_dir / EVENTS_FILE).read_text() == first + second
    assert (run_dir / "log" / "h0" / "worker.log").read_text() == "hello\n"
    # In between it asks nothing.
    seen = launcher.inner
    assert isinstance(seen, Recording)
    before = len(seen.seen)
    assert launcher.poll(handle).state is RunState.RUNNING
    assert len(seen.seen) == before

    launcher.stop(handle)
    lease = Lease.of_json(cloud(calls.get_object(order, f"{order.prefix}/lease.json"))["Body"])
    assert lease is not None
    assert lease.stop_training_s == 0, "the machines were asked to save a checkpoint first"
    assert leftovers(cloud) == []
    assert launcher.poll(handle).state is RunState.STOPPED
    before = len(seen.seen)
    launcher.stop(handle)
    assert len(seen.seen) == before, "stopping twice is stopping once"


def test_a_run_that_ends_by_itself_is_cleared(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    order = Order.load(run_dir / ORDER_FILE)
    handle = launcher.start(plan.run, run_dir, {})
    put(cloud, order, f"events/{0:015d}.jsonl", event("training_finished", reason="target"))
    end_machines(cloud, [machine.id for machine in ClusterState.load(run_dir / SEEN_FILE).machines])
    patience.now_s += 60
    assert launcher.poll(handle).state is RunState.FINISHED
    assert leftovers(cloud) == []
    assert ClusterState.load(run_dir / SEEN_FILE).cleared


def test_the_lease_grows_while_less_is_spent_than_feared_and_ends_before_the_budget(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    order = Order.load(run_dir / ORDER_FILE)
    dear = {
        zone.name: {
            name: rate.model_copy(update={"usd_per_hour": rate.worst_usd_per_hour / 2})
            for name, rate in zone.rates.items()
        }
        for zone in order.zones
    }
    zones = tuple(zone.model_copy(update={"rates": dear[zone.name]}) for zone in order.zones)
    worst = order.worst_usd_per_hour()
    order = order.model_copy(update={"zones": zones, "budget_usd": worst / 2, "lifetime_s": 1800.0})
    order.save(run_dir / ORDER_FILE)
    # moto's clock is not ours: machines have been there since now.
    patience.now_s = time.time()
    launcher = replace(launcher, inner=Priced(cloud, {}))
    handle = launcher.start(plan.run, run_dir, {})
    began = patience.now_s
    put(cloud, order, f"events/{0:015d}.jsonl", event("run_started") + event("training_started", step=0))
    first_end = ClusterState.load(run_dir / SEEN_FILE).lease_end_s
    assert first_end is not None
    ends, stopped_s, most = [first_end], None, 0.0
    for _ in range(400):
        patience.now_s += 60
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
    assert ends[-1] - began > 1.5 * order.lifetime_s, "what was not spent buys time"
    assert stopped_s is not None
    assert "budget" in str(launcher.poll(handle).reason)
    assert most > 0.9 * order.budget_usd, "nor is it stopped much too early"


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
    cloud(calls.stop_call(order, before.lease_end_s or 0.0))
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


class NoMore:
    """Has no capacity for what is asked after a loss."""

    def __init__(self, inner: BotoEdge) -> None:
        self.inner = inner

    def __call__(self, request: Request) -> Answer:
        if request.operation == "create_fleet" and "-101" in request.step:
            return {"FleetId": "fleet-0", "Errors": [{"ErrorCode": "InsufficientInstanceCapacity"}]}
        return self.inner(request)


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
    put(cloud, run.order, "ckpt/LATEST", "step-60\n")
    run.look()
    paused = placement_now(cloud, run.order)
    assert paused["pauses"]
    assert (paused["generation"], paused["resume_from"]) == (1, "step-40"), "who comes late begins where the others did"
    run.look()
    assert placement_now(cloud, run.order) == paused, "they have not saved their checkpoint"
    put(cloud, run.order, "ckpt/LATEST", "step-80\n")
    run.happens("training_finished", reason="stopped")
    run.look()
    joined = placement_now(cloud, run.order)
    assert (joined["generation"], joined["resume_from"]) == (2, "step-80")
    assert "pauses" not in joined
    assert set(joined["hosts"]) == survivors | {new}
    assert joined["hosts"][new]["host"] == run.victim.host
    for machine in run.before.machines:
        if machine.id in survivors:
            assert joined["hosts"][machine.id]["host"] == machine.host, "who is left keeps its place"
    assert sorted(run.shares()) == sorted(worker.local_batch_size for worker in plan.run.workers)
    run.happens("training_started", step=80)
    run.look()
    assert run.seen.generation == 2
    assert run.seen.absent == ()
    launcher.stop(run.handle)
    assert leftovers(cloud) == []


@pytest.fixture
def run_that_moves(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> Callable[[], Followed]:
    order = Order.load(run_dir / ORDER_FILE)
    order.model_copy(update={"move_usd": 0.3}).save(run_dir / ORDER_FILE)

    def follow() -> Followed:
        run = Followed(cloud, launcher, run_dir, plan.run, patience)
        launcher.move(run.handle, 3600.0)
        assert launcher.poll(run.handle).state is RunState.RUNNING, "it looks at once"
        return run

    return follow


def test_a_run_moves_to_machines_on_demand_and_stands_still_only_while_they_take_over(
    cloud: BotoEdge, run_that_moves: Callable[[], Followed]
) -> None:
    run = run_that_moves()
    before = {machine.host: machine for machine in run.before.machines}
    waiting = run.seen.waiting
    spot = {host for host, machine in before.items() if machine.instance_type == "c7i.large"}
    assert {machine.host for machine in waiting} == spot, "the fourth is on demand already"
    described = cloud(calls.addresses_call(run.order))["Reservations"]
    lifecycles = {one["InstanceId"]: one.get("InstanceLifecycle") for each in described for one in each["Instances"]}
    assert {lifecycles[machine.id] for machine in waiting} == {None}
    worst = run.order.zones[0].rates["c7i.large"].worst_usd_per_hour
    assert {machine.usd_per_hour for machine in waiting} == {worst}, "and paid as such"
    with pytest.raises(BadInput, match="cannot move"):
        run.launcher.move(run.handle, 3600.0)

    first, *others = [machine.id for machine in waiting]
    run.boots(first)
    run.look()
    assert "pauses" not in placement_now(cloud, run.order), "one pause for all of them"
    run.boots(*others)
    run.look()
    assert placement_now(cloud, run.order)["pauses"]
    assert len(run.seen.alive) == 7, "who trains is paid until the others can"
    put(cloud, run.order, "ckpt/LATEST", "step-80\n")
    run.happens("training_finished", reason="stopped")
    run.look()
    placed = placement_now(cloud, run.order)
    (stays,) = {machine.id for machine in before.values()} - {before[host].id for host in spot}
    assert set(placed["hosts"]) == {first, *others, stays}
    assert (placed["generation"], placed["resume_from"]) == (1, "step-80")
    assert sorted(run.shares()) == sorted(worker["local_batch_size"] for worker in placed["spec"]["workers"])
    run.happens("training_started", step=80)
    run.look()
    run.look()
    assert run.seen.has_moved
    assert {machine.id for machine in run.seen.alive} == {first, *others, stays}, "what was relieved is given back"
    assert {machine.ending for machine in run.seen.machines if not machine.alive} == {"stopped by us"}

    # What is lost from now on is asked for on demand, too.
    end_machines(cloud, [first])
    run.look()
    (again,) = run.seen.waiting
    assert again.on_demand
    run.launcher.stop(run.handle)
    assert leftovers(cloud) == []


def test_more_machines_join_a_run_and_its_lease_is_what_the_budget_pays_for_with_them(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    run = Followed(cloud, launcher, run_dir, plan.run, patience)
    like = next(machine for machine in run.before.machines if machine.instance_type == "c7i.large")
    before_s = run.seen.lease_end_s
    with pytest.raises(BadInput, match="is h99 now"):
        launcher.add(run.handle, "h99", 1, 60.0)
    with pytest.raises(BudgetStop, match="does not pay for 400 more machines"):
        launcher.add(run.handle, like.host, 400, 3600.0)
    assert Order.load(run_dir / ORDER_FILE) == run.order
    launcher.add(run.handle, like.host, 2, 3600.0)
    larger = Order.load(run_dir / ORDER_FILE)
    new = {host for role in larger.roles for host in role.hosts} - {machine.host for machine in run.before.machines}
    assert len(new) == 2
    body = cloud(calls.get_object(larger, f"{larger.prefix}/order.json"))["Body"]
    assert Order.from_json(body.decode(), origin="the bucket") == larger
    lease = Lease.of_json(cloud(calls.get_object(larger, f"{larger.prefix}/{LEASE_OBJECT}"))["Body"])
    assert lease is not None
    assert before_s is not None
    left_usd = larger.budget_usd - larger.fixed_usd - run.seen.spent_usd(patience.now_s)
    paid_s = 3600 * left_usd / larger.worst_usd_per_hour()
    assert lease.end_s + SHUTDOWN_S - patience.now_s == pytest.approx(paid_s, rel=1e-3)
    assert lease.end_s < before_s, "nobody outlives the budget, even if nobody looks again"
    assert launcher.poll(run.handle).state is RunState.RUNNING, "it looks at once"
    waiting = run.seen.waiting
    assert {(machine.host in new, machine.instance_type) for machine in waiting} == {(True, "c7i.large")}
    run.boots(*(machine.id for machine in waiting))
    run.look()
    put(cloud, larger, "ckpt/LATEST", "step-80\n")
    run.happens("training_finished", reason="stopped")
    run.look()
    placed = placement_now(cloud, larger)
    assert len(placed["hosts"]) == 6
    assert sum(run.shares()) == plan.run.global_batch_size
    shares = {worker["host"]: worker["local_batch_size"] for worker in placed["spec"]["workers"]}
    assert max(shares[host] for host in new) - shares[like.host] <= 1, "as much as those that they are like"

    # Whoever of them is lost comes back as any other.
    end_machines(cloud, [waiting[0].id])
    run.happens("training_started", step=80)
    run.look()
    assert waiting[0].host in {machine.host for machine in run.seen.waiting}
    launcher.stop(run.handle)
    assert leftovers(cloud) == []


@pytest.mark.parametrize("capacity", [True, False])
def test_survivors_that_cannot_hold_the_batch_wait_for_what_was_lost(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience, capacity: bool
) -> None:
    full = [worker.model_copy(update={"max_local_batch_size": worker.local_batch_size}) for worker in plan.run.workers]
    spec = plan.run.model_copy(update={"workers": tuple(full), "script": ("train.py",)})
    run = Lossy(cloud, launcher if capacity else replace(launcher, inner=NoMore(cloud)), run_dir, spec, patience)
    told = placement_now(cloud, run.order)
    assert told["generation"] == run.seen.generation == (1 if capacity else 0)
    assert len(told["hosts"]) == 4
    assert (run.victim.id in told["hosts"]) is not capacity
    asks = run.seen.asks
    run.look()
    assert run.seen.asks == asks == 1, "nor is an exhausted pool hammered"
    run.launcher.stop(run.handle)
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
    back = [worker for worker in workers if worker.host in lost]
    again = shared(left, (*left.workers, *back), left.global_batch_size)
    assert again.global_batch_size == spec.global_batch_size
    assert min(worker.local_batch_size for worker in again.workers) >= 1


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
