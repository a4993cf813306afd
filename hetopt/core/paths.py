"""Safe paths from untrusted names (keys, hosts, runs, regions), and bounded reading of regular files.

pathlib joins whatever it is given: an absolute right side wins, ``..`` climbs, a link leads away. So a name that was
not written in this program is checked first and resolved after, and never names a file outside its folder. Files are
read whole, as UTF-8 text or as JSON: a device or a pipe would be read without end, a deeply nested or immense number
ends the parser, and text that no encoding can write ends whoever prints it later, so all of these are refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hetopt.core.errors import BadInput

LONGEST_PART_BYTES = 255
"""Most bytes of a file's name on Linux (NAME_MAX)."""
LONGEST_NAME_BYTES = 1024
"""Most bytes of a whole name with its slashes: what S3 allows a key to have."""

HOST_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,79}$"
PROXY_PATTERN = r"^http://[A-Za-z0-9.-]{1,253}:[0-9]{1,5}$"
"""Pattern of a proxy's address: no credentials, as what machines are told when they boot is no secret."""

BUCKET_PATTERN = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"
"""Pattern of a name of an S3 bucket (Amazon S3 user guide, "Bucket naming rules")."""

ROLE_PATTERN = r"^[A-Za-z0-9_+=,.@-]{1,64}$"
"""Pattern of a role's name without its path (IAM API reference, CreateRole)."""

REGION_PATTERN = r"^[a-z]{2}(-[a-z]{1,20}){1,4}-[0-9]{1,2}$"

_PLAIN_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@,-]*")
_SHOWN = 80


def expanded(path: str | Path) -> Path:
    """Return the path with a user's home folder in place of a leading ``~``; any other path as it is.

    Raises:
        BadInput: the home folder is not known: HOME is not set and the system has no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadInput(
            f"nothing says which folder {str(path).partition('/')[0]!r} is: HOME is not set, or there is no such user.",
            hint="set HOME, or HETOPT_HOME, to a folder that you can write to",
        ) from None


def home() -> Path:
    """Return the folder of hetopt's own files of this user: ``$HETOPT_HOME``, else ``~/.hetopt``; it need not exist.

    Raises:
        BadInput: the home folder is not known (see `expanded`).
    """
    return expanded(os.environ.get("HETOPT_HOME") or "~/.hetopt")


def inside(folder: Path, name: str, *, what: str = "name", any_text: bool = False) -> Path:
    """Return the path of an untrusted name below ``folder``, existing or not; refuse a name that leads out of it.

    Args:
        folder: which everything must stay in; it need not exist.
        name: parts with slashes between them. Each begins with a letter, a digit or an underscore, and goes on with
            these or ``. - = + @ ,``.
        what: kind of thing that is named, such as ``host``, for errors.
        any_text: allow every printable character but a backslash, a dot at the start and spaces too, as people's own
            data have them.

    Raises:
        BadInput: the name is no such name or longer than 1,024 bytes, or a link leads out of the folder.
    """
    parts = name.split("/")
    if not all(_is_part(part, any_text=any_text) for part in parts) or _bytes(name) > LONGEST_NAME_BYTES:
        raise BadInput(
            f"the {what} {shown(name)} cannot be the name of a file.",
            hint="a name has parts of letters, digits and ._- with slashes between them, and none that is '..'",
        )
    path = folder.joinpath(*parts)
    try:
        root, leads_to = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise BadInput(f"the {what} {shown(name)} cannot be looked up: {error}.", hint="remove the link") from None
    if not leads_to.is_relative_to(root) or leads_to == root:
        raise BadInput(
            f"the {what} {shown(name)} leads out of {folder}.", hint="a link in it leads elsewhere; remove it"
        )
    return path


def is_name(pattern: str, text: object) -> bool:
    """Return whether a value is text that matches a pattern of this module, such as `RUN_PATTERN`, as a whole."""
    return isinstance(text, str) and re.fullmatch(pattern.removesuffix("$"), text) is not None


def host_name(text: str) -> str:
    """Return a machine's own name made fit to name a host of a run: letters, digits and ``._-``, at most 64.

    A name of which nothing is left becomes ``host``.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("-._")[:64] or "host"


def shown(name: str) -> str:
    """Format an untrusted name for an error message: quoted, escaped, and at most about 80 characters."""
    return repr(shortened(name, _SHOWN))


def _is_part(part: str, *, any_text: bool) -> bool:
    """Return whether a text may be a part of a path: plain letters, or with ``any_text`` anything printable."""
    if part in ("", ".", "..") or _bytes(part) > LONGEST_PART_BYTES:
        return False
    if not any_text:
        return _PLAIN_PART.fullmatch(part) is not None
    return "\\" not in part and all(
        character == " " or unicodedata.category(character)[0] not in "CZ" for character in part
    )


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", errors="surrogatepass"))


MOST_BYTES = 64_000_000
"""Largest file that is read whole; the largest profiles have a few megabytes."""

_LARGEST_INTEGER = 2**64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NAME_ANOTHER = "name another file"


class MissingFile(BadInput):
    """The error of a named file that does not exist."""


