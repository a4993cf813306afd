"""What was typed and is no command, option or value of one: one sentence and the next step, as of every other error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hetopt.core.errors import BadInput
from hetopt.core.names import unknown

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for all of that; it has no public name of its own."""

_COUNTED = {"recommend": "`hetopt estimate`, which needs no profile"}
_NO_SPOT = dict.fromkeys(("estimate", "gpus", "recommend"), "--market on-demand")
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "--params": _COUNTED,
    "--config": _COUNTED,
    "--flops": _COUNTED,
    "--tokens": _COUNTED,
    "--no-spot": _NO_SPOT,
    "--on-demand": _NO_SPOT,
}
"""What does what an option would do, by its name and by the command that has none of that name and none alike."""

COMMANDS: Mapping[str, str] = {"watch": "status --watch", "dashboard": "serve", "plan": "recommend"}
"""What does what a command would do that there is not, and whose name is alike to none."""

_RULE = "Input should be "
_KINDS = {"integer": "a whole number", "number": "a number", "float": "a number", "boolean": "true or false"}
"""What a value must be, by a word of typer's message about it."""


def refused(error: Any, typed: Sequence[str]) -> BadInput | None:
    """The error of what was typed; None: it is a group of commands alone, and its message their help.

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
        meant = COMMANDS.get(typed[command.count(" ")]) if command == "hetopt" else None
        if meant is not None:
            return BadInput(f"There is no command called {typed[0]!r}.", hint=f"did you mean `hetopt {meant}`? {shows}")
        return unknown(typed[command.count(" ")], context.command.list_commands(context), "command", hint=shows)
    if hasattr(error, "possibilities"):
        every = [name for one in context.command.params for name in one.opts if name.startswith("--")]
        elsewhere = ELSEWHERE.get(error.option_name, {}).get(context.command.name)
        if elsewhere is not None:
            return BadInput(
                f"There is no option called {error.option_name!r}.", hint=f"did you mean {elsewhere}? {shows}"
            )
        return unknown(error.option_name, every, "option", hint=shows)
    if hasattr(error, "param_type"):
        return BadInput(f"{_name(parameter)} is missing.", hint=f"{_form(context)}; {shows}")
    if hasattr(error, "option_name"):
        takes = "takes no value" if "does not take" in message else "needs a value"
        return BadInput(f"{error.option_name} {takes}.", hint=shows)
    if parameter is not None:
        name, kind = _name(parameter), next((_KINDS[word] for word in _KINDS if word in message), None)
        if kind is None:
            rule = message.rstrip(".")
            if rule.startswith(_RULE):
                return BadInput(f"{name} must be {rule.removeprefix(_RULE)}{_got(parameter.opts, typed)}.", hint=shows)
            return BadInput(f"{name}: {rule[:1].lower()}{rule[1:]}.", hint=shows)
        return BadInput(f"{name} must be {kind}{_got(parameter.opts, typed)}.", hint=shows)
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
