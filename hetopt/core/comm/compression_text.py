"""A compression as a person writes it: ``topk(0.01, momentum=0.9)``, ``dgc(1000x)``, ``powersgd(rank=2)``, ``dense``.

The same on the command line and in a script; ``topk:0.01,momentum=0.9`` is understood as well.
"""

from __future__ import annotations

from hetopt.core.comm.composition import AUTO, METHODS
from hetopt.core.errors import BadInput
from hetopt.core.grammar import FRACTION, call, record, written
from hetopt.core.plain_text import known
from hetopt.core.run_spec import Compression

DENSE = "dense"
"""What people call sending everything; the compressor's own name is `IDENTITY`."""

NONE = "none"
"""What plans and launches call a gradient that is sent whole, for people."""
IDENTITY = "identity"

USUAL_RATIO = 0.01
"""The ratio of a compressor that sends a part where none is named: 100x, in the middle of the published range."""

_KEYS = {field: field for field in Compression.model_fields if field != "name"}
_UNITS = {"ratio": FRACTION, "floor_ratio": FRACTION}


def parse_compression(text: str, *, option: str = "`compression`") -> Compression:
    """Parse a compression, ``NAME(RATIO, key=value)``; keys are fields of `Compression`.

    Args:
        text: as a person writes it. Without a ratio, a compressor that sends a part sends 1 %.
        option: what errors call the text.

    Raises:
        BadInput: a name or key is unknown (the nearest is named), the name is ``auto``, or a value is no number or out
            of its range. Whether the settings fit together is checked by `run_rules.checked`.
    """
    item = call(text, option)
    name = compressor(item.name)
    defaults: dict[str, object] = {"name": name}
    if METHODS[name].by_ratio:
        defaults["ratio"] = USUAL_RATIO
    return record(Compression, item, _KEYS, first=("ratio",), units=_UNITS, defaults=defaults)


def parse_wish(text: str) -> Compression | str:
    """Parse a compression as `parse_compression`, or return the text ``auto`` as it is: then the run chooses.

    Raises:
        BadInput: the text is neither ``auto`` nor a compression.
    """
    return text if text == AUTO else parse_compression(text)


def compressor(name: str) -> str:
    """Return the registry's name of a typed compressor: ``none`` and ``dense`` are ``identity``.

    Raises:
        BadInput: there is no such compressor, or the name is ``auto``, which takes no ratio and no options.
    """
    chosen = known(DENSE if name == NONE else name, (AUTO, DENSE, *METHODS), "compressor")
    if chosen == AUTO:
        raise BadInput("auto takes no ratio and no options.", hint="write auto alone, or name a compressor")
    return IDENTITY if chosen == DENSE else chosen


def spell(compression: Compression) -> str:
    """Format a compression as `parse_compression` reads it."""
    ratio = (compression.ratio,) if METHODS[compression.name].by_ratio else ()
    return written(compression.name, ratio, _options(compression))


def spell_options(compression: Compression) -> list[str]:
    """Format the fields of a compression that are not at their defaults, but for name and ratio, as ``key=value``."""
    return [f"{key}={value}" for key, value in _options(compression).items()]


def _options(compression: Compression) -> dict[str, object]:
    """Return the fields of a compression that are not at their defaults, by key, but for name and ratio."""
    fields = Compression.model_fields
    values = {key: getattr(compression, key) for key in _KEYS if key != "ratio"}
    return {key: value for key, value in values.items() if value != fields[key].default}


def way_in_words(key: str) -> str:
    """Format an exchange's name in the event log for people: 'uncompressed by all-reduce', 'topk 0.01 by ...'."""
    return key.replace("identity by", "uncompressed by").replace("all_", "all-")
