"""Untrusted text: which characters a record may hold, how others are escaped, and errors about unknown names.

In a terminal, a script or a page a line break in a name begins a line of its own, an escape character commands the
terminal, and a format character turns what stands beside it around. Records refuse such text; what a machine or a
library told, and has to be shown whatever it is, is cleaned.
"""

from __future__ import annotations

import difflib
import functools
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hetopt.core.errors import BadInput

MOST_CHARACTERS = 4_000
"""Longest text of a record: paths have up to 4,096 bytes, sentences a few hundred characters."""

_REFUSED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's control and format characters, halves of surrogate pairs, and separators of lines."""

_JOINERS = "\u200c\u200d"
"""Format characters that spell words of some languages."""

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Colours and the like, and titles of windows: nothing that means anything once it is not obeyed."""


def is_plain(character: str) -> bool:
    """Return whether a character is safe to print: no control, line separator or surrogate, no format but a joiner."""
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) not in _REFUSED


def fault_of(text: str) -> str | None:
    """Return why a record cannot hold a text, as half a sentence behind its name; None: it can."""
    if len(text) > MOST_CHARACTERS:
        return f"must have at most {MOST_CHARACTERS:,} characters, not {len(text):,}"
    if text.isprintable():
        return None
    for character in text:
        if not is_plain(character):
            return f"must be one line of printable characters, without U+{ord(character):04X}"
    return None


def texts_in(value: object) -> Iterable[str]:
    """Yield every text in a plain value: itself, or those nested in lists, sets and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list, set, frozenset)):
        for each in value:
            yield from texts_in(each)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from texts_in(key)
            yield from texts_in(each)


def escaped(text: str, keep: str = "") -> str:
    """Return a text with its control and format characters escaped as JSON does, but for those in ``keep``.

    Args:
        text: any.
        keep: characters that stay, such as line breaks.
    """
    if text.translate(dict.fromkeys(map(ord, keep))).isprintable():
        return text
    return "".join(character if character in keep or is_plain(character) else spelled(character) for character in text)


def one_line(text: str) -> str:
    """Return a text cleaned to one line that a record can hold: no colours, at most 4,000 characters.

    Line breaks and other runs of white space become one space, control characters are escaped, and a longer text ends
    with ``...``.
    """
    line = escaped(" ".join(_ANSI.sub("", text).split()))
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 4]} ..."


def without_colours(text: str) -> str:
    """Return a text without ANSI escape sequences (colours, window titles)."""
    return _ANSI.sub("", text)


def spelled(character: str) -> str:
    """Return the JSON escape of a character in ASCII: ``\\u001b``, or two for one beyond 16 bits."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[first : first + 2].hex()}" for first in range(0, len(units), 2))


MOST_LISTED = 24
"""Number of names up to which an error lists them all; of more, it names the nearest."""

_ALMOST = 0.8
"""How alike two names are (2 x what they share over what they have) of which one is the other with a slip or two."""

_SLIPS = 2
"""By how many letters they differ in length at most: ``step_time_low_s`` says more than ``step_time_s``."""

_INTERPRETERS = ("python", "python3")


def typed_script(words: Sequence[str]) -> tuple[str, ...]:
    """Return the script file and arguments of a typed command, such as ``python train.py`` or ``-m package.train``.

    A leading ``python`` or ``python3`` is dropped; a module becomes its file below the current folder. Other words are
    returned as they are.

    Raises:
        BadInput: the current folder has no such module, or none is named after ``-m``.
    """
    command = [*words]
    if len(command) > 1 and Path(command[0]).name in _INTERPRETERS:
        del command[0]
    if command[:1] != ["-m"]:
        return tuple(command)
    name = command[1] if len(command) > 1 else ""
    place = Path(*name.split(".")) if name else Path()
    for path in (place.with_suffix(".py"), place / "__main__.py") if name else ():
        if path.is_file():
            return (str(path), *command[2:])
    raise BadInput(
        f"there is no module {name!r} in {Path.cwd()}.",
        hint="go to the folder in which `python -m` finds it, or give the path of its file",
    )


def converted_script(script: Path) -> Path:
    """Return where `hetopt convert` writes a script's new form by default: ``train_hetopt.py`` beside ``train.py``.

    Nothing is written.
    """
    return script.with_name(f"{script.stem}_hetopt.py")


def known(name: str, names: Iterable[str], what: str, *, hint: str | None = None) -> str:
    """Return ``name`` if it is one of ``names``; else raise an error that names the nearest of them.

    Args:
        name: as it was given.
        names: all that exist.
        what: kind of thing that they name, such as ``compressor``, for the error.
        hint: what to do, where the names are too many to be listed; None: the names are listed, up to 24.

    Raises:
        BadInput: the name is none of them; the nearest one is named.
    """
    every = list(names)
    if name in every:
        return name
    raise unknown(name, every, what, hint=hint)


def unknown(name: str, names: Iterable[str], what: str, *, hint: str | None = None) -> BadInput:
    """Return the error of a name that is none of ``names``, with the nearest of them; raise nothing.

    Args:
        name: as it was given.
        names: all that exist; where there are none, the hint is to leave the name out.
        what: kind of thing that they name.
        hint: as of `known`.
    """
    spelled = {other.casefold(): other for other in names}
    near = [spelled[folded] for folded in _nearest(name.casefold(), spelled)]
    if hint is None:
        listed = "" if near and len(spelled) > MOST_LISTED else f"choose one of: {', '.join(spelled.values())}"
        hint = listed if spelled else "leave it out"
    guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return BadInput(f"There is no {what} called {name!r}.", hint=f"{guess}{hint}".strip() or None)


@functools.lru_cache(maxsize=256)
def meant(name: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` of which ``name`` is a misspelling; None: none is near enough.

    Args:
        name: a name that is none of these.
        names: of a hashable type, as answers are cached.
    """
    as_long = [candidate for candidate in names if abs(len(candidate) - len(name)) <= _SLIPS]
    return next(iter(difflib.get_close_matches(name.casefold(), as_long, n=1, cutoff=_ALMOST)), None)


def either(names: Iterable[object]) -> str:
    """Format one or more names as a choice: ``a, b or c``.

    Raises:
        ValueError: there are no names.
    """
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}" if most else last


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the names nearest to ``name``, equally near; none where none is close.

    Three and more letters and digits that stand within names go first: the two shortest such names at most, or the name
    itself if it is one.
    """
    names = tuple(names)
    letters = "".join(filter(str.isalnum, name))
    having = [candidate for candidate in names if letters in "".join(filter(str.isalnum, candidate))]
    if len(letters) > 2 and having:
        return [name] if name in having else sorted(having, key=len)[:2]
    near = difflib.get_close_matches(name, names, cutoff=0.7)
    alike = [difflib.SequenceMatcher(None, candidate, name).ratio() for candidate in near]
    return [candidate for candidate, ratio in zip(near, alike, strict=True) if ratio == alike[0]]


def typed(*words: object) -> str:
    """Format words as a shell command to type, each quoted where the shell needs it.

    Args:
        words: words of the command; each becomes one word of the shell.
    """
    return shlex.join(map(str, words))
