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
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hetopt.api.run import Run
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.events.log import DECISIONS_FILE, EVENTS_FILE
from hetopt.core.listening import is_loopback
from hetopt.core.run_folder import STOP_FILE, RunFolders, runs_home
from hetopt.optimizer.launch_record import LAUNCH_FILE
from hetopt.reports import cursor, dashboard
from hetopt.reports.dashboard import MOST_COMPARED, NOT_READ
from hetopt.reports.live_run import LiveRun, RunSummary
from hetopt.reports.scalars import CONTENT_TYPE, Exposed, exposition

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


WITHIN_S = 0.5
"""For which a look waits for logs that were not read before; the rest is read meanwhile."""

UNREADABLE = "unreadable"

Mark = tuple[tuple[int, int], ...]
"""Size and time of change of each file that a summary rests on."""


@dataclass(kw_only=True)
class KnownRuns:
    """The runs under a home, as far as they were read. Several threads may ask at once.

    Attributes:
        home: the folder of their folders.
        only: the one run that is shown; absent: all are.
        clock: seconds since the epoch.
    """

    home: Path
    only: str | None = None
    clock: Callable[[], float] = time.time
    _over: dict[str, tuple[Mark, RunSummary]] = field(default_factory=dict)
    _live: dict[str, LiveRun] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _reading: threading.Thread | None = None
    _is_closed: bool = False

    def summaries(self, *, within_s: float = WITHIN_S) -> list[RunSummary]:
        """Every run, newest first; those whose logs could not be read in time say so, and are read meanwhile.

        Raises:
            BadInput: the runs cannot be listed.
        """
        with self._lock:
            until_s = time.monotonic() + within_s
            told = [self._summary(folder, until_s) for folder in reversed(self._folders())]
            if any(one.state == NOT_READ for one in told) and self._reading is None:
                self._reading = threading.Thread(target=self._read_on, daemon=True)
                self._reading.start()
            return told

    def find(self, name: str) -> Run | None:
        """The run of exactly this name; None: there is none. The name never becomes a path: it is looked up."""
        with self._lock:
            for folder in self._folders():
                if folder.name == name:
                    return Run.in_folder(folder)
        return None

    def close(self) -> None:
        """Nothing is read from here on: a thread that is reading when the process ends would abort it."""
        self._is_closed = True
        self._lock.acquire()

    def metrics(self) -> str:
        """Prometheus' text of the runs that go on, or of the only one, or else of the newest.

        Raises:
            BadInput: a log cannot be read.
        """
        with self._lock:
            told = self.summaries()
            going = [one.run for one in told if not one.is_over and one.state not in (NOT_READ, UNREADABLE)]
            names = going if going and self.only is None else [one.run for one in told[:1]]
            folders = {folder.name: folder for folder in self._folders()}
            return exposition([self._exposed(folders[name]) for name in reversed(names)])

    def _folders(self) -> list[Path]:
        return [folder for folder in RunFolders(home=self.home).all() if self.only is None or folder.name == self.only]

    def _exposed(self, folder: Path) -> Exposed:
        live = self._followed(folder)
        live.read()
        return Exposed(name=folder.name, run=live.progress, unread=live.unread.lines)

    def _followed(self, folder: Path) -> LiveRun:
        if folder.name not in self._live:
            self._live[folder.name] = LiveRun.of(folder, Run.in_folder(folder).launch)
        return self._live[folder.name]

    def _summary(self, folder: Path, until_s: float) -> RunSummary:
        name = folder.name
        mark = _mark(folder)
        known, summary = self._over.get(name, (None, None))
        if summary is not None and known == mark:
            return summary
        try:
            summary = self._read(folder, until_s)
        except HetoptError as error:
            return RunSummary(run=name, state=UNREADABLE, reason=error.message)
        except OSError as error:
            return RunSummary(run=name, state=UNREADABLE, reason=f"it cannot be read: {error.strerror}")
        if summary.is_over:
            self._over[name] = (mark, summary)
            if self.only is None:
                self._live.pop(name, None)
        return summary

    def _read(self, folder: Path, until_s: float) -> RunSummary:
        name = folder.name
        if time.monotonic() > until_s and name not in self._live:
            return RunSummary(run=name, state=NOT_READ)
        run, live = Run.in_folder(folder), self._followed(folder)
        while live.read_some():
            if time.monotonic() > until_s:
                return RunSummary(run=name, state=NOT_READ)
        rented_usd, is_estimate = None, False
        if live.launch is not None and live.launch.on == "ec2":
            from hetopt.api.account import look

            status, rental = look(run, ask=False)
            rented_usd, is_estimate = float(rental["spent_usd"]), bool(rental["spent_is_estimate"])
        else:
            status = run.status()
        told = live.summary(name, status.state.value, now_s=self.clock(), reason=status.reason, rented_usd=rented_usd)
        return told.model_copy(update={"usd_is_estimate": is_estimate}) if is_estimate else told

    def _read_on(self) -> None:
        """Until every log was read once."""
        unread = True
        while unread and not self._is_closed:
            try:
                with self._lock:
                    unread = any(one.state == NOT_READ for one in self.summaries(within_s=WITHIN_S / 2))
            except BadInput:  # whoever looks next is told
                break
            time.sleep(0.01)  # others may ask in between
        self._reading = None


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
