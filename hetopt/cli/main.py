"""The `hetopt` command: registers every subcommand and turns errors into one sentence and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.main

from hetopt.cli import (
    attach,
    catalog,
    catalog_refresh,
    config,
    convert,
    doctor,
    export,
    fetch,
    gc,
    inject,
    launch,
    logs,
    metrics,
    old_names,
    predict,
    profile,
    recommend,
    report,
    setup,
    status,
    stop,
    terminal,
)
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.interruption import Terminated, ends_by_signals, exit_code_of

if TYPE_CHECKING:
    from typer._click import Command

COMPLETING = "_HETOPT_COMPLETE"
"""The variable by which a shell asks for completions."""

app = typer.Typer(
    name="hetopt",
    help="""Choose and run the cheapest, fastest cluster for distributed training.

    Measure the job once, ask for the best plan for your money, run it:

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
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"hetopt {version('hetopt')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


app.command()(profile.profile)
app.command()(predict.predict)
app.command()(recommend.recommend)
app.command()(launch.launch)
app.command()(status.status)
app.command()(logs.logs)
app.command()(stop.stop)
app.command()(fetch.fetch)
app.command()(report.report)
app.command()(export.export)
app.command()(convert.convert)
app.command()(metrics.metrics)
app.command()(inject.inject)
app.command()(attach.attach)
app.command()(gc.gc)
app.command()(doctor.doctor)
app.command()(setup.setup)
app.command()(config.config)
catalog.app.command()(catalog_refresh.refresh)
app.add_typer(catalog.app, name="catalog")


WHATEVER_HAPPENS = ("stop", "gc", "status")
"""Commands that end what costs money, or tell of it: a file of options that cannot be read must not stop them."""


def main() -> None:
    """Entry point of the `hetopt` command."""
    terminal.prepare()
    sys.exit(terminal.finish(_exit_code()))


def _exit_code() -> int:
    """Do what was typed; what goes wrong is said, and becomes the exit code that goes with it."""
    try:
        arguments, renamed = old_names.renewed(sys.argv[1:])
        terminal.check_arguments(arguments)
        if renamed:
            _note(f"{'; '.join(renamed)}; the old name goes with the next release.")
        command = typer.main.get_command(app)
        given = {} if COMPLETING in os.environ else _given(command, arguments)
        with ends_by_signals():
            command(arguments, prog_name="hetopt", default_map=given)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except terminal.ReaderGone as gone:
        return gone.exit_code
    except HetoptError as error:
        return _said(error.message, error.hint, error.exit_code)
    except OSError as error:
        # What the machine refuses is no fault of the program: it has no place in it that a person should look at.
        what = f"{error.filename}: " if error.filename else ""
        return _said(f"{what}{error.strerror or error}.", "correct that, then try again", BadInput.exit_code)
    except (KeyboardInterrupt, Terminated) as error:
        return exit_code_of(error)
    return 0


def _given(command: Command, arguments: list[str]) -> dict[str, Any]:
    """Options of files and of the environment for what was typed; where they come from is said on stderr."""
    name = arguments[0] if arguments else "--help"
    if name.startswith("-") or name == "config" or {"-h", "--help"} & set(arguments):
        return {}
    from hetopt.cli import configuration

    try:
        given = configuration.settings(command, os.environ, Path.cwd())
    except BadInput as error:
        if name not in WHATEVER_HAPPENS:
            raise
        _note(f"{error}")
        return {}
    said: dict[str, list[str]] = {}
    for one in configuration.of_command(given, arguments):
        said.setdefault(one.source, []).append(one.shown)
    for source, options in said.items():
        _note(f"from {source}: {' '.join(options)}")
    return configuration.default_map(given)


def _note(text: str) -> None:
    from hetopt.cli import render

    with contextlib.suppress(terminal.OutputLost):
        render.note(text)


def _said(message: str, hint: str | None, code: int) -> int:
    from hetopt.cli import render

    with contextlib.suppress(terminal.OutputLost):
        render.error(message, hint)
    return code


if __name__ == "__main__":
    main()
