"""The `hetopt` command: registers every subcommand and turns errors into one sentence and an exit code."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.main

from hetopt.cli import terminal, usage
from hetopt.cli.help_screen import ALL, OneScreen, OneScreenGroup
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.interruption import Terminated, ends_at_once, ends_by_signals, exit_code_of, ignore_signals

if TYPE_CHECKING:
    from typer._click import Command

COMPLETING = "_HETOPT_COMPLETE"
"""Name of the variable by which a shell asks for completions."""

COMMANDS: Mapping[str, str] = {
    "check": "hetopt.cli.check",
    "profile": "hetopt.cli.profile",
    "estimate": "hetopt.cli.estimate",
    "predict": "hetopt.cli.predict",
    "recommend": "hetopt.cli.recommend",
    "show": "hetopt.cli.show",
    "compare": "hetopt.cli.show",
    "launch": "hetopt.cli.launch",
    "status": "hetopt.cli.status",
    "logs": "hetopt.cli.runs",
    "stop": "hetopt.cli.runs",
    "fetch": "hetopt.cli.runs",
    "report": "hetopt.cli.report",
    "export": "hetopt.cli.report",
    "convert": "hetopt.cli.check",
    "inject": "hetopt.cli.runs",
    "attach": "hetopt.cli.account",
    "gc": "hetopt.cli.gc",
    "doctor": "hetopt.cli.account",
    "hosts": "hetopt.cli.account",
    "gpus": "hetopt.cli.catalog",
    "setup": "hetopt.cli.account",
    "config": "hetopt.cli.configuration",
    "catalog": "hetopt.cli.catalog",  # the last of its commands
}
"""Module of every command, by command; it has a function of that name, or an ``app`` of several."""


def _command(name: str) -> Command:
    """Return a command, imported only now, or a group of commands, as click has it."""
    module = import_module(COMMANDS[name])
    function = getattr(module, name, None)
    if not callable(function):
        return typer.main.get_command(module.app)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(cls=OneScreen)(function)
    return typer.main.get_command(alone)


class _Commands(Mapping[str, "Command"]):
    """The commands by name; the module of one is imported when it is asked for, so that no command waits for others."""

    def __init__(self) -> None:
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        """Return a command, imported at its first use; KeyError: there is no such command."""
        if name not in self._made:
            self._made[name] = _command(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Root(OneScreenGroup):
    """The group of all commands, whose modules are imported when asked for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"commands": _Commands()})


