"""`hetopt metrics`: a run's figures for TensorBoard and Prometheus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

EVENT_FILE = "events.out.tfevents.hetopt"


def metrics(
    run: str | None = typer.Argument(None, help="Run, or any unambiguous part of its name. Default: the newest."),
    tensorboard: Path | None = typer.Option(
        None, "--tensorboard", help="Write what is logged so far into this folder, which `tensorboard --logdir` reads."
    ),
    listen: str | None = typer.Option(
        None, "--listen", help="Answer Prometheus at ADDRESS:PORT until Ctrl-C, such as 127.0.0.1:9400."
    ),
) -> None:
    """Give a run's figures to other tools. Without an option, print them in Prometheus' text format."""

    from hetopt.optimizer.cli import render, terminal
    from hetopt.trainer.launch.runs import RunFolders, runs_home

    folder = RunFolders(home=runs_home()).find(run)
    if tensorboard is not None:
        _write(folder, tensorboard)
        render.note(f"wrote {tensorboard / EVENT_FILE}")
    if listen is not None:
        server = serve(folder, listen)
        render.note(f"answering at http://{listen}/metrics, until Ctrl-C")
        with server:
            server.serve_forever()
    elif tensorboard is None:
        terminal.write(_text(folder))


def _text(folder: Path) -> str:
    from hetopt.optimizer.reports.prometheus import exposition
    from hetopt.optimizer.reports.scalars import scalars
    from hetopt.trainer.events import EVENTS_FILE, read_events

    return exposition(scalars(read_events(folder / EVENTS_FILE)), run=folder.name)


def _write(folder: Path, into: Path) -> None:
    from hetopt.optimizer.reports.scalars import scalars
    from hetopt.optimizer.reports.tensorboard import event_file
    from hetopt.profiler.errors import BadInput
    from hetopt.trainer.events import EVENTS_FILE, read_events

    data = event_file(scalars(read_events(folder / EVENTS_FILE)))
    try:
        into.mkdir(parents=True, exist_ok=True)
        partial = into / f".{EVENT_FILE}.partial"
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(into / EVENT_FILE)
    except OSError as error:
        raise BadInput(f"{into} cannot be written: {error.strerror}.", hint="name another folder") from None


def serve(folder: Path, listen: str) -> ThreadingHTTPServer:
    """A server that answers ``/metrics`` with what the run has logged by then.

    Raises:
        BadInput: the address is none, or taken.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from hetopt.optimizer.reports.prometheus import CONTENT_TYPE
    from hetopt.profiler.errors import BadInput

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = (_text(folder) if found else "see /metrics\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are no news."""

    address, _, port = listen.rpartition(":")
    try:
        return ThreadingHTTPServer((address or "127.0.0.1", int(port)), Answer)
    except (ValueError, OverflowError):
        raise BadInput(f"--listen must be ADDRESS:PORT, not {listen!r}.", hint="for example 127.0.0.1:9400") from None
    except OSError as error:
        raise BadInput(f"nobody can listen at {listen}: {error.strerror}.", hint="name another port") from None
