"""`hetopt status`: how a run is, from any terminal; `--watch` draws it again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from hetopt.api.run import Run, facts_or_why
from hetopt.cli import render
from hetopt.cli.options import NewestRun
from hetopt.core.run_status import RunState

if TYPE_CHECKING:
    from hetopt.api.run import Run
    from hetopt.reports.live_run import LiveRun


def status(
    run: NewestRun = None,
    all_: bool = typer.Option(False, "--all", "-a", help="A line for every run."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Go on showing it, until it is over or Ctrl-C."),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show how a run is: state, steps, metric, each worker's share and waiting, and what it costs so far.

    \b
      hetopt status
      hetopt status --watch
    """
    from hetopt.reports import status_document
    from hetopt.reports.live_run import UNREADABLE

    if watch:
        from hetopt.core.errors import BadInput

        if all_ or json_:
            raise BadInput("--watch shows one run to a person.", hint="leave --all and --json out")
        watch_run(Run.find(run))
    elif all_:
        # A list of runs is read from their folders: it needs no login, and answers at once.
        listed = [facts_or_why(one) for one in Run.all()]
        if json_:
            render.print_json(listed)
            return
        render.show(status_document.runs(listed))
        for fact in listed:
            if note := fact["reason"] if fact["state"] == UNREADABLE else fact["unread"]:
                render.note(f"{fact['run']}: {note}")
    else:
        fact = Run.find(run).facts(ask=True)
        if json_:
            render.print_json(fact)
            return
        render.show(status_document.status(fact))
        for note in status_document.notes(fact):
            render.note(note)


EVERY_S = 2.0
"""Drawing sixteen workers takes some ten milliseconds: less than a hundredth of a core."""


def watch_run(run: Run, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it is over."""

    watched = run.unread()
    with render.live_view() as show:
        while True:
            fact = run.facts(ask=True, live=watched)
            show(picture(watched, fact, now_s=time.time()))
            if RunState(fact["state"]).is_over:
                return
            sleep(EVERY_S)


def picture(watched: LiveRun, fact: Mapping[str, Any], *, now_s: float) -> list[str]:
    """Return how the run is now, in lines."""
    from hetopt.reports.status_document import going

    unread = fact["unread"]
    return [*render.plain(going(watched, fact, now_s=now_s)), *([unread] if unread else [])]
