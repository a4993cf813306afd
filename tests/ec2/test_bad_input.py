"""Whatever is wrong with an account, a session, a region or a plan: one sentence, what to do, and nothing is left."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import be_unkind, leftovers
from tests.ec2.test_command import refused
from tests.face.conftest import Answer

Hetopt = Callable[..., Answer]

AS_WANTED = "as the test wants it"

REFUSALS = {
    "expired session": (
        ("GetCallerIdentity", 403, "ExpiredToken", AS_WANTED),
        r"session has expired.*aws sso login",
    ),
    "unknown key": (("GetCallerIdentity", 403, "InvalidClientTokenId", AS_WANTED), "does not know these"),
    "clock skew": (
        ("GetCallerIdentity", 403, "SignatureDoesNotMatch", "Signature expired"),
        "the clock of this machine is wrong",
    ),
    "clock skew of S3": (("PUT", 403, "RequestTimeTooSkewed", AS_WANTED), "the clock of this machine"),
    "region to opt in": (
        ("DescribeInstanceTypeOfferings", 401, "OptInRequired", AS_WANTED),
        "the account cannot use this region",
    ),
    "disabled region, or wrong keys": (
        ("DescribeSubnets", 401, "AuthFailure", "AWS was not able to validate them"),
        "does not accept these credentials in this region: AWS was not able to validate them.*not enabled",
    ),
    "a new account": (
        ("CreateFleet", 200, "PendingVerification", AS_WANTED),
        "AWS is still verifying this account.*launch again",
    ),
    "a blocked account": (
        ("CreateFleet", 400, "Blocked", "This account is currently blocked"),
        "AWS has blocked this account: This account is currently blocked.*support",
    ),
    "a type that the zone does not start": (
        ("CreateFleet", 400, "InvalidFleetConfig", "Unsupported instance types"),
        "no zone has all machines of the plan.*cannot be started so in this zone",
    ),
    "a bucket of somebody else": (("HEAD", 403, "403", AS_WANTED), "belongs to somebody else"),
    "a bucket in another region": (("HEAD", 301, "301", AS_WANTED), "is in another region"),
    "spot quota of zero": (
        ("CreateFleet", 200, "MaxSpotInstanceCountExceeded", AS_WANTED),
        r"quota for vCPUs is used up \(.*Spot",
    ),
    "on-demand quota of zero": (
        ("CreateFleet", 200, "VcpuLimitExceeded", AS_WANTED),
        "quota for vCPUs is used up",
    ),
    "no permission": (
        ("CreateLaunchTemplate", 403, "UnauthorizedOperation", AS_WANTED),
        r"may not do ec2:CreateLaunchTemplate: as the test wants it.*hetopt setup",
    ),
    "a tag policy": (
        ("CreateSecurityGroup", 400, "TagPolicyViolation", "The value is not allowed for the tag key: 'hetopt:owner'."),
        "a tag policy of the organisation refuses what hetopt tags: .* keys that begin with hetopt:",
    ),
    "a bucket whose policy denies": (
        ("PUT", 403, "AccessDenied", "User: x is not authorized, with an explicit deny in a resource-based policy"),
        "the bucket's own policy denies it.*aws s3api get-bucket-policy --bucket hetopt-",
    ),
    "a bucket with a key": (
        ("PUT", 403, "AccessDenied", "User: x is not authorized to perform: kms:GenerateDataKey on resource: k"),
        "the bucket's key must be allowed to you and to the machines' role",
    ),
    "a permissions boundary": (
        ("CreateLaunchTemplate", 403, "UnauthorizedOperation", "x, with an explicit deny in a permissions boundary"),
        "the permissions boundary of these credentials denies it",
    ),
    "a role that is not there": (
        ("CreateFleet", 403, "AuthFailure.ServiceLinkedRoleCreationNotPermitted", AS_WANTED),
        r"create-service-linked-role",
    ),
}


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


ONE_OF_EACH = (
    "a bucket whose policy denies",
    "a tag policy",
    "expired session",
    "clock skew",
    "a new account",
    "a type that the zone does not start",
    "a bucket of somebody else",
    "spot quota of zero",
    "no permission",
)
"""One of each call that is refused, at each moment of a launch; the others become sentences in the same way."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ONE_OF_EACH)) for name in REFUSALS]
)
def test_what_an_account_can_refuse(cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, name: str) -> None:
    (call, status, code, text), said = REFUSALS[name]
    be_unkind(refuses={call: [code, text, status]})
    refused(hetopt("launch", "--on", "ec2", plan_file, "--yes"), 4, said)
    be_unkind(refuses={})
    assert [one for one in leftovers(cloud) if one.kind != "fleet"] == []


