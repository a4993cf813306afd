"""Policies allow what hetopt calls, and no more; the doctor finds what would stop a launch; the bucket is private."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.optimizer.ec2 import calls, permissions
from hetopt.optimizer.ec2.bucket import bucket_calls
from hetopt.optimizer.ec2.bundle import Bundle
from hetopt.optimizer.ec2.doctor import Check, account_checks, role_checks, worst
from hetopt.optimizer.ec2.edge import BotoEdge
from hetopt.optimizer.ec2.errors import ApiRefused
from hetopt.optimizer.ec2.order import Order
from hetopt.optimizer.ec2.removal import Remover
from hetopt.optimizer.ec2.request import Answer, Request
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, Patience, Recording
from tests.ec2.test_renting import rent
from tests.face.conftest import Answer as Said

ROLE = "hetopt-node"


def operator() -> dict[str, object]:
    return permissions.operator_policy(account_id=ACCOUNT, region=REGION, bucket=BUCKET, role=ROLE)


def statements(policy: dict[str, object]) -> list[dict[str, object]]:
    found = policy["Statement"]
    assert isinstance(found, list)
    return found


def test_the_policies(golden: Callable[[str, str], None]) -> None:
    policies = {
        "operator": permissions.operator_policy(
            account_id=ACCOUNT, region=REGION, bucket=BUCKET, role=ROLE, types=("g5.xlarge",)
        ),
        "node": permissions.node_policy(bucket=BUCKET),
        "trust": permissions.trust_policy(),
        "bucket": permissions.bucket_policy(BUCKET),
        "commands": permissions.commands(ROLE),
    }
    golden("policies.json", json.dumps(policies, indent=2) + "\n")


def test_every_call_of_a_run_is_allowed(
    cloud: BotoEdge, order_for: Callable[..., Order], plan: Plan, bundle: Bundle, tmp_path: Path, patience: Patience
) -> None:
    """What is recorded is what is granted: nothing is missing, and nothing is granted that is never used."""
    allowed = {action for one in statements(operator()) for action in one["Action"]}  # type: ignore[attr-defined]
    seen = Recording(inner=cloud)
    order = order_for()
    rent(seen, order, plan, bundle, tmp_path, patience)
    remover = Remover(edge=seen, sleep=patience.sleep)
    remover.remove_run(order.run_id)
    asked = {request.api_name for request in seen.seen}
    s3 = {"s3:HeadBucket": "s3:ListBucket", "s3:ListObjectsV2": "s3:ListBucket"}
    assert {s3.get(name, name) for name in asked} <= allowed


def test_nothing_is_granted_without_a_bound() -> None:
    for one in statements(operator()):
        if one["Sid"] == "Look":
            assert all(":Describe" in name or ":Get" in name for name in one["Action"])  # type: ignore[attr-defined]
            continue
        resources = one["Resource"]
        assert isinstance(resources, list)
        assert "*" not in resources, one["Sid"]
        actions = one["Action"]
        assert isinstance(actions, list)
        assert not any(name.endswith("*") for name in actions)
        if any(name.startswith("ec2:") for name in actions):
            assert "Condition" in one, one["Sid"]
    remove = next(one for one in statements(operator()) if one["Sid"] == "RemoveWhatIsMine")
    tag = "${aws:ResourceTag/hetopt:owner}"
    assert remove["Condition"] == {"StringLike": {"aws:userid": [tag, f"{tag}:*"]}}, "in every session of a role"
    node = json.dumps(permissions.node_policy(bucket=BUCKET))
    assert "ec2:" not in node
    assert "iam:" not in node
    assert node.count("Delete") == 1, "of checkpoints"


def test_the_bucket_is_made_once_and_private(cloud: BotoEdge) -> None:
    from random import Random

    from hetopt.optimizer.ec2.retry import Retrying

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


class Answering:
    """The real cloud, but for some operations, which answer as they are told to."""

    def __init__(self, inner: BotoEdge, answers: dict[str, Answer | str]) -> None:
        self.inner, self.answers = inner, answers

    def __call__(self, request: Request) -> Answer:
        answer = self.answers.get(request.operation)
        if isinstance(answer, str):
            raise ApiRefused(request, answer, "no")
        return self.inner(request) if answer is None else answer


def found(edge: object, offset_s: float | None = 0.0) -> dict[str, Check]:
    checks = account_checks(edge, REGION, None, ROLE, lambda: offset_s)  # type: ignore[arg-type]
    return {check.name: check for check in checks}


def test_the_doctor_on_a_fresh_account(cloud: BotoEdge) -> None:
    checks = found(cloud)
    assert checks["credentials"].verdict == checks["bucket"].verdict == checks["region"].verdict == "good"
    assert checks["permission ec2:CreateLaunchTemplate"].verdict == "good"
    assert checks["machines' role"].verdict == "bad"
    assert "hetopt setup" in str(checks["machines' role"].hint)


@pytest.mark.parametrize(
    ("answers", "name", "verdict", "said"),
    [
        ({"get_caller_identity": "ExpiredToken"}, "credentials", "bad", "expired"),
        ({"get_caller_identity": "NoCredentialsError"}, "credentials", "bad", "no AWS credentials"),
        ({"get_caller_identity": "SignatureDoesNotMatch"}, "credentials", "bad", "clock"),
        ({"describe_subnets": "OptInRequired"}, "region", "bad", "cannot use this region"),
        ({"describe_subnets": {"Subnets": []}}, "region", "bad", "no default subnet"),
        ({"head_bucket": "403"}, "bucket", "bad", "belongs to somebody else"),
        ({"head_bucket": "404"}, "bucket", "bad", "does not exist"),
        (
            {"create_launch_template": "UnauthorizedOperation"},
            "permission ec2:CreateLaunchTemplate",
            "bad",
            "may not do",
        ),
        ({"get_instance_profile": {"InstanceProfile": {"Roles": []}}}, "machines' role", "bad", "has no role"),
    ],
)
def test_the_doctor_names_what_is_wrong(
    cloud: BotoEdge, answers: dict[str, Answer | str], name: str, verdict: str, said: str
) -> None:
    check = found(Answering(cloud, answers))[name]
    assert check.verdict == verdict
    assert said in check.said
    assert check.hint
    assert worst([check]) == "bad"


def test_a_wrong_clock_is_told(cloud: BotoEdge) -> None:
    assert found(cloud, 900.0)["clock"].verdict == "bad"
    assert "behind" in found(cloud, -900.0)["clock"].said
    cloud(Request(step="i", service="sts", operation="get_caller_identity", parameters={}, purpose=""))
    assert cloud.clock_offset_s is not None
    assert abs(cloud.clock_offset_s) < 60


@pytest.mark.parametrize(("granted", "verdict"), [(0.0, "bad"), (5.0, "bad"), (6.0, "good"), (640.0, "good")])
def test_quotas_are_those_of_family_and_market(
    cloud: BotoEdge, order_for: Callable[..., Order], catalog: Catalog, granted: float, verdict: str
) -> None:
    order = order_for()
    edge = Answering(cloud, {"get_service_quota": {"Quota": {"Value": granted}}})
    *_, spot, on_demand = role_checks(edge, catalog, order.roles)
    assert spot.name == "quota L-34B43A08"
    assert spot.verdict == verdict, "three machines of two vCPUs"
    assert on_demand.name == "quota L-1216C47A"
    unread = Answering(cloud, {"get_service_quota": "AccessDeniedException"})
    *_, spot, on_demand = role_checks(unread, catalog, order.roles)
    assert spot.verdict == on_demand.verdict == "unknown"
    default = Answering(
        cloud,
        {"get_service_quota": "NoSuchResourceException", "get_aws_default_service_quota": {"Quota": {"Value": 5.0}}},
    )
    *_, spot, _ = role_checks(default, catalog, order.roles)
    assert spot.verdict == "bad"


Hetopt = Callable[..., Said]


def test_the_commands(cloud: BotoEdge, hetopt: Hetopt, plan: Plan, tmp_path: Path) -> None:
    answer = hetopt("setup", "--print-policy")
    assert answer.code == 0
    assert set(json.loads(answer.out)) == {"operator_policy", "node_trust", "node_policy", "commands"}
    plan.save(tmp_path / "plan.json")
    answer = hetopt("doctor", tmp_path / "plan.json", "--json")
    assert answer.code == 4, "the account has no role for machines"
    assert {"torch", "credentials", "clock", "quota L-34B43A08"} <= {one["name"] for one in json.loads(answer.out)}
    assert hetopt("setup").code == 2
    assert hetopt("setup", "--print-policy", "--account", "12").code == 2
    assert hetopt("setup", "--create-bucket", "--bucket", "hetopt-other", "--yes").code == 0
    assert calls.client_token("a", "b") == calls.client_token("a", "b")
