"""`hetopt serve` and `metrics`: runs in a browser, and their figures for TensorBoard and Prometheus."""

from __future__ import annotations

from pathlib import Path

import typer

from hetopt.cli.options import NewestRun

EVENT_FILE = "events.out.tfevents.hetopt"


def serve(
    listen: str = typer.Option(
        "127.0.0.1:9400", help="ADDRESS:PORT of this machine alone; port 0 is any that is free."
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


def metrics(
    run: NewestRun = None,
    tensorboard: Path | None = typer.Option(
        None, help="Write what is logged so far into this folder, which `tensorboard --logdir` reads."
    ),
    listen: str | None = typer.Option(
        None, help="Answer Prometheus at ADDRESS:PORT until Ctrl-C, such as 127.0.0.1:9400."
    ),
) -> None:
    """Give a run's figures to other tools. Without an option, print them in Prometheus' text format.

    \b
      hetopt metrics
      hetopt metrics --listen 127.0.0.1:9400
    """
    from hetopt.api.dashboard import serve
    from hetopt.api.run import Run
    from hetopt.cli import render, terminal
    from hetopt.reports.live_run import LiveRun
    from hetopt.reports.scalars import Exposed, exposition

    folder = Run.find(run).folder
    if tensorboard is not None:
        _write(folder, tensorboard)
        render.note(f"wrote {tensorboard / EVENT_FILE}")
    if listen is not None:
        with serve(listen, run=folder.name, pages=False) as server:
            render.note(f"answering at {server.url}/metrics, until Ctrl-C")
            server.serve_forever()
    elif tensorboard is None:
        live = LiveRun.of(folder, None)
        live.read()
        terminal.write(exposition([Exposed(name=folder.name, run=live.progress, unread=live.unread.lines)]))
        if live.unread.sentence is not None:
            render.note(live.unread.sentence)


def _write(folder: Path, into: Path) -> None:
    from hetopt.cli import render
    from hetopt.core.artifact import write_atomically
    from hetopt.core.errors import BadInput
    from hetopt.core.events.log import EVENTS_FILE, read_log
    from hetopt.reports.scalars import event_file, scalars

    log = read_log(folder / EVENTS_FILE)
    if log.unread.sentence is not None:
        render.note(log.unread.sentence)
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{into} cannot be written: {error.strerror}.", hint="name another folder") from None
    write_atomically(into / EVENT_FILE, event_file(scalars(log.events)))
