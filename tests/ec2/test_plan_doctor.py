"""The doctor finds what would stop a plan's launch before anything is rented: a sentence, and the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.objects import PART_BYTES, S3Objects
from hetopt.backends.ec2.renter.bucket_doctor import denial_of
from hetopt.backends.ec2.renter.calls import order_call
from hetopt.backends.ec2.renter.doctor import Check, account_checks
from hetopt.backends.ec2.renter.edge import BotoEdge, Login
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.ordering import Wishes
from hetopt.backends.ec2.renter.permissions import bucket_calls, operator_policy
from hetopt.backends.ec2.renter.plan_doctor import PlanDoctor, _policies_of
from hetopt.backends.ec2.renter.request import Answer, Request
from hetopt.core.errors import CloudRefused
from hetopt.core.profile import Profile
from hetopt.optimizer.cost.billing import Billing
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, Patience, Recording, be_unkind, make_bucket, plan_of
from tests.face.conftest import Answer as Said

KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1234"
SCP = (
    "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/ann is not authorized to "
    "perform: ec2:RunInstances on resource: arn:aws:ec2:us-east-1:123456789012:instance/* with an explicit deny in a "
    "service control policy. Encoded authorization failure message: 8sJ2k"
)
STATIC = Login(source="shared-credentials-file", end_s=None, is_temporary=False)


NETWORKS = "network in us-east-1a, us-east-1b, us-east-1c, us-east-1d, us-east-1f"
"""Those of the default network that have both types of the plan."""


class WithPrices:
    """The real cloud, whose spot prices are those of the plan: moto's are of 2006, and of a thousandth of a cent."""

    def __init__(self, inner: BotoEdge, usd_per_hour: float = 0.04) -> None:
        self.inner, self.usd_per_hour = inner, usd_per_hour

    def __call__(self, request: Request) -> Answer:
        answer = self.inner(request)
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
    def examine(made: Plan = plan, edge: Any = None, login: Login = STATIC, **how: Any) -> dict[str, Check]:
        doctor = PlanDoctor(
            edge=edge or WithPrices(account),
            catalog=how.pop("catalog", catalog),
            billing=billing,
            wishes=Wishes(**how),
            login=lambda: login,
            version="0.1.0",
            now_s=patience.now_s,
        )
        return {check.name: check for check in doctor.checks(made)}

    return examine


def found(check: Check, said: str, hint: str, verdict: str = "bad") -> None:
    assert check.verdict == verdict, check
    assert said in check.said
    assert "\n" not in check.said
    assert hint in str(check.hint)


def test_where_all_is_well_nothing_is_said_against_it(examined: Doctor, account: BotoEdge) -> None:
    seen = Recording(inner=account)
    checks = examined(edge=WithPrices(seen))  # type: ignore[arg-type]
    assert {check.verdict for check in checks.values()} == {"good"}, [
        one for one in checks.values() if one.verdict != "good"
    ]
    tried = [one.operation for one in seen.seen if one.parameters.get("DryRun")]
    assert tried == ["run_instances"] * 2 + ["create_fleet"] * 2, "for each of the plan's groups"
    changing = [one.operation for one in seen.seen if not one.reads_only and not one.parameters.get("DryRun")]
    assert not changing
    assert not account(Request(step="d", service="ec2", operation="describe_instances", parameters={}, purpose=""))[
        "Reservations"
    ]


