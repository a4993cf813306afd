"""The grammar of option values that people type: ``name(value, key=value)``, lists, repetitions, and units.

    call       topk(0.01, momentum=0.9)    also written  topk:0.01,momentum=0.9
    arguments  speed=0.25, rate=25mbit     of something that needs no name
    list       1, 1, 2                     between commas or semicolons, outside parentheses
    repeated   speed=1 x2                  the same so many times

Values are text, or numbers with units. `record` makes a record of a call, and `written` the call again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hetopt.core.errors import BadInput
from hetopt.core.plain_text import known

if TYPE_CHECKING:
    from pydantic import BaseModel

RecordT = TypeVar("RecordT", bound="BaseModel")

_CALL = "write NAME, or NAME(VALUE, KEY=VALUE) in quotes"
_KEY = re.compile(r"[A-Za-z_][\w.:-]*")
_MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class Item:
    """A parsed ``name(value, key=value)``.

    Attributes:
        where: what error messages call it.
        name: the name; empty: arguments alone were parsed.
        values: texts without a key, in order.
        pairs: texts by key.
    """

    where: str
    name: str = ""
    values: tuple[str, ...] = ()
    pairs: Mapping[str, str]


def split(text: str, separators: str, where: str) -> list[str]:
    """Split a text at each of the characters ``separators`` outside parentheses; parts are stripped, and may be empty.

    Args:
        text: text to split.
        separators: each of its characters separates.
        where: with which errors begin.

    Raises:
        BadInput: a parenthesis is not closed, or closed without being opened.
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if depth == 0 and letter in separators:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise BadInput(f"{where} must close each parenthesis that it opens, got {text!r}.", hint=_CALL)
    return [part.strip() for part in parts]


def repeated(text: str) -> tuple[str, int]:
    """Return the text before a final ``x N``, and N: ``("0.5", 2)`` for ``0.5 x2``; N is 1 where none is written."""
    match = re.fullmatch(r"(.*\S)\s+x\s*(\d{1,9})", text.strip(), re.DOTALL)
    return (match[1], int(match[2])) if match else (text.strip(), 1)


def numbers(text: str, where: str) -> tuple[float, ...]:
    """Parse a list of numbers, ``1, 1, 2`` or ``1 x2, 2``; errors begin with ``where``.

    Raises:
        BadInput: a part is no number, or there are none or more than 10,000.
    """
    parts = [repeated(part) for part in split(text, ",;", where)]
    if not all(times for _, times in parts) or sum(times for _, times in parts) > _MOST:
        raise BadInput(f"{where} must be 1 to {_MOST:,} numbers, got {text!r}.", hint="for example 1, 1 x3, 2")
    return tuple(number for part, times in parts for number in [quantity(part, NUMBER, where)] * times)


def arguments(text: str, where: str, *, separators: str = ",", name: str = "") -> Item:
    """Parse ``value, key=value`` into an `Item`; values stay text.

    A part whose text before ``=`` cannot be a key, such as an address with a query, is a value.

    Args:
        text: as written; empty parts are passed over.
        where: with which errors begin.
        separators: characters between the parts.
        name: name of the item.

    Raises:
        BadInput: a key has no value or a value no key before its ``=``, a key stands twice, or a parenthesis is not
            closed.
    """
    values: list[str] = []
    pairs: dict[str, str] = {}
    for part in filter(None, split(re.sub(r"\s*=\s*", "=", text), separators, where)):
        key, equals, value = part.partition("=")
        if not equals or (key and not _KEY.fullmatch(key)):  # an address with a query is a value
            values.append(part)
        elif not key or not value:
            raise BadInput(f"{where} does not say what {key or value} is.", hint=f"write {key or 'KEY'}=VALUE")
        elif key in pairs:
            raise BadInput(f"{where} says twice what {key} is.", hint="say it once")
        else:
            pairs[key] = value
    return Item(where=where, name=name, values=tuple(values), pairs=pairs)


