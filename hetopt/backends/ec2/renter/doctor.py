"""What would stop a launch, found before it: each check is one sentence, and one command where something is wrong.

Nothing is made. Permissions are tried with calls that EC2 only checks (``DryRun``), which says nothing of capacity or
quota; quotas are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hetopt.backends.ec2.renter import account
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.order import Role
from hetopt.backends.ec2.renter.request import Edge, Request, read
from hetopt.core.errors import BadInput, CloudRefused, HetoptError
from hetopt.optimizer.cost.bill import Volume
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.quota import Quota, named_quota, needed

LARGEST_SKEW_S = 240.0
"""AWS refuses signatures that are five minutes off."""

Verdict = Literal["good", "bad", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found about one thing."""

    name: str
    verdict: Verdict
    said: str
    hint: str | None = None


def account_checks(
    edge: Edge, region: str, bucket: str | None, instance_profile: str, offset_s: Callable[[], float | None]
) -> Iterator[Check]:
    """Credentials, clock, region, bucket, role and permissions; ends where nothing more can be asked.

    Args:
        edge: carries out calls.
        region: to launch in.
        bucket: absent: the account's usual one.
        instance_profile: of the machines.
        offset_s: how far this machine's clock is ahead, once AWS has answered.
    """
    try:
        who = account.identity(edge)
    except CloudRefused as refused:
        yield _bad("credentials", refused)
        return
    yield Check(name="credentials", verdict="good", said=f"{who.arn} in account {who.account_id}")
    yield _clock(offset_s())
    try:
        found = account.default_subnets(edge)
    except CloudRefused as refused:
        yield _bad("region", refused)
        return
    if found:
        yield Check(name="region", verdict="good", said=f"{region} has default subnets in {len(found)} zones")
    else:
        yield Check(
            name="region",
            verdict="bad",
            said=f"{region} has no default subnet",
            hint="make the default network: `aws ec2 create-default-vpc`",
        )
    name = bucket or account.default_bucket(who.account_id, region)
    yield _try(
        "bucket", lambda: account.check_bucket(edge, name, who.account_id), f"{name} is there, and this account's"
    )
    yield _profile(edge, instance_profile)
    yield from _permissions(edge, found[0] if found else None)


def role_checks(edge: Edge, catalog: Catalog, roles: Sequence[Role]) -> Iterator[Check]:
    """The images that a plan's machines boot, and the quotas that it needs, one for each family and market."""
    for kind in dict.fromkeys(role.image_kind for role in roles):
        yield _image(edge, kind)
    wanted = needed((catalog.instance_type(role.instance_types[0]), role.market, role.machines) for role in roles)
    for bucket, vcpus in wanted.items():
        yield _quota(edge, named_quota(bucket), vcpus)


def _image(edge: Edge, kind: str) -> Check:
    name = f"image for {kind}"
    try:
        image = account.boot_image(edge, kind, None, round(Volume().gb))
    except (CloudRefused, BadInput) as refused:
        return _bad(name, refused)
    return Check(name=name, verdict="good", said=f"{image.ami}, whose root device is {image.root_device}")


def _quota(edge: Edge, quota: Quota, vcpus: int) -> Check:
    request = read("service-quotas", "get_service_quota", "", ServiceCode="ec2", QuotaCode=quota.code)
    raise_it = (
        f"`aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {quota.code} "
        f"--desired-value {vcpus}`"
    )
    name = f"quota {quota.code}"
    try:
        try:
            granted = float(edge(request)["Quota"]["Value"])
        except ApiRefused as refused:
            if not refused.code.startswith("NoSuchResource"):
                raise
            # An account that never asked for more has no applied value of its own.
            default = replace(request, operation="get_aws_default_service_quota")
            granted = float(edge(default)["Quota"]["Value"])
    except CloudRefused as refused:
        return Check(
            name=name,
            verdict="unknown",
            said=f"{vcpus} vCPUs are needed of '{quota.name}', which cannot be read "
            f"({refused.message.rstrip('.')}); new accounts have {quota.default}",
            hint=f"look it up in the Service Quotas console, or ask for enough: {raise_it}",
        )
    if granted < vcpus:
        return Check(
            name=name,
            verdict="bad",
            said=f"{vcpus} vCPUs are needed of '{quota.name}', and {granted:.0f} are granted",
            hint=raise_it,
        )
    return Check(name=name, verdict="good", said=f"{vcpus} of {granted:.0f} vCPUs of '{quota.name}' are needed")


