"""A plan is rented on the moto server exactly as its calls say, and leaves nothing behind.

Machines boot images that are there: found by parameter, or by name, with the root device that is the image's own.

The networks that an organisation has: named subnets, its own security group, machines without a public address.

Probes on rented machines: which there may be, that each is rented, measured, paid for and given back.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.box.manners import PARAMETERS, UBUNTU
from hetopt.api.probes import BOOT_S, ProbeRun, probe_usd, read_sample, rented_probes
from hetopt.api.profiling import measured
from hetopt.backends.ec2.renter import calls, ordering
from hetopt.backends.ec2.renter.backend import Ec2Probes, roles_for, spent_usd
from hetopt.backends.ec2.renter.order import ORDER_FILE, SEEN_FILE, ClusterState, Order
from hetopt.backends.ec2.renter.ordering import IMAGES, Orders, image_kind
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.request import LEDGER_FILE, Answer, BotoEdge, Request, read, read_ledger, unresolved
from hetopt.backends.host.bundle import Bundle
from hetopt.backends.options import Ec2
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused, RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_log
from hetopt.core.interruption import Reporter
from hetopt.core.profile import Profile
from hetopt.core.run_folder import read_spec
from hetopt.core.step_samples import StepSample
from hetopt.optimizer.cost.bill import Billing
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.prediction import PROBE_STEPS
from tests.ec2.conftest import Patience, Recording, be_unkind, leftovers, rent, stack
from tests.ec2.test_command import refused
from tests.face.conftest import Answer as Said
from tests.logs import fields

Make = Callable[..., Order]


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
    assert count == {"instance": 4, "security-group": 1, "launch-template": 2, "volume": 4}
    # The calls are those that were promised.
    promised = calls.launch_calls(order, {"plan.json": b""}, bundle.data)
    assert [one.operation for one in promised] == seen.operations
    assert [one.step for one in promised] == [one.step for one in seen.seen]
    # Everybody knows who is who.
    placement = json.loads(cloud(calls.get_object(order, f"{order.prefix}/placement.json"))["Body"])
    by_host = {place["host"]: place["address"] for place in placement["hosts"].values()}
    first, *_ = read_spec(tmp_path).workers
    assert placement["meeting"] == f"{by_host[first.host]}:29400", "all meet at the first host"
    assert {worker.host for worker in plan.run.workers} == set(by_host)
    for machine in rented.machines:
        assert machine.host.startswith(machine.instance_type)
    entries = read_ledger(tmp_path / LEDGER_FILE)
    assert not unresolved(entries)
    made = {id_ for entry in entries for id_ in entry.ids}
    assert {one.id for one in there if one.kind != "volume"} <= made

    Remover(edge=stack(cloud, tmp_path, patience), sleep=patience.sleep).remove_run(order.run_id)
    assert leftovers(cloud) == []


KINDS = sorted(IMAGES)


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_image_is_found_by_its_parameter(cloud: BotoEdge, kind: str) -> None:
    """The server knows parameters under the names that AWS has, and no other."""
    found = ordering.boot_image(cloud, kind, None)
    assert found.ami == PARAMETERS[IMAGES[kind]]
    assert found.root_device == "/dev/xvda"


def test_an_image_that_was_chosen_boots_by_its_own_root_device(
    cloud: BotoEdge, order_for: Callable[..., Order]
) -> None:
    order = order_for(images={"x86_64-cpu": UBUNTU})
    (template, *_) = calls.template_calls(order, "sg-1").values()
    (disk,) = template.parameters["LaunchTemplateData"]["BlockDeviceMappings"]
    assert disk["DeviceName"] == "/dev/sda1", "or it would get a second disk, and a root of 8 GB"


def test_an_image_whose_other_disks_outlive_their_machines_is_refused(cloud: BotoEdge) -> None:
    """Nobody would look for them, and they cost what they hold."""

    def image(*disks: tuple[str, bool]) -> Callable[[Request], Answer]:
        mappings = [{"DeviceName": name, "Ebs": {"VolumeSize": 8, "DeleteOnTermination": goes}} for name, goes in disks]
        told = {"ImageId": UBUNTU, "Architecture": "x86_64", "RootDeviceName": "/dev/sda1"}
        return lambda _: {"Images": [{**told, "BlockDeviceMappings": mappings}]}

    with pytest.raises(BadInput, match="brings /dev/sdb, which stays, and is paid for"):
        ordering.boot_image(image(("/dev/sda1", True), ("/dev/sdb", False)), "x86_64-cpu", UBUNTU)
    # Of its root, the machine's own settings say that it goes.
    assert ordering.boot_image(image(("/dev/sda1", False), ("/dev/sdb", True)), "x86_64-cpu", UBUNTU).ami == UBUNTU


NOWHERE = "subnet-0123456789abcdef0"


@pytest.fixture
def subnet(cloud: BotoEdge) -> dict[str, Any]:
    """One of the account's, in a zone that a plan would not choose by itself."""
    found = cloud(read("ec2", "describe_subnets", ""))["Subnets"]
    return dict(next(one for one in found if one["AvailabilityZone"] == "us-east-1b"))


