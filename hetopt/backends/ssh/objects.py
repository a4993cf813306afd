"""The objects of a run in its folder on the launching machine, and how a host reaches them by its connection.

They take the place of the bucket of rented machines: the launching machine answers requests, one at a time for each
host. A request and its answer are a frame each: two lengths, a line of JSON, and bytes.
"""

from __future__ import annotations

import hashlib
import io
import os
import select
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field

from hetopt.backends.host.protocol import OUTCOME_OBJECT, GoesOn, Objects, Versioned
from hetopt.core.artifact import Record, parse_from_peer
from hetopt.core.errors import BadInput
from hetopt.core.paths import LONGEST_NAME_BYTES, inside, shown
from hetopt.core.run_folder import LOG_FOLDER, MODEL_NAMES, OUTPUT_FOLDER

Place = Literal["objects", "models"]
OBJECTS: Place = "objects"
MODELS: Place = "models"
"""Names of the two places of a run's objects: `OBJECTS`, what steers the run, and this one, what the run leaves."""

SILENCE_S = 60.0
"""Seconds after which a host that gets no answer is cut off: the launching machine answers at once, or is gone."""

PART_BYTES = 4 * 2**20
MOST_HEADER = 2**16
MOST_BODY = 2**28
"""Largest body of a frame in bytes; the largest are events that a host could not send for a while, as files go in
parts."""
_LENGTHS = struct.Struct("!IQ")
_PARTIAL = ".partial"


class Cut(SystemExit):
    """The exit of a host's process whose connection to the launching machine is cut: nothing is left to do.

    As a SystemExit it ends the process where nobody catches it.
    """


class ObjectsInParts(Objects, ABC):
    """The base of object stores that read and write whole objects by a subclass's `part` and `put_part`."""

    @abstractmethod
    def part(self, name: str, offset: int) -> tuple[bytes, int] | None:
        """Return up to 4 MiB of an object from byte ``offset`` on, and the object's size in bytes; None: absent."""

    @abstractmethod
    def put_part(self, name: str, offset: int, data: bytes, *, last: bool) -> bool:
        """Write an object's part at byte ``offset``; return whether that succeeded.

        Args:
            name: name of the object.
            offset: bytes that were written before; parts come in order, from 0.
            data: the part.
            last: whether it is the last, which makes the object appear.
        """

    def versioned(self, name: str) -> Versioned | None:
        """Return the bytes under a name with their SHA-256 as version; None: there are none."""
        stream = io.BytesIO()
        if not self._read_into(stream, name):
            return None
        return Versioned(data=stream.getvalue(), version=hashlib.sha256(stream.getvalue()).hexdigest())

    def put(self, name: str, data: bytes) -> bool:
        """Write bytes under a name; return whether that succeeded."""
        return self.put_part(name, 0, data, last=True)

    def send(self, name: str, path: Path) -> bool:
        """Write a file under a name, in parts of 4 MiB; return whether that succeeded.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return all(
                self.put_part(name, offset, stream.read(PART_BYTES), last=offset + PART_BYTES >= size)
                for offset in range(0, max(1, size), PART_BYTES)
            )

    def fetch(self, name: str, path: Path) -> bool:
        """Read an object into the file ``path``, whole or not at all; return whether that succeeded."""
        partial = _partial(path)
        with partial.open("wb") as stream:
            is_whole = self._read_into(stream, name)
        if is_whole:
            os.replace(partial, path)
        else:
            partial.unlink()
        return is_whole

    def download(self, url: str, folder: Path, goes_on: GoesOn) -> bool:
        """Refuse to download: a host of the user's own reads no bucket.

        Raises:
            BadInput: always.
        """
        raise BadInput(
            f"{url} is in a bucket, which hosts of your own do not read.", hint="give a folder that they have"
        )

    def _read_into(self, stream: BinaryIO, name: str) -> bool:
        """Append an object to a stream, part by part; return whether it was read to its end."""
        while (read := self.part(name, stream.tell())) is not None:
            stream.write(read[0])
            if not read[0] or stream.tell() >= read[1]:
                return True
        return False


@dataclass(frozen=True, kw_only=True)
class FolderObjects(ObjectsInParts):
    """The objects of a run as files of a folder on the launching machine.

    Attributes:
        folder: folder in which an object's name is a file's path; files that end in ``.partial`` are no objects yet.
    """

    folder: Path

    def path(self, name: str) -> Path:
        """Return the path of the file of the object ``name``, which must lie inside the folder.

        Raises:
            BadInput: the name is no name of a file in the folder.
        """
        return inside(self.folder, name, what="object", any_text=True)

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Write bytes if the object's version is still ``version``; return whether they were written.

        It is not atomic, so the caller holds a lock.

        Args:
            name: name of the object.
            data: new contents.
            version: SHA-256 that the object must have, as of `versioned`; None: it must be absent.

        Raises:
            BadInput: the name is no name of a file in the folder.
        """
        there = self.versioned(name)
        return (None if there is None else there.version) == version and self.put(name, data)

    def names(self, prefix: str) -> Sequence[str]:
        """Return the sorted names of all whole objects with a prefix."""
        every = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        return sorted(name for name in every if name.startswith(prefix) and not name.endswith(_PARTIAL))

    def delete(self, name: str) -> None:
        """Remove an object; an absent object is no error.

        Raises:
            BadInput: the name is no name of a file in the folder.
        """
        self.path(name).unlink(missing_ok=True)

    def put_part(self, name: str, offset: int, data: bytes, *, last: bool) -> bool:
        """Append a part to an object's partial file, which gets its name with the ``last``; return whether it worked.

        False: ``offset`` is not the size of the partial file.

        Args:
            name: name of the object.
            offset: bytes that were written before; 0 begins anew.
            data: the part.
            last: whether it is the last, which makes the object appear.

        Raises:
            BadInput: the name is no name of a file in the folder.
        """
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _partial(path).open("ab" if offset else "wb") as stream:
            if stream.tell() != offset:
                return False
            stream.write(data)
        if last:
            os.replace(_partial(path), path)
        return True

    def part(self, name: str, offset: int) -> tuple[bytes, int] | None:
        """Return up to 4 MiB of an object from byte ``offset`` on, and its size in bytes; None if it cannot be read."""
        with suppress(OSError), self.path(name).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(offset)
            return stream.read(PART_BYTES), size
        return None


