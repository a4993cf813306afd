"""Text of other people: what a record may hold, and how it is shown where it may hold more.

A name out of a file ends up in a terminal, in a script and on a page. There a line break in it begins a line of its
own, an escape character commands the terminal, and a format character turns what stands beside it around. Records
refuse such text; what was told by a machine or a library, and has to be shown whatever it is, is cleaned.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping

MOST_CHARACTERS = 4_000
"""Longest text of a record: paths have up to 4,096 bytes, sentences a few hundred characters."""

_REFUSED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's control and format characters, halves of surrogate pairs, and separators of lines."""

_JOINERS = "\u200c\u200d"
"""Format characters that spell words of some languages."""

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Colours and the like, and titles of windows: nothing that means anything once it is not obeyed."""


def is_plain(character: str) -> bool:
    """Whether a character shows as itself, and does nothing else."""
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) not in _REFUSED


def fault_of(text: str) -> str | None:
    """Why a record cannot hold a text, in words that follow its name; None: it can."""
    if len(text) > MOST_CHARACTERS:
        return f"must have at most {MOST_CHARACTERS:,} characters, not {len(text):,}"
    if text.isprintable():
        return None
    for character in text:
        if not is_plain(character):
            return f"must be one line of printable characters, without U+{ord(character):04X}"
    return None


def texts_in(value: object) -> Iterable[str]:
    """Every text in plain values, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from texts_in(key)
            yield from texts_in(each)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for each in value:
            yield from texts_in(each)


def escaped(text: str, keep: str = "") -> str:
    """Text in which no character does anything: the others are spelled as JSON does, ``\\u001b``.

    Args:
        text: any.
        keep: characters that stay, such as line breaks.
    """
    if text.translate(dict.fromkeys(map(ord, keep))).isprintable():
        return text
    return "".join(one if one in keep or is_plain(one) else spelled(one) for one in text)


def one_line(text: str) -> str:
    """What was told, as one line that a record can hold: no colours, no line breaks, shortened where it is long."""
    line = escaped(" ".join(_ANSI.sub("", text).split()))
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 4]} ..."


def without_colours(text: str) -> str:
    """Text as it looks in a terminal that knows no colours."""
    return _ANSI.sub("", text)


def spelled(character: str) -> str:
    """A character as JSON can spell it in letters that every encoding knows."""
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
