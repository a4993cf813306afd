"""What printed policies grant, and what else AWS can be asked to do, which they must not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import botocore.session

from hetopt.backends.ec2.renter.doctor import Asked, Policy, concerns, several, statements


def actions_of(policy: Policy) -> Iterator[str]:
    """Yield every action that a policy names, in lower case."""
    for statement in statements(policy):
        yield from (action.lower() for action in several(statement["Action"]))


@cache
def _every_action() -> tuple[str, ...]:
    services = ("ec2", "iam", "kms", "lambda", "organizations", "s3", "scheduler", "secretsmanager", "ssm", "sts")
    session = botocore.session.get_session()
    return tuple(
        f"{name}:{operation}" for name in services for operation in session.get_service_model(name).operation_names
    )


def other_actions(policy: Policy) -> list[str]:
    """Return the actions of EC2, IAM, S3, KMS and other services that a policy does not name."""
    granted = set(actions_of(policy))
    return [action for action in _every_action() if action.lower() not in granted]


def allows(policies: Iterable[Policy], asked: Asked) -> bool:
    """Return whether policies together allow a request; what cannot be decided denies, and allows nothing."""
    decisions = [
        (statement["Effect"], concerns(statement, asked)) for policy in policies for statement in statements(policy)
    ]
    denied = any(effect == "Deny" and holds is not False for effect, holds in decisions)
    return not denied and ("Allow", True) in decisions