def _partial(path: Path) -> Path:
    """Return the path of a file until it is whole."""
    return Path(f"{path}{_PARTIAL}")


_STEERED_BY_HOSTS = ("ckpt/*", "events/*", f"{LOG_FOLDER}/*", OUTCOME_OBJECT, "state/*")


What = Literal["names", "part", "put_over", "put_part", "delete"]
Name = Annotated[str, Field(max_length=LONGEST_NAME_BYTES)]


class Request(Record):
    """A host's request about an object; each kind (``what``) needs some of the fields.

    Attributes:
        what: the method of `Objects` or `ObjectsInParts` that is asked for.
        place: `OBJECTS` or `MODELS`.
        name: name of the object; for ``names`` the prefix of names.
        version: version that ``put_over`` replaces; None: the object must be absent.
        offset: place of a part's first byte in the object.
        last: whether a part of ``put_part`` is the object's last.
    """

    what: What
    place: Place = OBJECTS
    name: Name
    version: Name | None = None
    offset: int = Field(default=0, ge=0, le=2**50, strict=True)
    last: bool = Field(default=False, strict=True)


class Answer(Record):
    """The launching machine's answer to a request; empty where it was refused.

    Attributes:
        done: whether the request was carried out.
        names: names of objects, the answer to ``names``; None: another request.
        size: bytes of the object, the answer to ``part``; None: it is absent, or another request.
    """

    done: bool = False
    names: tuple[Name, ...] | None = None
    size: int | None = None


def check_allowed(request: Request) -> None:
    """Refuse a host's request that would steer the run, or touch objects that are not its to touch.

    Raises:
        BadInput: the request is such a one.
    """
    writes = request.what not in ("names", "part")
    if request.place == MODELS:
        fine = writes and any(fnmatchcase(request.name, pattern) for pattern in (MODEL_NAMES, f"{OUTPUT_FOLDER}/*"))
    else:
        fine = not writes or any(fnmatchcase(request.name, pattern) for pattern in _STEERED_BY_HOSTS)
    if not fine:
        raise BadInput(f"a host must not {request.what} {shown(request.name)}.", hint="update hetopt there")


def answer(objects: FolderObjects, request: Request, body: bytes) -> tuple[Answer, bytes]:
    """Carry out a host's allowed request on a folder of objects; return the answer, and the bytes read, if any.

    Args:
        objects: the folder.
        request: request to carry out.
        body: bytes to write, of a request that writes.

    Raises:
        BadInput: the name is no name of a file in the folder.
    """
    name = request.name
    match request.what:
        case "put_over":
            return Answer(done=objects.put_over(name, body, request.version)), b""
        case "names":
            return Answer(names=tuple(objects.names(name))), b""
        case "delete":
            objects.delete(name)
            return Answer(done=True), b""
        case "put_part":
            return Answer(done=objects.put_part(name, request.offset, body, last=request.last)), b""
        case "part":
            read, size = objects.part(name, request.offset) or (b"", None)
            return Answer(size=size), read


