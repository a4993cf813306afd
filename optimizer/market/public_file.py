"""Fetches a public file: as it comes, only if it has changed, and on from where an earlier try was interrupted.

A file of hundreds of megabytes goes through in pieces: whoever reads it gets each as it arrives, and it is appended to
a partial file meanwhile. An interrupted try is gone on with by the next one (``Range`` with ``If-Range``, RFC 9110
section 13.1.5), and what was made of a file that has not changed since is used again (``If-None-Match``). Only https,
or http on this machine; a redirect stays on its host; every size is bounded.
"""

from __future__ import annotations

import codecs
import contextlib
import datetime
import email.utils
import http.client
import ipaddress
import json
import re
import ssl
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar
from urllib.parse import urljoin, urlsplit

from hetopt.core.artifact import write_atomically
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.paths import inside
from hetopt.core.plain_text import one_line
from hetopt.core.reading import parse_json, read_json

PIECE_BYTES = 1 << 18
TIMEOUT_S = 30.0
"""Without a byte."""
TRIES = 4
"""In a row without a byte; between them 1, 2 and 4 seconds."""
MOST_REDIRECTS = 3
LARGEST_RATIO = 200
"""Of a packed file's size to what is sent: deflate cannot do better than 1,032, price lists have about 20."""

_ETAG = re.compile(r'(W/)?"[\x21\x23-\x7e]{0,200}"')
_GZIP = zlib.MAX_WBITS | 16
_AGAIN = "run it again: what was read is kept, and it goes on from there"


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What was made of a file.

    Attributes:
        made: by whoever read it: something that JSON can hold.
        day: when the server says that the file was changed last; where it does not say, when it was read.
    """

    made: Any
    day: datetime.date


@dataclass(frozen=True, kw_only=True)
class _State:
    """Which version of a file something belongs to."""

    url: str
    etag: str
    last_modified: str
    packed: bool

    @property
    def validator(self) -> str:
        """What ``If-Range`` may name: a strong ETag, or else the date; '' where the server gave neither."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.last_modified


class _Changed(Exception):
    """The file became another one between two pieces."""


class _AsAnswered(urllib.request.HTTPErrorProcessor):
    """Leaves redirects, 304 and errors to whoever asked."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response


class PublicFiles:
    """Public files, and what was made of them, under one folder.

    Args:
        folder: of what is kept.
        now: to date what is read.
    """

    schema_version: ClassVar[int] = 1

    def __init__(self, folder: Path, now: datetime.datetime) -> None:
        self.folder = folder
        self._now = now

    def fetch(
        self,
        name: str,
        url: str,
        make: Callable[[Iterator[bytes]], Any],
        *,
        most_bytes: int,
        told: Callable[[int, int | None], None] = lambda done, total: None,
    ) -> Fetched:
        """Read a file, unless what was made of it earlier still holds.

        Args:
            name: under which it is kept.
            url: https, or http on this machine.
            make: reads the pieces, unpacked, and makes something that JSON can hold.
            most_bytes: that the file may have, unpacked.
            told: is told how many bytes are there, and of how many (absent: unknown).

        Raises:
            CloudRefused: the file cannot be had; what came of it so far is kept.
            BadInput: it is not what it should be (as ``make`` says).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.kept(name, url)
        for _ in range(TRIES):
            transfer = _Transfer(self._path(name, "part"), url, kept and kept[1], most_bytes, told)
            try:
                with transfer:
                    if transfer.unchanged and kept:
                        return Fetched(made=kept[0].made, day=self._day(kept[1]))
                    made = make(transfer.pieces())
                    transfer.finish()
            except _Changed:
                continue
            except BadInput:  # what cannot be used is no beginning of anything
                transfer.discard()
                raise
            except OSError as error:  # those of the network are sentences by now
                raise BadInput(
                    f"{self.folder} cannot be written: {error.strerror}.", hint=f"make room on the disk, then {_AGAIN}"
                ) from None
            record = {
                "schema_version": self.schema_version,
                "url": url,
                "etag": transfer.state.etag,
                "last_modified": transfer.state.last_modified,
                "read": self._now.isoformat(),
                "made": made,
            }
            write_atomically(self._path(name, "json"), json.dumps(record) + "\n")
            transfer.discard()
            return Fetched(made=made, day=self._day(transfer.state))
        raise CloudRefused(f"{url} changed again and again while it was read.", hint="run it again later")

    def kept(self, name: str, url: str) -> tuple[Fetched, _State] | None:
        """What was made of a file when it was read last, and of which version of it."""
        with contextlib.suppress(BadInput, ValueError, TypeError, KeyError):
            record = read_json(self._path(name, "json"))
            if record["schema_version"] == self.schema_version and record["url"] == url:
                state = _State(
                    url=url, etag=str(record["etag"]), last_modified=str(record["last_modified"]), packed=False
                )
                read = datetime.datetime.fromisoformat(record["read"]).date()
                day = _http_day(state.last_modified) or read
                return Fetched(made=record["made"], day=day), state
        return None

    def _day(self, state: _State) -> datetime.date:
        return _http_day(state.last_modified) or self._now.date()

    def _path(self, name: str, suffix: str) -> Path:
        return inside(self.folder, f"{name}.{suffix}", what="file")


