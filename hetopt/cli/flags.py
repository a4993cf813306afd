"""The library's parameters as the command line spells them: `` `max_workers=8` `` in a message is ``--max-workers 8``.

The library names a parameter in backticks as Python has it, alone or with a value. At a terminal people type options,
so every text on its way there goes through `in_flags`. Commands, such as `` `hetopt stop RUN` ``, stay as they are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import cache

OTHERS: Mapping[str, str] = {
    "account": "--account",
    "everybody": "--everybody",
    "explain": "--explain",
    "on": "--on",
}
"""Options of parameters that are no field of a record of options, by parameter."""

_NAMED = re.compile(r"`(?P<name>[a-z_0-9]+)(?:=(?P<value>[^`]*))?`")


@cache
def flag_of(name: str) -> str | None:
    """Return the command-line option of a library parameter that a message may name; None: it has none."""
    from hetopt.api.options import RECORDS
    from hetopt.core.option import options_of

    owners = (record for record in reversed(RECORDS) if name in record.__dataclass_fields__ and name != "script")
    derived = (options_of(owner).get(name) for owner in owners)  # an argument is the script alone
    return OTHERS.get(name) or next((f"--{option.called(name)}" for option in derived if option is not None), None)


def in_flags(text: str) -> str:
    """Return the text with command-line options in place of the library's parameters in backticks.

    Names that are no parameter, such as commands, stay as they are.
    """
    return _NAMED.sub(_flag, text) if "`" in text else text


def _flag(named: re.Match[str]) -> str:
    """Return a library parameter in a message, with its value, as the option to type; as it is, if it has none."""
    flag, value = flag_of(named["name"]), named["value"]
    if flag is None:
        return named[0]
    return flag if value in (None, "True") else f"{flag} {_typed(value)}"


def _typed(value: str) -> str:
    """Return a Python literal as a shell argument: in quotes where it needs them, without brackets."""
    if value[:1] in ("[", "("):
        value = re.sub("[\"' ]", "", value[1:-1]).rstrip(",")
    elif value[:1] == "{":
        value = re.sub("[\"' ]", "", value[1:-1]).replace(":", "=")
    return shlex.quote(value[1:-1] if value[:1] in ("'", '"') else value)
