"""Facts of AWS that hetopt relies on, read from ``facts.toml``: each constant with its meaning, its source and the day.

``facts.NAME`` is the value of the table of that name. Codes of refusals stand in ``renter/errors.toml``, codes of
quotas in `hetopt.optimizer.market.quota`, and prices in ``catalogs/aws/billing.json``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    """Return the contents of a TOML file in this package's folder, with its lists as tuples.

    Args:
        name: name of the file, such as ``facts.toml``.
    """
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return {key: _frozen(value) for key, value in tomllib.loads(text).items()}


def _frozen(value: Any) -> Any:
    """Return a TOML value with its lists as tuples, at every depth."""
    if isinstance(value, Mapping):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(_frozen(inner) for inner in value) if isinstance(value, list) else value


BELIEFS: Mapping[str, Mapping[str, Any]] = read_table("facts.toml")
"""Each belief by its name: ``value``, ``means``, ``source``, ``read`` (a date) and ``about`` (which part of AWS)."""


def __getattr__(name: str) -> Any:
    """Return the value of a fact of ``facts.toml`` by its name there.

    Raises:
        AttributeError: there is none of that name.
    """
    try:
        return BELIEFS[name]["value"]
    except KeyError:
        raise AttributeError(name) from None
