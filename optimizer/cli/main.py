"""The `hetopt` command: registers every subcommand and turns errors into one sentence and an exit code."""

from __future__ import annotations

import sys

import typer

from hetopt.optimizer.cli import (
    adopt,
    catalog,
    catalog_refresh,
    disturb,
    doctor,
    export,
    gc,
    launch,
    logs,
    metrics,
    predict,
    profile,
    recommend,
    report,
    setup,
    status,
    stop,
)
from hetopt.profiler.errors import HetoptError
from hetopt.trainer.launch.interruption import Terminated, ends_by_signals, exit_code_of

app = typer.Typer(
    name="hetopt",
    help="""Choose and run the cheapest, fastest cluster for distributed training.

    Measure the job once, ask for the best plan for your money, run it:

      hetopt profile digits -o profile.json

      hetopt recommend profile.json --budget 2 -o plan.json

      hetopt launch plan.json --on local --pace 1,2

      hetopt report
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
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
app.command()(report.report)
app.command()(export.export)
app.command()(metrics.metrics)
app.command()(disturb.disturb)
app.command()(adopt.adopt)
app.command()(gc.gc)
app.command()(doctor.doctor)
app.command()(setup.setup)
catalog.app.command()(catalog_refresh.refresh)
app.add_typer(catalog.app, name="catalog")


def main() -> None:
    """Entry point of the `hetopt` command."""
    try:
        with ends_by_signals():
            app(prog_name="hetopt")
    except HetoptError as error:
        from hetopt.optimizer.cli import render

        render.error(error.message, error.hint)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, Terminated) as error:
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
