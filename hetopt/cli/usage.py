"""What was typed and is no command, option or value of one: one sentence and the next step, as of every other error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from hetopt.core.errors import BadInput
from hetopt.core.plain_text import unknown

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for all of that; it has no public name of its own."""

_KINDS = {"integer": "a whole number", "number": "a number", "float": "a number", "boolean": "true or false"}
"""What a value must be, by a word of typer's message about it."""


def refused(error: Any, typed: Sequence[str]) -> BadInput | None:
    """Return the error of what was typed; None: it is a group of commands alone, and its message their help.

    Args:
        error: a `UsageError`.
        typed: arguments of the command line.
    """
    context, parameter = error.ctx, getattr(error, "param", None)
    command = context.command_path if context is not None else " ".join(["hetopt", *typed[:1]])
    shows = f"`{command} -h` shows what there is"
    message: str = error.message
    if message.startswith("Usage:"):
        return None
    if message.startswith("No such command"):
        return unknown(typed[command.count(" ")], context.command.list_commands(context), "command", hint=shows)
    if hasattr(error, "possibilities"):
        every = [name for one in context.command.params for name in one.opts if name.startswith("--")]
        return unknown(error.option_name, every, "option", hint=shows)
    if hasattr(error, "param_type"):
        return BadInput(f"{_name(parameter)} is missing.", hint=f"{_form(context)}; {shows}")
    if hasattr(error, "option_name"):
        takes = "takes no value" if "does not take" in message else "needs a value"
        return BadInput(f"{error.option_name} {takes}.", hint=shows)
    if parameter is not None:
        rule = message.rstrip(".").removeprefix("Input should be ")
        kind = next((_KINDS[word] for word in _KINDS if word in message), rule)
        return BadInput(f"{_name(parameter)} must be {kind}{_got(parameter.opts, typed)}.", hint=shows)
    if "extra argument" in message:
        left = message[message.find("(s) (") + len("(s) (") : -1]
        return BadInput(f"{command} has no use for {left!r}.", hint=f"{_form(context)}; {shows}")
    return BadInput(f"{message[:1].lower()}{message[1:].rstrip('.')}.", hint=shows)


def _name(parameter: Any) -> str:
    options = [name for name in parameter.opts if name.startswith("--")]
    return options[0] if options else str(parameter.metavar or parameter.name).upper()


def _form(context: Any) -> str:
    return f"write `{context.get_usage().removeprefix('Usage:').strip()}`"


def _got(options: Sequence[str], typed: Sequence[str]) -> str:
    for place, word in enumerate(typed):
        name, equals, value = word.partition("=")
        if name in options and (equals or place + 1 < len(typed)):
            return f", got {value if equals else typed[place + 1]!r}"
    return ""