app = typer.Typer(
    name="hetopt",
    cls=_Root,
    help="""Choose and run the cheapest, fastest cluster for distributed training.

    \b
      hetopt estimate --params 110M --samples 3M --tokens 128 --budget 200
      hetopt profile digits -o profile.json
      hetopt recommend profile.json --budget 2 -o plan.json
      hetopt launch plan.json --on local --slowdown 1,2
      hetopt report
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done · 2 bad input · 3 no feasible plan · 4 cloud refused · 5 budget or deadline stop · "
    "6 run failed · 7 run stopped before its end · 129, 130, 143 ended by SIGHUP, Ctrl-C, SIGTERM.",
    context_settings={"help_option_names": ["-h", "--help", ALL], "max_content_width": 100},
)


_SHOWN = 9
"""Characters of a commit that a person compares."""


def _version(wanted: bool) -> None:
    """Print the version, with the commit in parentheses where an installation knows it, and exit; do so if ``wanted``.

    The commit is that of the wheel, written by `setup.py`, or the one that ``pip install git+https://`` was given
    (PEP 610). A checkout prints none, as its files may have changed.
    """
    if not wanted:
        return
    from importlib.metadata import distribution

    installed = distribution("hetopt")
    noted = json.loads(installed.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id")
    is_checkout = (Path(__file__).resolve().parents[2] / ".git").exists()
    commit = "" if is_checkout else (installed.read_text("commit.txt") or noted or "").strip()
    typer.echo(f"hetopt {installed.version}" + (f" ({commit[:_SHOWN]})" if commit else ""))
    raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print version and commit."
    ),
) -> None:
    pass


WHATEVER_HAPPENS = ("stop", "gc", "status")
"""Names of commands that end what costs money, or tell of it: an unreadable file of options must not stop them."""


_NEXT: Mapping[type[OSError], str] = {
    PermissionError: "name a place that you may use, or ask whoever owns this one",
    FileNotFoundError: "see that it is there, and try again",
}
"""What to do about what the machine refuses."""


def main() -> None:
    """Run the `hetopt` command: parse the process's arguments, do it, and exit with its code; never returns.

    Errors are printed as a sentence and a hint on stderr. Signals end the process at once until the command begins.
    """
    gc.set_threshold(100_000)  # what a command imports is no garbage, and looking through it took a tenth of its time
    ends_at_once()
    terminal.prepare()
    code = terminal.finish(_exit_code())
    ignore_signals()
    gc.freeze()  # or all that was made is looked through once more as the process ends: a tenth of a first answer
    sys.exit(code)


def _exit_code() -> int:
    """Run the command that was typed and return its exit code; errors are printed as one sentence.

    Ctrl-C and signals give a code, too. Other exceptions than hetopt's, click's and the system's pass through.
    """
    try:
        arguments = sys.argv[1:]
        terminal.check_arguments(arguments)
        command = typer.main.get_command(app)
        given = {} if COMPLETING in os.environ else _given(command, arguments)
        with ends_by_signals():
            # Whatever it returns by itself is an exit code.
            return command(arguments, prog_name="hetopt", default_map=given, standalone_mode=False) or 0
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except terminal.ReaderGone as gone:
        return gone.exit_code
    except usage.UsageError as error:
        refusal = usage.refused(error, arguments)
        if refusal is None:
            typer.echo(error, err=True)
            return BadInput.exit_code
        return _refuse(refusal.message, refusal.hint, refusal.exit_code)
    except typer.Abort:
        _note("nothing was done.")  # Ctrl-C or the end of the input, where a question was asked
        return exit_code_of(KeyboardInterrupt())
    except HetoptError as error:
        return _refuse(error.message, error.hint, error.exit_code)
    except OSError as error:
        # What the machine refuses is no fault of the program: it has no place in it that a person should look at.
        what = f"{error.filename}: " if error.filename else ""
        hint = _NEXT.get(type(error), "correct that, then try again")
        return _refuse(f"{what}{error.strerror or error}.", hint, BadInput.exit_code)
    except (KeyboardInterrupt, Terminated) as error:
        return exit_code_of(error)
    return 0


def _given(command: Command, arguments: list[str]) -> dict[str, Any]:
    """Return click's default map of options from files and the environment; note on stderr where they come from."""
    name = arguments[0] if arguments else "--help"
    if name.startswith("-") or name == "config" or {"-h", "--help", ALL} & set(arguments):
        return {}
    from hetopt.cli import configuration

    try:
        given = configuration.settings(command, os.environ, Path.cwd(), typed=name)
    except BadInput as error:
        if name not in WHATEVER_HAPPENS:
            raise
        _note(f"{error}")
        return {}
    by_source: dict[str, list[str]] = {}
    for setting in configuration.of_command(given, arguments):
        by_source.setdefault(setting.source, []).append(setting.shown)
    for source, options in by_source.items():
        _note(f"from {source}: {' '.join(options)}")
    return configuration.default_map(given)


def _note(text: str) -> None:
    """Print a remark on stderr, if stderr can be written."""
    from hetopt.cli import render

    with contextlib.suppress(terminal.OutputLost):
        render.note(text)


def _refuse(message: str, hint: str | None, code: int) -> int:
    """Print an error and its hint on stderr, if that can be written; return ``code``."""
    from hetopt.cli import render

    with contextlib.suppress(terminal.OutputLost):
        render.error(message, hint)
    return code


if __name__ == "__main__":
    main()
