"""IAM's way to decide, as far as hetopt's policies go: a denial counts, then any permission, else nothing is allowed.

By the IAM user guide, 'Policy evaluation logic' and 'IAM JSON policy elements: Condition operators' (read 2026-11-26):
all operators and all keys of a condition must hold, and one of a key's values; a key that is not there holds for no
operator but ``Null``; ``*`` and ``?`` in actions, resources and StringLike; variables are put in before comparing, and
one that is not known matches nothing. moto's own evaluator takes an unmet condition for a denial.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import botocore.session

from hetopt.backends.ec2.renter.authorizations import Asked

Policy = Mapping[str, Any]

_VARIABLE = re.compile(r"\$\{([^}]+)\}")


def allows(policies: Iterable[Policy], asked: Asked) -> bool:
    """Whether these policies together allow what is asked."""
    effects = [
        statement["Effect"] for policy in policies for statement in policy["Statement"] if concerns(statement, asked)
    ]
    return "Deny" not in effects and "Allow" in effects


def concerns(statement: Mapping[str, Any], asked: Asked) -> bool:
    return (
        any(like(one, asked.action, case=False) for one in several(statement["Action"]))
        and any(like(one, asked.resource) for one in several(statement["Resource"]))
        and all(
            holds(operator, several(values), asked.context.get(key), asked.context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def holds(operator: str, values: list[str], found: str | None, context: Mapping[str, str]) -> bool:
    if operator == "Null":
        return values == ["true" if found is None else "false"]
    if found is None:
        return False
    known = [one for value in values if (one := filled(value, context)) is not None]
    match operator:
        case "StringEquals":
            return found in known
        case "StringLike":
            return any(like(one, found) for one in known)
    raise NotImplementedError(operator)


def filled(value: str, context: Mapping[str, str]) -> str | None:
    """A value with its variables; None where one of them is not known."""
    if any(name not in context for name in _VARIABLE.findall(value)):
        return None
    return _VARIABLE.sub(lambda found: context[found[1]], value)


def like(pattern: str, text: str, *, case: bool = True) -> bool:
    escaped = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(escaped, text, 0 if case else re.IGNORECASE) is not None


def several(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def actions_of(policy: Policy) -> Iterator[str]:
    """Every action that a policy names, in small letters."""
    for statement in policy["Statement"]:
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