def call(text: str, where: str) -> Item:
    """Parse ``name(value, key=value)``, also ``name:value,key=value``; values stay text, errors begin with ``where``.

    Raises:
        BadInput: as of `arguments`, or the closing parenthesis is not the end.
    """
    name = re.split(r"[(:,]", text, maxsplit=1)[0]
    rest = text[len(name) :].strip()
    if (rest.startswith("(") and not rest.endswith(")")) or rest == ":":
        raise BadInput(f"{where} must be a name with its values in parentheses, got {text!r}.", hint=_CALL)
    return arguments(rest[1:-1] if rest.startswith("(") else rest[1:], where, name=name.strip())


def fields(item: Item, keys: Mapping[str, str], first: Iterable[str] = ()) -> dict[str, str]:
    """Return the values of a parsed call as text, by record field.

    Args:
        item: the parsed call.
        keys: for each key that may be written, its field; where a field has several keys, the first is the usual one.
        first: keys whose values may stand in front without them, in this order.

    Raises:
        BadInput: a key is unknown or stands without a value, there are more values without a key than ``first`` has, or
            a field stands twice.
    """
    left, texts = list(first), dict[str, str]()
    for key, value in [*(("", value) for value in item.values), *item.pairs.items()]:
        if not key and value in keys:
            raise BadInput(f"{item.where} does not say what {value} is.", hint=f"write {value}=VALUE")
        if not key and not left:
            takes = f"{item.name or 'it'} takes {', '.join(keys) or 'none'}"
            raise BadInput(f"{item.where} has a value too many: {value!r}.", hint=takes)
        key = known(key, keys, f"option of {item.name or item.where}") if key else left.pop(0)
        if keys[key] in texts:
            raise BadInput(f"{item.where} says twice what {key} is.", hint="say it once")
        texts[keys[key]] = value
    return texts


