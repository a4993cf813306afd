"""Names: of what hetopt writes, and those that people give of a closed set; one that is none is refused with the
nearest."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetopt.core.errors import BadInput

MOST_LISTED = 24
"""Names that are told one by one; of more, the nearest are."""

_ALMOST = 0.8
"""How alike two names are (2 x what they share over what they have) of which one is the other with a slip or two."""

_SLIPS = 2
"""By how many letters they differ in length at most: ``step_time_low_s`` says more than ``step_time_s``."""

_INTERPRETERS = ("python", "python3")


def typed_script(words: Sequence[str]) -> tuple[str, ...]:
    """A script's file and its arguments, of how people start it: ``python train.py``, ``-m package.train``.

    Raises:
        BadInput: there is no such module in this folder.
    """
    told = [*words]
    if len(told) > 1 and Path(told[0]).name in _INTERPRETERS:
        del told[0]
    if told[:1] != ["-m"]:
        return tuple(told)
    name = told[1] if len(told) > 1 else ""
    place = Path(*name.split(".")) if name else Path()
    for path in (place.with_suffix(".py"), place / "__main__.py") if name else ():
        if path.is_file():
            return (str(path), *told[2:])
    raise BadInput(
        f"there is no module {name!r} in {Path.cwd()}.",
        hint="go to the folder in which `python -m` finds it, or give the path of its file",
    )


def converted_script(script: Path) -> Path:
    """What a script is called once a session was written into it: beside it, as it imports what lies there."""
    return script.with_name(f"{script.stem}_hetopt.py")


def known(name: str, names: Iterable[str], what: str, *, hint: str | None = None) -> str:
    """The name, if it is one of these.

    Args:
        name: as it was given.
        names: that there are.
        what: they name.
        hint: how to find them, where they are too many to be listed.

    Raises:
        BadInput: it is not; the nearest one is named.
    """
    every = list(names)
    if name in every:
        return name
    raise unknown(name, every, what, hint=hint)


def unknown(name: str, names: Iterable[str], what: str, *, hint: str | None = None) -> BadInput:
    """The error of a name that is none of these; see `known`."""
    spelled = {other.casefold(): other for other in names}
    near = [spelled[one] for one in _nearest(name.casefold(), spelled)]
    if hint is None:
        listed = "" if near and len(spelled) > MOST_LISTED else f"choose one of: {', '.join(spelled.values())}"
        hint = listed if spelled else "leave it out"
    guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return BadInput(f"There is no {what} called {name!r}.", hint=f"{guess}{hint}".strip() or None)


@functools.lru_cache(maxsize=256)
def meant(name: str, names: Iterable[str]) -> str | None:
    """Which of these a name is that has a slip or two; None: it is a name of its own, which somebody else reads.

    Args:
        name: none of these.
        names: hashable, as answers are kept.
    """
    as_long = [one for one in names if abs(len(one) - len(name)) <= _SLIPS]
    return next(iter(difflib.get_close_matches(name.casefold(), as_long, n=1, cutoff=_ALMOST)), None)


def either(names: Iterable[object]) -> str:
    """Such as ``a, b or c``."""
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}" if most else last


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    """The name that is most alike, and those that are just as much so; none where none is close."""
    near = difflib.get_close_matches(name, names)
    alike = [difflib.SequenceMatcher(None, one, name).ratio() for one in near]
    return [one for one, ratio in zip(near, alike, strict=True) if ratio == alike[0]]