def test_without_credentials(hetopt: Hetopt, plan_file: Path, cloud: BotoEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    refused(hetopt("launch", "--on", "ec2", plan_file, "--yes"), 4, "no AWS credentials here")


def test_a_profile_that_there_is_not(
    hetopt: Hetopt, plan_file: Path, cloud: BotoEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    answer = hetopt("launch", "--on", "ec2", plan_file, "--yes")
    assert answer.code in (2, 4)
    assert "nobody" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AWS_ENDPOINT_URL", "localhost:4566", "an address that is set for AWS is none: .*localhost:4566.*http://"),
        ("HTTP_PROXY", "http://127.0.0.1:9", "the proxy for AWS cannot be used: .*127.0.0.1:9.*look at HTTPS_PROXY"),
        ("AWS_CONFIG_FILE", "broken", "Unable to parse config file: .*broken.*aws configure"),
    ],
)
def test_what_is_set_wrongly_here(
    hetopt: Hetopt,
    plan_file: Path,
    cloud: BotoEdge,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    said: str,
) -> None:
    """It comes from botocore, as an exception of one kind or another, before any call is made."""
    (plan_file.parent / "broken").write_text("this is [no configuration\n")
    monkeypatch.chdir(plan_file.parent)
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv(variable, value)
    refused(hetopt("launch", "--on", "ec2", plan_file, "--yes"), 4, said)
    answer = hetopt("doctor", plan_file)
    assert answer.code == 4
    assert "Traceback" not in answer.err + answer.out


def test_a_plan_for_a_region_that_there_is_not(hetopt: Hetopt, plan_file: Path, cloud: BotoEdge) -> None:
    data = json.loads(plan_file.read_text())
    for group in data["chosen"]["groups"]:
        group["region"] = "eu-moon-1"
    plan_file.write_text(json.dumps(data))
    answer = hetopt("launch", "--on", "ec2", plan_file, "--yes")
    assert answer.code in (2, 4)
    assert re.search("eu-moon-1", answer.err)
    assert "Traceback" not in answer.err


def test_a_script_is_ordered_with_its_files_or_refused_before_anything_is_made(
    cloud: BotoEdge, hetopt: Hetopt, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom hetopt import session\nrun = session(None, None)\n")
    (tmp_path / "small.yaml").write_text("lr: 1\n")
    (tmp_path / "images").mkdir()
    of_script = plan.model_copy(update={"run": plan.run.model_copy(update={"script": ("train.py",)})})
    of_script.save(tmp_path / "plan.json")
    order = ("launch", "--on", "ec2", tmp_path / "plan.json", "--dry-run")
    config = f"--config={tmp_path / 'small.yaml'}"
    answer = hetopt(*order, "--data", "s3://bucket/data/x", "--", script, config, "{data}")
    assert answer.code == 0, answer.err
    told = " ".join((answer.out + answer.err).split())
    assert "train.py saves no checkpoint: after a loss it begins again" in told
    assert "the plan reckons with checkpoints" in told
    refused(hetopt(*order, "--", script, tmp_path / "images"), 2, "given the folder .*images, which rented machines")
    refused(hetopt(*order, "--data", "s3://bucket/data/x", "--", script), 2, r"by \{data\} among its arguments")
    script.write_text("import torch\n")
    refused(hetopt(*order, "--", script), 2, "uses neither DistributedDataParallel nor a session")
    assert leftovers(cloud) == []