@pytest.mark.parametrize(
    ("unkind", "name", "said", "hint"),
    [
        ({"subnets": "none"}, "zones", "no default subnet", "aws ec2 create-default-vpc"),
        (
            {"subnets": "private"},
            NETWORKS,
            "no public address",
            "--map-public-ip-on-launch`, or name other",
        ),
        ({"routes": False}, NETWORKS, "no route to the internet", "aws ec2 create-route"),
        ({"disk_key": KEY, "key_state": "PendingDeletion"}, "disk encryption", "is PendingDeletion", "aws kms cancel-"),
        ({"disk_key": KEY, "key_state": "Disabled"}, "disk encryption", "is Disabled", "`aws kms enable-key"),
        ({"quotas": {}}, "quota L-34B43A08", "6 vCPUs are needed", "request-service-quota-increase"),
        ({"quotas": {"L-34B43A08": 0.0}}, "quota L-34B43A08", "0 are granted", "--desired-value 6"),
        ({"disk_key": KEY}, "disk encryption", "no grant", f"aws kms create-grant --key-id {KEY}"),
        ({"no_roles": ["AWSServiceRoleForEC2Spot"]}, "role AWSServiceRoleForEC2Spot", "has none", "spot.amazonaws.com"),
        ({"no_roles": ["AWSServiceRoleForEC2Fleet"]}, "role AWSServiceRoleForEC2Fleet", "has none", "ec2fleet."),
        ({"denied": ["s3:GetObject"]}, "permissions, simulated", "s3:GetObject", "--print-policy"),  # on a later page
        ({"denied": ["ec2:TerminateInstances"]}, "permissions, simulated", "ec2:TerminateInstances", "--print-policy"),
        (
            {"denied": ["ec2:DescribeSpotPriceHistory"]},  # as roles of version 0.1 are
            "machines' permissions, simulated",
            "hetopt-node lacks ec2:DescribeSpotPriceHistory",
            "`aws iam put-role-policy --role-name hetopt-node ",
        ),
        (
            {"refuses": {"RunInstances": ["UnauthorizedOperation", SCP]}},
            "permission ec2:RunInstances (c7i.large)",
            "service control policy",
            "the organisation forbids it",
        ),
        (
            {"refuses": {"RunInstances": ["UnauthorizedOperation", SCP.replace("service control", "session")]}},
            "permission ec2:RunInstances (c7i.large)",
            "session policy",
            "the policy that this session was given when it began",
        ),
        (
            {
                "refuses": {
                    "RunInstances": ["UnauthorizedOperation", SCP.replace("a service control", "an identity-based")]
                }
            },
            "permission ec2:RunInstances (c7i.large)",
            "identity-based policy",
            "a policy of your own denies it, whatever others allow",
        ),
        (
            {"refuses": {"RunInstances": ["UnauthorizedOperation", "not authorized to perform: iam:PassRole"]}},
            "permission ec2:RunInstances (c7i.large)",
            "iam:PassRole",
            "--print-policy",
        ),
        (
            {"refuses": {"RunInstances": ["PendingVerification", "Your request is being validated"]}},
            "permission ec2:RunInstances (c7i.large)",
            "still verifying this account",
            "wait for its e-mail",
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
    found(examined()[name], said, hint)


def test_every_type_that_may_be_rented_is_tried(examined: Doctor) -> None:
    """An organisation may allow the planned one, and not what stands in for it."""
    tried = [name for name in examined(substitutes={"c7i.large": ["c6i.large"]}) if "RunInstances" in name]
    assert tried == [f"permission ec2:RunInstances ({name})" for name in ("c7i.large", "c6i.large", "c7g.xlarge")]


def test_machines_that_run_count_against_the_quota(examined: Doctor, account: BotoEdge) -> None:
    class Running(WithPrices):
        def __call__(self, request: Request) -> Answer:
            if request.operation == "describe_instances":
                one = {"InstanceType": "c7i.16xlarge", "InstanceLifecycle": "spot"}
                return {"Reservations": [{"Instances": [one]}]}
            return super().__call__(request)

    check = examined(edge=Running(account))["quota L-34B43A08"]
    found(check, "64 are granted; machines that run use 64 of them", "hetopt gc --on ec2")


def test_a_key_that_spot_machines_may_use_is_no_fault(examined: Doctor) -> None:
    be_unkind(disk_key=KEY, grants=[f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/x/AWSServiceRoleForEC2Spot"])
    assert examined()["disk encryption"].verdict == "good"


def test_what_a_run_needs_to_keep_its_deadline_is_looked_at(
    examined: Doctor, profile: Profile, catalog: Catalog
) -> None:
    """Its quota on demand is another one, of which nothing is used until then."""
    made = plan_of(profile, catalog, (("c7i.large", 2, "spot"),), budget_usd=50.0)
    goal = made.goal.model_copy(update={"deadline_s": 36_000.0})
    made = made.model_copy(update={"goal": goal})
    assert not [name for name in examined(made) if name.startswith("deadline")], "there is enough"
    be_unkind(quotas={"L-34B43A08": 64.0, "L-1216C47A": 2.0})
    check = examined(made)["deadline, quota L-1216C47A"]
    found(check, "could not move to on-demand machines", "request-service-quota-increase", verdict="unknown")
    assert not [name for name in examined() if name.startswith("deadline")], "a plan without one never moves"


def of_bucket(edge: BotoEdge, operation: str, **told: Any) -> None:
    parameters = {"Bucket": BUCKET, **told}
    edge(Request(step="b", service="s3", operation=operation, parameters=parameters, purpose=""))


def test_a_bucket_that_keeps_what_a_run_deletes_is_told(
    examined: Doctor, account: BotoEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ec2.reviewed_members.unread", lambda *_: [])  # the organisation does this
    of_bucket(account, "put_bucket_versioning", VersioningConfiguration={"Status": "Enabled"})
    check = examined()["versions in the bucket"]
    found(check, "checkpoints that a run deletes stay", "Status=Suspended", verdict="unknown")
    for made in bucket_calls(BUCKET, REGION, ACCOUNT):
        account(made)
    assert examined()["versions in the bucket"].verdict == "good", "setup has them deleted"


def test_a_bucket_that_locks_what_is_written_is_told(
    examined: Doctor, account: BotoEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that deletes old versions has to wait for its locks."""
    monkeypatch.setattr("tests.ec2.reviewed_members.unread", lambda *_: [])
    locks = {"Bucket": "locked", "ObjectLockEnabledForBucket": True}
    account(Request(step="b", service="s3", operation="create_bucket", parameters=locks, purpose=""))
    assert "keeps every one" in examined(bucket="locked")["versions in the bucket"].said, "it locks what asks for it"
    kept = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 90}}}
    told = {"Bucket": "locked", "ObjectLockConfiguration": kept}
    account(Request(step="l", service="s3", operation="put_object_lock_configuration", parameters=told, purpose=""))
    check = examined(bucket="locked")["versions in the bucket"]
    found(check, "locked locks all that is written for 90 days", "--create-bucket --bucket", verdict="unknown")


PUT, ENCRYPTION, OBJECTS = "s3:PutObject", "s3:x-amz-server-side-encryption", f"arn:aws:s3:::{BUCKET}/*"


@pytest.mark.parametrize(
    ("condition", "about", "verdict", "said"),
    [
        ({"StringNotEquals": {ENCRYPTION: "aws:kms"}}, PUT, "bad", f"PutObject (StringNotEquals {ENCRYPTION} aws:kms)"),
        ({"Null": {ENCRYPTION: "true"}}, "s3:Put*", "bad", "PutObject (Null"),
        ({"StringNotEqualsIfExists": {f"{ENCRYPTION}-aws-kms-key-id": KEY}}, "s3:*", "bad", f"kms-key-id {KEY}"),
        ({"ForAllValues:StringEquals": {ENCRYPTION: "aws:kms"}}, PUT, "bad", "ForAllValues"),
        # They are of uploads that say something.
        ({"Null": {ENCRYPTION: "false"}, "StringNotEquals": {ENCRYPTION: "aws:kms"}}, PUT, "good", ""),
        ({"StringEquals": {ENCRYPTION: "AES256"}}, PUT, "good", ""),
        ({"Null": {"s3:x-amz-acl": "false"}}, "s3:*", "good", ""),
        # Without encryption only where there is no TLS.
        ({"Null": {ENCRYPTION: "true"}, "Bool": {"aws:securetransport": "false"}}, PUT, "good", ""),
        ({"NumericLessThan": {"s3:TlsVersion": "1.2"}}, "s3:*", "good", ""),
        ({"NumericLessThan": {"s3:TlsVersion": 1.3}}, "s3:*", "bad", "s3:TlsVersion 1.3"),
        ({"StringNotEquals": {ENCRYPTION: "aws:kms"}}, "s3:PutBucketAcl", "good", ""),
        ({}, "s3:GetObject", "bad", "GetObject"),
        ({}, "s3:DeleteObject", "unknown", "DeleteObject"),  # machines can do without
        ({}, "s3:DeleteBucket", "good", ""),
        ({}, {"NotAction": ["s3:PutObject", "s3:GetObject"]}, "unknown", "AbortMultipartUpload"),
        ({}, {"NotResource": f"arn:aws:s3:::{BUCKET}"}, "bad", "GetObject, s3:PutObject"),
        ({}, {"Resource": f"arn:aws:s3:::{BUCKET}/payroll/*"}, "good", ""),
        ({}, {"Principal": {"AWS": f"arn:aws:iam::{ACCOUNT}:user/bob"}}, "unknown", "PutObject"),
        ({"StringNotEquals": {"aws:PrincipalOrgID": "o-1"}}, "s3:*", "unknown", "aws:PrincipalOrgID o-1"),
        ({"NotIpAddress": {"aws:sourceip": ["192.0.2.0/24"]}}, "s3:*", "unknown", "aws:sourceip 192.0.2.0/24"),
        ({"StringNotEquals": {"aws:SourceVpc": "mine"}}, "s3:*", "unknown", "aws:SourceVpc"),  # by an endpoint alone
        ({"StringNotEquals": {"aws:SourceVpc": "vpc-0"}}, "s3:*", "bad", "aws:SourceVpc vpc-0"),
    ],
)
def test_what_the_doctor_says_of_a_buckets_policy_is_what_a_launch_meets(
    examined: Doctor,
    account: BotoEdge,
    order_for: Callable[..., Order],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    condition: dict[str, Any],
    about: Any,
    verdict: str,
    said: str,
) -> None:
    """Uploads go over the wire to a bucket that decides by the headers that arrive."""
    monkeypatch.setattr("tests.ec2.reviewed_members.unread", lambda *_: [])
    order = order_for()
    named = {"Action": about} if isinstance(about, str) else {} if "NotAction" in about else {"Action": "s3:*"}
    denial = {"Effect": "Deny", "Principal": "*", **named, **(about if isinstance(about, dict) else {})}
    denial |= {} if "NotResource" in denial else {"Resource": denial.get("Resource", OBJECTS)}
    denial |= {"Condition": condition} if condition else {}
    policy = json.dumps({"Version": "2012-10-17", "Statement": denial})
    of_bucket(account, "put_bucket_policy", Policy=policy.replace("mine", order.zones[0].vpc_id))
    check = examined()["the bucket's policy"]
    assert check.verdict == verdict, check
    assert said in check.said
    assert verdict == "good" or f"get-bucket-policy --bucket {BUCKET}" in str(check.hint)
    objects = S3Objects.connect(region=REGION, bucket=BUCKET, prefix=order.prefix, account_id=ACCOUNT)
    (large := tmp_path / "rank-0.safetensors").write_bytes(b"0" * (PART_BYTES + 1))

    def launch_uploads() -> bool:
        try:
            account(order_call(order))
        except CloudRefused:
            return False
        return True

    did = (
        launch_uploads(),
        objects.put("state/i-0.json", b"{}"),
        objects.send("ckpt/step-1/rank-0.safetensors", large),
    )
    assert len(set(did)) == 1, "all uploads look alike to a policy"
    read_back = objects.get("state/i-0.json") is not None and objects.names("state/") != []
    if verdict != "unknown":
        assert (all(did) and read_back) == (verdict == "good")


@given(allowed=st.sets(st.sampled_from(["s3:PutObject", "s3:GetBucketPolicy", "s3:List*", "s3:*", "*"])))
def test_a_denial_of_all_but_some_actions_is_about_a_run_unless_these_are_all_that_it_does(allowed: set[str]) -> None:
    statement = {"Effect": "Deny", "Principal": "*", "NotAction": sorted(allowed)}
    assert (denial_of(statement, set()) is None) == bool({"s3:*", "*"} & allowed)


def test_a_type_that_left_the_region_is_found(examined: Doctor, account: BotoEdge) -> None:
    class Without(WithPrices):
        def __call__(self, request: Request) -> Answer:
            answer = super().__call__(request)
            if request.operation != "describe_instance_type_offerings":
                return answer
            left = [one for one in answer["InstanceTypeOfferings"] if one["InstanceType"] != "c7g.xlarge"]
            return {"InstanceTypeOfferings": left}

    found(examined(edge=Without(account))["zones"], "c7g.xlarge cannot be rented in this region", "--exclude")


def test_a_type_that_left_the_zones_of_the_others_is_found(examined: Doctor, account: BotoEdge) -> None:
    class Apart(WithPrices):
        def __call__(self, request: Request) -> Answer:
            answer = super().__call__(request)
            if request.operation != "describe_instance_type_offerings":
                return answer
            of_zone = {"c7g.xlarge": "us-east-1a", "c7i.large": "us-east-1b"}
            offered = answer["InstanceTypeOfferings"]
            return {
                "InstanceTypeOfferings": [one for one in offered if of_zone[one["InstanceType"]] == one["Location"]]
            }

    found(examined(edge=Apart(account))["zones"], "no zone of the region has all of c7i.large, c7g.xlarge", "--exclude")


def test_subnets_without_an_address_for_each_machine_are_found(examined: Doctor, account: BotoEdge) -> None:
    class Full(WithPrices):
        def __call__(self, request: Request) -> Answer:
            answer = super().__call__(request)
            for one in answer.get("Subnets", ()):
                one["AvailableIpAddressCount"] = 1
            return answer

    found(examined(edge=Full(account))["zones"], "no subnet has 4 free addresses", "`subnets`")


def test_a_name_that_no_bucket_has_is_found(account: BotoEdge) -> None:
    """It could not be made either."""
    checks = {one.name: one for one in account_checks(account, REGION, "MyBucket", "hetopt-node", lambda: 0.0)}
    found(checks["bucket"], "must be 3 to 63 small letters", "no bucket can have another name")


def test_the_printed_policy_is_all_that_the_doctor_needs(examined: Doctor) -> None:
    """IAM decides every call by it; whoever may not ask IAM for simulations is told that nobody knows."""
    policy = operator_policy(account_id=ACCOUNT, region=REGION, bucket=BUCKET, role="hetopt-node")
    be_unkind(policy=policy)
    checks = examined()
    assert checks.pop("permissions, simulated").verdict == "unknown"
    assert checks.pop("machines' permissions, simulated").verdict == "unknown"
    assert {check.verdict for check in checks.values()} == {"good"}, checks


def test_a_role_that_a_profile_takes_on_is_a_caller_as_any_other(
    account: BotoEdge, hetopt: Callable[..., Said], plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.ec2 import reviewed_members

    plain = reviewed_members.unread
    mine = ("sts:AssumeRole",)  # botocore's own call
    monkeypatch.setattr(reviewed_members, "unread", lambda call, told: [] if call in mine else plain(call, told))
    (tmp_path / "config").write_text(
        f"[profile trainer]\nrole_arn = arn:aws:iam::{ACCOUNT}:role/trainer\nsource_profile = base\nregion = {REGION}\n"
        "[profile base]\naws_access_key_id = AKIA0123456789EXAMPL\naws_secret_access_key = x\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    plan.save(tmp_path / "plan.json")
    answer = hetopt("doctor", "--plan", tmp_path / "plan.json", "--json")
    told = {one["name"]: one for one in json.loads(answer.out)}
    assert ":assumed-role/trainer/" in told["credentials"]["said"]
    assert told["login"]["verdict"] == "good", "botocore renews it as long as its source lasts"
    assert told["permissions, simulated"]["verdict"] == "good"


def test_prices_beyond_the_plans_are_found(examined: Doctor, account: BotoEdge) -> None:
    check = examined(edge=WithPrices(account, usd_per_hour=3.0), budget_usd=2.0)["prices"]
    found(check, "at the prices of now the plan may cost", "plan again")


def test_a_budget_that_pays_for_less_than_a_boot_is_found(examined: Doctor) -> None:
    found(examined(budget_usd=0.05)["budget"], "the budget is $0.05", "budget")


def test_a_cluster_that_outspends_its_budget_before_it_boots_is_found(
    examined: Doctor, profile: Profile, catalog: Catalog
) -> None:
    made = plan_of(profile, catalog, (("c7i.large", 40, "spot"),), budget_usd=0.3)
    usd = made.chosen.prediction.cost_usd.model_copy(update={"value": 0.1, "low": 0.1, "high": 0.2})
    prediction = made.chosen.prediction.model_copy(update={"cost_usd": usd})
    made = made.model_copy(update={"chosen": made.chosen.model_copy(update={"prediction": prediction})})
    be_unkind(quotas={"L-34B43A08": 640.0})
    found(examined(made)["budget"], "pays for only", "budget")


@pytest.mark.parametrize(
    ("left_s", "verdict", "said"),
    [
        (600.0, "bad", "end in 10 min, before a run has begun"),
        (-5.0, "bad", "before a run has begun"),
        (1300.0, "unknown", "nobody grants it more time"),
        (40_000.0, "good", "end in 11 h"),
    ],
)
def test_credentials_that_end_are_found(
    examined: Doctor, patience: Patience, left_s: float, verdict: str, said: str
) -> None:
    login = Login(source="env", end_s=patience.now_s + left_s, is_temporary=True)
    check = examined(login=login)["login"]
    assert check.verdict == verdict
    assert said in check.said
    assert verdict == "good" or "aws sso login" in str(check.hint)


def test_credentials_tell_when_they_end(cloud: BotoEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    assert BotoEdge(REGION).login() == Login(source="env", end_s=None, is_temporary=False)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    assert BotoEdge(REGION).login() == Login(source="env", end_s=None, is_temporary=True)
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", "2099-01-01T00:00:00Z")
    assert BotoEdge(REGION).login() == Login(source="env", end_s=4_070_908_800.0, is_temporary=True)


def test_a_plan_older_than_the_catalogue_is_told(examined: Doctor, plan: Plan) -> None:
    groups = tuple(group.model_copy(update={"price_date": "2025-01-01"}) for group in plan.chosen.groups)
    old = plan.model_copy(update={"chosen": plan.chosen.model_copy(update={"groups": groups})})
    found(examined(old)["plan"], "c7i.large of 2025-01-01, now 20", "hetopt recommend", verdict="unknown")


def test_a_bucket_in_another_region_is_found(account: BotoEdge) -> None:
    abroad = make_bucket("hetopt-abroad")
    place = {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}}
    account(replace(abroad, parameters={**abroad.parameters, **place}))
    checks = {one.name: one for one in account_checks(account, REGION, "hetopt-abroad", "hetopt-node", lambda: 0.0)}
    found(checks["bucket"], "is in eu-west-1, and the machines are in us-east-1", "--create-bucket --region us-east-1")


def test_who_may_not_ask_iam_is_told_so(examined: Doctor, account: BotoEdge) -> None:
    class Mute(WithPrices):
        def __call__(self, request: Request) -> Answer:
            if request.operation in ("simulate_principal_policy", "get_role"):
                raise ApiRefused(request, "AccessDenied", "not authorized")
            return super().__call__(request)

    checks = examined(edge=Mute(account))
    assert checks["permissions, simulated"].verdict == checks["role AWSServiceRoleForEC2Spot"].verdict == "unknown"


@pytest.mark.parametrize(
    ("arn", "source"),
    [
        ("arn:aws:iam::123456789012:user/a/ann", "arn:aws:iam::123456789012:user/a/ann"),
        ("arn:aws:sts::123456789012:assumed-role/trainer/s", "arn:aws:iam::123456789012:role/trainer"),
        ("arn:aws:iam::123456789012:root", None),
        ("arn:aws:sts::123456789012:federated-user/x", None),
    ],
)
def test_whose_policies_are_simulated(arn: str, source: str | None) -> None:
    assert _policies_of(arn) == source


def test_every_check_that_a_belief_names_is_made(examined: Doctor, account: BotoEdge) -> None:
    made = set(examined()) | {one.name for one in account_checks(account, REGION, None, "hetopt-node", lambda: 0.0)}
    for name, belief in facts.all_facts().items():
        stem = belief.doctor.split(" KIND")[0].split(" CODE")[0].split(" ZONE")[0]
        assert any(one.startswith(stem) for one in (*made, "quotas")), name


def test_the_command_proves_a_plan(account: BotoEdge, hetopt: Callable[..., Said], plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    be_unkind(subnets="private")
    answer = hetopt("doctor", "--plan", tmp_path / "plan.json", "--json")
    assert answer.code == 4
    told = {one["name"]: one for one in json.loads(answer.out)}
    assert told[NETWORKS]["verdict"] == "bad"
    assert told["permission ec2:RunInstances (c7i.large)"]["verdict"] == "good"
    assert BUCKET in told["bucket"]["said"]
    told_last = " ".join(hetopt("doctor", "--plan", tmp_path / "plan.json").out.split())
    assert told_last.endswith(f"1 of 31 would stop a launch: {NETWORKS}"), "what a screen keeps of it"