class _Transfer:
    """One file on its way: the part that is there already, and what the server sends."""

    def __init__(
        self,
        part: Path,
        url: str,
        kept: _State | None,
        most_bytes: int,
        told: Callable[[int, int | None], None],
    ) -> None:
        self._part = part
        self._note = part.with_suffix(".part.json")
        self._url = url
        self._kept = kept
        self._most_bytes = most_bytes
        self._told = told
        self._answer: Any = None
        self._stream: IO[bytes] | None = None
        self._size = 0
        self._total: int | None = None
        self.unchanged = False
        self.state = _State(url=url, etag="", last_modified="", packed=False)

    def __enter__(self) -> _Transfer:
        begun = self._begun()
        if begun is not None:
            self.state, self._size = begun, self._part.stat().st_size
        self._open()
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        if self._stream is not None:
            self._stream.close()

    def discard(self) -> None:
        """Forget the part."""
        self._part.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def pieces(self) -> Iterator[bytes]:
        """The file from its first byte, unpacked."""
        if not self.state.packed:
            yield from self._bounded(self._sent())
            return
        yield from self._bounded(self._unpacked())

    def finish(self) -> None:
        """Hold what came against what was announced.

        Raises:
            BadInput: whoever read the file did not want all of it.
        """
        if self._total is not None and self._size != self._total:
            raise BadInput(f"{self._url} has {self._total:,} bytes, of which {self._size:,} were read.", hint=_AGAIN)

    def _unpacked(self) -> Iterator[bytes]:
        unpack = zlib.decompressobj(wbits=_GZIP)
        try:
            for piece in self._sent():
                rest = piece
                while rest:
                    if unpack.eof:  # gzip files may follow one another in one
                        unpack = zlib.decompressobj(wbits=_GZIP)
                    yield unpack.decompress(rest, PIECE_BYTES)
                    rest = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
            yield unpack.flush()
        except zlib.error as error:
            raise BadInput(f"{self._url} cannot be unpacked: {error}.", hint="run it again") from None
        if not unpack.eof:
            raise BadInput(f"{self._url} ends in the middle of what was packed.", hint="run it again")

    def _bounded(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        seen = 0
        for piece in pieces:
            seen += len(piece)
            if seen > self._most_bytes or (self.state.packed and seen > LARGEST_RATIO * (self._size + PIECE_BYTES)):
                raise BadInput(
                    f"{self._url} is larger than the {self._most_bytes / 1e6:,.0f} MB that such a file can have.",
                    hint="look whether a proxy answers in its place",
                )
            yield piece

    def _sent(self) -> Iterator[bytes]:
        """What is on the disk, then what comes; a connection that breaks is made again, from the byte it broke at."""
        if self._size:
            with self._part.open("rb") as before:
                while piece := before.read(PIECE_BYTES):
                    yield piece
        self._stream = self._part.open("ab")
        idle = 0
        while self._total is None or self._size < self._total:
            try:
                piece = self._answer.read(PIECE_BYTES) if self._answer else b""
            except (OSError, http.client.HTTPException):
                piece = b""
                self._close()
            if piece:
                idle = 0
                self._stream.write(piece)
                self._size += len(piece)
                self._told(self._size, self._total)
                yield piece
            elif self._answer is not None and self._total is None:
                break  # it was sent without a length, and is over
            else:
                idle += 1
                if idle >= TRIES:
                    of = "" if self._total is None else f" of {self._total / 1e6:,.1f}"
                    raise CloudRefused(
                        f"{_host(self._url)} stopped sending after {self._size / 1e6:,.1f}{of} MB of {self._url}.",
                        hint=f"look at the network connection, then {_AGAIN}",
                    )
                self._stream.flush()
                self._close()
                time.sleep(2.0 ** (idle - 1))
                with contextlib.suppress(CloudRefused):
                    self._open(again=True)

    def _open(self, *, again: bool = False) -> None:
        """Ask for what is missing.

        Raises:
            _Changed: the file became another one, and what was read of it belongs to the old one.
            CloudRefused: it cannot be had.
        """
        headers = {"User-Agent": "hetopt", "Accept-Encoding": "gzip"}
        if self._size:
            headers |= {"Range": f"bytes={self._size}-", "If-Range": self.state.validator}
            if not self.state.packed:
                headers["Accept-Encoding"] = "identity"
        elif self._kept is not None and self._kept.etag:
            headers["If-None-Match"] = self._kept.etag
        elif self._kept is not None and self._kept.last_modified:
            headers["If-Modified-Since"] = self._kept.last_modified
        answer = self._asked(headers)
        status = answer.status
        if status == 206 and self._continues(answer):
            self._answer = answer
            return
        if status == 416 and answer.headers.get("Content-Range") == f"bytes */{self._size}":
            answer.close()
            self._total = self._size  # all of it was there
            return
        if status in (206, 416) or (status == 200 and again and self._size):
            answer.close()
            self.discard()
            raise _Changed
        if status == 304 and self._kept is not None:
            answer.close()
            self.unchanged = True
            return
        if status != 200:
            answer.close()
            raise self._refused(status)
        self.state = _State(
            url=self._url,
            etag=_etag(answer.headers.get("ETag")),
            last_modified=_http_date(answer.headers.get("Last-Modified")),
            packed=self._packing(answer),
        )
        self._size, self._total = 0, _length(answer.headers.get("Content-Length"))
        self._note.unlink(missing_ok=True)  # first: an old part never stands beside the note of a new file
        if self._stream is None:
            self._part.unlink(missing_ok=True)
        else:
            self._stream.truncate(0)
        if self.state.validator:
            note = {"url": self._url, "etag": self.state.etag, "last_modified": self.state.last_modified}
            write_atomically(self._note, json.dumps({**note, "packed": self.state.packed}) + "\n")
        self._answer = answer

    def _continues(self, answer: Any) -> bool:
        """Whether a partial answer begins where the part ends; sets the size of the whole."""
        found = re.fullmatch(r"bytes (\d{1,15})-\d{1,15}/(\d{1,15})", answer.headers.get("Content-Range") or "")
        if found is None or int(found.group(1)) != self._size or self._packing(answer) != self.state.packed:
            return False
        self._total = int(found.group(2))
        return True

    def _packing(self, answer: Any) -> bool:
        """Whether the answer is packed by gzip.

        Raises:
            CloudRefused: it is packed otherwise, or it is a page for people.
        """
        kind = str(answer.headers.get("Content-Type") or "").lower()
        if kind.startswith(("text/html", "application/xhtml")):
            answer.close()
            raise CloudRefused(
                f"{self._url} was answered with a web page in place of prices: a proxy's login page, most likely.",
                hint="sign in to the network with a browser, or name its proxy in HTTPS_PROXY",
            )
        coding = str(answer.headers.get("Content-Encoding") or "identity").lower()
        if coding not in ("identity", "gzip", "x-gzip"):
            answer.close()
            raise CloudRefused(
                f"{self._url} was answered in the encoding {one_line(coding[:40])!r}, which was not asked for.",
                hint="look whether a proxy answers in its place",
            )
        return coding != "identity"

    def _asked(self, headers: dict[str, str]) -> Any:
        """The answer to a request, after redirects on the same host.

        Raises:
            CloudRefused: nobody answers, or a redirect leads elsewhere.
        """
        url = self._url
        for _ in range(MOST_REDIRECTS + 1):
            request = urllib.request.Request(checked(url), headers=headers)
            # What goes to this machine takes no proxy; for the rest urllib finds them where every tool has them.
            proxies: dict[str, str] | None = {} if url.startswith("http://") else None
            opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _AsAnswered)
            try:
                answer = opener.open(request, timeout=TIMEOUT_S)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from None
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            answer.close()
            target = urljoin(url, str(answer.headers.get("Location") or ""))
            if urlsplit(target)[:2] != urlsplit(self._url)[:2]:
                raise CloudRefused(
                    f"{self._url} leads on to another place, {one_line(target[:120])}, which is not followed.",
                    hint="sign in to the network with a browser, or name its proxy in HTTPS_PROXY",
                )
            url = target
        raise CloudRefused(f"{self._url} leads on and on.", hint="run it again later")

    def _unreachable(self, error: Exception) -> CloudRefused:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return CloudRefused(
                f"{_host(self._url)} shows a certificate that this machine does not trust.",
                hint="name the certificates of the network's proxy in SSL_CERT_FILE",
            )
        why = getattr(reason, "strerror", None) or type(reason).__name__
        return CloudRefused(
            f"{_host(self._url)} cannot be reached ({why}).",
            hint=f"look at the network connection and HTTPS_PROXY, then {_AGAIN}",
        )

    def _refused(self, status: int) -> CloudRefused:
        if status in (403, 404):
            return CloudRefused(f"{self._url} is not there ({status}).", hint="look whether hetopt is the newest")
        return CloudRefused(f"{self._url} was answered with {status}.", hint=f"wait a minute, then {_AGAIN}")

    def _begun(self) -> _State | None:
        """The version of the file that the part is of, if it can be gone on with."""
        with contextlib.suppress(BadInput, OSError, KeyError, TypeError):
            note = read_json(self._note)
            state = _State(
                url=str(note["url"]),
                etag=_etag(note["etag"]),
                last_modified=_http_date(note["last_modified"]),
                packed=note["packed"] is True,
            )
            if state.url == self._url and state.validator and self._part.stat().st_size:
                return state
        self.discard()
        return None

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None


