"""Names of commands, options and values as they were before, and what they are called now.

Scripts that use the old ones go on working: arguments are rewritten before anything reads them, and the new name is
said once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COMMANDS: Mapping[str, str] = {"disturb": "inject", "adopt": "attach"}

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "launch": {
        "--pace": "--slowdown",
        "--policy": "--batch-policy",
        "--inject": "--data-injection",
        "--restarts": "--max-restarts",
    },
}
"""By the command's present name."""


VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("recommend", "--objective"): {"time": "fastest", "cost": "cheapest", "knee": "balanced"},
}
"""By the command and the option that takes them."""


def present_option(command: str, option: str) -> str:
    """An option of a command by its present name; both without dashes in front."""
    return OPTIONS.get(command, {}).get(f"--{option}", option).removeprefix("--")


def present_value(command: str, option: str, value: str) -> str:
    """A value of an option, as it is called now."""
    return VALUES.get((command, option), {}).get(value, value)


def renewed(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The arguments by their present names, and a sentence for each name that was an old one.

    Args:
        arguments: as typed behind ``hetopt``; what stands behind ``--`` is left alone.
    """
    now, said = list(arguments), dict[str, None]()
    if now and now[0] in COMMANDS:
        said[f"`hetopt {now[0]}` is now called `hetopt {COMMANDS[now[0]]}`"] = None
        now[0] = COMMANDS[now[0]]
    names = OPTIONS.get(now[0], {}) if now else {}
    end = now.index("--") if "--" in now else len(now)
    for place in range(1, end):
        option, equals, value = now[place].partition("=")
        if option in names:
            said[f"{option} is now called {names[option]}"] = None
            now[place] = f"{names[option]}{equals}{value}"
        values = VALUES.get((now[0], option), {})
        at = place if equals else place + 1
        word = value if equals else now[at] if at < end else ""
        if word in values:
            said[f"{option} {word} is now called {option} {values[word]}"] = None
            now[at] = f"{option}={values[word]}" if equals else values[word]
    return now, tuple(said)
