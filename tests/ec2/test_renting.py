"""A plan is rented on the moto server exactly as its calls say, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.edge import LEDGER_FILE, BotoEdge, read_ledger, unresolved
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.renting import Rented, Renter
from hetopt.backends.ec2.renter.request import Answer, ApiRefused, Request
from hetopt.core.errors import CloudRefused
from hetopt.core.run_spec import RunSpec
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import Patience, Recording, leftovers, plan_of, stack

Make = Callable[..., Order]


def rent(edge: object, order: Order, plan: Plan, bundle: Bundle, folder: Path, patience: Patience) -> Rented:
    renter = Renter(edge=stack(edge, folder, patience), sleep=patience.sleep, tell=lambda _: None)  # type: ignore[arg-type]
    return renter.rent(order, plan.run, {"plan.json": plan.to_json().encode()}, bundle.data)


def test_a_plan_is_rented_and_everything_is_removed(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    order.save(tmp_path / ORDER_FILE)
    assert Order.load(tmp_path / ORDER_FILE) == order
    seen = Recording(inner=cloud)
    rented = rent(seen, order, plan, bundle, tmp_path, patience)
    there = leftovers(cloud, order.run_id)
    count = {kind: sum(one.kind == kind for one in there) for kind in {one.kind for one in there}}
    assert count == {"instance": 4, "fleet": 2, "security-group": 1, "launch-template": 2, "volume": 4}
    assert all(one.expires_at_s == pytest.approx(order.created_s + order.lifetime_s, abs=1) for one in there)
    # The calls are those that were promised.
    promised = calls.launch_calls(order, {"plan.json": b""}, bundle.data)
    assert [one.operation for one in promised] == seen.operations
    assert [one.step for one in promised] == [one.step for one in seen.seen]
    # Everybody knows who is who.
    placement = json.loads(cloud(calls.get_object(order, f"{order.prefix}/placement.json"))["Body"])
    addresses = [placement["hosts"][machine.id]["address"] for machine in rented.assigned.values()]
    assert placement["meeting"] == f"{min(addresses)}:29400"
    by_host = {host: machine.address for host, machine in rented.assigned.items()}
    assert [by_host[worker.host] for worker in rented.spec.workers] == sorted(by_host.values())
    assert {worker.host for worker in plan.run.workers} == set(by_host)
    for host, machine in rented.assigned.items():
        assert host.startswith(machine.instance_type)
    entries = read_ledger(tmp_path / LEDGER_FILE)
    assert not unresolved(entries)
    made = {id_ for entry in entries for id_ in entry.ids}
    assert {one.id for one in there if one.kind != "volume"} <= made

    Remover(edge=stack(cloud, tmp_path, patience), sleep=patience.sleep).remove_run(order.run_id)
    assert leftovers(cloud) == []


def test_calls_are_linear_in_groups_not_in_machines(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience, profile, catalog
) -> None:
    few, many = (
        plan_of(profile, catalog, (("c7i.large", machines, "spot"), ("c7g.xlarge", machines, "on-demand")), 50.0)
        for machines in (2, 32)
    )
    counts = []
    for number, chosen in enumerate((few, many)):
        seen = Recording(inner=cloud)
        order = order_for(f"run-{number}", chosen)
        rent(seen, order, chosen, bundle, tmp_path, patience)
        Remover(edge=seen, sleep=patience.sleep).remove_run(order.run_id)
        counts.append(len(seen.seen))
    removing_volumes_one_by_one = 0
    assert counts[1] <= counts[0] + removing_volumes_one_by_one + 2
    assert leftovers(cloud) == []


class Errors:
    """Fills no fleet of one step, for a reason that arrives inside an answer: moto never sends one."""

    def __init__(self, inner: BotoEdge, code: str, zones: int) -> None:
        self.inner, self.code, self.left = inner, code, zones

    def __call__(self, request: Request) -> Answer:
        if request.step.startswith("fleet-1") and self.left:
            self.left -= 1
            return {"FleetId": "fleet-0", "Instances": [], "Errors": [{"ErrorCode": self.code, "ErrorMessage": "no"}]}
        return self.inner(request)


def test_a_zone_without_capacity_gives_back_what_it_gave_and_the_next_is_asked(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    assert len(order.zones) >= 2
    edge = Errors(cloud, "InsufficientInstanceCapacity", zones=1)
    rented = rent(edge, order, plan, bundle, tmp_path, patience)
    assert rented.zone == order.zones[1]
    assert sum(one.kind == "instance" for one in leftovers(cloud, order.run_id)) == 4
    tokens = [entry.token for entry in read_ledger(tmp_path / LEDGER_FILE) if entry.api_name == "ec2:CreateFleet"]
    begun = [token for token in tokens if token]
    assert len(set(begun)) == 4, "another zone is another request"


def test_no_capacity_anywhere_leaves_nothing(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    seen = Recording(inner=Errors(cloud, "UnfulfillableCapacity", zones=99))
    with pytest.raises(CloudRefused, match=r"no zone has all machines of the plan.*c7g\.xlarge"):
        rent(seen, order, plan, bundle, tmp_path, patience)
    assert leftovers(cloud) == []
    assert not patience.waits, "an exhausted pool is not asked again, and nobody waits for it"
    asked = [one.step for one in seen.seen if one.operation == "create_fleet"]
    assert len(asked) == len(set(asked)) == 2 * len(order.zones)


def test_a_quota_stops_at_once(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    seen = Recording(inner=Errors(cloud, "VcpuLimitExceeded", zones=99))
    with pytest.raises(ApiRefused, match=r"L-1216C47A") as refused:
        rent(seen, order_for(), plan, bundle, tmp_path, patience)
    assert "request-service-quota-increase" in str(refused.value.hint)
    assert seen.operations.count("create_fleet") == 2
    assert leftovers(cloud) == []


@pytest.mark.parametrize("accepted", [True, False])
def test_fewer_machines_do_where_that_is_accepted(
    cloud: BotoEdge,
    order_for: Make,
    plan: Plan,
    bundle: Bundle,
    tmp_path: Path,
    patience: Patience,
    accepted: bool,
) -> None:
    """No zone has the second group: its share goes to the others, and somebody is asked."""
    asked: list[int] = []

    def accept(spec: RunSpec) -> bool:
        asked.append(len(spec.workers))
        assert spec.global_batch_size == plan.run.global_batch_size
        return accepted

    edge = stack(Errors(cloud, "InsufficientInstanceCapacity", zones=99), tmp_path, patience)
    renter = Renter(edge=edge, sleep=patience.sleep, tell=lambda _: None, accept=accept)
    order = order_for()
    if accepted:
        rented = renter.rent(order, plan.run, {}, bundle.data)
        assert len(rented.assigned) == len(rented.spec.workers) == 3
        assert sorted(worker.local_batch_size for worker in rented.spec.workers) == [21, 21, 22]
        assert sum(one.kind == "instance" for one in leftovers(cloud)) == 3
    else:
        with pytest.raises(CloudRefused, match="no zone has all"):
            renter.rent(order, plan.run, {}, bundle.data)
        assert leftovers(cloud) == []
    assert asked == [3]


class Short:
    """Grants one machine too few the first time, although it was asked for all or none."""

    def __init__(self, inner: BotoEdge) -> None:
        self.inner, self.done = inner, False

    def __call__(self, request: Request) -> Answer:
        if request.operation != "create_fleet" or self.done:
            return self.inner(request)
        self.done = True
        target = {**request.parameters["TargetCapacitySpecification"], "TotalTargetCapacity": 2}
        return self.inner(replace(request, parameters={**request.parameters, "TargetCapacitySpecification": target}))


def test_what_was_granted_against_the_order_is_given_back(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    rented = rent(Short(cloud), order, plan, bundle, tmp_path, patience)
    assert rented.zone == order.zones[1]
    assert sum(one.kind == "instance" for one in leftovers(cloud)) == 4
