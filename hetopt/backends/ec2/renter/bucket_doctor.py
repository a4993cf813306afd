"""What a bucket does that a run would pay for, or be kept out by; nothing of it is changed.

Every call of hetopt goes by TLS, so that policies which demand it are met. It sends no ACLs, and machines write as a
role of the bucket's own account, so that nothing depends on who owns objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.doctor import Check
from hetopt.backends.ec2.renter.errors import if_there
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.request import Answer, Edge, read
from hetopt.core.errors import CloudRefused


def bucket_checks(edge: Edge, order: Order) -> Iterator[Check]:
    """Old versions that are kept, and policies that look at where calls come from."""
    for name, look in (("versions in the bucket", _versions), ("the bucket's policy", _policy)):
        try:
            verdict, said, hint = look(edge, order)
        except CloudRefused as refused:
            yield Check(name=name, verdict="unknown", said=refused.message.rstrip("."), hint=refused.hint)
            continue
        yield Check(name=name, verdict="good" if verdict else "unknown", said=said, hint=hint)


def _read(edge: Edge, order: Order, operation: str, absent: tuple[str, ...]) -> Answer | None:
    own = {"Bucket": order.bucket, "ExpectedBucketOwner": order.account_id}
    return if_there(edge, read("s3", operation, "what the bucket does with what is in it", **own), absent)


def _versions(edge: Edge, order: Order) -> tuple[bool, str, str | None]:
    """Whether deleted checkpoints go."""
    told = _read(edge, order, "get_bucket_versioning", ())
    assert told is not None
    if told.get("Status") != facts.KEEPS_VERSIONS.value:
        return True, f"{order.bucket} keeps none: what is deleted is gone", None
    absent = (facts.NO_LIFECYCLE.value,)
    rules = (_read(edge, order, "get_bucket_lifecycle_configuration", absent) or {"Rules": ()})["Rules"]
    if any("NoncurrentVersionExpiration" in one for one in rules):
        return True, f"{order.bucket} keeps old ones, and deletes them by a rule", None
    said = f"{order.bucket} keeps every one: checkpoints that a run deletes stay, and are paid for"
    suspend = f"aws s3api put-bucket-versioning --bucket {order.bucket} --versioning-configuration Status=Suspended"
    return False, said, f"`{suspend}`, or give it a rule that expires noncurrent versions"


def _policy(edge: Edge, order: Order) -> tuple[bool, str, str | None]:
    """Whether it looks at where a call comes from: machines are elsewhere than whoever asks here."""
    told = _read(edge, order, "get_bucket_policy", (facts.NO_BUCKET_POLICY.value,))
    statements = [] if told is None else _list(json.loads(told["Policy"])["Statement"])
    keys = {
        key: _list(values)
        for statement in statements
        if statement["Effect"] == "Deny"
        for tests in statement.get("Condition", {}).values()
        for key, values in tests.items()
        if key.lower() in facts.WHERE_CALLS_COME_FROM.value
    }
    networks = {zone.vpc_id for zone in order.zones}
    asked = {key: values for key, values in keys.items() if not networks.issubset(values)}
    if not asked:
        return True, "it denies nothing by where a call comes from", None
    wanted = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in sorted(asked.items()))
    said = f"it denies by where a call comes from ({wanted}), and machines are in {', '.join(sorted(networks))}"
    return False, said, f"see that it lets them in: `aws s3api get-bucket-policy --bucket {order.bucket}`"


def _list(told: Any) -> list[Any]:
    """JSON policies write one thing as itself."""
    return [told] if isinstance(told, str | Mapping) else list(told)
