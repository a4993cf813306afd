"""Download of a public file in pieces, without keeping it.

A connection that breaks is made again, and the file read from its start. Only https, or http on this machine; a
redirect stays on its host; every size is bounded.
"""

from __future__ import annotations

import codecs
import datetime
import email.utils
import gzip
import http.client
import ipaddress
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.paths import parse_json
from hetopt.core.plain_text import one_line

PIECE_BYTES = 1 << 18
TIMEOUT_S = 30.0
"""Seconds without a byte after which a connection counts as broken."""
TRIES = 4
"""Number of tries to read a file; between them 1, 2 and 4 seconds pass."""
LARGEST_RATIO = 200
"""Largest ratio of a packed file's unpacked size to what is sent: deflate cannot do better than 1,032, price lists have
about 20."""

_BEHIND_A_PROXY = "sign in to the network with a browser, or name its proxy in HTTPS_PROXY"

Progress = Callable[[int, int | None], None]
Made = TypeVar("Made")


class _Broken(Exception):
    """A connection that ended before the file did."""


class _SameHost(urllib.request.HTTPRedirectHandler):
    """A redirect handler that follows redirects on the host that was asked, and refuses others."""

    def redirect_request(
        self, request: urllib.request.Request, file: Any, code: int, text: str, headers: Any, target: str
    ) -> urllib.request.Request | None:
        same = urlsplit(target)[:2] == urlsplit(request.full_url)[:2]
        return super().redirect_request(request, file, code, text, headers, target) if same else None


def fetched(
    url: str, make: Callable[[Iterator[bytes]], Made], *, most_bytes: int, progress: Progress = lambda done, total: None
) -> tuple[Made, datetime.date | None]:
    """Download a file; return the result of ``make``, and the day of the file's last change (None: not said).

    A connection that breaks on the way is made again, after 1, 2 and 4 seconds; an answer that refuses is final.

    Args:
        url: url of the file.
        make: parses the file's pieces, which must be read to the end; called anew for each try. Errors of the call go
            through.
        most_bytes: most bytes of the file, unpacked.
        progress: is called with the bytes received so far, and with the bytes of the file (None: unknown).

    Raises:
        BadInput: the address may not be used (see `checked`), or the file is too large or cannot be unpacked.
        CloudRefused: the server cannot be reached or answers with an error, or every try broke off.
    """
    for attempt in range(TRIES):
        try:
            with _asked(url) as answer:
                content = make(_pieces(answer, url, most_bytes, progress))
                return content, _http_day(answer.headers.get("Last-Modified") or "")
        except _Broken:
            time.sleep(2.0**attempt if attempt + 1 < TRIES else 0.0)
    raise CloudRefused(
        f"The connection ended in the middle of {url}.",
        hint="look at the network connection, then run it again",
    )


def _asked(url: str) -> Any:
    """Return the server's answer to a request for the file at a URL.

    Raises:
        BadInput: the address may not be used.
        CloudRefused: the server cannot be reached, or answers with an error.
        _Broken: the connection ended before the answer came.
    """
    headers = {"User-Agent": "hetopt", "Accept-Encoding": "gzip"}
    # What goes to this machine takes no proxy; for the rest urllib finds them where every tool has them.
    proxies: dict[str, str] | None = {} if url.startswith("http://") else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _SameHost)
    try:
        return opener.open(urllib.request.Request(checked(url), headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        hint = _BEHIND_A_PROXY if error.code // 100 == 3 else "wait a minute, then run it again"
        hint = "look whether hetopt is the newest" if error.code in (403, 404) else hint
        raise CloudRefused(f"{url} was answered with {error.code}.", hint=hint) from None
    except http.client.HTTPException:
        raise _Broken from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise CloudRefused(
            f"{url} cannot be reached ({getattr(reason, 'strerror', None) or type(reason).__name__}).",
            hint="look at the network connection, HTTPS_PROXY and SSL_CERT_FILE, then run it again",
        ) from None


def _pieces(answer: Any, url: str, most_bytes: int, progress: Progress) -> Iterator[bytes]:
    """Yield the unpacked pieces of a server's answer, reporting ``progress``.

    Raises:
        BadInput: the file is larger than ``most_bytes``, or cannot be unpacked.
        _Broken: the connection ended before the file did.
    """
    length = answer.headers.get("Content-Length") or ""
    total = int(length) if length.isdecimal() and len(length) <= 15 else None
    packed = str(answer.headers.get("Content-Encoding") or "identity").lower() != "identity"
    stream, seen = gzip.GzipFile(fileobj=answer) if packed else answer, 0
    try:
        while piece := stream.read1(PIECE_BYTES):
            seen += len(piece)
            sent = seen if total is None else total - (answer.length or 0)
            progress(sent, total)
            if seen > most_bytes or (packed and seen > LARGEST_RATIO * (sent + PIECE_BYTES)):
                raise BadInput(
                    f"{url} is larger than the {most_bytes / 1e6:,.0f} MB that such a file can have.",
                    hint="look whether a proxy answers in its place",
                )
            yield piece
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadInput(f"{url} cannot be unpacked: {error}.", hint="run it again") from None
    except (EOFError, OSError, http.client.HTTPException):
        raise _Broken from None
    if answer.length:
        raise _Broken


def checked(url: str) -> str:
    """Return the URL unchanged if it may be downloaded from: https, or http on this machine; else raise BadInput.

    Raises:
        BadInput: the address is of another kind, has no host, or holds a user's name.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    allowed = parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))
    if host and "@" not in parts.netloc and allowed:
        return url
    raise BadInput(f"{one_line(url[:120])} is no https address.", hint="name one, or http on this machine")


def json_of(pieces: Iterator[bytes], origin: str) -> Any:
    """Return the JSON value in the pieces of a downloaded file.

    Args:
        pieces: pieces of the file, in order; read to the end.
        origin: URL of the file, for errors.

    Raises:
        BadInput: the pieces are no JSON, not UTF-8, or a web page.
    """
    content = b"".join(pieces)
    if is_page(content):
        raise web_page(origin)
    try:
        return parse_json(content.decode("utf-8-sig"), origin=origin, hint="run it again")
    except UnicodeDecodeError:
        raise BadInput(f"{origin} is not UTF-8 text.", hint="run it again") from None


def is_page(content: bytes) -> bool:
    """Return whether a file's bytes begin with '<', as a web page does and prices do not."""
    return content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"<"


def web_page(origin: str) -> BadInput:
    """Return, not raise, the error of a web page where prices should be; ``origin``: its URL."""
    return BadInput(f"{origin} is a web page and no prices: a proxy's login page, most likely.", hint=_BEHIND_A_PROXY)


def _is_loopback(host: str) -> bool:
    """Return whether a host of a URL is a loopback address, or localhost; other names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _http_day(text: str) -> datetime.date | None:
    """Return the day of an HTTP date such as a header has; None: the text is no date."""
    try:
        return email.utils.parsedate_to_datetime(text).date() if text.isascii() and text.isprintable() else None
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
