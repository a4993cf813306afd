"""What printed policies grant, and what else AWS can be asked to do, which they must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import botocore.session

from hetopt.backends.ec2.renter.authorizations import Asked
from hetopt.backends.ec2.renter.policies import Policy, allows, several, statements


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


def others_denied(policy: Policy, allowed: Sequence[Asked], count: int) -> int:
    """Of so many other actions, drawn by a seed, how many are denied on whatever an allowed call was about.

    Args:
        policy: that one.
        allowed: questions that it allows; each other action is asked with the resource and the keys of one of them, and
            with these keys about everything.
        count: of actions.
    """
    drawn, names = Random(0), other_actions(policy)
    pairs = [(drawn.choice(names), drawn.choice(allowed)) for _ in range(count)]
    return sum(
        allows([policy], one)
        and not allows([policy], replace(one, action=name))
        and not allows([policy], replace(one, action=name, resource="*"))
        for name, one in pairs
    )
