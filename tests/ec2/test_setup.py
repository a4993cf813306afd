"""The printed policy allows the calls that hetopt makes, as IAM decides, and nothing that is not one of them.

Policies allow what hetopt calls, and no more; the doctor finds what would stop a launch; the bucket is private.

The doctor finds what would stop a plan's launch before anything is rented: a sentence, and the way out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.box.authorizations import Place, authorizations
from benchmarks.box.iam import Asked, allows, other_actions, several
from hetopt.api.account import Setup, checks
from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.objects import PART_BYTES, S3Objects
from hetopt.backends.ec2.renter import doctor
from hetopt.backends.ec2.renter.calls import END_ROLE
from hetopt.backends.ec2.renter.doctor import Check, bucket_calls, plan_checks
from hetopt.backends.ec2.renter.order import OWNER, RUN_ID
from hetopt.backends.ec2.renter.ordering import Identity, Orders
from hetopt.backends.ec2.renter.request import Answer, BotoEdge, Request
from hetopt.backends.options import Ec2
from hetopt.core.errors import BadInput
from hetopt.optimizer.cost.bill import Billing
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.quota import NEW_ACCOUNT, AccountQuotas, Bucket
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, Patience, Recording, account_truth, be_unkind
from tests.face.conftest import RECORDED, Answer as Said

ROLE = "hetopt-node"
SESSION = Identity(
    account_id=ACCOUNT,
    arn=f"arn:aws:sts::{ACCOUNT}:assumed-role/trainer/botocore-session-1",
    user_id="AROA0123456789EXAMPLE:botocore-session-1",
)
USER = Identity(account_id=ACCOUNT, arn=f"arn:aws:iam::{ACCOUNT}:user/ann", user_id="AIDA0123456789EXAMPLE")


def operator(*types: str) -> doctor.Policy:
    return doctor.policy("operator_policy", types=types, account=ACCOUNT, region=REGION, bucket=BUCKET, role=ROLE)


def place(who: Identity, run_id: str = "r") -> Place:
    return Place(who=who, region=REGION, tags={RUN_ID: run_id, OWNER: who.owner}, role=ROLE)


def call(service: str, operation: str, **parameters: object) -> Request:
    return Request(step=operation, service=service, operation=operation, parameters=parameters, purpose="")


def tagged(*kinds: str) -> list[dict[str, object]]:
    tags = [{"Key": RUN_ID, "Value": "r"}, {"Key": OWNER, "Value": USER.owner}]
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds]


OVERRIDES = [{"InstanceType": "c7i.large"}, {"InstanceType": "c7a.large"}]
WITH_MACHINES = ("instance", "network-interface", "volume")
FLEET = call(
    "ec2",
    "create_fleet",
    LaunchTemplateConfigs=[{"Overrides": OVERRIDES}],
    TagSpecifications=tagged("fleet", *WITH_MACHINES),
)
CALLS = (
    call("ec2", "create_security_group", VpcId="vpc-1", TagSpecifications=tagged("security-group")),
    call("ec2", "create_launch_template", TagSpecifications=tagged("launch-template")),
    FLEET,
    call("ec2", "run_instances", InstanceType="c7i.large", TagSpecifications=tagged(*WITH_MACHINES)),
    call("ec2", "terminate_instances", InstanceIds=["i-1", "i-2"]),
    call("ec2", "delete_launch_template", LaunchTemplateId="lt-1"),
    call("ec2", "delete_security_group", GroupId="sg-1"),
    call("ec2", "delete_volume", VolumeId="vol-1"),
    call("ec2", "authorize_security_group_ingress", GroupId="sg-1"),
    call("scheduler", "create_schedule_group", Name="hetopt-r.0", Tags=tagged("group")[0]["Tags"]),
    call(
        "scheduler",
        "create_schedule",
        Name="i-1",
        GroupName="hetopt-r.0",
        Target={"RoleArn": f"arn:aws:iam::{ACCOUNT}:role/{END_ROLE}"},
    ),
    call("scheduler", "delete_schedule_group", Name="hetopt-r.0"),
    call("s3", "put_object", Bucket=BUCKET, Key="runs/r/lease.json"),
    call("s3", "get_object", Bucket=BUCKET, Key="runs/r/state/i-1.json"),
    call("s3", "list_objects_v2", Bucket=BUCKET, Prefix="runs/r/"),
    call("s3", "head_bucket", Bucket=BUCKET),
)
"""One of each kind that makes, changes or removes something, and of each that names what it reads."""

ASKED = [one for request in CALLS for one in authorizations(request, place(USER))]


FORMS: dict[str, dict[str, Any]] = {
    "any type": {},
    "some types": {"types": "c7i.large,g5.xlarge"},
    "another role, bucket and region": {"role": "Team-node", "bucket": "team", "region": "eu-west-1"},
}
"""Ways to call `hetopt setup --print-policy`."""


def printed(types: str | tuple[str, ...] = (), **wanted: str) -> dict[str, doctor.Policy]:
    told = Setup.of(**{"region": REGION, **wanted}, account=ACCOUNT).policies(types)
    return {name: policy for name, policy in told.items() if name != "commands"}


@pytest.mark.parametrize("form", FORMS)
def test_no_action_is_a_pattern_and_what_aws_can_bound_is_bounded(form: str) -> None:
    for name, granted in printed(**FORMS[form]).items():
        for statement in granted["Statement"]:
            actions = set(several(statement["Action"]))
            assert not [one for one in actions if set("*?") & set(one)], name
            if "*" in several(statement.get("Resource", [])):
                assert all(re.search(":(Describe|Get|List)", one) for one in actions), name
            assert "NotAction" not in statement
            assert "NotResource" not in statement


"""What is right, and parliament 1.6.4 does not know: public parameters belong to no account (Systems Manager user
guide, 'Calling AMI public parameters': arn:aws:ssm:us-east-2::parameter/aws/service/...), and quotas bound
GetServiceQuota since. Read 2026-11-27."""


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"role": "*"}, "`role` must be"),
        ({"role": "team/node"}, "`role` must be"),
        ({"bucket": "*"}, "`bucket` must be"),
        ({"region": "*"}, "region"),
        ({"types": "c7i.*"}, "instance type"),
    ],
)
def test_no_pattern_comes_in_by_a_name(wanted: dict[str, str], said: str) -> None:
    """A role called * would be every role."""
    with pytest.raises(BadInput, match=said):
        printed(**wanted)


def owned(one: Asked, by: str) -> Asked:
    """The same about a thing of somebody else's."""
    context = {key: by if key.startswith("aws:ResourceTag") else value for key, value in one.context.items()}
    return replace(one, context=context)