def read_frame(read: Callable[[int], bytes]) -> tuple[bytes, bytes] | None:
    """Read the next frame; return its header, a record in JSON, and its body; None: the connection ended.

    Args:
        read: returns so many bytes, fewer at the end.

    Raises:
        ValueError: the frame is larger than any may be.
    """
    lengths = read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header, body = _LENGTHS.unpack(lengths)
    if header > MOST_HEADER or body > MOST_BODY:
        raise ValueError(f"a frame of {header} and {body} bytes")
    data = read(header + body)
    return (data[:header], data[header:]) if len(data) == header + body else None


def frame(header: Request | Answer, body: bytes = b"") -> bytes:
    """Return the bytes of a frame that carries a request or answer with a ``body``."""
    encoded = header.model_dump_json(exclude_defaults=True).encode()
    return _LENGTHS.pack(len(encoded), len(body)) + encoded + body


@dataclass(kw_only=True)
class Connection:
    """A host's end of the connection to the launching machine, for a request at a time.

    Attributes:
        incoming: descriptor of the open file to read from.
        outgoing: descriptor of the open file to write to.
        silence_s: seconds without an answer after which nobody is there.
    """

    incoming: int
    outgoing: int
    silence_s: float = SILENCE_S

    def ask(self, request: Request, body: bytes = b"") -> tuple[Answer, bytes]:
        """Send a request with a ``body``, wait for the answer, and return it with its body.

        Raises:
            Cut: no answer came in time, or the connection ended: the process is to exit.
            RunFailed: the answer is none.
        """
        try:
            with os.fdopen(self.outgoing, "wb", closefd=False) as stream:
                stream.write(frame(request, body))
            reply = read_frame(self._read)
        except (OSError, ValueError):
            reply = None
        if reply is None:
            raise Cut("the machine that launched the run is gone")
        return parse_from_peer(Answer, reply[0], "the machine that launched the run"), reply[1]

    def _read(self, count: int) -> bytes:
        """Return ``count`` bytes; fewer where the connection ended, or brought nothing for ``silence_s`` seconds."""
        data = b""
        while len(data) < count:
            ready, _, _ = select.select([self.incoming], [], [], self.silence_s)
            part = os.read(self.incoming, count - len(data)) if ready else b""
            if not part:
                return data
            data += part
        return data


@dataclass(frozen=True, kw_only=True)
class RemoteObjects(ObjectsInParts):
    """The launching machine's objects as a host reaches them: each call is a request by the connection.

    Every call may exit the process by `Cut`.

    Attributes:
        connection: connection to the launching machine.
        place: `OBJECTS` or `MODELS`.
    """

    connection: Connection
    place: Place

    def _ask(self, what: What, name: str, body: bytes = b"", **more: Any) -> tuple[Answer, bytes]:
        return self.connection.ask(Request(what=what, place=self.place, name=name, **more), body)

    def part(self, name: str, offset: int) -> tuple[bytes, int] | None:
        """Ask the launching machine for up to 4 MiB of an object from byte ``offset``, and its size; None: absent."""
        reply, data = self._ask("part", name, offset=offset)
        return None if reply.size is None else (data, reply.size)

    def put_part(self, name: str, offset: int, data: bytes, *, last: bool) -> bool:
        """Have the launching machine write a part of an object; return whether it did.

        Args:
            name: name of the object.
            offset: bytes that were written before; 0 begins anew.
            data: the part.
            last: whether it is the last, which makes the object appear.
        """
        return self._ask("put_part", name, data, offset=offset, last=last)[0].done

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Have the launching machine write bytes if the version is still ``version``; return whether it did.

        Args:
            name: name of the object.
            data: new contents.
            version: SHA-256 that the object must have; None: it must be absent.
        """
        return self._ask("put_over", name, data, version=version)[0].done

    def names(self, prefix: str) -> Sequence[str] | None:
        """Ask the launching machine for the sorted names of all objects with a prefix; None: it refuses."""
        return self._ask("names", prefix)[0].names

    def delete(self, name: str) -> None:
        """Have the launching machine remove an object; report no failure."""
        self._ask("delete", name)
