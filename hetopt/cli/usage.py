"""Errors of mistyped commands, options and values, as one sentence and the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from hetopt.core.errors import BadInput
from hetopt.core.plain_text import unknown

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Class of all that typer raises for a mistyped command; it has no public name of its own."""


def refused(error: Any, typed: Sequence[str]) -> BadInput | None:
    """Return a usage error of typer's as the command line's own error, not raised; None: a group prints its help.

    Args:
        error: a `UsageError`.
        typed: arguments of the command line.
    """
    context, parameter = error.ctx, getattr(error, "param", None)
    command = context.command_path if context is not None else " ".join(["hetopt", *typed[:1]])
    shows = f"`{command} -h` shows what there is"
    message = str(error.format_message()).rstrip(".")
    if message.startswith("Usage:"):
        return None
    if message.startswith("No such command"):
        word, commands = typed[command.count(" ")], context.command.commands
        owner = next(
            (name for name in commands if any(f"--{word}" in option.opts for option in commands[name].params)), None
        )
        shows = shows if owner is None else f"write `{command} {owner} --{word}`; {shows}"
        return unknown(word, commands, "command", hint=shows)
    if hasattr(error, "possibilities"):
        every = [name for option in context.command.params for name in option.opts if name.startswith("--")]
        if not all(option.opts[0].startswith("-") for option in context.command.params):
            shows = f"write `{context.get_usage().removeprefix('Usage:').strip()}`; {shows}"
        return unknown(error.option_name, every, "option", hint=shows)
    if parameter is not None and not hasattr(error, "param_type"):
        name = next((option for option in parameter.opts if option.startswith("--")), str(parameter.name).upper())
        rule = error.message.partition(",")[0].rstrip(".").removeprefix("Input should be ")
        return BadInput(f"{name} must be {rule}{_got(parameter.opts, typed)}.", hint=shows)
    form = "" if context is None else f"write `{context.get_usage().removeprefix('Usage:').strip()}`; "
    return BadInput(f"{message[:1].lower()}{message[1:]}.", hint=f"{form}{shows}")


def _got(options: Sequence[str], typed: Sequence[str]) -> str:
    """Return ', got VALUE' of an option as it was typed; empty: it was typed without a value, or not at all."""
    for place, word in enumerate(typed):
        name, equals, value = word.partition("=")
        if name in options and (equals or place + 1 < len(typed)):
            return f", got {value if equals else typed[place + 1]!r}"
    return ""
