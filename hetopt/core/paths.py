"""The one way from a foreign name (a bucket's key, a host, a run, a region, a file in a manifest) to a path.

pathlib joins whatever it is given: an absolute right side wins, ``..`` climbs, a link leads away. So a name that was
not written in this program is checked first and resolved after: nothing that anybody else chose names a file outside
the folder that it was meant for.
"""

from __future__ import annotations

import re
import secrets
import tempfile
import unicodedata
from pathlib import Path

from hetopt.core.errors import BadInput

LONGEST_PART_BYTES = 255
"""Of a file's name on Linux (NAME_MAX)."""
LONGEST_NAME_BYTES = 1024
"""Of a whole name: what S3 allows a key to have."""

HOST_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,79}$"
PROXY_PATTERN = r"^http://[A-Za-z0-9.-]{1,253}:[0-9]{1,5}$"
"""Of a proxy: no credentials, as what machines are told when they boot is no secret."""

BUCKET_PATTERN = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"
"""Of a bucket of S3 (Amazon S3 user guide, "Bucket naming rules")."""

ROLE_PATTERN = r"^[A-Za-z0-9_+=,.@-]{1,64}$"
"""Of a role without its path (IAM API reference, CreateRole)."""

REGION_PATTERN = r"^[a-z]{2}(-[a-z]{1,20}){1,4}-[0-9]{1,2}$"

_PLAIN_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@,-]*")
_SHOWN = 80


def expanded(path: str | Path) -> Path:
    """The path with a user's home folder in place of ``~``.

    Raises:
        BadInput: nothing says where that is: HOME is not set and the system has no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadInput(
            f"nothing says which folder {str(path).partition('/')[0]!r} is: HOME is not set, or there is no such user.",
            hint="set HOME, or HETOPT_HOME, to a folder that you can write to",
        ) from None


def inside(folder: Path, name: str, *, what: str = "name", any_text: bool = False) -> Path:
    """Where a foreign name lies below a folder; it need not exist yet.

    Args:
        folder: which everything must stay in.
        name: parts with slashes between them. Each begins with a letter, a digit or an underscore, and goes on with
            these or ``. - = + @ ,``.
        what: the name is of, for the message.
        any_text: allow every printable character, a dot at the start and spaces too, as people's own data have them.

    Raises:
        BadInput: the name is no such name, or a link leads out of the folder.
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


def temporary_folder(purpose: str) -> Path:
    """Where a folder of this program may be made among the temporary files; nothing is there yet.

    It has a name before it is made: whatever comes between, who asked can remove it.
    """
    return inside(Path(tempfile.gettempdir()), f"hetopt-{purpose}-{secrets.token_hex(8)}")


def is_name(pattern: str, text: object) -> bool:
    """Whether something is text that a pattern of this module describes, all of it."""
    return isinstance(text, str) and re.fullmatch(pattern.removesuffix("$"), text) is not None


def host_name(text: str) -> str:
    """What a machine that calls itself so is called in a run."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("-._")[:64]
    return name or "host"


def run_name(text: str) -> str:
    """The name of a run as somebody gave it.

    Raises:
        BadInput: no run can be called so.
    """
    if not is_name(RUN_PATTERN, text):
        raise BadInput(f"{shown(text)} cannot be the name of a run.", hint="list them with `hetopt status --all`")
    return text


def shown(name: str) -> str:
    """A foreign name for a message: quoted, in plain characters, and no longer than a line."""
    short = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"
    return ascii(short) if not short.isprintable() else repr(short)


def _is_part(part: str, *, any_text: bool) -> bool:
    if part in ("", ".", "..") or _bytes(part) > LONGEST_PART_BYTES:
        return False
    if not any_text:
        return _PLAIN_PART.fullmatch(part) is not None
    return "\\" not in part and all(one == " " or unicodedata.category(one)[0] not in "CZ" for one in part)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", errors="surrogatepass"))
