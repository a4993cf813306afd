"""A compression as a person writes it: ``topk:0.01``, ``dgc:1000x,momentum=0.9``, ``powersgd,rank=2``, ``dense``.

``NAME[:RATIO][,key=value...]``, the same on the command line and in a script; each bad value becomes one sentence.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from hetopt.core.comm.composition import AUTO, METHODS, known
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression

DENSE = "dense"
"""What people call sending everything; the compressor's own name is `IDENTITY`."""

IDENTITY = "identity"

USUAL_RATIO = 0.01
"""Where a compressor that sends a part is named without saying how much: 100x, in the middle of the published range."""

FIELDS = tuple(field for field in Compression.model_fields if field != "name")
"""What can be said of a compressor, behind commas."""

_NAMES = {AUTO: "", DENSE: "", **METHODS}


def parse_compression(text: str, *, option: str = "`compression`") -> Compression:
    """``NAME[:RATIO][,key=value...]``; keys are the fields of `Compression`, a ratio may be written as ``100x``.

    Args:
        text: as written.
        option: where, for the sentence about what cannot be.

    Raises:
        BadInput: an unknown name or key (the nearest is named), or a value that cannot be.
    """
    head, *rest = (part.strip() for part in text.split(","))
    name, colon, amount = (part.strip() for part in head.partition(":"))
    name = known(name, _NAMES, "compressor")
    if name == AUTO:
        raise BadInput("auto takes no ratio and no options.", hint="write auto alone, or name a compressor")
    values = {"ratio": amount} if colon else {}
    for part in rest:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        known(key, dict.fromkeys(FIELDS), "option of a compression")
        if not equals or not value:
            raise BadInput(f"{option} {text!r} does not say what {key} is.", hint=f"write {key}=VALUE")
        if key in values:
            raise BadInput(f"{option} {text!r} says twice what {key} is.", hint="say it once")
        values[key] = value
    name = IDENTITY if name == DENSE else name
    if METHODS[name].by_ratio:
        values.setdefault("ratio", repr(USUAL_RATIO))
    fractions = {key: _fraction(value) for key, value in values.items() if key in ("ratio", "floor_ratio")}
    try:
        return Compression.model_validate({"name": name, **values, **fractions})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise BadInput(
            f"{option}: {key} cannot be {values[key]!r}: {reason}.",
            hint=f"for example {option} topk:0.01, topk:100x, powersgd,rank=2 or auto",
        ) from None


def spell(compression: Compression) -> str:
    """The compression as `parse_compression` reads it."""
    amount = f":{compression.ratio!r}" if METHODS[compression.name].by_ratio else ""
    return ",".join([f"{compression.name}{amount}", *spell_options(compression)])


def spell_options(compression: Compression) -> list[str]:
    """What is said of it beyond name and ratio, as ``key=value``."""
    fields = Compression.model_fields
    said = ((key, getattr(compression, key)) for key in FIELDS if key != "ratio")
    return [f"{key}={value}" for key, value in said if value != fields[key].default]


def _fraction(text: str) -> str:
    """A fraction, or how many times less is sent, as a decimal number."""
    factor = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*x", text)
    if factor is None:
        return text
    return repr(1 / float(factor[1])) if float(factor[1]) > 0 else "inf"
