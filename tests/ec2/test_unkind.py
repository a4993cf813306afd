"""On an account as unkind as EC2: what was granted is ended, what is there is found, and nobody is told less.

Stories on the unkind account, in which several moods hold at once: a few here, 400 in `benchmarks.ec2_in_a_box`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.box.iam import actions_of
from benchmarks.box.stories import Account, Groups, Narrator
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.doctor import policy as printed
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.ordering import Identity
from hetopt.backends.ec2.renter.reconcile import Rent
from hetopt.backends.ec2.renter.removal import LocalRun, Remover, settle
from hetopt.backends.ec2.renter.request import (
    LEDGER_FILE,
    SETTLES_S,
    Answer,
    ApiRefused,
    BotoEdge,
    Edge,
    Request,
    made,
    read_ledger,
)
from hetopt.backends.host.bundle import Bundle
from hetopt.core.errors import CloudRefused
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import (
    ACCOUNT,
    BUCKET,
    Patience,
    Recording,
    account_truth,
    be_unkind,
    leftovers,
    plan_of,
    renter,
    stack,
)
from tests.face.conftest import Answer as Said
from tests.thinned import few

Make = Callable[..., Order]
Hetopt = Callable[..., Said]
LAG_S = 5.0
ROLE = f"arn:aws:sts::{ACCOUNT}:assumed-role"


class Shared(Patience):
    """A clock that the account has, too: whoever waits here finds its lists further."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        be_unkind(advance_s=seconds)


@pytest.fixture
def patience() -> Patience:
    return Shared()


def asking(service: str, operation: str, **parameters: object) -> Request:
    return Request(step="t", service=service, operation=operation, parameters=parameters, purpose="")


def with_two_regions() -> Callable[[BotoEdge, Request], Answer]:
    """Seventeen regions take a minute."""
    plain = BotoEdge.__call__

    def call(self: BotoEdge, request: Request) -> Answer:
        answer = plain(self, request)
        if request.operation != "describe_regions":
            return answer
        some = ("eu-west-1", "us-east-1")
        return {"Regions": [one for one in answer["Regions"] if one["RegionName"] in some]}

    return call


def alive(cloud: Edge) -> list[str]:
    be_unkind(lag_s=0)
    return [one.id for one in leftovers(cloud) if one.kind == "instance"]