@contextmanager
def opened_file(path: Path, *, hint: str = _NAME_ANOTHER) -> Iterator[BinaryIO]:
    """Open a regular file for reading bytes in a with block, never a device, pipe or socket.

    Args:
        path: path of the file; a link is followed.
        hint: what to do about a file that cannot be read, at the end of errors.

    Raises:
        MissingFile: the file does not exist.
        BadInput: the path is a folder, a device or a pipe or may not be read, or reading fails inside the block.
    """
    shown = shortened(str(path))
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to waits for ever.
        stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except FileNotFoundError:
        raise MissingFile(f"{shown} does not exist.", hint=hint) from None
    except OSError as error:
        raise BadInput(f"{shown} cannot be read: {error.strerror}.", hint=hint) from None
    except ValueError:  # a NUL in the path, or letters that no file name can hold
        raise BadInput(f"{shown!r} cannot be the name of a file.", hint=hint) from None
    with stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise BadInput(f"{shown} cannot be read: it is a device, a pipe or a socket, and no file.", hint=hint)
        try:
            yield stream
        except OSError as error:
            raise BadInput(f"{shown} cannot be read: {error.strerror}.", hint=hint) from None


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES, hint: str = _NAME_ANOTHER) -> bytes:
    """Read all bytes of a regular file of at most ``most_bytes``; errors end with ``hint``.

    Raises:
        MissingFile: the file does not exist.
        BadInput: the file cannot be read (see `opened_file`), or is larger than ``most_bytes``.
    """
    with opened_file(path, hint=hint) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise BadInput(f"{shortened(str(path))} cannot be read: it is larger than {most_bytes / 1e6:g} MB.", hint=hint)
    return content


def read_text(path: Path, *, most_bytes: int = MOST_BYTES, hint: str = _NAME_ANOTHER) -> str:
    """Read a regular file of at most ``most_bytes`` as UTF-8 text; line ends become newlines, a byte order mark goes.

    Raises:
        MissingFile: the file does not exist.
        BadInput: the file cannot be read (see `read_bytes`), or is not UTF-8 text.
    """
    return decoded(read_bytes(path, most_bytes=most_bytes, hint=hint), origin=shortened(str(path)), hint=hint)


def read_json(path: Path, *, most_bytes: int = MOST_BYTES, hint: str = _NAME_ANOTHER) -> Any:
    """Read a regular file of at most ``most_bytes`` as JSON, into plain values; errors end with ``hint``.

    Raises:
        MissingFile: the file does not exist.
        BadInput: the file cannot be read (see `read_text`), or is not JSON (see `parse_json`).
    """
    text = read_text(path, most_bytes=most_bytes, hint=hint)
    return parse_json(text, origin=str(path), hint=hint)


def decoded(content: bytes, *, origin: str, hint: str = _NAME_ANOTHER) -> str:
    """Decode bytes as UTF-8 without a byte order mark; line ends become newlines.

    Args:
        content: the bytes.
        origin: what errors call them, usually the path.
        hint: what to do about bytes that cannot be used.

    Raises:
        BadInput: the bytes are not UTF-8.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{origin} cannot be read: not UTF-8 text.", hint=hint) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes, *, origin: str, hint: str = _NAME_ANOTHER) -> Any:
    """Parse untrusted JSON text into plain values; errors name ``origin`` and end with ``hint``.

    Args:
        text: as it was read; a byte order mark is passed over.
        origin: what errors call it, usually the path.
        hint: what to do about text that cannot be used.

    Raises:
        BadInput: the text is not UTF-8 or not complete JSON, is nested too deeply, or holds an integer beyond 64 bits
            or half of a surrogate pair, which no encoding can write.
    """
    shown = shortened(origin)
    if isinstance(text, bytes):
        text = decoded(text, origin=shown, hint=hint)
    text = text.removeprefix("\ufeff")
    try:
        value = json.loads(text, parse_int=_integer)
        if _SURROGATE.search(text) or not text.isascii():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        fault = f"line {error.lineno}: {error.msg.lower()}" if text.strip() else "it is empty"
        raise BadInput(f"{shown} is not complete JSON ({fault}).", hint=hint) from None
    except UnicodeEncodeError:
        raise BadInput(f"{shown} holds half of a surrogate pair, so it is not Unicode text.", hint=hint) from None
    except RecursionError:
        raise BadInput(f"{shown} is nested too deeply.", hint=hint) from None
    except ValueError:
        raise BadInput(f"{shown} holds an integer that is too large.", hint=hint) from None
    return value


def shortened(text: str, most: int = 4 * _SHOWN) -> str:
    """Return a text of at most ``most`` characters: of a longer one the middle is replaced by ``...``."""
    if len(text) <= most:
        return text
    kept = (most - 5) // 2
    return f"{text[:kept]} ... {text[-kept:]}"


def _integer(digits: str) -> int:
    """Parse an integer of JSON; refuse immense ones, which measure nothing and overflow a float."""
    if len(digits) > len(str(_LARGEST_INTEGER)) + 1 or abs(value := int(digits)) > _LARGEST_INTEGER:
        raise ValueError("beyond 64 bits")
    return value
