"""How people read what logs call a way to exchange gradients."""

from __future__ import annotations

import re

_WAY = re.compile(r"(?P<name>\S+?)(?: (?P<ratio>[\d.e+-]+))? by (?P<collective>[a-z_]+)(?P<rest>,? .*)?")


def way_in_words(key: str) -> str:
    """A way to exchange gradients, as logs name it, in words: 'uncompressed (all-reduce)', 'topk 1 % (all-gather)'."""
    found = _WAY.fullmatch(key)
    if found is None:
        return key
    name = "uncompressed" if found["name"] == "identity" else found["name"]
    amount = f" {float(found['ratio']) * 100:.4g} %" if found["ratio"] and found["name"] != "identity" else ""
    rest = (found["rest"] or "").removeprefix(",")
    return f"{name}{amount} ({found['collective'].replace('_', '-')}{',' if rest else ''}{rest})"
