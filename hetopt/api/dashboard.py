"""`hetopt.serve`: a server on this machine that shows its runs, and tells Prometheus of them. It changes nothing.

It answers only what asks for this machine by one of its own names, so that no page of the web can read it by a name
that leads here (DNS rebinding). Names of runs are looked up, never joined to a path. Pages may run one script, which is
known by its hash, and load nothing: text of a log that got into one as markup could do neither.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import unquote, urlsplit

from hetopt.api.run import Run, facts_or_why
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.events.log import DECISIONS_FILE, EVENTS_FILE
from hetopt.core.listening import is_loopback
from hetopt.core.run_folder import STOP_FILE, RunFolders, runs_home
from hetopt.optimizer.launch_record import LAUNCH_FILE
from hetopt.reports import cursor, dashboard, status_document
from hetopt.reports.document import Heading, Line
from hetopt.reports.live_run import LiveRun
from hetopt.reports.prometheus import CONTENT_TYPE, exposition

MOST_CLIENTS = 8
"""That are answered at once; others are sent away."""

CLIENT_S = 10.0
"""For which a client may say nothing."""

OWN_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""By which a browser on this machine, or at the other end of a tunnel to it, asks for what listens here."""


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


POLICY = "; ".join(
    [
        "default-src 'none'",
        # Widths and places of what is drawn are attributes; styles can load nothing, and so tell nobody anything.
        "style-src 'unsafe-inline'",
        f"script-src {_hash(dashboard.SCRIPT)} {_hash(cursor.SCRIPT)}",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HTML = "text/html; charset=utf-8"
PLAIN = "text/plain; charset=utf-8"


class Answer(Exception):
    """What is told instead of a page: a status, and a sentence."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Dashboard(ThreadingHTTPServer):
    """The server; ``serve_forever()`` answers until ``shutdown()``, and leaving it as a context closes it.

    Args:
        address: and port to listen at.
        runs: that are shown.
        pages: whether there are pages beside ``/metrics``.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], runs: KnownRuns, *, pages: bool) -> None:
        self.runs, self.pages = runs, pages
        self.is_loopback = is_loopback(address[0])
        self._places = BoundedSemaphore(MOST_CLIENTS)
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """Return where it answers."""
        address, port = self.server_address[:2]
        return f"http://{address!s}:{port}"

    def server_close(self) -> None:
        """End it once nobody is reading; requests that wait stay without an answer."""
        super().server_close()
        self.runs.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See socketserver; at most `MOST_CLIENTS` at once."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:  # who asks so often at once asks again
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See socketserver."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of an answer is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_S
    server: Dashboard
    server_version, sys_version = "hetopt", ""

    def do_GET(self) -> None:
        try:
            self._check_host()
            kind, text = self._answer()
            status = HTTPStatus.OK
        except Answer as told:
            status, (kind, text) = told.status, self._told(str(told))
        except HetoptError as error:
            status, (kind, text) = HTTPStatus.INTERNAL_SERVER_ERROR, self._told(error.message)
        body = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _told(self, text: str) -> tuple[str, str]:
        """Return one sentence, as a page where a person may be reading."""
        if not self.server.pages or self.path.startswith("/metrics"):
            return PLAIN, f"{text}\n"
        return HTML, dashboard.page("hetopt", [Line(text)])

    def _check_host(self) -> None:
        if not self.server.is_loopback:
            return
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        if host not in OWN_NAMES:
            raise Answer(HTTPStatus.MISDIRECTED_REQUEST, "ask for 127.0.0.1 or localhost")

    def _answer(self) -> tuple[str, str]:
        try:
            asked = urlsplit(self.path)
        except ValueError:
            raise Answer(HTTPStatus.NOT_FOUND, "see / and /metrics") from None
        path, runs = unquote(asked.path), self.server.runs
        if path == "/metrics":
            return CONTENT_TYPE, runs.metrics()
        if not self.server.pages:
            raise Answer(HTTPStatus.NOT_FOUND, "see /metrics")
        if path == "/":
            return HTML, dashboard.overview(runs.facts(), now_s=time.time())
        if path == "/favicon.ico":
            return PLAIN, ""  # every browser asks for it, and complains where there is none
        if path.startswith("/run/"):
            return HTML, self._run(path.removeprefix("/run/"))
        raise Answer(HTTPStatus.NOT_FOUND, "see / and /metrics")

    def _run(self, name: str) -> str:
        run = self.server.runs.find(name)
        if run is None:
            raise Answer(HTTPStatus.NOT_FOUND, "there is no such run")
        try:
            return run.html()
        except BadInput:  # no step yet, or nothing was predicted: what is known is told
            fact = next(fact for fact in self.server.runs.facts() if fact["run"] == name)
            known = status_document.status(fact) if "step" in fact else [Line(fact["reason"])]
            return dashboard.page(name, [Heading("So far"), *known])

    def log_message(self, *_: object) -> None:
        """Print nothing about a request."""


