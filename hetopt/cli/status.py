"""`hetopt status`: how a run is, from any terminal."""

from __future__ import annotations

import typer

from hetopt.api.run import Run, facts_or_why
from hetopt.cli import render
from hetopt.cli.options import NewestRun


def status(
    run: NewestRun = None,
    all_: bool = typer.Option(False, "--all", "-a", help="A line for every run."),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show how a run is: state, steps, metric, each worker's batch and waiting, and the cost so far.

    \b
      hetopt status
      watch -n 2 hetopt status
    """
    from hetopt.reports import live_run, status_document

    if all_:
        # A list of runs is read from their folders: it needs no login, and answers at once.
        listed = [facts_or_why(run_) for run_ in Run.all()]
        if json_:
            render.print_json(listed)
            return
        render.show(status_document.runs(listed))
        for fact in listed:
            if note := fact["reason"] if fact["state"] == live_run.UNREADABLE else fact["unread"]:
                render.note(f"{fact['run']}: {note}")
        return
    fact = Run.find(run).facts(ask=True)
    if json_:
        render.print_json(fact)
        return
    render.show(status_document.status(fact))
    for note in status_document.notes(fact):
        render.note(note)
