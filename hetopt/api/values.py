"""Values as people give them, as numbers in seconds, dollars and samples; a bad one is one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import TypeVar, cast

from hetopt.core.comm.composition import AUTO
from hetopt.core.comm.compression_text import compressor
from hetopt.core.errors import BadInput, setting
from hetopt.core.grammar import arguments, split
from hetopt.core.names import known
from hetopt.core.quantities import COUNT, DURATION, FRACTION, MONEY, NUMBER, SIZE, quantity

T = TypeVar("T")
AnyNumber = TypeVar("AnyNumber", int, float)

MOST_STEPS = 10**12
"""Of one training; at 20 microseconds each, the shortest that a step takes, they are most of a year."""
MOST_EPOCHS = 1e9
LARGEST_SEED = 2**63 - 1
"""What every generator of random numbers and every file takes."""

_NUMBER_ALONE = re.compile(r"(\d+\.?\d*|\.\d+)(e\d+)?", re.IGNORECASE)
_COUNTED = ("parameters", "samples", "FLOPs")
"""Units of numbers that run into millions."""


def positive(value: float | str | None, name: str, unit: str) -> float | None:
    """A finite number above zero, which may be a text such as '$20' or '110M'; None where nothing was given.

    Raises:
        BadInput: it is not.
    """
    if value is None:
        return None
    said = COUNT if unit in _COUNTED else MONEY if unit.startswith("USD") else NUMBER
    if not isinstance(value, str | Real):
        raise BadInput(f"`{name}` must be {said.what}, got {value!r}.", hint=f"write {said.example}")
    number = quantity(value if isinstance(value, str) else repr(float(value)), said, f"`{name}`")
    if not (math.isfinite(number) and number > 0):
        raise BadInput(f"`{name}` must be a positive number of {unit}, got {value}.", hint=f"for example `{name}=5`")
    return number


def within(value: AnyNumber, name: str, least: float, most: float, *, example: str) -> AnyNumber:
    """The number, if it is one from ``least`` to ``most``.

    Raises:
        BadInput: it is not.
    """
    if not isinstance(value, Real):
        raise BadInput(f"`{name}` must be a number, got {value!r}.", hint=f"for example `{name}={example}`")
    if value < least:
        raise BadInput(f"`{name}` must be at least {least:,}, got {value}.", hint=f"for example `{name}={example}`")
    if not value <= most:
        raise BadInput(f"`{name}` must be at most {most:,}, got {value}.", hint=f"for example `{name}={example}`")
    return value


def chosen(name: str | None, choices: Sequence[T], what: str) -> T | None:
    """The choice of that name; None where none was given.

    Raises:
        BadInput: there is none.
    """
    return None if name is None else cast(T, known(name, map(str, choices), what))


def duration_s(given: str | float | None, name: str) -> float | None:
    """'90s', '45m', '6h', '1h30m', '2d', or seconds as a number; None where nothing was given.

    Raises:
        BadInput: it is no length of time above 0.
    """
    if given is None:
        return None
    if isinstance(given, str) and _NUMBER_ALONE.fullmatch(given.strip()):
        example = setting(name, f"{given.strip()}h")
        raise BadInput(f"`{name}` needs a unit, got {given!r}.", hint=f"for example {example}")
    seconds = quantity(str(given), DURATION, f"`{name}`")
    if seconds <= 0:
        raise BadInput(
            f"`{name}` must be a length of time above 0, got {given!r}.", hint=f"for example {setting(name, '6h')}"
        )
    return seconds


def size_bytes(given: str | float | None, name: str) -> float:
    """'150GB', '2TB', or bytes as a number; 0 where nothing was given.

    Raises:
        BadInput: it is no size of data.
    """
    return 0.0 if given is None else quantity(given, SIZE, f"`{name}`") if isinstance(given, str) else float(given)


def metric_target(text: str) -> tuple[str, float]:
    """'accuracy=0.97' as its name and value.

    Raises:
        BadInput: it is none.
    """
    pairs = list(arguments(text, "`target`").pairs.items())
    if len(pairs) != 1:
        raise BadInput(
            f"`target` must be METRIC=VALUE, got {text!r}.", hint=f"for example {setting('target', 'accuracy=0.97')}"
        )
    [(name, value)] = pairs
    return name, quantity(value, NUMBER, f"`target` of {name}")


def compressors(given: Sequence[str] | str) -> tuple[str, ...]:
    """Methods by which gradients travel, as the registry names them; none for ``auto``.

    Raises:
        BadInput: there is no such method.
    """
    each = [given] if isinstance(given, str) else given
    asked = tuple(name for one in each for name in names(one, "compression"))
    return () if asked == (AUTO,) else tuple(dict.fromkeys(compressor(name) for name in asked))


def ratios(given: Sequence[float | str] | float | str) -> tuple[float, ...]:
    """Parts of a gradient: ``0.01``, ``"1%"``, ``"100x"``, or several of them.

    Raises:
        BadInput: one is not above 0 and below 1.
    """
    each = [given] if isinstance(given, int | float | str) else given
    told = [quantity(part, FRACTION, "`ratio`") for one in each for part in names(str(one), "ratio")]
    for part in told:
        if not 0 < part < 1:
            raise BadInput(f"`ratio` must be above 0 and below 1, got {part:g}.", hint="for example `ratio=0.01`")
    return tuple(dict.fromkeys(told))


def names(given: Sequence[str] | str, name: str) -> tuple[str, ...]:
    """Names, also out of a text with commas between them.

    Raises:
        BadInput: a text that names nothing, as of a shell's variable that is not set, would be no limit at all.
    """
    parts = split(given, ",;", f"`{name}`") if isinstance(given, str) else given
    found = tuple(part.strip() for part in parts if part.strip())
    if isinstance(given, str) and not found:
        raise BadInput(f"`{name}` must name at least one, got {given!r}.", hint=f"name one, or leave `{name}` out")
    return found
