"""What would stop a launch, found before it: each check is one sentence, and one command where something is wrong.

Nothing is made. Permissions are tried with calls that EC2 only checks (``DryRun``), which says nothing of capacity or
quota; quotas are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import account, scheduled_ends
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.order import Role
from hetopt.backends.ec2.renter.request import Edge, Request, read
from hetopt.core.errors import BadInput, CloudRefused, HetoptError
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.quota import NEW_ACCOUNT, Bucket, Quota, named_quota, needed, quota_of

LARGEST_SKEW_S = 0.8 * facts.LARGEST_SKEW_S.value

Verdict = Literal["good", "bad", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found about one thing."""

    name: str
    verdict: Verdict
    said: str
    hint: str | None = None


def account_checks(
    edge: Edge,
    region: str,
    bucket: str | None,
    instance_profile: str,
    offset_s: Callable[[], float | None],
    subnets: Sequence[str] = (),
) -> Iterator[Check]:
    """Credentials, clock, region, bucket, role and permissions; ends where nothing more can be asked.

    Args:
        edge: carries out calls.
        region: to launch in.
        bucket: absent: the account's usual one.
        instance_profile: of the machines.
        offset_s: how far this machine's clock is ahead, once AWS has answered.
        subnets: that machines are to be in; none: the default ones.
    """
    try:
        who = account.identity(edge)
    except CloudRefused as refused:
        yield bad("credentials", refused)
        if offset_s() is not None:
            yield _clock(offset_s())  # a refusal may mean it
        return
    yield Check(name="credentials", verdict="good", said=f"{who.arn} in account {who.account_id}")
    yield _clock(offset_s())
    try:
        found = account.subnets_of(edge, subnets)
    except (CloudRefused, BadInput) as refused:
        yield bad("region", refused)
        return
    if found:
        yield Check(
            name="region",
            verdict="good",
            said=f"{region} has {'these' if subnets else 'default'} subnets in {len(found)} zones",
        )
    else:
        yield Check(
            name="region",
            verdict="bad",
            said=f"{region} has no default subnet",
            hint=account.MAKE_SUBNETS,
        )
    name = bucket or account.default_bucket(who.account_id, region)
    yield _try(
        "bucket",
        lambda: account.check_bucket(edge, name, who.account_id, region),
        f"{name} is there, and this account's",
    )
    yield _profile(edge, instance_profile)
    yield _end_outside(edge)
    yield from _permissions(edge, found[0] if found else None)


def role_checks(
    edge: Edge,
    catalog: Catalog,
    roles: Sequence[Role],
    disk_gb: int,
    images: Mapping[str, str] | None = None,
) -> Iterator[Check]:
    """The images that a plan's machines boot, and the quotas that it needs, one for each family and market."""
    for kind in dict.fromkeys(role.image_kind for role in roles):
        yield _image(edge, kind, (images or {}).get(kind), disk_gb)
    yield from quota_checks(edge, catalog, roles)


def quota_checks(edge: Edge, catalog: Catalog, roles: Sequence[Role]) -> Iterator[Check]:
    """The quotas that roles need beside what runs, one for each family and market."""
    wanted = needed((catalog.instance_type(role.instance_types[0]), role.market, role.machines) for role in roles)
    try:
        running = _running(edge, catalog)
    except CloudRefused:
        running = {}
    for bucket, vcpus in wanted.items():
        quota = named_quota(bucket)
        yield _quota(edge, quota, vcpus, running.get(quota.code, 0))


def _running(edge: Edge, catalog: Catalog) -> dict[str, int]:
    """VCPUs of the region's machines by the code of the quota that they count against."""
    states = [{"Name": "instance-state-name", "Values": list(facts.COUNTED_STATES.value)}]
    answer = edge(read("ec2", "describe_instances", "what counts against the quotas", Filters=states))
    found: dict[str, int] = {}
    for one in (one for each in answer["Reservations"] for one in each["Instances"]):
        known = catalog.instance_types.get(one["InstanceType"])
        code = quota_of(one["InstanceType"], "spot" if one.get("InstanceLifecycle") == "spot" else "on-demand").code
        found[code] = found.get(code, 0) + (0 if known is None else known.vcpus)
    return found


def account_quotas(edge: Edge) -> dict[Bucket, int]:
    """The vCPUs of every quota that machines with torch count against, as the account has them in the edge's region.

    Raises:
        CloudRefused: they cannot be read.
    """
    named: dict[str, float] = {}
    found: dict[Bucket, int] = {}
    for bucket in NEW_ACCOUNT:
        code = named_quota(bucket).code
        if code not in named:
            named[code] = _granted(edge, code)
        found[bucket] = math.floor(named[code])
    return found


def _granted(edge: Edge, code: str) -> float:
    """VCPUs of a quota: what was granted, or what every account has that never asked for more."""
    request = read("service-quotas", "get_service_quota", "", ServiceCode="ec2", QuotaCode=code)
    try:
        return float(edge(request)["Quota"]["Value"])
    except ApiRefused as refused:
        if not refused.code.startswith(facts.NO_QUOTA.value):
            raise
    return float(edge(replace(request, operation="get_aws_default_service_quota"))["Quota"]["Value"])