def _permissions(edge: Edge, subnet: object) -> Iterator[Check]:
    """Whether each kind of call would be allowed. The tags are those that the policy of `setup` asks for."""
    tags = [{"Key": "hetopt:run-id", "Value": "doctor"}, {"Key": "hetopt:owner", "Value": "doctor"}]

    def specification(kind: str) -> list[dict[str, object]]:
        return [{"ResourceType": kind, "Tags": tags}]

    attempts: list[tuple[str, dict[str, object]]] = [
        (
            "create_security_group",
            {
                "GroupName": "hetopt-doctor",
                "Description": "only tried",
                "TagSpecifications": specification("security-group"),
            },
        ),
        (
            "create_launch_template",
            {
                "LaunchTemplateName": "hetopt-doctor",
                "LaunchTemplateData": {"InstanceInitiatedShutdownBehavior": "terminate"},
                "TagSpecifications": specification("launch-template"),
            },
        ),
    ]
    for operation, parameters in attempts:
        yield _dry_run(edge, operation, parameters)


def _dry_run(edge: Edge, operation: str, parameters: dict[str, object]) -> Check:
    request = Request(
        step=f"try {operation}",
        service="ec2",
        operation=operation,
        parameters={**parameters, "DryRun": True},
        purpose="",
    )
    name = f"permission {request.api_name}"
    try:
        edge(request)
    except ApiRefused as refused:
        if refused.code == "DryRunOperation":
            return Check(name=name, verdict="good", said="allowed")
        if refused.code == "UnauthorizedOperation" or refused.code.startswith("AccessDenied"):
            return _bad(name, refused)
        return Check(name=name, verdict="unknown", said=refused.message, hint=refused.hint)
    return Check(
        name=name, verdict="unknown", said="the call was carried out instead of tried", hint="look with `hetopt gc`"
    )


def _profile(edge: Edge, instance_profile: str) -> Check:
    request = read("iam", "get_instance_profile", "", InstanceProfileName=instance_profile)
    make = "an administrator makes it with the commands of `hetopt setup`"
    try:
        roles = edge(request)["InstanceProfile"]["Roles"]
    except ApiRefused as refused:
        if refused.code.startswith("NoSuchEntity"):
            return Check(
                name="machines' role", verdict="bad", said=f"there is no instance profile {instance_profile}", hint=make
            )
        return Check(name="machines' role", verdict="unknown", said=refused.message, hint=refused.hint)
    if not roles:
        return Check(
            name="machines' role", verdict="bad", said=f"the instance profile {instance_profile} has no role", hint=make
        )
    return Check(name="machines' role", verdict="good", said=f"{instance_profile} is there")


def _clock(offset_s: float | None) -> Check:
    if offset_s is None:
        return Check(name="clock", verdict="unknown", said="AWS did not say what time it is", hint="`timedatectl`")
    if abs(offset_s) > LARGEST_SKEW_S:
        return Check(
            name="clock",
            verdict="bad",
            said=f"this machine's clock is {abs(offset_s):.0f} s {'ahead' if offset_s > 0 else 'behind'}",
            hint="set it: `timedatectl set-ntp true`",
        )
    return Check(name="clock", verdict="good", said=f"within {max(1.0, abs(offset_s)):.0f} s of AWS's")


def _try(name: str, step: Callable[[], None], said: str) -> Check:
    try:
        step()
    except CloudRefused as refused:
        return _bad(name, refused)
    return Check(name=name, verdict="good", said=said)


def _bad(name: str, refused: HetoptError) -> Check:
    return Check(name=name, verdict="bad", said=refused.message.rstrip("."), hint=refused.hint)


def worst(checks: Iterable[Check]) -> Verdict:
    """The verdict of all together."""
    verdicts = {check.verdict for check in checks}
    return "bad" if "bad" in verdicts else "unknown" if "unknown" in verdicts else "good"
