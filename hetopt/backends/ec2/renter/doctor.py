"""Finds what would stop a launch, and says what an administrator sets up once so that nothing does.

Nothing is made: permissions are tried with calls that EC2 only checks (``DryRun``), which says nothing of capacity;
quotas are read, and an object of the bucket is written over a version that it does not have.

What hetopt must be allowed, and no more, is data: ``policies.json``. Whatever is made must carry hetopt's tags in the
call that makes it, and only what carries the caller's own name can be removed: the id of a role alone, as its sessions
are called 'ID:SESSION' and have a new name in every process.

Machines of an account share one role, which reaches the bucket and sees what spot costs: the credentials of an instance
profile take neither session policies nor session tags, and a role for each run would need rights that few people have
(IAM user guide, "Session policies" and "Session tags"; EC2 user guide, "IAM roles for Amazon EC2"; read 2026-11). So a
run is kept from another by its name, which ends in 64 random bits and is in no list that a machine may ask for; and
machines are denied to write what steers machines, whatever an administrator allows their role beside.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.bootstrap import WHEELS_FOLDER
from hetopt.backends.ec2.renter import calls, ordering
from hetopt.backends.ec2.renter.calls import END_ROLE, fleet_call, machine_settings
from hetopt.backends.ec2.renter.order import Order, Role
from hetopt.backends.ec2.renter.ordering import Orders, check_prices, roles_of
from hetopt.backends.ec2.renter.request import ApiRefused, Edge, Request, if_there, read
from hetopt.backends.options import Ec2
from hetopt.core.errors import CloudRefused, HetoptError
from hetopt.core.formatting import duration, usd
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.quota import NEW_ACCOUNT, Bucket, Quota, named_quota, needed
from hetopt.optimizer.plan import Plan

Verdict = Literal["good", "bad", "unknown"]
"""Verdict of a check: fine, something stops a launch, or AWS does not tell."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One result of the doctor, such as on the bucket or on a quota.

    Attributes:
        name: what was looked at.
        verdict: good, bad or unknown.
        said: sentence on what was found.
        hint: what to do about it; None: nothing needs to be done.
    """

    name: str
    verdict: Verdict
    said: str
    hint: str | None = None


def worst(checks: Iterable[Check]) -> Verdict:
    """Return the worst verdict of checks, bad before unknown before good; good if there is none."""
    verdicts = {check.verdict for check in checks}
    return "bad" if "bad" in verdicts else "unknown" if "unknown" in verdicts else "good"


def examined(name: str, step: Callable[..., str], *arguments: object, unread: Verdict = "bad") -> Check:
    """Run ``step(*arguments)``; return a check: good with the sentence that it returns, else bad with its error.

    Args:
        name: name of the check.
        step: returns the sentence where all is well, and raises a HetoptError where something is wrong.
        arguments: arguments of ``step``.
        unread: verdict where AWS itself refuses a call.
    """
    try:
        return Check(name=name, verdict="good", said=step(*arguments))
    except HetoptError as refused:
        verdict = unread if isinstance(refused, ApiRefused) else "bad"
        return Check(name=name, verdict=verdict, said=refused.message.rstrip("."), hint=refused.hint)


def account_checks(edge: Edge, region: str, options: Ec2) -> Iterator[Check]:
    """Yield checks of credentials, region, bucket, roles and permissions in AWS; end after bad credentials or region.

    A clock that is wrong is refused by AWS with the credentials.

    Args:
        edge: makes the calls.
        region: AWS region to launch in.
        options: options of the launch, whose subnets, bucket and instance profile are checked.
    """
    credentials = examined("credentials", lambda: "{0.arn} in account {0.account_id}".format(ordering.identity(edge)))
    yield credentials
    if credentials.verdict != "good":
        return
    account_id = ordering.identity(edge).account_id
    network = examined("region", _network, edge, region, options.subnets)
    yield network
    if network.verdict != "good":
        return
    yield examined("bucket", _bucket, edge, options.bucket, account_id, region)
    profile = options.instance_profile or ordering.PROFILE_NAME
    yield examined("machines' role", _profile, edge, profile, unread="unknown")
    yield examined("end outside", _end_outside, edge)
    # The tags that the policy of `setup` asks for.
    tags = [{"Key": "hetopt:run-id", "Value": "doctor"}, {"Key": "hetopt:owner", "Value": "doctor"}]
    group = {"GroupName": "hetopt-doctor", "Description": "only tried"}
    yield try_only(edge, "create_security_group", {**group, **_tagged("security-group", tags)})
    # What organisations make a condition: a dry run is asked with what stands in it alone.
    machine = {"InstanceInitiatedShutdownBehavior": "terminate", "MetadataOptions": {"HttpTokens": "required"}}
    template = {"LaunchTemplateName": "hetopt-doctor", "LaunchTemplateData": machine}
    yield try_only(edge, "create_launch_template", {**template, **_tagged("launch-template", tags)})


def _tagged(kind: str, tags: list[dict[str, str]]) -> dict[str, object]:
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": tags}]}


def _network(edge: Edge, region: str, subnets: Sequence[str]) -> str:
    """Return a sentence on the subnets that machines would be in; CloudRefused: there are none."""
    listed = ordering.subnets_of(edge, subnets)
    if not listed:
        raise CloudRefused(f"{region} has no default subnet.", hint=ordering.MAKE_SUBNETS)
    return f"{region} has {'these' if subnets else 'default'} subnets in {len(listed)} zones"


def _bucket(edge: Edge, bucket: str | None, account_id: str, region: str) -> str:
    """Return a sentence that the bucket (None: the default one) is there; HetoptError: it is not, or is another's."""
    name = bucket or ordering.default_bucket(account_id, region)
    ordering.check_bucket(edge, name, account_id, region)
    return f"{name} is there, and this account's"


