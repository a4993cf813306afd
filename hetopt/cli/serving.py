"""`hetopt serve` and `metrics`: runs in a browser, and their figures for Prometheus."""

from __future__ import annotations

import typer

from hetopt.api.run import Run
from hetopt.cli import render, terminal
from hetopt.cli.options import NewestRun


def serve(
    listen: str = typer.Option(
        "127.0.0.1:9400", help="ADDRESS:PORT of this machine alone; port 0 is any that is free."
    ),
) -> None:
    """Show all runs in a browser until Ctrl-C: progress, cost and time beside what was planned.

    Nothing can be changed from there, and other machines cannot reach it. Prometheus is answered at /metrics.

    \b
      hetopt serve
      hetopt serve --listen 127.0.0.1:8000
    """
    from hetopt.api.dashboard import serve as serve_runs

    with serve_runs(listen) as server:
        render.line(f"all runs are at {server.url}, until Ctrl-C")
        terminal.flush()
        server.serve_forever()


def metrics(
    run: NewestRun = None,
    listen: str | None = typer.Option(
        None, help="Answer Prometheus at ADDRESS:PORT until Ctrl-C, such as 127.0.0.1:9400."
    ),
) -> None:
    """Print a run's newest figures in Prometheus' text format, or answer Prometheus.

    \b
      hetopt metrics
      hetopt metrics --listen 127.0.0.1:9400
    """
    from hetopt.api.dashboard import serve
    from hetopt.reports.prometheus import exposition

    found = Run.find(run)
    if listen is not None:
        with serve(listen, run=found.name, pages=False) as server:
            render.note(f"answering at {server.url}/metrics, until Ctrl-C")
            server.serve_forever()
        return
    live = found.unread()
    live.read()
    terminal.write(exposition([(found.name, live.progress, live.unread.lines)]))
    if live.unread.sentence is not None:
        render.note(live.unread.sentence)