def without_tags(one: Asked) -> Asked:
    return replace(one, context={key: value for key, value in one.context.items() if "Tag/" not in key})


def elsewhere(one: Asked) -> Asked:
    region = "eu-west-1"
    context = {**one.context, "aws:RequestedRegion": region}
    return replace(one, resource=one.resource.replace(REGION, region), context=context)


CHANGES: dict[str, Callable[[Asked], Asked]] = {
    "another account": lambda one: replace(one, resource=one.resource.replace(ACCOUNT, "210987654321")),
    "another region": elsewhere,
    "another bucket": lambda one: replace(one, resource=one.resource.replace(BUCKET, "payroll")),
    "another owner": lambda one: owned(one, "AIDA9"),
    "an owner whose id begins alike": lambda one: owned(one, f"{USER.user_id}9"),
    "no tags": without_tags,
    "another role": lambda one: replace(one, resource=re.sub(r"role/\S+", "role/admin", one.resource)),
    "a role for another service": lambda one: replace(
        one,
        context={
            **one.context,
            **({"iam:PassedToService": "lambda.amazonaws.com"} if "PassRole" in one.action else {}),
        },
    ),
}
"""What turns a call into one that hetopt never makes."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_was_changed_is_refused(name: str) -> None:
    """As soon as one of its questions is denied."""
    changed = 0
    for request in CALLS:
        asked = list(authorizations(request, place(USER)))
        others = [CHANGES[name](one) for one in asked]
        if others != asked and not (name == "another region" and request.service == "s3"):  # buckets know no region
            assert not all(allows([operator()], one) for one in others), request.operation
            changed += 1
    assert changed


OTHERS = st.deferred(lambda: st.sampled_from(other_actions(operator())))


@settings(max_examples=200, deadline=None)
@given(action=OTHERS, like=st.sampled_from(ASKED))
def test_two_hundred_other_actions_are_denied(action: str, like: Asked) -> None:
    """On whatever resource, and with whatever keys, a call of hetopt's has."""
    assert allows([operator()], like)
    assert not allows([operator()], replace(like, action=action))
    assert not allows([operator()], replace(like, action=action, resource="*"))


