"""Numbers with units as people write them: ``110M``, ``6h``, ``$20``, ``150GB``, ``25mbit``, ``30%``, ``100x``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hetopt.core.errors import BadInput

_PART = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([a-z%]*)\s*")


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
"""As in 3,000,000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What a number is followed by.

    Attributes:
        what: a value "must be" this.
        example: of how it is written.
        scales: by suffix: how much one of it is, in the unit that the program computes in. The empty suffix is there
            where a plain number is understood. NaN: one part in so many.
        prefix: that may stand in front.
        adds: parts may follow each other, as in ``1h30m``.
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
    scales={"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18},
)
"""Of things that there are millions of: parameters, samples, FLOPs."""
DURATION = Unit(
    what="a length of time",
    example="6h or 1h30m, not a date",
    scales={"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
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
MONEY = Unit(what="an amount in USD", example="20 or $20", scales={"": 1.0, "usd": 1.0}, prefix="$", most=1e12)
"""At most what all clouds together are paid in a year."""
FRACTION = Unit(what="a fraction", example="0.01, 1% or 100x", scales={"": 1.0, "%": 0.01, "x": math.nan})
PERCENT = Unit(what="a percentage", example="10%", scales={"": 0.01, "%": 0.01})


def quantity(text: str, unit: Unit, what: str) -> float:
    """The number that a person wrote, in the unit that the program computes in: s, USD, bits a second, parts of 1.

    Args:
        text: as written.
        unit: of the quantity.
        what: the parameter, for the sentence about what cannot be.

    Raises:
        BadInput: it is not written so, not finite, or more than makes sense.
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
            suffix = max(unit.scales, key=lambda one: unit.scales[one])
            raise BadInput(
                f"{what} must be at most {unit.most / unit.scales[suffix]:.6g}{suffix}, got {text.strip()!r}.",
                hint=f"write {unit.example}",
            )
    raise BadInput(f"{what} must be {unit.what}, got {text.strip()!r}.", hint=f"write {unit.example}")


def _scaled(number: float, scale: float) -> float:
    if math.isnan(scale):
        return 1 / number if number else math.inf
    return number / 100 if scale == 0.01 else number * scale  # 30 / 100 is 0.3, and 30 * 0.01 is not