@pytest.fixture
def group(cloud: BotoEdge, subnet: dict[str, Any]) -> str:
    """A security group of the account's own, which nothing is open in yet."""
    told = {"GroupName": "trainers", "Description": "of the organisation", "VpcId": subnet["VpcId"]}
    made = cloud(Request(step="g", service="ec2", operation="create_security_group", parameters=told, purpose=""))
    return str(made["GroupId"])


def open_within(cloud: BotoEdge, group: str) -> None:
    rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    told = {"GroupId": group, "IpPermissions": [rule]}
    operation = "authorize_security_group_ingress"
    cloud(Request(step="i", service="ec2", operation=operation, parameters=told, purpose=""))


def test_machines_go_where_they_are_to_be_and_nothing_is_made_beside_them(
    cloud: BotoEdge,
    order_for: Callable[..., Order],
    plan: Plan,
    bundle: Bundle,
    billing: Billing,
    patience: Patience,
    tmp_path: Path,
    subnet: dict[str, Any],
    group: str,
) -> None:
    open_within(cloud, group)
    usual = order_for()
    order = order_for(subnets=(subnet["SubnetId"],), security_group=group, public_address=False)
    assert [zone.subnet_id for zone in order.zones] == [subnet["SubnetId"]]
    saved = usual.extras_usd_per_hour - order.extras_usd_per_hour
    assert saved == pytest.approx(billing.public_ipv4_usd_per_hour.value), "an address that is not had is not paid"
    seen = Recording(inner=cloud)
    rented = rent(seen, order, plan, bundle, tmp_path, patience)
    assert rented.zone == "us-east-1b"
    assert "create_security_group" not in seen.operations
    for one in seen.seen:
        if one.operation == "create_launch_template":
            data = one.parameters["LaunchTemplateData"]
            [interface] = data["NetworkInterfaces"]
            assert interface["AssociatePublicIpAddress"] is False
            assert interface["Groups"] == [group]
            assert "SecurityGroupIds" not in data, "EC2 takes either"
        if one.operation == "create_fleet":
            overrides = one.parameters["LaunchTemplateConfigs"][0]["Overrides"]
            assert {override["SubnetId"] for override in overrides} == {subnet["SubnetId"]}
    Remover(edge=cloud, sleep=patience.sleep).remove_run(order.run_id)
    assert leftovers(cloud) == []
    groups = cloud(read("ec2", "describe_security_groups", "", GroupIds=[group]))["SecurityGroups"]
    assert len(groups) == 1, "what the organisation made stays"


def test_a_group_that_keeps_its_machines_apart_is_refused(
    order_for: Callable[..., Order], group: str, cloud: BotoEdge
) -> None:
    with pytest.raises(CloudRefused, match="does not let its machines reach each other") as told:
        order_for(security_group=group)
    assert f"authorize-security-group-ingress --group-id {group}" in str(told.value.hint)
    with pytest.raises(CloudRefused, match="sg-0123456789abcdef0"):
        order_for(security_group="sg-0123456789abcdef0")
    with pytest.raises(CloudRefused, match="not all of the subnets"):
        order_for(subnets=(NOWHERE,))


@pytest.mark.parametrize("kind", ["local-zone", "wavelength-zone"])
def test_subnets_where_the_regions_prices_do_not_hold_are_refused(
    order_for: Callable[..., Order], subnet: dict[str, Any], kind: str
) -> None:
    """The budget would be bounded by a price that is not theirs."""
    be_unkind(kinds={"us-east-1b": kind})
    with pytest.raises(
        BadInput, match=f"{subnet['SubnetId']} is on an Outpost, or in a local or Wavelength zone: types, prices"
    ):
        order_for(subnets=(subnet["SubnetId"],))


def made(cloud: BotoEdge, operation: str, **told: Any) -> Any:
    return cloud(Request(step="m", service="ec2", operation=operation, parameters=told, purpose=""))


