"""What printed policies grant, and what else AWS can be asked to do, which they must not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import botocore.session

from hetopt.backends.ec2.renter.bucket_doctor import Asked, Policy, concerns, several, statements


def actions_of(policy: Policy) -> Iterator[str]:
    """Every action that a policy names, in small letters."""
    for statement in statements(policy):
        yield from (one.lower() for one in several(statement["Action"]))


@cache
def _every_action() -> tuple[str, ...]:
    services = ("ec2", "iam", "kms", "lambda", "organizations", "s3", "scheduler", "secretsmanager", "ssm", "sts")
    session = botocore.session.get_session()
    return tuple(f"{name}:{one}" for name in services for one in session.get_service_model(name).operation_names)


def other_actions(policy: Policy) -> list[str]:
    """What EC2, IAM, S3, KMS and others can be asked to do, and a policy does not name."""
    granted = set(actions_of(policy))
    return [one for one in _every_action() if one.lower() not in granted]


def allows(policies: Iterable[Policy], asked: Asked) -> bool:
    """Whether policies together allow what is asked; what cannot be decided denies, and allows nothing."""
    found = [(one["Effect"], concerns(one, asked)) for policy in policies for one in statements(policy)]
    denied = any(effect == "Deny" and holds is not False for effect, holds in found)
    return not denied and ("Allow", True) in found
