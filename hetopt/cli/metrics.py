"""`hetopt metrics`: a run's figures for TensorBoard and Prometheus."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hetopt.cli.options import NewestRun

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

EVENT_FILE = "events.out.tfevents.hetopt"

MOST_CLIENTS = 8
"""That are answered at once; others are sent away."""

CLIENT_S = 10.0
"""For which a client may say nothing."""


def metrics(
    run: NewestRun = None,
    tensorboard: Path | None = typer.Option(
        None, "--tensorboard", help="Write what is logged so far into this folder, which `tensorboard --logdir` reads."
    ),
    listen: str | None = typer.Option(
        None, "--listen", help="Answer Prometheus at ADDRESS:PORT until Ctrl-C, such as 127.0.0.1:9400."
    ),
) -> None:
    """Give a run's figures to other tools. Without an option, print them in Prometheus' text format."""
    from hetopt.api.run import Run
    from hetopt.cli import render, terminal

    folder = Run.find(run).folder
    if tensorboard is not None:
        _write(folder, tensorboard)
        render.note(f"wrote {tensorboard / EVENT_FILE}")
    if listen is not None:
        server = serve(folder, listen)
        render.note(f"answering at http://{listen}/metrics, until Ctrl-C")
        with server:
            server.serve_forever()
    elif tensorboard is None:
        figures = Figures(folder)
        terminal.write(figures.text())
        if figures.unread is not None:
            render.note(figures.unread)


class Figures:
    """The newest figures of a run, by its log as far as it was read: each scrape reads what the log has gained.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        from threading import Lock

        from hetopt.core.events.fold import RunFold
        from hetopt.core.events.log import EVENTS_FILE
        from hetopt.core.events.reader import EventReader

        self._reader = EventReader(path=folder / EVENTS_FILE)
        self._run = RunFold()
        self._name = folder.name
        self._reading = Lock()

    def text(self) -> str:
        """In Prometheus' format, with what is logged by now; scrapes that come together wait for one reading.

        Raises:
            BadInput: the log cannot be read.
        """
        from hetopt.reports.scalars import exposition

        with self._reading:
            for events in self._reader.parts():
                for event in events:
                    self._run.take(event)
            return exposition(self._run, name=self._name, unread=self._reader.unread.lines)

    @property
    def unread(self) -> str | None:
        """What is told of lines that could not be read; None: all could."""
        return self._reader.unread.sentence


def _write(folder: Path, into: Path) -> None:
    from hetopt.cli import render
    from hetopt.core.errors import BadInput
    from hetopt.core.events.log import EVENTS_FILE
    from hetopt.core.events.reader import read_log
    from hetopt.reports.scalars import scalars
    from hetopt.reports.tensorboard import event_file

    log = read_log(folder / EVENTS_FILE)
    if log.unread.sentence is not None:
        render.note(log.unread.sentence)
    data = event_file(scalars(log.events))
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
    from threading import BoundedSemaphore

    from hetopt.core.errors import BadInput
    from hetopt.reports.scalars import CONTENT_TYPE

    figures, places = Figures(folder), BoundedSemaphore(MOST_CLIENTS)

    class Answer(BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            try:
                status, text = (200, figures.text()) if found else (404, "see /metrics\n")
            except BadInput as error:
                status, text = 500, f"{error.message}\n"
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing about a scrape."""

    class Bounded(ThreadingHTTPServer):
        daemon_threads = True

        def process_request(self, request: Any, client_address: Any) -> None:
            if places.acquire(blocking=False):
                super().process_request(request, client_address)
            else:  # who asks so often at once asks again
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                places.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that goes away in the middle of an answer is no news either."""
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)

    address, _, port = listen.rpartition(":")
    try:
        return Bounded((address or "127.0.0.1", int(port)), Answer)
    except (ValueError, OverflowError):
        raise BadInput(f"--listen must be ADDRESS:PORT, not {listen!r}.", hint="for example 127.0.0.1:9400") from None
    except OSError as error:
        raise BadInput(f"nobody can listen at {listen}: {error.strerror}.", hint="name another port") from None