def test_what_no_list_shows_yet_is_ended_by_the_ids_that_were_granted(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    """The second group has no capacity in any zone; the first is granted in each, and is in no list for seconds."""
    order = order_for()
    be_unkind(lag_s=LAG_S, exhausted=["c7g.xlarge"])
    seen = Recording(inner=cloud)
    with pytest.raises(CloudRefused, match="no zone has all machines"):
        renter(seen, order, tmp_path, patience).begin(plan.run, {}, bundle.data)
    granted = {id_ for entry in read_ledger(tmp_path / LEDGER_FILE) if entry.makes == "fleet" for id_ in entry.ids}
    ending = [one.parameters["InstanceIds"] for one in seen.seen if one.operation == "terminate_instances"]
    ended = {id_ for ids in ending for id_ in ids}
    assert {id_ for id_ in granted if id_.startswith("i-")} <= ended
    assert len(ended) == 3 * len(order.zones)
    be_unkind(lag_s=0)
    assert leftovers(cloud) == []


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_launch_that_is_broken_off_gives_back_what_no_list_shows_yet(
    cloud: BotoEdge,
    order_for: Make,
    plan: Plan,
    bundle: Bundle,
    tmp_path: Path,
    patience: Patience,
    is_heard: bool,
) -> None:
    """Ctrl-C just after the last fleet, or before its first grant was heard of."""
    fleets: list[str] = []

    def broken(request: Request) -> Answer:
        if is_heard and len(fleets) == 2:
            fleets.append("broken off")
            raise KeyboardInterrupt
        answer = cloud(request)
        if request.operation == "create_fleet":
            fleets.append("granted")
            if not is_heard:
                raise KeyboardInterrupt
        return answer

    be_unkind(lag_s=LAG_S)
    with pytest.raises(KeyboardInterrupt):
        renter(broken, order_for(), tmp_path, patience).begin(plan.run, {}, bundle.data)
    be_unkind(lag_s=0)
    assert leftovers(cloud) == []
    assert sum(patience.waits) <= 3 * SETTLES_S


@pytest.mark.parametrize("partly", [True, False])
def test_machines_beside_a_refusal_are_ended_at_once(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience, partly: bool
) -> None:
    """InsufficientInstanceCapacity, and a machine all the same: at launch, and with --allow-partial."""
    be_unkind(lag_s=LAG_S, short={"c7i.large": 1})
    renting = renter(cloud, order_for(), tmp_path, patience)
    if partly:
        renting = replace(renting, accept=lambda spec: True)
        rented = renting.begin(plan.run, {}, bundle.data)
        assert len(rented.machines) == 1
        assert alive(cloud) == [rented.machines[0].id], "the c7g.xlarge, which is there as asked for"
    else:
        with pytest.raises(CloudRefused, match="no zone has all machines"):
            renting.begin(plan.run, {}, bundle.data)
        assert alive(cloud) == []


def test_machines_beside_a_refusal_are_ended_where_a_run_asks_for_more(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    rented = renter(cloud, order, tmp_path, patience).begin(plan.run, {}, bundle.data)
    before = alive(cloud)
    be_unkind(advance_s=60, lag_s=LAG_S, short={"c7i.large": 2})
    more = renter(cloud, order, tmp_path, patience)
    assert (
        more.act(Rent(state=rented.model_copy(update={"asks": 1}), roles=order.roles[:1])).machines == rented.machines
    )
    assert alive(cloud) == before


class Failing:
    """Some lists cannot be had."""

    def __init__(self, inner: Edge, *operations: str) -> None:
        self.inner, self.operations = inner, operations

    def __call__(self, request: Request) -> Answer:
        if request.operation in self.operations:
            raise ApiRefused(request, "UnauthorizedOperation", f"not authorized to perform {request.api_name}")
        return self.inner(request)


LISTS = (
    "describe_instances",
    "describe_launch_templates",
    "describe_security_groups",
    "describe_volumes",
)


def test_a_list_that_cannot_be_had_hides_no_other_and_is_no_all_clear(
    cloud: BotoEdge, order_for: Make, plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    order = order_for()
    renter(cloud, order, tmp_path, patience).begin(plan.run, {}, bundle.data)
    whole = leftovers(cloud)
    for operation in LISTS:
        remover = Remover(edge=Failing(cloud, operation), sleep=patience.sleep)
        survey = remover.look()
        assert len(survey.unseen) == 1, operation
        [kind] = survey.unseen
        assert {one.id for one in survey.resources} == {one.id for one in whole if one.kind != kind}
        with pytest.raises(CloudRefused, match=f"the {kind}s were not looked at, so some may be left"):
            survey.check()
    # What can be found goes all the same.
    with pytest.raises(CloudRefused, match="volumes were not looked at"):
        Remover(edge=Failing(cloud, "describe_volumes"), sleep=patience.sleep).remove_run(order.run_id)
    assert alive(cloud) == []


def another(cloud: BotoEdge, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_id: str) -> None:
    """From now on somebody else is here, on another machine."""
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / f"home-of-{user_id.replace(':', '-')}"))
    be_unkind(user_id=user_id, arn=f"{ROLE}/{user_id.replace(':', '/')}")


def test_nobody_removes_the_living_run_of_another(
    cloud: BotoEdge,
    hetopt: Hetopt,
    plan_file: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be_unkind(user_id="AROATEAM:botocore-session-1", arn=f"{ROLE}/Team/botocore-session-1")
    assert hetopt("launch", "--on", "ec2", plan_file, "--yes", "--detach").code == 0
    (folder,) = home.iterdir()
    order = Order.load(folder / ORDER_FILE)
    assert order.owner == "AROATEAM", "the same in every session of the role"
    assert order.bucket == BUCKET
    there = len(leftovers(cloud))

    another(cloud, home, tmp_path, monkeypatch, "AROAOTHER:ann")
    answer = hetopt("gc", "--on", "ec2", "--region", "us-east-1", "--remove", "--run", folder.name)
    assert "it belongs to arn:aws:sts::123456789012:assumed-role/Team/botocore-session-1" in " ".join(
        answer.out.split()
    )
    answer = hetopt("gc", "--on", "ec2", "--region", "us-east-1", "--remove", "--everybody")
    assert "its run goes on" in answer.out, "by its lease, whatever its tags say"
    assert len(leftovers(cloud)) == there

    # The same role from another machine: its own, and it goes on.
    another(cloud, home, tmp_path, monkeypatch, "AROATEAM:botocore-session-2")
    answer = hetopt("gc", "--on", "ec2", "--region", "us-east-1", "--remove")
    assert "its run goes on" in answer.out
    assert len(leftovers(cloud)) == there
    # Its lease has ended, but its machines say that they live.
    lease = json.dumps({"end_s": 1.0, "stop_training_s": 1.0}).encode()
    cloud(calls.put_object(order, "t", f"{order.prefix}/lease.json", lease, "it is over"))
    cloud(calls.put_object(order, "t", f"{order.prefix}/state/i-1.json", b"{}", "a machine lives"))
    answer = hetopt("gc", "--on", "ec2", "--region", "us-east-1", "--remove")
    assert "that they live" in answer.out
    assert len(leftovers(cloud)) == there
    key = f"{order.prefix}/state/i-1.json"
    cloud(asking("s3", "delete_object", Bucket=BUCKET, Key=key, ExpectedBucketOwner=ACCOUNT))
    assert hetopt("gc", "--on", "ec2", "--region", "us-east-1", "--remove").code == 0
    assert leftovers(cloud) == [], "over by its lease, and one's own"


def test_the_printed_policy_allows_what_the_commands_ask_and_grants_nothing_else(
    cloud: BotoEdge,
    hetopt: Hetopt,
    plan_file: Path,
    home: Path,
    tmp_path: Path,
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run from the doctor to the last look for what is left, and a disk that EC2 has left all the same."""
    import boto3

    me = Identity(account_id=ACCOUNT, arn=f"{ROLE}/Team/one", user_id="AROATEAM:one")
    lost = {"run-id": "20200101-000000-lost-0001", "owner": me.owner, "launched-by": me.arn, "bucket": BUCKET}
    ended = {"created": "1970-01-01T00:00:01+00:00", "expires-at": "1970-01-01T00:00:02+00:00", "version": "0.1.0"}
    tags = [{"Key": f"hetopt:{key}", "Value": value} for key, value in (lost | ended).items()]
    boto3.client("ec2", region_name="us-east-1").create_volume(
        AvailabilityZone="us-east-1a", Size=8, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}]
    )
    # An account that has whatever a look asks for only where it is there.
    boto3.client("s3").put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    subnets = boto3.client("ec2", region_name="us-east-1").describe_subnets()["Subnets"]
    policy = printed("operator_policy", account=ACCOUNT, region="us-east-1", bucket=BUCKET, role="hetopt-node")
    be_unkind(
        policy=policy, user_id=me.user_id, arn=me.arn, end_role=True, profile="hetopt-node", quotas={"L-34B43A08": 64.0}
    )
    hetopt("doctor", plan_file)
    hetopt("doctor", plan_file, "--subnet", subnets[0]["SubnetId"])
    assert hetopt("launch", "--on", "ec2", plan_file, "--yes", "--detach").code == 0
    for command in (("status",), ("gc", "--on", "ec2"), ("stop",), ("gc", "--on", "ec2", "--remove")):
        assert hetopt(*command).code == 0
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "fresh"))
    monkeypatch.setattr(BotoEdge, "__call__", with_two_regions())
    hetopt("gc", "--on", "ec2")
    told = account_truth()
    assert told["refused"] == []
    for_nothing = set(actions_of(policy)) - set(told["allowed"])
    assert not for_nothing, f"{for_nothing}"


def test_an_attempt_that_nobody_answered_counts_whatever_the_next_one_says(
    cloud: BotoEdge, tmp_path: Path, patience: Patience
) -> None:
    """A group is made, the answer is lost, and then the call is refused: it may be there, and is looked for."""

    def edge(request: Request) -> Answer:
        raise ApiRefused(request, codes.pop(0), "as the test wants it")

    for last, hangs in (("InvalidParameterValue", True), ("UnauthorizedOperation", True), ("", False)):
        codes = ["ReadTimeoutError", last] if last else ["UnauthorizedOperation"]
        folder = tmp_path / last
        folder.mkdir(exist_ok=True)
        made_here = replace(asking("ec2", "create_security_group", GroupName="g"), makes="security-group")
        with pytest.raises(ApiRefused):
            stack(edge, folder, patience)(made_here)
        assert made(read_ledger(folder / LEDGER_FILE), patience.now_s).hanging is hangs


def test_what_a_killed_launch_made_is_waited_for_before_nothing_is_said_to_be_left(tmp_path: Path) -> None:
    run = LocalRun(folder=tmp_path, region="us-east-1", over=True, made_s=1000.0)
    # A clock that was set back by a second, as time servers do, is no reason not to wait.
    for now_s, waits in ((1005.0, [SETTLES_S - 5]), (1000.0 + SETTLES_S, []), (999.0, [SETTLES_S])):
        waited: list[float] = []
        settle({"r": run}, now_s, waited.append)
        assert waited == waits
    settle({"r": replace(run, made_s=None)}, 1005.0, pytest.fail)


SEEDS = (1, 6, 25, 140, 202)


@pytest.fixture
def narrator(
    cloud: BotoEdge, moto_url: str, profile: Profile, catalog: Catalog, bundle: Bundle, tmp_path: Path
) -> Narrator:
    def made(groups: Groups, budget_usd: float) -> Plan:
        return plan_of(profile, catalog, groups, budget_usd=budget_usd)

    account = Account(url=moto_url)
    return Narrator(account=account, folder=tmp_path, catalog=catalog, plan_of=made, bundle_sha256=bundle.sha256)


@pytest.mark.parametrize("seed", few(3, SEEDS))
def test_whatever_comes_together_nothing_stays_and_nobody_is_told_less(narrator: Narrator, seed: int) -> None:
    story = narrator.tell(seed)
    assert not story.faults, story.timeline()
    assert story.questions > 50, "each call is asked of the policy"