def _profile(edge: Edge, instance_profile: str) -> str:
    """Return a sentence that an instance profile is there.

    Raises:
        CloudRefused: there is no such profile, or it has no role.
    """
    request = read("iam", "get_instance_profile", "the machines' role", InstanceProfileName=instance_profile)
    answer = if_there(edge, request, (facts.NO_ROLE,))
    if answer is None or not answer["InstanceProfile"]["Roles"]:
        raise CloudRefused(
            f"there is no instance profile {instance_profile} with a role.",
            hint="an administrator makes it with the commands of `hetopt setup --print-policy --role "
            f"{instance_profile}`",
        )
    return f"{instance_profile} is there"


def _end_outside(edge: Edge) -> str:
    """Return a sentence on whether the account's scheduler may end machines that no run reaches, which is optional."""
    if calls.end_role(edge) is not None:
        return f"{calls.END_ROLE} is there: the scheduler ends machines that nothing else has ended"
    return (
        f"there is no role {calls.END_ROLE} that can be looked up, so machines end by their own timers alone; "
        "the commands of `hetopt setup --print-policy` make it"
    )


def plan_checks(orders: Orders, plan: Plan, now_s: float) -> Iterator[Check]:
    """Yield checks of what a plan's launch needs in AWS: images, quotas, zones, prices, bucket, and calls by dry run.

    Args:
        orders: writes the order that a launch would write.
        plan: plan to be launched.
        now_s: seconds since the epoch.
    """
    edge, kept, roles = orders.edge, dict[str, Order](), tuple[Role, ...]()
    with suppress(HetoptError):  # which the order tells
        roles = roles_of(plan, orders.catalog)
    for kind in dict.fromkeys(role.image_kind for role in roles):
        yield examined(f"image for {kind}", _image, edge, kind, orders.options.images.get(kind))
    yield from quota_checks(edge, orders.catalog, roles)

    def ordered() -> str:
        """Return a sentence on the order that a launch would write, with its zones and cost.

        Errors as of `Orders.of_plan`.
        """
        order = kept["order"] = orders.of_plan(plan, run_id="doctor", bundle_sha256="0" * 64, now_s=now_s)
        check_prices(plan, order)
        expected, high = order.expected_usd(plan)
        return (
            f"every type is offered in {', '.join(zone.name for zone in order.zones)}, the cheapest first; the run "
            f"should cost {usd(expected)}, and not above {usd(high)} in nine of ten; the budget of "
            f"{usd(order.budget_usd)} pays for {duration(order.lifetime_s)} at their highest prices"
        )

    yield examined("order", ordered)
    if "order" in kept:
        yield from _order_checks(edge, kept["order"])


def _order_checks(edge: Edge, order: Order) -> Iterator[Check]:
    """Yield checks of an order's objects and, by dry runs, of renting each of its types and fleets."""
    yield examined("objects of a run", _objects, edge, order)
    for role, name in ((each, name) for each in order.roles for name in each.instance_types):
        market = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}}
        parameters = {
            **machine_settings(order, role.image_kind),
            "InstanceType": name,
            "MinCount": role.machines,
            "MaxCount": role.machines,
            "SubnetId": order.zones[0].subnet_id,
            **({"InstanceMarketOptions": market} if role.market == "spot" else {}),
        }
        yield try_only(edge, "run_instances", parameters, of=name)
    for role in order.roles:
        fleet = fleet_call(order, role, order.zones[0], facts.NO_TEMPLATE, attempt=0)
        yield try_only(edge, "create_fleet", fleet.parameters, of=role.instance_types[0])


