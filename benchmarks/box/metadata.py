"""A server of EC2's instance metadata, version 2: tokens are required and end; notices are 404 until written."""

from __future__ import annotations

import http.server
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LONGEST_TTL_S = 21_600


@dataclass
class MetadataService:
    """The answers of a metadata service by path, which may change while it runs.

    Attributes:
        tokens: moment on the monotonic clock when each token that was given out ends.
        refused: number of requests without a valid token.
        url: address of the service.
    """

    answers: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    refused: int = 0
    url: str = ""


@contextmanager
def metadata_service(answers: dict[str, str]) -> Iterator[MetadataService]:
    """Run a metadata service on a free port of this machine inside; yield its state, which may be changed meanwhile."""
    state = MetadataService(answers=dict(answers))
    server = _server(state)
    state.url = "http://{}:{}".format(*server.server_address)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _server(state: MetadataService) -> http.server.ThreadingHTTPServer:
    """Return a server of EC2's metadata protocol on a free port, which answers only by a valid token."""

    class Handler(http.server.BaseHTTPRequestHandler):
        """Handler of requests for a token or, with a valid one, for an answer of ``state``."""

        def do_PUT(self) -> None:
            """Give a token for the seconds that are asked for; 400 for another path or a time that EC2 refuses."""
            ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if self.path != "/latest/api/token" or not ttl.isdigit() or not 1 <= int(ttl) <= _LONGEST_TTL_S:
                return self._answer(400, "")
            token = secrets.token_urlsafe(8)
            state.tokens[token] = time.monotonic() + int(ttl)
            return self._answer(200, token)

        def do_GET(self) -> None:
            """Answer by a valid token: 401 without one (counted), 404 where there is no answer."""
            until = state.tokens.get(self.headers.get("X-aws-ec2-metadata-token", ""), 0.0)
            if time.monotonic() >= until:
                state.refused += 1
                return self._answer(401, "")
            text = state.answers.get(self.path)
            return self._answer(404, "") if text is None else self._answer(200, text)

        def _answer(self, status: int, text: str) -> None:
            """Send a status and a text."""
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server
