"""The calls of a run that a bucket's policy denies: its statements evaluated over the calls that a launch makes. Pure.

Uploads name no encryption, so that keys for headers are absent; a call comes from a machine's network or the internet.

AWS's way to decide by policies: a denial counts, then any permission, else nothing is allowed.
By the IAM user guide, 'Policy evaluation logic', 'IAM JSON policy elements: Condition operators' and 'Conditions with
multiple context keys or values' (read 2026-11-28): all operators and all keys of a condition must hold, and one of a
key's values (none, of an operator with Not); a key that is not there holds for operators with Not, IfExists or
ForAllValues, and for ``Null``; ``*`` and ``?`` are patterns in actions, resources, ARNs and StringLike; variables are
put in before comparing, and one that is not known matches nothing.

True: it holds. False: it does not. None: what is known does not decide it, such as whom a policy means by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

from hetopt.backends.ec2 import facts

ACTIONS = ("s3:PutObject", "s3:GetObject")
"""What machines and renters do with a run's objects; without one of them no run goes on."""
NETWORK_KEY = "aws:sourcevpc"


def denials(policy: Policy, network: str, objects: str) -> dict[str, bool | None]:
    """Return whether a bucket's policy denies each action of a run; None: what is known does not decide it.

    Args:
        policy: the bucket's own.
        network: id of the machines' network, which a call may come from.
        objects: the run's objects, as a resource of a policy.
    """

    def possible(key: str) -> tuple[str | None, ...]:
        if key == NETWORK_KEY:
            return None, network
        return (None,) if key.startswith(facts.OF_HEADERS) else ()

    denied: dict[str, bool | None] = {}
    for action in ACTIONS:
        call = Asked(action=action, resource=objects, context=facts.EVERY_CALL_OF_S3)
        denying = [statement for statement in statements(policy) if statement["Effect"] == "Deny"]
        truths = [concerns(statement, call, possible) for statement in denying]
        denied[action] = True if True in truths else None if None in truths else False
    return denied


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question to the policies.

    Attributes:
        action: such as 'ec2:RunInstances'.
        resource: its ARN; ``*`` where the action knows none.
        context: values of the keys that policies may condition upon.
    """

    action: str
    resource: str
    context: Mapping[str, str]


Policy = Mapping[str, Any]
Statement = Mapping[str, Any]

Possible = Callable[[str], Sequence[str | None]]
"""What a key in small letters may be that the question does not tell; None: it is not there; nothing: anything."""

_VARIABLE = re.compile(r"\$\{([^}]+)\}")


def statements(policy: Policy) -> list[Statement]:
    """Return the statements of a policy as a list; a policy of one may name it without a list."""
    return several(policy["Statement"])


def several(value: Any) -> list[Any]:
    """Return the values of a policy element as a list; an element of one may name it without a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def concerns(statement: Statement, asked: Asked, possible: Possible = lambda key: (None,)) -> bool | None:
    """Return whether a policy statement applies to a call; None: that depends on keys that are not known.

    Args:
        statement: of a policy.
        asked: the action, the resource and the keys that are known.
        possible: what other keys may be; absent: none of them is there.
    """
    known = {key.lower(): value for key, value in asked.context.items()}
    truths = [
        _named(statement, "Action", asked.action.lower(), lambda pattern: pattern.lower()),
        _named(statement, "Resource", asked.resource, lambda pattern: _filled(pattern, known) or ""),
        None if "NotPrincipal" in statement or statement.get("Principal", "*") not in _EVERYBODY else True,
    ]
    tests = ((operator, key, keys[key]) for operator, keys in statement.get("Condition", {}).items() for key in keys)
    for operator, key, values in tests:
        candidates = (known[key.lower()],) if key.lower() in known else possible(key.lower())
        wanted = [filled for value in several(values) if (filled := _filled(str(value), known)) is not None]
        results = {_holds(operator, wanted, candidate) for candidate in candidates}
        truths.append(results.pop() if len(results) == 1 else None)
    return False if False in truths else None if None in truths else True


_EVERYBODY = ("*", {"AWS": "*"}, {"AWS": ["*"]})


def _named(statement: Statement, element: str, text: str, prepared: Callable[[str], str]) -> bool:
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


def _in_small_letters(wanted: str, actual: str) -> bool:
    return wanted.lower() == actual.lower()


_COMPARE: Mapping[str, Callable[[str, str], bool]] = {
    "StringEquals": eq,
    "StringEqualsIgnoreCase": _in_small_letters,
    "StringLike": _like,
    "ArnEquals": _like,
    "ArnLike": _like,
    "Bool": _in_small_letters,
    "NumericEquals": lambda wanted, actual: float(actual) == float(wanted),
    "NumericLessThan": lambda wanted, actual: float(actual) < float(wanted),
    "NumericLessThanEquals": lambda wanted, actual: float(actual) <= float(wanted),
    "NumericGreaterThan": lambda wanted, actual: float(actual) > float(wanted),
    "NumericGreaterThanEquals": lambda wanted, actual: float(actual) >= float(wanted),
}
"""How a value that a policy wants is compared with what was found, by operators without Not; others are not known."""


def _holds(operator: str, wanted: Sequence[str], actual: str | None) -> bool | None:
    """Return whether a condition holds for the actual value of a key (None: absent); None: it cannot be evaluated."""
    quantifier, _, name = operator.rpartition(":")
    plain, is_negated = name.removesuffix("IfExists").replace("Not", ""), "Not" in name
    if plain == "Null":
        return str(actual is None).lower() in [value.lower() for value in wanted]
    if actual is None:
        holds_without = is_negated or name.endswith("IfExists")
        return quantifier == "ForAllValues" or (quantifier == "" and holds_without)
    if plain not in _COMPARE:
        return None
    try:
        return any(_COMPARE[plain](value, actual) for value in wanted) != is_negated
    except ValueError:
        return None  # no number