def _image(edge: Edge, kind: str, chosen: str | None) -> str:
    image = ordering.boot_image(edge, kind, chosen)
    return f"{image.ami}, whose root device is {image.root_device}"


def quota_checks(edge: Edge, catalog: Catalog, roles: Sequence[Role]) -> Iterator[Check]:
    """Yield a check of the vCPU quota of each family and market of machines that roles need; bad: it is too small.

    Args:
        edge: makes the calls.
        catalog: catalog of the region.
        roles: fleets to rent.
    """
    wanted = needed((catalog.instance_type(role.instance_types[0]), role.market, role.machines) for role in roles)
    for bucket, vcpus in wanted.items():
        quota = named_quota(bucket)
        yield examined(f"quota {quota.code}", _quota, edge, quota, vcpus, unread="unknown")


def account_quotas(edge: Edge) -> dict[Bucket, int]:
    """Ask AWS for the account's quotas in the edge's region, in whole vCPUs by market and family of machines.

    Raises:
        CloudRefused: AWS does not tell a quota.
    """
    codes = {bucket: named_quota(bucket).code for bucket in NEW_ACCOUNT}
    granted = {code: _granted(edge, code) for code in dict.fromkeys(codes.values())}
    return {bucket: math.floor(granted[code]) for bucket, code in codes.items()}


def _granted(edge: Edge, code: str) -> float:
    """Return the vCPUs of the quota with AWS's ``code``: what was granted, or what every account has.

    Raises:
        ApiRefused: AWS does not tell.
    """
    request = read("service-quotas", "get_service_quota", "", ServiceCode="ec2", QuotaCode=code)
    try:
        return float(edge(request)["Quota"]["Value"])
    except ApiRefused as refused:
        if not refused.code.startswith(facts.NO_QUOTA):
            raise
    return float(edge(replace(request, operation="get_aws_default_service_quota"))["Quota"]["Value"])


def _quota(edge: Edge, quota: Quota, vcpus: int) -> str:
    """Return a sentence that a quota has ``vcpus``; CloudRefused: fewer were granted, or AWS does not tell."""
    granted = _granted(edge, quota.code)
    if granted < vcpus:
        raise CloudRefused(
            f"{vcpus} vCPUs are needed of '{quota.name}', and {granted:.0f} are granted.",
            hint="`aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
            f"{quota.code} --desired-value {vcpus}`",
        )
    return f"{vcpus} of {granted:.0f} vCPUs of '{quota.name}' are needed, beside what runs"