def test_the_policy_fits_and_denies_types_that_were_not_named() -> None:
    assert len(json.dumps(operator(), separators=(",", ":"))) < facts.POLICY_CHARACTERS
    asked = [one for one in authorizations(FLEET, place(USER)) if "ec2:InstanceType" in one.context]
    told = {one.context["ec2:InstanceType"]: allows([operator("c7i.large")], one) for one in asked}
    assert told == {"c7i.large": True, "c7a.large": False}


def test_machines_may_not_do_what_renters_do() -> None:
    node = doctor.policy("node_policy", bucket=BUCKET)
    for request in CALLS:
        for one in authorizations(request, place(SESSION)):
            reads = one.action == "s3:GetObject" or "s3:prefix" in one.context
            assert allows([node], one) is reads, one


def test_machines_use_what_they_are_granted_and_no_more(cloud: BotoEdge, tmp_path: Path) -> None:
    """As IAM decides each of their calls, in the way in which they make it."""
    objects = S3Objects.connect(region=REGION, bucket=BUCKET, prefix="runs/r", account_id=ACCOUNT)
    node = doctor.policy("node_policy", bucket=BUCKET)
    be_unkind(policy=node)
    large = tmp_path / "rank-0.safetensors"
    large.write_bytes(b"0" * (PART_BYTES + 1))
    assert objects.put("state/i-0.json", b"{}")
    assert objects.send("ckpt/step-1/rank-0.safetensors", large)
    assert objects.names("ckpt/") == ["ckpt/step-1/rank-0.safetensors"]
    assert objects.size_bytes("ckpt/step-1/rank-0.safetensors") == PART_BYTES + 1
    assert objects.get("state/i-0.json") == b"{}"
    objects.delete("ckpt/step-1/rank-0.safetensors")
    assert objects.names("ckpt/") == []
    begun = objects.client.create_multipart_upload(Bucket=BUCKET, Key="runs/r/ckpt/x")  # as boto3 does where one fails
    objects.client.abort_multipart_upload(Bucket=BUCKET, Key="runs/r/ckpt/x", UploadId=begun["UploadId"])
    told = account_truth()
    assert not told["refused"]
    granted = {one for statement in node["Statement"] if statement["Effect"] == "Allow" for one in statement["Action"]}
    assert set(told["allowed"]) == {one.lower() for one in granted}


RENTERS_WRITE = ("lease.json", "order.json", "placement.json", "plan.json", "spec.json")
"""What steers machines, or whoever looks after them."""


def test_the_bucket_is_made_once_and_private(cloud: BotoEdge) -> None:
    from random import Random

    from hetopt.backends.ec2.renter.request import Retrying

    edge = Retrying(inner=cloud, sleep=lambda _: None, random=Random(0))
    for _ in range(2):
        for request in bucket_calls("hetopt-made", REGION, ACCOUNT):
            edge(request)
    blocked = cloud(
        Request(
            step="g",
            service="s3",
            operation="get_public_access_block",
            parameters={"Bucket": "hetopt-made"},
            purpose="",
        )
    )
    assert all(blocked["PublicAccessBlockConfiguration"].values())
    (abroad, *_) = bucket_calls("b-2", "eu-west-1", ACCOUNT)
    assert abroad.parameters["CreateBucketConfiguration"] == {"LocationConstraint": "eu-west-1"}


Hetopt = Callable[..., Said]


