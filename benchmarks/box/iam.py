"""IAM's decision whether policies allow a call, and the actions of AWS that a policy does not name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import eq
from typing import Any

import botocore.session

Policy = Mapping[str, Any]
Statement = Mapping[str, Any]

_VARIABLE = re.compile(r"\$\{([^}]+)\}")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A call that IAM policies are asked about: its action, resource, and condition keys.

    Attributes:
        action: such as 'ec2:RunInstances'.
        resource: its ARN; ``*`` where the action knows none.
        context: values of the keys that policies may condition upon.
    """

    action: str
    resource: str
    context: Mapping[str, str]


def several(value: Any) -> list[Any]:
    """Return the value of a policy's element as a list; a value without a list becomes a list of itself."""
    return list(value) if isinstance(value, list | tuple) else [value]


def concerns(statement: Statement, asked: Asked) -> bool | None:
    """Return whether a policy statement applies to a call; None: that depends on who calls, or on other operators.

    By the IAM user guide, 'Policy evaluation logic', 'IAM JSON policy elements: Condition operators' and 'Conditions
    with multiple context keys or values' (read 2026-11-28): all operators and all keys of a condition must hold, and
    one of a key's values (none, of an operator with Not); a key that is not there holds for operators with Not,
    IfExists or ForAllValues, and for ``Null``; ``*`` and ``?`` are patterns in actions, resources, ARNs and StringLike;
    variables are put in before comparing, and one that is not known matches nothing.
    """
    known = {key.lower(): value for key, value in asked.context.items()}
    truths = [
        _covers(statement, "Action", asked.action.lower(), str.lower),
        _covers(statement, "Resource", asked.resource, lambda pattern: _filled(pattern, known) or ""),
        None if "NotPrincipal" in statement or statement.get("Principal", "*") not in _EVERYBODY else True,
    ]
    for operator, keys in statement.get("Condition", {}).items():
        for key, values in keys.items():
            wanted = [filled for value in several(values) if (filled := _filled(str(value), known)) is not None]
            truths.append(_holds(operator, wanted, known.get(key.lower())))
    return False if False in truths else None if None in truths else True


_EVERYBODY = ("*", {"AWS": "*"}, {"AWS": ["*"]})


def _covers(statement: Statement, element: str, text: str, prepared: Callable[[str], str]) -> bool:
    """Return whether a statement's element (Action or Resource, or its Not form) covers a text."""
    is_left_out = f"Not{element}" in statement
    patterns = several(statement.get(f"Not{element}" if is_left_out else element, "*"))
    return any(_like(prepared(pattern), text) for pattern in patterns) != is_left_out


def _filled(value: str, known: Mapping[str, str]) -> str | None:
    """Return a value with its variables put in; None where one of them is not known."""
    if any(name.lower() not in known for name in _VARIABLE.findall(value)):
        return None
    return _VARIABLE.sub(lambda match: known[match[1].lower()], value)


def _like(pattern: str, text: str) -> bool:
    escaped = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(escaped, text, re.DOTALL) is not None


_COMPARE: Mapping[str, Callable[[str, str], bool]] = {
    "StringEquals": eq,
    "StringLike": _like,
    "Bool": lambda wanted, actual: wanted.lower() == actual.lower(),
    "NumericLessThan": lambda wanted, actual: float(actual) < float(wanted),
}
"""How a value that a policy wants is compared with what was found, by operators without Not; others are not known."""


def _holds(operator: str, wanted: Sequence[str], actual: str | None) -> bool | None:
    """Return whether a condition holds for the actual value of a key (None: absent); None: it cannot be evaluated."""
    quantifier, _, name = operator.rpartition(":")
    plain, is_negated = name.removesuffix("IfExists").replace("Not", ""), "Not" in name
    if plain == "Null":
        return str(actual is None).lower() in [value.lower() for value in wanted]
    if actual is None:
        return quantifier == "ForAllValues" or (quantifier == "" and (is_negated or name.endswith("IfExists")))
    if plain not in _COMPARE:
        return None
    return any(_COMPARE[plain](value, actual) for value in wanted) != is_negated


def actions_of(policy: Policy) -> Iterator[str]:
    """Yield every action that a policy names, in lower case."""
    for statement in several(policy["Statement"]):
        yield from (action.lower() for action in several(statement["Action"]))


@cache
def _every_action() -> tuple[str, ...]:
    """Return every action of the services that hetopt's policies may name, as ``service:Operation``."""
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
        (statement["Effect"], concerns(statement, asked))
        for policy in policies
        for statement in several(policy["Statement"])
    ]
    denied = any(effect == "Deny" and holds is not False for effect, holds in decisions)
    return not denied and ("Allow", True) in decisions