def _image(edge: Edge, kind: str, chosen: str | None, disk_gb: int) -> Check:
    name = f"image for {kind}"
    try:
        image = account.boot_image(edge, kind, chosen, disk_gb)
    except (CloudRefused, BadInput) as refused:
        return bad(name, refused)
    return Check(name=name, verdict="good", said=f"{image.ami}, whose root device is {image.root_device}")


def _quota(edge: Edge, quota: Quota, vcpus: int, running: int) -> Check:
    raise_it = (
        f"`aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {quota.code} "
        f"--desired-value {vcpus + running}`"
    )
    beside = f"; machines that run use {running} of them" if running else ""
    name = f"quota {quota.code}"
    try:
        granted = _granted(edge, quota.code)
    except CloudRefused as refused:
        return Check(
            name=name,
            verdict="unknown",
            said=f"{vcpus} vCPUs are needed of '{quota.name}', which cannot be read "
            f"({refused.message.rstrip('.')}); new accounts have {quota.default}",
            hint=f"look it up in the Service Quotas console, or ask for enough: {raise_it}",
        )
    if granted - running < vcpus:
        said = f"{vcpus} vCPUs are needed of '{quota.name}', and {granted:.0f} are granted{beside}"
        hint = f"`hetopt gc --on ec2` shows what runs, or ask for more: {raise_it}" if running else raise_it
        return Check(name=name, verdict="bad", said=said, hint=hint)
    said = f"{vcpus} of {granted:.0f} vCPUs of '{quota.name}' are needed{beside}"
    return Check(name=name, verdict="good", said=said)


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
                "LaunchTemplateData": {
                    "InstanceInitiatedShutdownBehavior": "terminate",
                    # What organisations make a condition: a dry run is asked with what stands in it alone.
                    "MetadataOptions": {"HttpTokens": "required"},
                },
                "TagSpecifications": specification("launch-template"),
            },
        ),
    ]
    for operation, parameters in attempts:
        yield try_only(edge, operation, parameters)


def try_only(edge: Edge, operation: str, parameters: Mapping[str, object], *, of: str = "") -> Check:
    """Make a call that EC2 only checks.

    Args:
        edge: carries out calls.
        operation: of EC2, which must know `DryRun`.
        parameters: of the call.
        of: what it is about, where there are several.
    """
    request = Request(
        step=f"try {operation}",
        service="ec2",
        operation=operation,
        parameters={**parameters, "DryRun": True},
        purpose="whether it would be allowed",
    )
    name = f"permission {request.api_name}" + (f" ({of})" if of else "")
    try:
        edge(request)
    except ApiRefused as refused:
        if refused.code == facts.ONLY_TRIED.value:
            return Check(name=name, verdict="good", said="allowed")
        if refused.code == facts.TEMPLATE_NOT_KNOWN_YET.value:
            return Check(name=name, verdict="unknown", said="EC2 tries it only with a template that is there")
        # Parameters of a call that is only tried may be refused for that alone; what the account lacks stops a launch.
        if refused.reaction == "stop" and refused.is_known and not refused.code.startswith(facts.INVALID.value):
            return bad(name, refused)
        return Check(name=name, verdict="unknown", said=refused.message.rstrip("."), hint=refused.hint)
    return Check(
        name=name, verdict="unknown", said="the call was carried out instead of tried", hint="look with `hetopt gc`"
    )


def _profile(edge: Edge, instance_profile: str) -> Check:
    request = read("iam", "get_instance_profile", "", InstanceProfileName=instance_profile)
    make = f"an administrator makes it with the commands of `hetopt setup --print-policy --role {instance_profile}`"
    try:
        roles = edge(request)["InstanceProfile"]["Roles"]
    except ApiRefused as refused:
        if refused.code.startswith(facts.NO_ROLE.value):
            return Check(
                name="machines' role", verdict="bad", said=f"there is no instance profile {instance_profile}", hint=make
            )
        return Check(name="machines' role", verdict="unknown", said=refused.message, hint=refused.hint)
    if not roles:
        return Check(
            name="machines' role", verdict="bad", said=f"the instance profile {instance_profile} has no role", hint=make
        )
    return Check(name="machines' role", verdict="good", said=f"{instance_profile} is there")


def _end_outside(edge: Edge) -> Check:
    """Whether something ends machines that nothing of the run reaches. A launch does without."""
    name = "end outside"
    if scheduled_ends.end_role(edge) is not None:
        said = f"{scheduled_ends.END_ROLE} is there: the scheduler ends machines that nothing else has ended"
        return Check(name=name, verdict="good", said=said)
    said = (
        f"there is no role {scheduled_ends.END_ROLE} that can be looked up, so machines end by their own timers alone"
    )
    hint = "no launch needs it; an administrator makes it with the commands of `hetopt setup --print-policy`"
    return Check(name=name, verdict="good", said=said, hint=hint)


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
    except (CloudRefused, BadInput) as refused:
        return bad(name, refused)
    return Check(name=name, verdict="good", said=said)


def bad(name: str, refused: HetoptError) -> Check:
    """What was refused, as a check."""
    return Check(name=name, verdict="bad", said=refused.message.rstrip("."), hint=refused.hint)


def worst(checks: Iterable[Check]) -> Verdict:
    """The verdict of all together."""
    verdicts = {check.verdict for check in checks}
    return "bad" if "bad" in verdicts else "unknown" if "unknown" in verdicts else "good"
