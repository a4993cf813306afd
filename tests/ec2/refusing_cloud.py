"""A cloud that refuses: AWS's own words to the calls that a test names, over HTTP; everything else goes on to moto."""

from __future__ import annotations

import http.client
import http.server
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

_EC2 = "<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors></Response>"
_QUERY = (
    "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>"
)
_S3 = "<Error><Code>{code}</Code><Message>{message}</Message></Error>"
_FLEET = (
    '<CreateFleetResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><fleetId>fleet-0</fleetId>'
    "<errorSet><item><errorCode>{code}</errorCode><errorMessage>{message}</errorMessage><lifecycle>spot</lifecycle>"
    "</item></errorSet></CreateFleetResponse>"
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What a call is answered.

    Attributes:
        call: the API's action, or the method for S3.
        inside: of an answer that is no error itself, as fleets' are.
    """

    call: str
    status: int
    code: str
    message: str = "as the test wants it"
    inside: bool = False

    def body(self) -> bytes:
        """As the service writes it."""
        form = _FLEET if self.inside else _QUERY if self.call == "GetCallerIdentity" else _EC2
        if self.call.isupper():
            form = _S3
        return form.format(code=self.code, message=self.message).encode()


@contextmanager
def refusing_cloud(moto_url: str, refusal: Refusal) -> Iterator[str]:
    """The address of a cloud that refuses one call."""
    where = urllib.parse.urlsplit(moto_url)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            action = urllib.parse.parse_qs(body.decode("latin-1")).get("Action", [self.command])[0]
            if action == refusal.call:
                # S3 names the bucket's region with whatever it refuses.
                self._answer(refusal.status, {"x-amz-bucket-region": "eu-west-1"}, refusal.body())
                return
            onward = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
            onward.request(self.command, self.path, body or None, dict(self.headers))
            answer = onward.getresponse()
            self._answer(answer.status, dict(answer.headers), answer.read())
            onward.close()

        def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "date", "server", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            self._pass()

        def do_POST(self) -> None:
            self._pass()

        def do_PUT(self) -> None:
            self._pass()

        def do_HEAD(self) -> None:
            self._pass()

        def do_DELETE(self) -> None:
            self._pass()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
