"""`hetopt logs`: what the workers of a run printed, and its events, while it runs or after."""

from __future__ import annotations

import typer

from hetopt.cli.options import NewestRun


def logs(
    run: NewestRun = None,
    follow: bool = typer.Option(False, "--follow", "-f", help="Keep printing until the run is over."),
    events: bool = typer.Option(False, "--events", "--json", help="The event log (JSON Lines) instead of the output."),
    worker: int | None = typer.Option(None, "--worker", "-w", min=0, help="Only this worker's output."),
) -> None:
    """Print what happened in a run and what its workers wrote, each line behind its source; -f follows.

    \b
      hetopt logs
      hetopt logs --follow
    """
    from hetopt.api.run import Run
    from hetopt.cli import terminal

    for line in Run.find(run).logs(worker=worker, events=events, follow=follow):
        terminal.write(f"{line.text}\n" if events else f"[{line.source}] {line.text}\n")
        if follow:
            terminal.flush()
    terminal.flush()
