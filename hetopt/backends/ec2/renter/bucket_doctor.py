"""What a bucket does that a run would pay for, or be kept out by; nothing of it is changed.

The bucket's policy is asked about the very calls that a launch and its machines make, with their headers. Uploads name
no encryption: the bucket's own setting encrypts them. They name no ACL either, and machines write as a role of the
bucket's own account, so that nothing depends on who owns objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.authorizations import of_storage
from hetopt.backends.ec2.renter.calls import launch_calls
from hetopt.backends.ec2.renter.doctor import Check, Verdict
from hetopt.backends.ec2.renter.errors import if_there
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.policies import Statement, concerns, statements, tests_of
from hetopt.backends.ec2.renter.request import Answer, Edge, Request, read
from hetopt.core.errors import CloudRefused

_TIDIES = ("delete_object", "abort_object")
"""What machines do that a run can do without: what they cannot delete stays, and is paid for."""


def calls_of_machines(bucket: str, prefix: str) -> list[Request]:
    """The calls of S3 that the machines of a run make, in the run's folder of its bucket."""
    one, listed = {"Bucket": bucket, "Key": f"{prefix}/state/i-0.json"}, {"Bucket": bucket, "Prefix": f"{prefix}/"}
    told = [("list_objects_v2", listed), *((name, one) for name in ("put_object", "get_object", *_TIDIES))]
    return [Request(step=name, service="s3", operation=name, parameters=named, purpose="") for name, named in told]


def bucket_checks(edge: Edge, order: Order) -> Iterator[Check]:
    """Old versions that are kept, and policies that deny what a run does."""
    for name, look in (("versions in the bucket", _versions), ("the bucket's policy", _policy)):
        try:
            verdict, said, hint = look(edge, order)
        except CloudRefused as refused:
            yield Check(name=name, verdict="unknown", said=refused.message.rstrip("."), hint=refused.hint)
            continue
        yield Check(name=name, verdict=verdict, said=said, hint=hint)


def _read(edge: Edge, order: Order, operation: str, absent: tuple[str, ...]) -> Answer | None:
    own = {"Bucket": order.bucket, "ExpectedBucketOwner": order.account_id}
    return if_there(edge, read("s3", operation, "what the bucket does with what is in it", **own), absent)


def _versions(edge: Edge, order: Order) -> tuple[Verdict, str, str | None]:
    """Whether deleted checkpoints go."""
    told = _read(edge, order, "get_bucket_versioning", ())
    assert told is not None
    if told.get("Status") != facts.KEEPS_VERSIONS.value:
        return "good", f"{order.bucket} keeps none: what is deleted is gone", None
    locks = _read(edge, order, "get_object_lock_configuration", (facts.NO_LOCK.value,)) or {}
    if kept := locks.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention"):
        unit = "days" if "Days" in kept else "years"
        said = (
            f"{order.bucket} locks all that is written for {kept[unit.capitalize()]} {unit}: checkpoints that a run "
            "deletes stay so long, and are paid for"
        )
        return "unknown", said, "name another `bucket`: `hetopt setup --create-bucket --bucket NAME` makes one"
    absent = (facts.NO_LIFECYCLE.value,)
    rules = (_read(edge, order, "get_bucket_lifecycle_configuration", absent) or {"Rules": ()})["Rules"]
    if any("NoncurrentVersionExpiration" in one for one in rules):
        return "good", f"{order.bucket} keeps old ones, and deletes them by a rule", None
    said = f"{order.bucket} keeps every one: checkpoints that a run deletes stay, and are paid for"
    suspend = f"aws s3api put-bucket-versioning --bucket {order.bucket} --versioning-configuration Status=Suspended"
    return "unknown", said, f"`{suspend}`, or give it a rule that expires noncurrent versions"


def _policy(edge: Edge, order: Order) -> tuple[Verdict, str, str | None]:
    """Whether it denies what a run does."""
    told = _read(edge, order, "get_bucket_policy", (facts.NO_BUCKET_POLICY.value,))
    networks, requests = {zone.vpc_id for zone in order.zones}, requests_of(order)
    asked = [] if told is None else statements(json.loads(told["Policy"]))
    denials = [denial for one in asked if (denial := denial_of(one, networks, requests)) is not None]
    if not denials:
        return "good", "it denies nothing that a run does", None
    stops = [one for one in denials if one.stops_a_run]
    said = "; ".join(map(str, stops or denials))
    hint = f"`aws s3api get-bucket-policy --bucket {order.bucket}`"
    if stops:
        mend = f"its owner takes that out: {hint}; or name a `bucket` that `hetopt setup --create-bucket` makes"
        return "bad", f"it denies calls as hetopt makes them: {said}", mend
    look = f"see that it lets you and {order.instance_profile} in: {hint}"
    return "unknown", f"it may deny what a run does: {said}", look


@dataclass(frozen=True, kw_only=True)
class Denial:
    """A statement of a bucket's policy that denies what a run does.

    Attributes:
        actions: of S3.
        tests: what it looks at: operator, key and values.
        stops_a_run: whether it denies, whoever calls from wherever, what a run cannot do without.
    """

    actions: Sequence[str]
    tests: Sequence[tuple[str, str, list[str]]]
    stops_a_run: bool

    def __str__(self) -> str:
        by = ", ".join(f"{operator} {key} {' '.join(values)}" for operator, key, values in self.tests)
        return f"{', '.join(self.actions)}{f' ({by})' if by else ''}"


def requests_of(order: Order) -> list[Request]:
    """The calls of S3 that a launch makes, and those of its machines."""
    launch = [one for one in launch_calls(order, {}, b"") if one.service == "s3"]
    return [*launch, *calls_of_machines(order.bucket, order.prefix)]


def denial_of(statement: Statement, networks: set[str], requests: Sequence[Request] = ()) -> Denial | None:
    """What a statement of a bucket's policy denies of a run's calls; None where that is nothing.

    Args:
        statement: of the policy.
        networks: of the machines.
        requests: the calls; none: those of machines, in any bucket.
    """

    def possible(key: str) -> tuple[str | None, ...]:
        if key == facts.NETWORK_OF_A_CALL.value:
            return None, *networks  # none of them, where a call comes by the internet
        return (None,) if key.startswith(facts.OF_HEADERS.value) else ()

    told = [
        (one, concerns(statement, of_storage(one), possible)) for one in requests or calls_of_machines("*", "runs/*")
    ]
    denied = [one for one, holds in told if holds is not False]
    if statement["Effect"] != "Deny" or not denied:
        return None
    return Denial(
        actions=sorted({of_storage(one).action for one in denied}),
        tests=tests_of(statement),
        stops_a_run=any(holds and one.operation not in _TIDIES for one, holds in told),
    )
