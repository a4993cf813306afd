"""Policies allow what hetopt calls, and no more; the doctor finds what would stop a launch; the bucket is private."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.api import account
from hetopt.api.account import checks
from hetopt.backends.ec2.renter import permissions
from hetopt.backends.ec2.renter.doctor import Check, account_checks, worst
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.permissions import bucket_calls
from hetopt.backends.ec2.renter.request import Answer, ApiRefused, Request
from hetopt.optimizer.market.account_quotas import AccountQuotas
from hetopt.optimizer.market.quota import NEW_ACCOUNT, Bucket
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, be_unkind
from tests.face.conftest import RECORDED
from tests.face.conftest import Answer as Said

ROLE = "hetopt-node"
RENTERS_WRITE = ("lease.json", "order.json", "placement.json", "plan.json", "spec.json")
"""What steers machines, or whoever looks after them."""


def operator() -> dict[str, object]:
    return permissions.policy("operator_policy", account=ACCOUNT, region=REGION, bucket=BUCKET, role=ROLE)


def statements(policy: dict[str, object]) -> list[dict[str, object]]:
    found = policy["Statement"]
    assert isinstance(found, list)
    return found


def test_nothing_is_granted_without_a_bound() -> None:
    for one in statements(operator()):
        if one["Sid"] == "Look":
            assert all(re.search(":(Describe|Get|List)", name) for name in one["Action"])  # type: ignore[attr-defined]
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
    node = json.dumps(permissions.policy("node_policy", bucket=BUCKET))
    assert re.findall(r"ec2:\w+", node) == ["ec2:DescribeSpotPriceHistory"], "which changes nothing"
    assert "iam:" not in node
    deletes = [
        one
        for one in permissions.policy("node_policy", bucket=BUCKET)["Statement"]
        if "s3:DeleteObject" in one["Action"]
    ]
    assert [(one["Sid"], one["Effect"]) for one in deletes] == [
        ("ForgetOldCheckpoints", "Allow"),
        ("SteerNobody", "Deny"),
    ]


def test_the_bucket_is_made_once_and_private(cloud: BotoEdge) -> None:
    from random import Random

    from hetopt.backends.ec2.renter.edge import Retrying

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
    assert "spot:g=8" in told.said
    assert "spot:standard=64" in told.said
    assert "on-demand:standard=5" in told.said, "never asked for: AWS's default"
    kept = AccountQuotas.load(tmp_path / "account-quotas.json")
    assert kept.account_id == ACCOUNT
    quotas = kept.of(REGION)
    assert quotas is not None
    assert quotas.keys() == NEW_ACCOUNT.keys(), "also those of which there is nothing"
    assert quotas[Bucket(market="spot", family="p5")] == 0
    asked = ("recommend", RECORDED / "digits.json", "--epochs", 2000, "--budget", 5, "--types", "c7a.large,p5.48xlarge")
    answer = hetopt(*asked, "--json")
    assert answer.code == 0, answer.err
    assert f"quotas of account {ACCOUNT} in {REGION}, read " in answer.err
    assert {group["instance_type"] for group in json.loads(answer.out)["chosen"]["groups"]} == {"c7a.large"}


def test_quotas_that_may_not_be_read_are_unknown_and_stop_nothing(
    cloud: BotoEdge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    told = account._quotas(Answering(cloud, {"get_service_quota": "AccessDeniedException"}), REGION)
    assert (told.name, told.verdict) == ("quotas", "unknown")
    assert "may not do service-quotas:GetServiceQuota" in told.said
    assert not (tmp_path / "account-quotas.json").exists()


def test_the_commands(cloud: BotoEdge, hetopt: Hetopt, plan: Plan, tmp_path: Path) -> None:
    answer = hetopt("setup", "--print-policy")
    assert answer.code == 0
    assert set(json.loads(answer.out)) == {
        "operator_policy",
        "node_trust",
        "node_policy",
        "end_trust",
        "end_policy",
        "commands",
    }
    plan.save(tmp_path / "plan.json")
    answer = hetopt("doctor", tmp_path / "plan.json", "--json")
    assert answer.code == 4, "the account has no role for machines"
    assert {"torch", "credentials", "clock", "quota L-34B43A08"} <= {one["name"] for one in json.loads(answer.out)}
    assert hetopt("setup").code == 2
    assert hetopt("setup", "--print-policy", "--account", "12").code == 2
    assert hetopt("setup", "--create-bucket", "--bucket", "hetopt-other", "--yes").code == 0


def machine_may(action: str, key: str) -> bool:
    from moto.iam.access_control import IAMPolicy, PermissionResult

    node = permissions.policy("node_policy", bucket=BUCKET)
    objects = {**node, "Statement": [one for one in node["Statement"] if "Condition" not in one]}
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
    from moto.iam.access_control import IAMPolicy, PermissionResult

    node = permissions.policy("node_policy", bucket=BUCKET)
    more = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    both = {**node, "Statement": [more, *(one for one in node["Statement"] if "Condition" not in one)]}
    for name in RENTERS_WRITE:
        resource = f"arn:aws:s3:::{BUCKET}/runs/r/{name}"
        assert IAMPolicy(json.dumps(both)).is_action_permitted("s3:PutObject", resource) is PermissionResult.DENIED


@given(prefix=st.one_of(st.just(""), st.text(alphabet="runs/2*?-0abcdef", max_size=60), st.integers(0, 80)))
def test_a_list_needs_the_whole_name_of_a_run(prefix: str | int) -> None:
    """No prefix that a machine may ask for finds another run unless it holds that run's whole name."""
    key = "runs/20261120-000000-digits-0123456789abcdef/lease.json"
    asked = key[:prefix] if isinstance(prefix, int) else prefix
    machines = permissions.policy("node_policy", bucket=BUCKET)["Statement"]
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
