"""`hetopt.serve`: a server on this machine that shows its runs, and tells Prometheus of them. It changes nothing.

It answers only what asks for this machine by one of its own names, so that no page of the web can read it by a name
that leads here (DNS rebinding). Names of runs are looked up, never joined to a path. Pages may run one script, which is
known by its hash, and load nothing: text of a log that got into one as markup could do neither.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hetopt.api.known_runs import KnownRuns
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.listening import is_loopback
from hetopt.core.run_folder import runs_home
from hetopt.reports import cursor, dashboard
from hetopt.reports.dashboard import MOST_COMPARED, NOT_READ
from hetopt.reports.scalars import CONTENT_TYPE

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
        """Where it answers."""
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
        """One sentence, as a page where a person may be reading."""
        if not self.server.pages or self.path.startswith("/metrics"):
            return PLAIN, f"{text}\n"
        return HTML, dashboard.message("hetopt", text)

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
            told = runs.summaries()
            unread = sum(one.state == NOT_READ for one in told)
            return HTML, dashboard.overview(told, now_s=time.time(), unread=unread)
        if path == "/compare":
            return HTML, self._compared(parse_qs(asked.query).get("run", []))
        if path == "/favicon.ico":
            return PLAIN, ""  # every browser asks for it, and complains where there is none
        if path.startswith("/run/"):
            return HTML, self._run(path.removeprefix("/run/"))
        raise Answer(HTTPStatus.NOT_FOUND, "see / and /metrics")

    def _compared(self, names: list[str]) -> str:
        told = {one.run: one for one in self.server.runs.summaries()}
        chosen = [told[name] for name in dict.fromkeys(names) if name in told]
        if not 2 <= len(chosen) <= MOST_COMPARED:
            return dashboard.message("Compare", f"Choose two to {MOST_COMPARED} runs in the list of all runs.")
        return dashboard.compare(chosen)

    def _run(self, name: str) -> str:
        run = self.server.runs.find(name)
        if run is None:
            raise Answer(HTTPStatus.NOT_FOUND, "there is no such run")
        try:
            return run.html()
        except BadInput:  # no step yet, or nothing was predicted: what is known is told
            known = next(one for one in self.server.runs.summaries() if one.run == name)
            return dashboard.brief(known, now_s=time.time())

    def log_message(self, *_: object) -> None:
        """Print nothing about a request."""


def serve(
    listen: str = "127.0.0.1:9400", *, run: str | None = None, pages: bool = True, home: Path | None = None
) -> Dashboard:
    """A server that shows the runs of this user: ``serve().serve_forever()`` answers until Ctrl-C.

    ``/`` shows all runs, ``/run/NAME`` one of them, ``/compare?run=A&run=B`` some side by side, and ``/metrics``
    answers Prometheus.

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