def test_a_network_whose_machines_cost_more_than_the_price_list_is_refused(
    cloud: BotoEdge, hetopt: Callable[..., Said], plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machines are dedicated, whatever a launch says: no budget would bound them."""
    network = made(cloud, "create_vpc", CidrBlock="10.7.0.0/16", InstanceTenancy="dedicated")["Vpc"]["VpcId"]
    own = made(cloud, "create_subnet", VpcId=network, CidrBlock="10.7.0.0/24")["Subnet"]["SubnetId"]
    plan.save(tmp_path / "plan.json")
    said = rf"machines in the network {network} have hardware of their own \(dedicated tenancy\)"
    refused(hetopt("launch", tmp_path / "plan.json", "--on", "ec2", "--yes", "--subnet", own), 2, said)
    answer = hetopt("doctor", tmp_path / "plan.json", "--subnet", own)
    told = " ".join(answer.out.split())
    assert answer.code == 4
    assert f"modify-vpc-tenancy --vpc-id {network} --instance-tenancy default" in told
    assert leftovers(cloud) == []


def test_machines_go_by_the_proxy_that_is_named(
    cloud: BotoEdge, hetopt: Callable[..., Said], order_for: Callable[..., Order], plan: Plan, tmp_path: Path
) -> None:
    order = order_for(proxy="http://proxy.corp:3128").of_run(plan.run)
    (made, *_) = calls.template_calls(order, "sg-1").values()
    template = made.parameters["LaunchTemplateData"]
    script = base64.b64decode(template["UserData"]).decode()
    lines = script.splitlines()
    told = "export HTTP_PROXY=http://proxy.corp:3128 HTTPS_PROXY=http://proxy.corp:3128 NO_PROXY="
    [line] = [one for one in lines if one.startswith(told)]
    assert line.removeprefix(told).split(",") == ["169.254.169.254", "localhost", "127.0.0.1"]
    assert lines.index(line) < next(number for number, one in enumerate(lines) if "aws s3" in one)
    [egress] = [one for one in calls.rule_calls(order, "sg-1") if one.step == "group-egress"]
    ports = [rule["FromPort"] for rule in egress.parameters["IpPermissions"] if "FromPort" in rule]
    assert ports == [443, 3128], "and nowhere else"
    plan.save(tmp_path / "plan.json")
    launch = ("launch", tmp_path / "plan.json", "--on", "ec2", "--dry-run", "--json", "--proxy")
    for wrong in ("proxy.corp:3128", "http://ann:secret@proxy.corp:3128", "http://proxy.corp:3128; rm -r /"):
        refused(hetopt(*launch, wrong), 2, "--proxy must be http://HOST:PORT, without a password")


def test_packages_of_machines_without_an_address_are_in_the_bill(
    cloud: BotoEdge, order_for: Callable[..., Order], billing: Billing, subnet: dict[str, Any]
) -> None:
    usual, where = order_for(), {"VpcId": subnet["VpcId"], "AvailabilityZone": subnet["AvailabilityZone"]}
    private = made(cloud, "create_subnet", CidrBlock="172.31.240.0/24", **where)["Subnet"]["SubnetId"]
    try:
        for options in ({"public_address": False}, {"subnets": (private,)}):
            order = order_for(**options)
            assert order.fixed_usd == pytest.approx(usual.fixed_usd + 4 * 0.31 * billing.nat_gateway_usd_per_gb.value)
    finally:
        made(cloud, "delete_subnet", SubnetId=private)


def some(catalog: Catalog) -> list[InstanceType]:
    return [catalog.instance_type(name) for name in ("c7i.large", "c7i.xlarge", "c7g.large")]


def test_layouts_are_one_and_two_machines_and_mixes_of_one_image(profile: Profile, catalog: Catalog) -> None:
    probes = rented_probes(profile, some(catalog), image_kind)
    layouts = {probe.configuration.layout for probe in probes}
    assert len(layouts) == len(probes) == 7
    assert (("c7i.large", 1), ("c7i.xlarge", 1)) in layouts
    assert not any({name for name, _ in layout} == {"c7i.large", "c7g.large"} for layout in layouts)
    for probe in probes:
        assert probe.spec.global_batch_size <= profile.job.batch_size
        assert [worker.type for worker in probe.spec.workers] == [node.type for node in probe.configuration.nodes]
        roles = roles_for(probe.spec, catalog)
        assert sum(role.machines for role in roles) == len(probe.configuration.nodes)
        assert {role.market for role in roles} == {"spot"}
    assert probe_usd(0.05, BOOT_S, None) == pytest.approx(0.05 * BOOT_S / 3600)
    assert probe_usd(0.05, BOOT_S, 1.0) == pytest.approx(0.05 * BOOT_S / 3600 * (1 + PROBE_STEPS / BOOT_S))


def a_machine_that(events: list[dict[str, object]], cloud: BotoEdge, folder: Path) -> Callable[[], None]:
    """What the machines of a probe write, and that they then shut down."""

    def work() -> None:
        order = Order.load(folder / ORDER_FILE)
        text = "".join(json.dumps({"time_s": 1.0, **event}) + "\n" for event in events)
        cloud(calls.put_object(order, "node", f"{order.prefix}/events/{0:015d}.jsonl", text.encode(), "by a machine"))
        ids = [machine.id for machine in ClusterState.load(folder / SEEN_FILE).machines]
        end = {"InstanceIds": ids}
        cloud(Request(step="t", service="ec2", operation="terminate_instances", parameters=end, purpose="they end"))

    return work


@pytest.fixture
def probes(
    cloud: BotoEdge,
    catalog: Catalog,
    billing: Billing,
    bundle: Bundle,
    profile: Profile,
    patience: Patience,
    tmp_path: Path,
) -> Ec2Probes:
    patience.now_s = time.time()  # moto's machines are of now
    return Ec2Probes(
        home=tmp_path,
        inner=cloud,
        clock=patience.clock,
        sleep=patience.sleep,
        orders=Orders(edge=cloud, catalog=catalog, billing=billing, options=Ec2(), version="0.1.0"),
        bundle=bundle,
        data=None,
        gradient_bytes=profile.job.gradient_bytes,
        budget_usd=0.5,
    )


def measured_probe(
    probes: Ec2Probes, probe: ProbeRun, folder: Path, patience: Patience, work: Callable[[], None]
) -> StepSample:
    """Rent and run a probe, whose machines do their work by the second look."""
    looks = itertools.count()

    def look(_: Path) -> None:
        if next(looks) == 0:
            work()
        patience.sleep(20.0)

    folder.mkdir(parents=True)
    with measured(probes, probe.spec, {}, what="a probe", reporter=Reporter(), look=look, folder=folder):
        return read_sample(probe, read_log(folder / EVENTS_FILE))


def test_a_probe_is_rented_measured_and_given_back(
    cloud: BotoEdge, probes: Ec2Probes, profile: Profile, catalog: Catalog, patience: Patience, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "20261120-000000-probe-0001"
    probe = rented_probes(profile, some(catalog), image_kind)[1]
    steps = [
        fields("step", step=step, step_time_s=0.02, compute_s=[0.015, 0.016]) for step in range(5, PROBE_STEPS + 1, 5)
    ]
    events = [fields("training_started"), *steps, fields("training_finished", reason="steps")]
    sample = measured_probe(probes, probe, folder, patience, a_machine_that(events, cloud, folder))
    assert sample.step_time_s == 0.02
    assert sample.sync_time_s == pytest.approx(0.004)
    assert sample.layout == (("c7i.large", 1), ("c7i.large", 1))
    assert Order.load(folder / ORDER_FILE).budget_usd == 0.5
    assert 0 < spent_usd(folder) < 0.5
    assert leftovers(cloud) == []


def test_a_probe_that_fails_or_cannot_be_paid_for_leaves_nothing(
    cloud: BotoEdge, probes: Ec2Probes, profile: Profile, catalog: Catalog, patience: Patience, tmp_path: Path
) -> None:
    probe = rented_probes(profile, some(catalog), image_kind)[0]
    folder = tmp_path / "runs" / "20261120-000000-probe-0002"
    failed = a_machine_that([fields("run_failed", reason="no memory.")], cloud, folder)
    with pytest.raises(RunFailed, match="a probe failed: no memory"):
        measured_probe(probes, probe, folder, patience, failed)
    poor, other = dataclasses.replace(probes, budget_usd=0.001), tmp_path / "runs" / "20261120-000000-probe-0003"
    with pytest.raises(BudgetStop, match="minutes of this cluster"):
        measured_probe(poor, probe, other, patience, failed)
    assert leftovers(cloud) == []


def test_what_cannot_be_explored_on_ec2(cloud: BotoEdge, hetopt: Callable[..., Said], tmp_path: Path) -> None:
    budget = ("--explore", "--probe-budget", "0.5", "-o", tmp_path / "p.json")
    rented = (*budget, "--on", "ec2", "--types", "c7i.large")
    refused(hetopt("profile", "digits", *rented), 2, "nobody is there to say yes")
    refused(hetopt("profile", "digits", *rented, "--data", tmp_path), 2, "rented machines cannot read")
    assert not (tmp_path / "p.json").exists()
