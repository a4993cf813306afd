"""`hetopt serve`: all runs in a browser, and for Prometheus."""

from __future__ import annotations

import typer


def serve(
    listen: str = typer.Option(
        "127.0.0.1:9400", "--listen", help="ADDRESS:PORT of this machine alone; port 0 is any that is free."
    ),
) -> None:
    """Show all runs in a browser until Ctrl-C: progress, cost, timeline, comparisons, beside what was planned.

    Nothing can be changed from there, and other machines cannot reach it. Prometheus is answered at /metrics.

    \b
      hetopt serve
      hetopt serve --listen 127.0.0.1:8000
    """
    from hetopt.api.dashboard import serve as serve_runs
    from hetopt.cli import render, terminal

    with serve_runs(listen) as server:
        render.line(f"all runs are at {server.url}, until Ctrl-C")
        terminal.flush()
        server.serve_forever()