def checked(url: str) -> str:
    """The address, if it may be asked: https, or http on this machine.

    Raises:
        BadInput: it may not.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    allowed = parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))
    if host and "@" not in parts.netloc and allowed:
        return url
    raise BadInput(f"{one_line(url[:120])} is no https address.", hint="name one, or http on this machine")


def whole(pieces: Iterator[bytes], origin: str) -> Any:
    """All pieces as JSON.

    Raises:
        BadInput: they are none, or a page for people.
    """
    content = b"".join(pieces)
    if is_page(content):
        raise web_page(origin)
    try:
        return parse_json(content.decode("utf-8-sig"), origin=origin, hint="run it again")
    except UnicodeDecodeError:
        raise BadInput(f"{origin} is not UTF-8 text.", hint="run it again") from None


def is_page(content: bytes) -> bool:
    """Whether it begins as a page for people does."""
    return content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"<"


def web_page(origin: str) -> BadInput:
    """The error of a page where prices should be."""
    return BadInput(
        f"{origin} is a web page and no prices: a proxy's login page, most likely.",
        hint="sign in to the network with a browser, or name its proxy in HTTPS_PROXY",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host(url: str) -> str:
    return urlsplit(url).hostname or url


def _etag(text: object) -> str:
    """An ETag that may be sent back; '' for anything else."""
    return text if isinstance(text, str) and _ETAG.fullmatch(text) else ""


def _http_date(text: object) -> str:
    """A date of HTTP that may be sent back; '' for anything else."""
    return text if isinstance(text, str) and len(text) < 60 and _http_day(text) else ""


def _http_day(text: str) -> datetime.date | None:
    try:
        return email.utils.parsedate_to_datetime(text).date() if text.isascii() and text.isprintable() else None
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _length(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) <= 15 else None