def try_only(edge: Edge, operation: str, parameters: Mapping[str, object], *, of: str = "") -> Check:
    """Check whether EC2 would allow a call, by its `DryRun`, which changes nothing.

    Verdict ``unknown``: EC2 answers in a way that tells nothing.

    Args:
        edge: makes the call.
        operation: operation of EC2, which must know `DryRun`.
        parameters: parameters of the call.
        of: instance type, for the check's name; empty: none.
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
        if refused.code == facts.ONLY_TRIED:
            return Check(name=name, verdict="good", said="allowed")
        if refused.code == facts.TEMPLATE_NOT_KNOWN_YET:
            return Check(name=name, verdict="unknown", said="EC2 tries it only with a template that is there")
        # Parameters of a call that is only tried may be refused for that alone; what the account lacks stops a launch.
        stops = refused.reaction == "stop" and refused.is_known and not refused.code.startswith(facts.INVALID)
        verdict: Verdict = "bad" if stops else "unknown"
        return Check(name=name, verdict=verdict, said=refused.message.rstrip("."), hint=refused.hint)
    return Check(
        name=name, verdict="unknown", said="the call was carried out instead of tried", hint="look with `hetopt gc`"
    )


def _objects(edge: Edge, order: Order) -> str:
    """Return a sentence that a run's objects may be written and read, by trying both on an object that is not there.

    A write over a version that is not there is refused after whatever policy would deny it; nothing is written.

    Raises:
        CloudRefused: one of both is denied.
    """
    lease = calls.lease_call(order, 0.0, 0.0, over='"none"')
    if_there(edge, lease, (*facts.NO_OBJECT, facts.WRITTEN_MEANWHILE))
    if_there(edge, calls.get_object(order, str(lease.parameters["Key"])))
    return f"what a run writes to {order.bucket} may be written and read"


Policy = Mapping[str, Any]

POLICIES = ("operator_policy", "node_trust", "node_policy", "end_trust", "end_policy")
"""Names of the policies: of whoever launches; of machines and who may take their role; of the scheduler's role that
ends machines, likewise."""


def policy(name: str, *, types: Sequence[str] = (), **names: str) -> Policy:
    """Return an IAM policy of ``policies.json`` with its placeholders filled in.

    Args:
        name: one of `POLICIES`, or ``bucket_policy``.
        types: the only instance types that may be rented; empty: any.
        names: ``account``, ``region``, ``bucket`` and ``role``, as far as the policy names them.

    Raises:
        KeyError: there is no such policy, or a name that it needs is not given.
    """
    text = json.dumps(json.loads(Path(__file__).with_name("policies.json").read_text(encoding="utf-8"))[name])
    filled: Policy = json.loads(re.sub(r"@(account|region|bucket|role)@", lambda match: names[match[1]], text))
    for statement in filled["Statement"] if types else ():
        if statement.get("Sid") == "RentWhatIsTagged":
            statement["Condition"]["StringEquals"]["ec2:InstanceType"] = list(types)
    return filled


def commands(role: str) -> list[str]:
    """Return the shell commands by which an administrator makes the roles; run nothing.

    The policies must be in files of their names, such as ``node_trust.json``.

    Args:
        role: name of the role of machines.
    """
    return [
        f"aws iam create-role --role-name {role} --assume-role-policy-document file://node_trust.json",
        f"aws iam put-role-policy --role-name {role} --policy-name hetopt --policy-document file://node_policy.json",
        f"aws iam create-instance-profile --instance-profile-name {role}",
        f"aws iam add-role-to-instance-profile --instance-profile-name {role} --role-name {role}",
        f"aws iam create-role --role-name {END_ROLE} --assume-role-policy-document file://end_trust.json",
        f"aws iam put-role-policy --role-name {END_ROLE} --policy-name hetopt --policy-document file://end_policy.json",
        "aws iam create-policy --policy-name hetopt-operator --policy-document file://operator_policy.json",
        f"aws iam create-service-linked-role --aws-service-name {facts.SPOT_SERVICE}",
        f"aws iam create-service-linked-role --aws-service-name {facts.FLEET_SERVICE}",
    ]


KEPT_DAYS = 30
"""Days after which the bucket deletes checkpoints and states of runs, code and wheels; these are packed and left again
when needed. Models and data stay."""


def bucket_calls(bucket: str, region: str, account_id: str) -> tuple[Request, ...]:
    """Return the calls that create a bucket, private, encrypted and with expiry; made twice, they change nothing.

    Args:
        bucket: name of the bucket.
        region: AWS region to make it in.
        account_id: number of the account that must own it.
    """
    target = {"Bucket": bucket, "ExpectedBucketOwner": account_id}
    # Where buckets are when nothing is said must not be said.
    place = {} if region == facts.FIRST_REGION else {"CreateBucketConfiguration": {"LocationConstraint": region}}

    public = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    rule = {
        "ID": "hetopt",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "Expiration": {"Days": KEPT_DAYS},
        # For buckets that keep versions: theirs would stay for ever.
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    runs = [
        {**rule, "ID": f"hetopt-{part}", "Filter": {"Prefix": f"{part}/"}} for part in ("runs", "code", WHEELS_FOLDER)
    ]
    over_tls = json.dumps(policy("bucket_policy", bucket=bucket))
    encrypted = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}
    steps: tuple[tuple[str, dict[str, object], str], ...] = (
        ("create_bucket", {"Bucket": bucket, **place}, "where code, checkpoints and states of runs go"),
        (
            "put_public_access_block",
            {**target, "PublicAccessBlockConfiguration": dict.fromkeys(public, True)},
            "nobody outside the account reads it",
        ),
        ("put_bucket_encryption", {**target, "ServerSideEncryptionConfiguration": encrypted}, "encrypted at rest"),
        ("put_bucket_policy", {**target, "Policy": over_tls}, "over TLS only"),
        (
            "put_bucket_lifecycle_configuration",
            {**target, "LifecycleConfiguration": {"Rules": runs}},
            f"runs, code and wheels go after {KEPT_DAYS} days; models and data stay",
        ),
    )
    return tuple(
        Request(
            step=operation.replace("_", "-"),
            service="s3",
            operation=operation,
            parameters=parameters,
            purpose=purpose,
            tolerates=frozenset({facts.BUCKET_IS_OURS}),
        )
        for operation, parameters, purpose in steps
    )