def test_what_the_account_may_run_is_read_over_the_wire_and_plans_keep_to_it(
    cloud: BotoEdge, hetopt: Hetopt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    be_unkind(quotas={"L-3819A6DF": 8.0, "L-34B43A08": 64.0})
    try:
        told = {check.name: check for check in checks(region=REGION)}["quotas"]
    finally:
        be_unkind(quotas={})
    assert told.verdict == "good"
    kept = AccountQuotas.load(tmp_path / "account-quotas.json")
    assert kept.account_id == ACCOUNT
    quotas = kept.of(REGION)
    assert quotas is not None
    assert quotas.keys() == NEW_ACCOUNT.keys(), "also those of which there is nothing"
    assert quotas[Bucket(market="spot", family="p5")] == 0
    asked = ("recommend", RECORDED / "digits.json", "--epochs", 2000, "--budget", 5, "--types", "c7a.large,p5.48xlarge")
    answer = hetopt(*asked, "--json")
    assert answer.code == 0, answer.err
    assert {group["instance_type"] for group in json.loads(answer.out)["chosen"]["groups"]} == {"c7a.large"}


def test_the_commands(cloud: BotoEdge, hetopt: Hetopt, plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    answer = hetopt("doctor", tmp_path / "plan.json", "--json")
    assert answer.code == 4, "the account has no role for machines"
    assert {"credentials", "quota L-34B43A08"} <= {one["name"] for one in json.loads(answer.out)}
    assert hetopt("setup").code == 2
    assert hetopt("setup", "--create-bucket", "--bucket", "hetopt-other", "--yes").code == 0


def machine_may(action: str, key: str, *more: doctor.Policy) -> bool:
    from moto.iam.access_control import IAMPolicy, PermissionResult

    node = doctor.policy("node_policy", bucket=BUCKET)
    objects = {**node, "Statement": [*more, *(one for one in node["Statement"] if "Condition" not in one)]}
    told = IAMPolicy(json.dumps(objects)).is_action_permitted(action, f"arn:aws:s3:::{BUCKET}/{key}")
    return bool(told is PermissionResult.PERMITTED)


@pytest.mark.parametrize("run", ["20261120-000000-digits-0123456789abcdef", "r", "log", "state"])
def test_machines_write_what_they_tell_and_steer_nobody(run: str) -> None:
    """As moto evaluates the policy, whatever the run is called."""
    told = ("state/i-0.json", "events/000000000000000.jsonl", "log/h0/x/attempt_0/0/stderr.log", "outcome.json")
    for name in (*told, "ckpt/LATEST", "ckpt/WANTED", "ckpt/step-1/rank-0.safetensors", "boot/ip-10-0-0-1.log"):
        assert machine_may("s3:PutObject", f"runs/{run}/{name}"), name
        assert machine_may("s3:GetObject", f"runs/{run}/{name}"), name
    for name in (*RENTERS_WRITE, "model.safetensors", "x.json", "", "state", "task.py"):
        assert not machine_may("s3:PutObject", f"runs/{run}/{name}"), name
        assert not machine_may("s3:DeleteObject", f"runs/{run}/{name}"), name
    for key in ("code/0.tar.gz", "data/x/y.bin", "lease.json", "x"):
        assert not machine_may("s3:PutObject", key)
        assert not machine_may("s3:DeleteObject", key)
    assert machine_may("s3:DeleteObject", f"runs/{run}/ckpt/step-1/rank-0.safetensors")
    for name in ("model.safetensors", "model-unfinished.safetensors", "model-2.safetensors", "outputs/a/b.png"):
        assert machine_may("s3:PutObject", f"models/{run}/{name}")
    assert not machine_may("s3:PutObject", f"models/{run}/x.pt")
    assert not machine_may("s3:PutObject", f"runs/{run}/log/../lease.json")


def test_a_machine_that_was_given_more_still_steers_nobody() -> None:
    anything = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    assert machine_may("s3:PutObject", "runs/r/log/x", anything)
    for name in RENTERS_WRITE:
        assert not machine_may("s3:PutObject", f"runs/r/{name}", anything)


@given(prefix=st.one_of(st.just(""), st.text(alphabet="runs/2*?-0abcdef", max_size=60), st.integers(0, 80)))
def test_a_list_needs_the_whole_name_of_a_run(prefix: str | int) -> None:
    """No prefix that a machine may ask for finds another run unless it holds that run's whole name."""
    key = "runs/20261120-000000-digits-0123456789abcdef/lease.json"
    asked = key[:prefix] if isinstance(prefix, int) else prefix
    machines = doctor.policy("node_policy", bucket=BUCKET)["Statement"]
    (listing,) = [one for one in machines if one["Sid"] == "ListOneRun"]
    patterns = listing["Condition"]["StringLike"]["s3:prefix"]
    allowed = any(re.fullmatch(re.escape(one).replace(r"\*", ".*"), asked) for one in patterns)
    if allowed and key.startswith(asked):
        assert asked.startswith("runs/20261120-000000-digits-0123456789abcdef/")


def test_the_name_of_a_rented_run_cannot_be_guessed(tmp_path: Path) -> None:
    import datetime

    from hetopt.core.paths import RUN_PATTERN, is_name
    from hetopt.core.run_folder import RunFolders

    now = datetime.datetime(2026, 11, 20, tzinfo=datetime.UTC)
    names = {RunFolders(home=tmp_path).create("x" * 100, now, secret=True).name for _ in range(50)}
    assert len(names) == 50
    assert all(is_name(RUN_PATTERN, name) and re.search(r"-[0-9a-f]{16}$", name) for name in names)


SCP = (
    "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/ann is not authorized to "
    "perform: ec2:RunInstances on resource: arn:aws:ec2:us-east-1:123456789012:instance/* with an explicit deny in a "
    "service control policy. Encoded authorization failure message: 8sJ2k"
)


class WithPrices:
    """The real cloud, whose spot prices are those of the plan: moto's are of 2006, and of a thousandth of a cent."""

    def __init__(self, inner: Any, usd_per_hour: float = 0.04) -> None:
        self.inner, self.usd_per_hour = inner, usd_per_hour

    def __call__(self, request: Request) -> Answer:
        answer: Answer = self.inner(request)
        if request.operation != "describe_spot_price_history":
            return answer
        return {
            "SpotPriceHistory": [{**one, "SpotPrice": str(self.usd_per_hour)} for one in answer["SpotPriceHistory"]]
        }


@pytest.fixture
def account(cloud: BotoEdge) -> BotoEdge:
    """An account in which all is well."""
    be_unkind(quotas={"L-34B43A08": 64.0, "L-1216C47A": 64.0}, profile="hetopt-node")
    return cloud


Doctor = Callable[..., dict[str, Check]]


@pytest.fixture
def examined(account: BotoEdge, catalog: Catalog, billing: Billing, plan: Plan, patience: Patience) -> Doctor:
    def examine(launched: Plan = plan, edge: Any = None, **options: Any) -> dict[str, Check]:
        orders = Orders(
            edge=edge or WithPrices(account),
            catalog=catalog,
            billing=billing,
            options=Ec2(**options),
            version="0.1.0",
        )
        return {check.name: check for check in plan_checks(orders, launched, patience.now_s)}

    return examine


def tells(check: Check, said: str, hint: str, verdict: str = "bad") -> None:
    assert check.verdict == verdict, check
    assert said in check.said
    assert "\n" not in check.said
    assert hint in str(check.hint)


def test_where_all_is_well_nothing_is_said_against_it(examined: Doctor, account: BotoEdge) -> None:
    seen = Recording(inner=account)
    checks = examined(edge=WithPrices(seen))
    assert {check.verdict for check in checks.values()} == {"good"}, checks
    tried = [one.operation for one in seen.seen if one.parameters.get("DryRun")]
    assert tried == ["run_instances"] * 2 + ["create_fleet"] * 2, "for each of the plan's groups"
    made = [one for one in seen.seen if not one.reads_only and not one.parameters.get("DryRun")]
    assert [one.operation for one in made] == ["put_object"], "over a version that is not there"
    assert "Contents" not in account(call("s3", "list_objects_v2", Bucket=BUCKET))


@pytest.mark.parametrize(
    ("unkind", "name", "said", "hint"),
    [
        ({"subnets": "none"}, "order", "no zone of the region has all of", "aws ec2 create-default-vpc"),
        ({"quotas": {}}, "quota L-34B43A08", "6 vCPUs are needed", "request-service-quota-increase"),
        (
            {"refuses": {"RunInstances": ["UnauthorizedOperation", SCP]}},
            "permission ec2:RunInstances (c7i.large)",
            "service control policy",
            "the organisation forbids it",
        ),
        (
            {"refuses": {"CreateFleet": ["UnauthorizedOperation", "not authorized to perform: ec2:CreateTags"]}},
            "permission ec2:CreateFleet (c7g.xlarge)",
            "ec2:CreateTags",
            "--print-policy",
        ),
    ],
)
def test_what_the_account_lacks_is_found(
    examined: Doctor, unkind: dict[str, object], name: str, said: str, hint: str
) -> None:
    be_unkind(**unkind)
    tells(examined()[name], said, hint)


PUT, ENCRYPTION, OBJECTS = "s3:PutObject", "s3:x-amz-server-side-encryption", f"arn:aws:s3:::{BUCKET}/*"


@pytest.mark.parametrize(
    ("condition", "about", "verdict"),
    [
        ({"StringNotEquals": {ENCRYPTION: "aws:kms"}}, {"Action": PUT}, "bad"),
        ({"Null": {ENCRYPTION: "true"}}, {"Action": "s3:Put*"}, "bad"),
        # They are of uploads that say something.
        ({"Null": {ENCRYPTION: "false"}, "StringNotEquals": {ENCRYPTION: "aws:kms"}}, {"Action": PUT}, "good"),
        ({"Null": {"s3:x-amz-acl": "false"}}, {"Action": "s3:*"}, "good"),
        ({"NumericLessThan": {"s3:TlsVersion": "1.2"}}, {"Action": "s3:*"}, "good"),
        ({}, {"Action": "s3:GetObject"}, "bad"),
        ({}, {"Action": "s3:*", "Resource": f"arn:aws:s3:::{BUCKET}/payroll/*"}, "good"),
        ({"StringNotEquals": {"aws:PrincipalOrgID": "o-1"}}, {"Action": "s3:*"}, "bad"),
    ],
)
def test_what_the_doctor_says_of_a_buckets_policy_is_what_uploads_meet(
    examined: Doctor, account: BotoEdge, tmp_path: Path, condition: dict[str, Any], about: dict[str, Any], verdict: str
) -> None:
    """Uploads name no encryption; they go over the wire to a bucket that decides by the headers that arrive."""
    denial = {"Effect": "Deny", "Principal": "*", "Resource": OBJECTS, **about}
    denial |= {"Condition": condition} if condition else {}
    parameters = {"Bucket": BUCKET, "Policy": json.dumps({"Version": "2012-10-17", "Statement": denial})}
    account(Request(step="b", service="s3", operation="put_bucket_policy", parameters=parameters, purpose=""))
    check = examined()["objects of a run"]
    assert check.verdict == verdict, check
    assert verdict == "good" or f"get-bucket-policy --bucket {BUCKET}" in str(check.hint)
    objects = S3Objects.connect(region=REGION, bucket=BUCKET, prefix="runs/r", account_id=ACCOUNT)
    (large := tmp_path / "rank-0.safetensors").write_bytes(b"0" * (PART_BYTES + 1))
    sent = (objects.put("state/i-0.json", b"{}"), objects.send("ckpt/step-1/rank-0.safetensors", large))
    assert len(set(sent)) == 1, "all uploads look alike to a policy"
    assert (all(sent) and objects.get("state/i-0.json") is not None) == (verdict == "good")


def test_prices_beyond_the_plans_and_budgets_that_pay_for_no_boot_are_found(
    examined: Doctor, account: BotoEdge
) -> None:
    check = examined(edge=WithPrices(account, usd_per_hour=3.0), budget_usd=2.0)["order"]
    tells(check, "at the prices of now the plan may cost", "plan again")
    tells(examined(budget_usd=0.05)["order"], "the budget is $0.05", "budget")