def serve(
    listen: str = "127.0.0.1:9400", *, run: str | None = None, pages: bool = True, home: Path | None = None
) -> Dashboard:
    """Return a server that shows the runs of this user: ``serve().serve_forever()`` answers until Ctrl-C.

    ``/`` shows all runs, ``/run/NAME`` one of them, and ``/metrics`` answers Prometheus.

    Args:
        listen: ``ADDRESS:PORT``, of this machine alone where there are pages; port 0 is any that is free.
        run: only this run.
        pages: whether there are pages beside ``/metrics``.
        home: the folder of the runs' folders; absent: this user's.

    Raises:
        BadInput: the address is none, is taken, or would show pages to other machines.
    """
    address, _, port = listen.rpartition(":")
    address = address.strip("[]") or "127.0.0.1"
    if pages and not is_loopback(address):
        raise BadInput(
            f"`listen` must be an address of this machine alone, got {listen!r}: whoever can reach it sees all runs.",
            hint="listen at 127.0.0.1, and reach it from elsewhere by `ssh -L 9400:127.0.0.1:9400 HOST`",
        )
    try:
        return Dashboard((address, int(port)), KnownRuns(home=home or runs_home(), only=run), pages=pages)
    except (ValueError, OverflowError):
        raise BadInput(f"`listen` must be ADDRESS:PORT, got {listen!r}.", hint="for example 127.0.0.1:9400") from None
    except OSError as error:
        raise BadInput(
            f"nobody can listen at {listen}: {error.strerror}.", hint="name another port with `listen`"
        ) from None


Mark = tuple[tuple[int, int], ...]
"""Size and time of change of each file that the facts of a run rest on."""


@dataclass(kw_only=True)
class KnownRuns:
    """The runs under a home, as far as they were read. Several threads may ask at once.

    Attributes:
        home: the folder of their folders.
        only: the one run that is shown; absent: all are.
    """

    home: Path
    only: str | None = None
    _over: dict[str, tuple[Mark, dict[str, Any]]] = field(default_factory=dict)
    _live: dict[str, LiveRun] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def facts(self) -> list[dict[str, Any]]:
        """Return the facts of every run, newest first; what was read is not read again.

        Raises:
            BadInput: the runs cannot be listed.
        """
        with self._lock:
            return [self._facts(folder) for folder in reversed(self._folders())]

    def find(self, name: str) -> Run | None:
        """Return the run of exactly this name; None: there is none. It never becomes a path: it is looked up."""
        with self._lock:
            return next((Run.in_folder(folder) for folder in self._folders() if folder.name == name), None)

    def close(self) -> None:
        """Read nothing from here on: a thread that is reading when the process ends would abort it."""
        self._lock.acquire()

    def metrics(self) -> str:
        """Return Prometheus' text of the runs that go on, or of the only one, or else of the newest.

        Raises:
            BadInput: a log cannot be read.
        """
        with self._lock:
            facts = self.facts()
            going = [fact["run"] for fact in facts if fact["state"] in ("starting", "running")]
            names = going if going and self.only is None else [fact["run"] for fact in facts[:1]]
            exposed = []
            for folder in (folder for folder in self._folders() if folder.name in names):
                live = self._followed(folder)
                live.read()
                exposed.append((folder.name, live.progress, live.unread.lines))
            return exposition(exposed)

    def _folders(self) -> list[Path]:
        return [folder for folder in RunFolders(home=self.home).all() if self.only is None or folder.name == self.only]

    def _followed(self, folder: Path) -> LiveRun:
        if folder.name not in self._live:
            self._live[folder.name] = Run.in_folder(folder).unread()
        return self._live[folder.name]

    def _facts(self, folder: Path) -> dict[str, Any]:
        mark = _mark(folder)
        known, facts = self._over.get(folder.name, (None, None))
        if facts is not None and known == mark:
            return facts
        facts = facts_or_why(Run.in_folder(folder), self._followed)
        if facts["state"] in status_document.OVER:
            self._over[folder.name] = (mark, facts)
            if self.only is None:
                self._live.pop(folder.name, None)
        return facts


def _mark(folder: Path) -> Mark:
    from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE

    found = []
    for name in (EVENTS_FILE, DECISIONS_FILE, LAUNCH_FILE, STOP_FILE, SEEN_FILE):
        try:
            status = (folder / name).stat()
        except OSError:
            found.append((-1, 0))
        else:
            found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)
