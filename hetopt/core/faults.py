"""What is wrong with a record, in the words of every other error: the field, the rule and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hetopt.core.reading import shortened

_RULE = "Input should be "


def faults(
    error: ValidationError, names: Mapping[str, str] | None = None, texts: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Each fault as a part of a sentence: ``workers must be greater than 0, got -1``.

    Args:
        error: of a record.
        names: what its fields are called by whoever wrote the values, where that is not the record's own name.
        texts: what was written for a field, where that is not the value that the record was given.
    """
    found: dict[tuple[str, ...], list[Any]] = {}
    for one in error.errors(include_url=False):
        where = tuple(str(part) for part in one["loc"] if not _is_branch(str(part)))
        found.setdefault(where, []).append(one)
    told = []
    for where, its in found.items():
        if its[0]["type"] == "too_short" and any(other[: len(where)] == where for other in found if other != where):
            continue  # an item that cannot be is not counted
        field = where[0] if where else ""
        name = ".".join(((names or {}).get(field, field), *where[1:]))
        got = repr(texts[field]) if texts and field in texts else _shown(its[0]["input"])
        told.append(_told(shortened(name, 80), its, shortened(got, 80)))
    return tuple(told)


def _is_branch(part: str) -> bool:
    """Of a choice, such as a number or a list of numbers, the branches are no part of what was written."""
    return part.startswith("constrained-") or "[" in part


def _told(named: str, its: list[Any], got: str) -> str:
    """The faults of one value: of a choice each branch has its own."""
    first = its[0]
    rules = list(dict.fromkeys(one["msg"] for one in its))
    match first["type"]:
        case "missing":
            return f"{named} is missing"
        case "extra_forbidden":
            return f"{named} is no field of it"
        case "too_short" | "too_long":
            limit = first["ctx"].get("min_length", first["ctx"].get("max_length"))
            least = "least" if first["type"] == "too_short" else "most"
            return f"{named} must have at {least} {limit} item{'s' * (limit != 1)}, got {first['ctx']['actual_length']}"
    if all(rule.startswith(_RULE) for rule in rules):
        rule = " or ".join(rule.removeprefix(_RULE).partition(", unable")[0] for rule in rules)
        return f"{named or 'it'} must be {rule}, got {got}"
    said = next(rule for rule in rules if not rule.startswith(_RULE)).removeprefix("Value error, ").rstrip(".")
    said = f"{said[:1].lower()}{said[1:]}" if said[1:2].islower() else said
    return f"{named}: {said}" if named else said


def _shown(value: object) -> str:
    match value:
        case None:
            return "null"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return repr(value)
