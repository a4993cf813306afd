"""The EC2 launcher is a peer of the others: start, poll, stop, from the run's folder alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetopt.optimizer.ec2 import calls
from hetopt.optimizer.ec2.bundle import Bundle
from hetopt.optimizer.ec2.edge import BotoEdge
from hetopt.optimizer.ec2.errors import ApiRefused
from hetopt.optimizer.ec2.launcher import BUNDLE_FILE, PLAN_OBJECT, Ec2Launcher
from hetopt.optimizer.ec2.ledger import known_regions
from hetopt.optimizer.ec2.order import ORDER_FILE, Order
from hetopt.optimizer.ec2.request import Answer, Request
from hetopt.optimizer.ec2.seen import SEEN_FILE, Seen
from hetopt.optimizer.plan import Plan
from hetopt.profiler.errors import CloudRefused
from hetopt.trainer.events import EVENTS_FILE
from hetopt.trainer.launch.base import RunHandle, RunState
from hetopt.trainer.launch.ec2.protocol import Lease, placement_of
from tests.ec2.conftest import REGION, Patience, Recording, leftovers

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


def put(cloud: BotoEdge, order: Order, name: str, text: str) -> None:
    cloud(calls.put_object(order, "test", f"{order.prefix}/{name}", text.encode(), "what a machine would write"))


def event(name: str, **fields: object) -> str:
    return json.dumps({"event": name, "time_s": 1.0, **fields}) + "\n"


def test_a_run_is_started_followed_and_stopped(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience, tmp_path: Path
) -> None:
    order = Order.load(run_dir / ORDER_FILE)
    handle = launcher.start(plan.run, run_dir, {})
    assert known_regions(tmp_path) == [REGION]
    assert launcher.poll(handle).state is RunState.STARTING
    body = cloud(calls.get_object(order, f"{order.prefix}/placement.json"))["Body"]
    machines = Seen.load(run_dir / SEEN_FILE).machines
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


def end_machines(cloud: BotoEdge, ids: list[str]) -> None:
    cloud(
        Request(
            step="t",
            service="ec2",
            operation="terminate_instances",
            parameters={"InstanceIds": ids},
            purpose="they end",
        )
    )


def test_a_run_that_ends_by_itself_is_cleared(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience
) -> None:
    order = Order.load(run_dir / ORDER_FILE)
    handle = launcher.start(plan.run, run_dir, {})
    put(cloud, order, f"events/{0:015d}.jsonl", event("training_finished", reason="target"))
    end_machines(cloud, [machine.id for machine in Seen.load(run_dir / SEEN_FILE).machines])
    patience.now_s += 60
    assert launcher.poll(handle).state is RunState.FINISHED
    assert leftovers(cloud) == []
    assert Seen.load(run_dir / SEEN_FILE).cleared


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
    handle = launcher.start(plan.run, run_dir, {})
    began = patience.now_s
    put(cloud, order, f"events/{0:015d}.jsonl", event("run_started") + event("training_started", step=0))
    first_end = Seen.load(run_dir / SEEN_FILE).lease_end_s
    assert first_end is not None
    ends, stopped_s, most = [first_end], None, 0.0
    for _ in range(400):
        patience.now_s += 60
        launcher.poll(handle)
        seen = Seen.load(run_dir / SEEN_FILE)
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


def test_nothing_rented_is_nothing_to_stop(launcher: Ec2Launcher, tmp_path: Path) -> None:
    handle = RunHandle(run_dir=tmp_path)
    launcher.stop(handle)
    assert launcher.poll(handle).state is RunState.FAILED
    assert replace(launcher).home == tmp_path


class NoMore:
    """Has no capacity for what is asked after a loss."""

    def __init__(self, inner: BotoEdge) -> None:
        self.inner = inner

    def __call__(self, request: Request) -> Answer:
        if request.operation == "create_fleet" and "-101" in request.step:
            return {"FleetId": "fleet-0", "Errors": [{"ErrorCode": "InsufficientInstanceCapacity"}]}
        return self.inner(request)


@pytest.mark.parametrize("capacity", [True, False])
def test_only_what_was_lost_is_rented_again(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, plan: Plan, patience: Patience, capacity: bool
) -> None:
    order = Order.load(run_dir / ORDER_FILE)
    if not capacity:
        launcher = replace(launcher, inner=NoMore(cloud))
    patience.now_s = time.time()  # moto's machines are of now
    handle = launcher.start(plan.run, run_dir, {})
    put(cloud, order, f"events/{0:015d}.jsonl", event("run_started") + event("training_started", step=0))
    put(cloud, order, "ckpt/LATEST", "step-40\n")
    patience.now_s += 60
    launcher.poll(handle)
    before = Seen.load(run_dir / SEEN_FILE)
    victim = next(machine for machine in before.machines if machine.instance_type == "c7i.large")
    end_machines(cloud, [victim.id])
    patience.now_s += 60
    assert launcher.poll(handle).state is RunState.RUNNING
    after = Seen.load(run_dir / SEEN_FILE)
    placement = json.loads(cloud(calls.get_object(order, f"{order.prefix}/placement.json"))["Body"])
    assert placement["generation"] == after.generation == 1
    assert placement["resume_from"] == "step-40"
    survivors = {machine.id for machine in before.machines} - {victim.id}
    assert survivors < set(placement["hosts"]) if capacity else survivors == set(placement["hosts"])
    for machine in before.machines:
        if machine.id in survivors:
            assert placement["hosts"][machine.id]["host"] == machine.host, "who is left keeps its place"
    assert sum(worker["local_batch_size"] for worker in placement["spec"]["workers"]) == plan.run.global_batch_size
    assert len(after.alive) == (4 if capacity else 3)
    # The next looks find nothing to do.
    patience.now_s += 60
    launcher.poll(handle)
    assert Seen.load(run_dir / SEEN_FILE).generation == 1
    launcher.stop(handle)
    assert leftovers(cloud) == []


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
