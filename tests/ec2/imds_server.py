"""A metadata service as EC2's: tokens are required and end, and notices are 404 until they are scripted."""

from __future__ import annotations

import http.server
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class ImdsServer:
    """What the service answers, by path; may change while it runs."""

    answers: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    refused: int = 0
    url: str = ""


@contextmanager
def imds_server(answers: dict[str, str]) -> Iterator[ImdsServer]:
    """The service on a port of this machine."""
    state = ImdsServer(answers=dict(answers))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            if self.path != "/latest/api/token" or ttl is None or not 1 <= int(ttl) <= 21600:
                return self._answer(400, "")
            token = secrets.token_urlsafe(8)
            state.tokens[token] = time.monotonic() + int(ttl)
            return self._answer(200, token)

        def do_GET(self) -> None:
            until = state.tokens.get(self.headers.get("X-aws-ec2-metadata-token", ""), 0.0)
            if time.monotonic() >= until:
                state.refused += 1
                return self._answer(401, "")
            text = state.answers.get(self.path)
            return self._answer(404, "") if text is None else self._answer(200, text)

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
