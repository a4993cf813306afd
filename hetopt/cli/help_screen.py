"""`--help` on one screen of 80 by 24: what a command is for, examples, and what is mostly asked for.

Which options come first is said here, a line a command; one that is not named shows all it has. `--help-all` has all of
them, and what a docstring says behind a form feed.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter, Parameter

ALL = "--help-all"
MARGIN = 2
"""Columns that click leaves free beside its help, which it never makes narrower than 50 columns by itself."""
_WHOLE = 1000
"""Characters: more than any first sentence has."""
_WANTS_ALL = "hetopt.cli.help_screen.all"

FIRST: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "catalog list": (
            "--gpus",
            "--types",
            "--max-hourly",
            "--market",
            "--region",
            "--sort",
            "--json",
        ),
        "convert": ("--output", "--force", "--compare"),
        "estimate": ("--params", "--config", "--flops", "--samples", "--tokens", "--budget", "--deadline", "--region"),
        "doctor": ("--region", "--budget", "--bucket", "--subnet", "--security-group", "--json"),
        "gc": ("--on", "--dry-run", "--remove", "--json"),
        "gpus": ("--region", "--market", "--sort", "--reverse", "--json"),
        "launch": ("--on", "--budget", "--slowdown", "--hosts", "--steps", "--dry-run", "--detach", "--yes"),
        "predict": ("--suggest-probes",),
        "profile": ("--output", "--data", "--time-budget", "--from-samples", "--explore", "--json"),
        "recommend": (
            "--budget",
            "--deadline",
            "--epochs",
            "--objective",
            "--gpus",
            "--quota",
            "--explain",
            "--output",
        ),
    }
)
"""Options of a command's first screen, in order, by command."""

MAIN: Mapping[str, str] = MappingProxyType(
    {
        "estimate": "Say what training would take and cost before it is measured.",
        "gpus": "List the GPUs that can be rented: memory, rates, prices.",
        "check": "Say how far unequal shares are from one machine.",
        "profile": "Measure a training job on this machine.",
        "recommend": "Find the best cluster for a profiled job.",
        "launch": "Run a plan: here, in a rehearsal, or on other machines.",
        "status": "Show how a run is: state, steps, metric, workers, cost.",
        "logs": "Print what the workers of a run wrote.",
        "stop": "Stop a run.",
        "report": "Hold a run against its prediction.",
    }
)
"""Few words for each command that the first screen explains, which fit beside its name; the others are named."""


def wants_all(context: Context) -> bool:
    """Return whether `--help-all` was given in this context."""
    return bool(context.meta.get(_WANTS_ALL))


class _Screen:
    """Formatting that the help of commands and of groups shares."""

    help: str | None

    def _read(self, context: Context, arguments: Sequence[str]) -> None:
        if ALL in arguments:
            context.meta[_WANTS_ALL] = True

    def get_help_option_names(self, ctx: Context) -> list[str]:
        """Return the names of the help options in the order given; click has them in no order."""
        return list(ctx.help_option_names)

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Return the parts of the usage line: required ones in capitals, optional ones in brackets."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]  # of the command beside it
        return [_as_written(piece) if re.match(r"[\[{][\[\w]", piece) else piece for piece in pieces]

    def format_help_text(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the description, with the part behind the form feed only where everything is wanted."""
        first, _, rest = inspect.cleandoc(self.help or "").partition("\f")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"{first.rstrip()}\n\n{rest.strip()}" if rest and wants_all(ctx) else first.rstrip())


class OneScreen(_Screen, TyperCommand):
    """A command whose help fits on a screen."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments, noting `--help-all` in the context; return those that are left."""
        self._read(ctx, args)
        _narrow(ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the arguments and the few options of a first screen, each on a line.

        With `--help-all`, and of a command without an entry in `FIRST`, all options are written.
        """
        first = FIRST.get(ctx.command_path.partition(" ")[2])
        if wants_all(ctx) or first is None:
            super().format_options(ctx, formatter)
            return
        parameters = self.get_params(ctx)
        by_name = {name: parameter for parameter in parameters for name in parameter.opts}
        rows = [
            row for parameter in parameters if parameter.param_type_name == "argument" for row in _row(ctx, parameter)
        ]
        rows += [row for name in first for row in _row(ctx, by_name[name])]
        left = (
            sum(
                parameter.param_type_name == "option" and not getattr(parameter, "hidden", False)
                for parameter in parameters
            )
            - len(first)
            - 1
        )
        more = f"{left} more option{'s' * (left != 1)}, and all" if left else "All"
        rows.append((ALL, f"{more} there is to say."))
        width = formatter.width - max(len(name) for name, _ in rows) - 4
        with formatter.section("Options"):
            formatter.write_dl([(name, _in_a_line(text, width)) for name, text in rows])


class OneScreenGroup(_Screen, TyperGroup):
    """A group of commands whose help fits on a screen."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments of the group, noting `--help-all` ahead of a command; return those that are left."""
        if args and args[0].startswith("-"):
            self._read(ctx, args)
        _narrow(ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the commands that are explained, and the names of the others."""
        if wants_all(ctx) or ctx.parent is not None:
            super().format_options(ctx, formatter)
            return
        with formatter.section("Commands"):
            formatter.write_dl([*MAIN.items()])
            others = [name for name in self.commands if name not in MAIN]
            formatter.write_text(f"also: {', '.join(others)}")
        formatter.write_text(f"hetopt COMMAND --help has examples; {ALL} has everything.")

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write a group's commands with the whole first sentence of each, which click would cut."""
        rows = [
            (name, command.get_short_help_str(_WHOLE)) for name, command in self.commands.items() if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the group's epilog, only where the whole help is asked for (see `wants_all`)."""
        if wants_all(ctx):
            super().format_epilog(ctx, formatter)


def _as_written(piece: str) -> str:
    """Return a usage piece as documented: ``{profile}`` is PROFILE, ``[plan]`` [PLAN], ``[script]...`` [SCRIPT]...,
    ``[[GPU]...]...`` [GPU]..."""
    name = re.sub(r"[^\w-]", "", piece).upper()
    return f"{f'[{name}]' if piece.startswith('[') else name}{'...' if piece.endswith('...') else ''}"


def _narrow(context: Context) -> None:
    """Set the help's width where the terminal is narrower than click's least width; a width that is set stays."""
    columns = shutil.get_terminal_size().columns
    if context.terminal_width is None and columns < 50 + MARGIN:
        context.terminal_width = columns - MARGIN


def _row(context: Context, parameter: Parameter) -> Iterator[tuple[str, str]]:
    """Yield a parameter's spelling and help text, if it is shown."""
    record = parameter.get_help_record(context)
    if record is not None:
        yield record


def _in_a_line(text: str, width: int) -> str:
    """Return the leading clauses of a text that fit into ``width`` characters; at least the first, whole."""
    ends = [end.start() for end in re.finditer(r"[.;,] | \(|$", text)]
    ends = [end for end in ends if text[:end].count("(") == text[:end].count(")")]
    fitting = [end for end in ends if end < width]
    return text[: max(fitting, default=ends[0])].rstrip(".") + "."