def record(
    kind: type[RecordT],
    item: Item,
    keys: Mapping[str, str],
    *,
    first: Iterable[str] = (),
    units: Mapping[str, Unit] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> RecordT:
    """Make a record of class ``kind`` from a parsed call.

    Args:
        kind: pydantic class of the record.
        item: the parsed call.
        keys: as of `fields`.
        first: as of `fields`.
        units: by field, the unit that its text is read in; other texts go to the record as they are, as all do with
            None.
        defaults: by field, values in place of the record's own defaults; None: none.

    Raises:
        BadInput: as of `fields`, a text is no quantity of its unit, or the record refuses a value.
    """
    from pydantic import ValidationError

    from hetopt.core.artifact import faults

    texts, units = fields(item, keys, first), units or {}
    names = {field: key for key, field in reversed(list(keys.items()))}
    values: dict[str, object] = {
        field: quantity(text, units[field], f"{item.where}: {names[field]}") if field in units else text
        for field, text in texts.items()
    }
    try:
        return kind.model_validate({**(defaults or {}), **values})
    except ValidationError as error:
        fault = faults(error, names, texts)[0]
        raise BadInput(f"{item.where}: {fault}.", hint="correct that, then try again") from None


def written(name: str, values: Iterable[object] = (), pairs: Mapping[str, object] | None = None) -> str:
    """Format ``name(values, key=value)`` so that `call` reads it back, numbers exactly.

    Args:
        name: in front; alone where there are no values and pairs.
        values: without a key, in order.
        pairs: values by key; None: none.
    """
    inside = [*map(_plain, values), *(f"{key}={_plain(value)}" for key, value in (pairs or {}).items())]
    return f"{name}({', '.join(inside)})" if inside else name


def _plain(value: object) -> str:
    """Return a value as `call` reads it: true and false in small letters, floats exactly and without '.0'."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


_PART = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([a-z%$]*)\s*")


_THOUSANDS = re.compile(r"(?<=\d)[,_](?=\d{3}(?!\d))")
"""As in 3,000,000, and in Python's 3_000_000."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A kind of quantity that people type, such as a duration, with the units that may follow the number.

    Attributes:
        what: what a value must be, for errors, such as 'a length of time'.
        example: example of how it is written.
        scales: by suffix, how much one of it is in the unit that the program computes in. The empty suffix is there
            where a plain number is understood. NaN: one part in so many (100x is 0.01).
        prefix: text that may stand in front, such as ``$``.
        adds: whether parts may follow each other, as in ``1h30m``.
        most: largest value that makes sense.
    """

    what: str
    example: str
    scales: Mapping[str, float]
    prefix: str = ""
    adds: bool = False
    most: float = math.inf


NUMBER = Unit(what="a number", example="0.25", scales={"": 1.0})
COUNT = Unit(
    what="a number",
    example="110M, 7B or 1.1e8",
    scales={"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
    | {"thousand": 1e3, "million": 1e6, "billion": 1e9},
)
"""Number of things that there are millions of: parameters, samples, FLOPs."""
WHOLE = Unit(what="a whole number", example="128, 10k or 2M", scales=COUNT.scales)
"""Number of things that cannot be halved: steps, workers, samples of a batch."""
DURATION = Unit(
    what="a length of time",
    example="6h or 1h30m, not a date",
    scales={"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    | dict.fromkeys(("sec", "secs", "second", "seconds"), 1.0)
    | dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0)
    | dict.fromkeys(("hr", "hrs", "hour", "hours"), 3600.0)
    | dict.fromkeys(("day", "days"), 86400.0),
    adds=True,
    most=100 * 365.25 * 86400,
)
RATE = Unit(
    what="a link rate",
    example="25mbit or 1.5gbit, in bits a second",
    scales={"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9},
    most=1e12,
)
SIZE = Unit(
    what="a size of data",
    example="150GB or 2TB",
    scales={"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "gib": 2.0**30, "tib": 2.0**40},
    most=1e17,
)
MONEY = Unit(
    what="an amount in USD", example="20 or $20", scales={"": 1.0, "usd": 1.0, "$": 1.0}, prefix="$", most=1e12
)
"""Amount in USD: at most what all clouds together are paid in a year."""
FRACTION = Unit(what="a fraction", example="0.01, 1% or 100x", scales={"": 1.0, "%": 0.01, "x": math.nan})


def quantity(text: str, unit: Unit, what: str) -> float:
    """Parse a number with its unit into the base unit of ``unit``: s, USD, bit/s, bytes, a fraction of 1, or a count.

    Numbers below 0 and parts of a whole are not refused.

    Args:
        text: as written; thousands may be separated by commas or underscores.
        unit: kind of quantity; one that ``adds`` takes several parts, as in '1h30m'.
        what: the parameter, with which errors begin.

    Raises:
        BadInput: the text is not written so, is not finite, or is more than ``unit.most``.
    """
    typed = _THOUSANDS.sub("", text.strip().lower().removeprefix(unit.prefix))
    parts = list(_PART.finditer(typed))
    whole = bool(parts) and sum(len(part[0]) for part in parts) == len(typed)
    joined = len(parts) == 1 or (unit.adds and all(part[2] and part[1][0].isdigit() for part in parts))
    if whole and joined and all(part[2] in unit.scales for part in parts):
        value = sum(_scaled(float(part[1]), unit.scales[part[2]]) for part in parts)
        if math.isfinite(value) and value <= unit.most:
            return value
        if math.isfinite(unit.most):
            suffix = max(unit.scales, key=lambda ending: unit.scales[ending])
            raise BadInput(
                f"{what} must be at most {unit.most / unit.scales[suffix]:.6g}{suffix}, got {text.strip()!r}.",
                hint=f"write {unit.example}",
            )
    raise BadInput(f"{what} must be {unit.what}, got {text.strip()!r}.", hint=f"write {unit.example}")


def _scaled(number: float, scale: float) -> float:
    """Return a number in the base unit; a scale that is not a number stands for the inverse, as of '100x'."""
    if math.isnan(scale):
        return 1 / number if number else math.inf
    return number / 100 if scale == 0.01 else number * scale  # 30 / 100 is 0.3, and 30 * 0.01 is not
