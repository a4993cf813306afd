"""The doctor finds what would stop a plan's launch before anything is rented: a sentence, and the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.ec2.objects import PART_BYTES, S3Objects
from hetopt.backends.ec2.renter.doctor import Check, plan_checks
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.ordering import Orders, Wishes
from hetopt.backends.ec2.renter.permissions import policy
from hetopt.backends.ec2.renter.request import Answer, Request
from hetopt.core.profile import Profile
from hetopt.optimizer.cost.billing import Billing
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, Patience, Recording, be_unkind, plan_of
from tests.face.conftest import Answer as Said

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
    def examine(launched: Plan = plan, edge: Any = None, **wishes: Any) -> dict[str, Check]:
        orders = Orders(
            edge=edge or WithPrices(account),
            catalog=catalog,
            billing=billing,
            wishes=Wishes(**wishes),
            version="0.1.0",
        )
        return {check.name: check for check in plan_checks(orders, launched, patience.now_s)}

    return examine


def found(check: Check, said: str, hint: str, verdict: str = "bad") -> None:
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
    assert not [one.operation for one in seen.seen if not one.reads_only and not one.parameters.get("DryRun")]


@pytest.mark.parametrize(
    ("unkind", "name", "said", "hint"),
    [
        ({"subnets": "none"}, "order", "no default subnet", "aws ec2 create-default-vpc"),
        ({"quotas": {}}, "quota L-34B43A08", "6 vCPUs are needed", "request-service-quota-increase"),
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
                machine = {"InstanceType": "c7i.16xlarge", "InstanceLifecycle": "spot"}
                return {"Reservations": [{"Instances": [machine]}]}
            return super().__call__(request)

    check = examined(edge=Running(account))["quota L-34B43A08"]
    found(check, "64 are granted; machines that run use 64 of them", "hetopt gc --on ec2")


def test_what_a_run_needs_to_keep_its_deadline_is_looked_at(
    examined: Doctor, profile: Profile, catalog: Catalog
) -> None:
    """Its quota on demand is another one, of which nothing is used until then."""
    launched = plan_of(profile, catalog, (("c7i.large", 2, "spot"),), budget_usd=50.0)
    goal = launched.goal.model_copy(update={"deadline_s": 36_000.0})
    launched = launched.model_copy(update={"goal": goal})
    be_unkind(quotas={"L-34B43A08": 64.0, "L-1216C47A": 2.0})
    check = examined(launched)["deadline, quota L-1216C47A"]
    found(check, "could not move to on-demand machines", "request-service-quota-increase", verdict="unknown")
    assert not [name for name in examined() if name.startswith("deadline")], "a plan without one never moves"


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
        ({}, {"Action": "s3:*", "Principal": {"AWS": f"arn:aws:iam::{ACCOUNT}:user/bob"}}, "unknown"),
        ({"StringNotEquals": {"aws:PrincipalOrgID": "o-1"}}, {"Action": "s3:*"}, "unknown"),
    ],
)
def test_what_the_doctor_says_of_a_buckets_policy_is_what_uploads_meet(
    examined: Doctor,
    account: BotoEdge,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    condition: dict[str, Any],
    about: dict[str, Any],
    verdict: str,
) -> None:
    """Uploads name no encryption; they go over the wire to a bucket that decides by the headers that arrive."""
    denial = {"Effect": "Deny", "Principal": "*", "Resource": OBJECTS, **about}
    denial |= {"Condition": condition} if condition else {}
    parameters = {"Bucket": BUCKET, "Policy": json.dumps({"Version": "2012-10-17", "Statement": denial})}
    account(Request(step="b", service="s3", operation="put_bucket_policy", parameters=parameters, purpose=""))
    check = examined()["the bucket's policy"]
    assert check.verdict == verdict, check
    assert verdict == "good" or f"get-bucket-policy --bucket {BUCKET}" in str(check.hint)
    objects = S3Objects.connect(region=REGION, bucket=BUCKET, prefix="runs/r", account_id=ACCOUNT)
    (large := tmp_path / "rank-0.safetensors").write_bytes(b"0" * (PART_BYTES + 1))
    sent = (objects.put("state/i-0.json", b"{}"), objects.send("ckpt/step-1/rank-0.safetensors", large))
    assert len(set(sent)) == 1, "all uploads look alike to a policy"
    if verdict != "unknown":
        assert (all(sent) and objects.get("state/i-0.json") is not None) == (verdict == "good")


def test_the_printed_policy_is_all_that_the_doctor_needs(examined: Doctor) -> None:
    """IAM decides every call by it; whoever may not ask IAM for simulations is told that nobody knows."""
    be_unkind(policy=policy("operator_policy", account=ACCOUNT, region=REGION, bucket=BUCKET, role="hetopt-node"))
    checks = examined()
    assert checks.pop("machines' permissions, simulated").verdict == "unknown"
    assert {check.verdict for check in checks.values()} == {"good"}, checks


def test_prices_beyond_the_plans_and_budgets_that_pay_for_no_boot_are_found(
    examined: Doctor, account: BotoEdge
) -> None:
    check = examined(edge=WithPrices(account, usd_per_hour=3.0), budget_usd=2.0)["order"]
    found(check, "at the prices of now the plan may cost", "plan again")
    found(examined(budget_usd=0.05)["order"], "the budget is $0.05", "budget")


def test_the_command_proves_a_plan(account: BotoEdge, hetopt: Callable[..., Said], plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    be_unkind(refuses={"CreateFleet": ["UnauthorizedOperation", SCP]})
    answer = hetopt("doctor", tmp_path / "plan.json", "--json")
    assert answer.code == 4
    told = {one["name"]: one for one in json.loads(answer.out)}
    assert told["permission ec2:CreateFleet (c7i.large)"]["verdict"] == "bad"
    assert told["permission ec2:RunInstances (c7i.large)"]["verdict"] == "good"
    assert BUCKET in told["bucket"]["said"]
