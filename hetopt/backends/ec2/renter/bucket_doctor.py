"""What a bucket does that a run would pay for, or be kept out by; nothing of it is changed.

Every call of hetopt goes by TLS, so that policies which demand it are met. It sends no ACLs, and machines write as a
role of the bucket's own account, so that nothing depends on who owns objects. Uploads name no encryption: the bucket's
own setting encrypts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.doctor import Check, Verdict
from hetopt.backends.ec2.renter.errors import if_there
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.request import Answer, Edge, read
from hetopt.core.errors import CloudRefused

Statement = Mapping[str, Any]

_USES = ("s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:ListBucket", "s3:PutObject")
"""What a run does with its bucket."""


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
    """Whether it denies what a run does: machines are elsewhere than whoever asks here, and others."""
    told = _read(edge, order, "get_bucket_policy", (facts.NO_BUCKET_POLICY.value,))
    networks = {zone.vpc_id for zone in order.zones}
    statements = [] if told is None else _list(json.loads(told["Policy"])["Statement"])
    denials = [found for one in statements if (found := denial_of(one, networks)) is not None]
    hint = f"`aws s3api get-bucket-policy --bucket {order.bucket}`"
    asked = {key: values for found in denials for key, values in found.items()}
    wanted = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in sorted(asked.items()))
    if any(found and all(map(_of_encryption, found)) for found in denials):
        said = f"it denies uploads that do not say how they are encrypted ({wanted}), and hetopt's do not"
        mend = "its owner takes that out, as S3 encrypts every object: "
        return "bad", said, f"{mend}{hint}; or name a `bucket` that `hetopt setup --create-bucket` makes"
    if any(key.lower() in facts.WHERE_CALLS_COME_FROM.value for key in asked):
        said = f"it denies by where a call comes from ({wanted}), and machines are in {', '.join(sorted(networks))}"
        return "unknown", said, f"see that it lets them in: {hint}"
    if denials:
        said = f"it denies {f'by {wanted}' if wanted else 'something whatever the call says'}"
        return "unknown", said, f"see that it lets you and {order.instance_profile} in: {hint}"
    return "good", "it denies nothing that a run does", None


def denial_of(statement: Statement, networks: set[str]) -> dict[str, list[Any]] | None:
    """By what a statement of a bucket's policy denies what a run does: values by keys; no keys where it always does.

    Args:
        statement: that one.
        networks: of the machines.

    Returns:
        None where it denies nothing that a run does, as far as is known.
    """
    if statement["Effect"] != "Deny" or not _is_about_uses(statement):
        return None
    found: dict[str, list[Any]] = {}
    for operator, tests in statement.get("Condition", {}).items():
        for key, told in tests.items():
            values = _list(told)
            met = key.lower() in facts.MET_BY_EVERY_CALL.value
            inside = key.lower() in facts.WHERE_CALLS_COME_FROM.value and networks.issubset(values)
            unsaid = _of_encryption(key) and not _holds_without(operator, values)
            if met or inside or unsaid:
                return None  # all that it looks at must hold together
            found[key] = values
    return found


def _of_encryption(key: str) -> bool:
    return key.lower().startswith(facts.NAMES_ENCRYPTION.value)


def _holds_without(operator: str, values: list[Any]) -> bool:
    """Whether a test holds of a call that does not have its key at all."""
    if operator == "Null":
        return any(str(value).lower() == "true" for value in values)
    return "Not" in operator or operator.endswith("IfExists")


def _is_about_uses(statement: Statement) -> bool:
    """Whether it is about anything that a run does with a bucket."""
    named = "NotAction" if "NotAction" in statement else "Action"
    patterns = [str(one).lower() for one in _list(statement[named])]
    covered = [any(fnmatchcase(use.lower(), pattern) for pattern in patterns) for use in _USES]
    return not all(covered) if named == "NotAction" else any(covered)


def _list(told: Any) -> list[Any]:
    """JSON policies write one thing as itself."""
    return list(told) if isinstance(told, list | tuple) else [told]
