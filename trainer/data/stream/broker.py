"""The connection to Redis: opened as the run says, and its refusals in one sentence each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.extras import install_command

if TYPE_CHECKING:
    from redis import Redis

PASSWORD_VARIABLE = "HETOPT_REDIS_PASSWORD"
OLDEST = (7, 0)
"""The first Redis that counts what was added to a stream, which is how rates are measured."""

_CONNECT_S = 5.0
_ANSWER_S = 30.0


class Unreachable(Exception):
    """The broker does not answer now; it may later."""


def connect(url: str) -> Redis:
    """A connection, which is opened by its first command.

    Raises:
        BadInput: the client is not installed, or the address cannot be.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise BadInput("streams out of Redis need its client.", hint=install_command("streams")) from None
    options: dict[str, Any] = {
        "password": os.environ.get(PASSWORD_VARIABLE) or None,
        "socket_connect_timeout": _CONNECT_S,
        "socket_timeout": _ANSWER_S,
        "retry": Retry(NoBackoff(), 0),  # whoever asks knows whether a command may be said twice
    }
    if urlsplit(url).scheme == "unix":
        del options["socket_connect_timeout"]
    try:
        return redis.Redis.from_url(url, **options)
    except ValueError as error:
        raise BadInput(
            f"the address of Redis must be a URL, got {url}: {error}", hint="for example redis://127.0.0.1:6379/0"
        ) from None


def place_of(url: str) -> str:
    """The broker's address for messages, without its password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"


@contextmanager
def explained(url: str, key: str) -> Iterator[None]:
    """What the client raises, as what hetopt raises.

    Raises:
        Unreachable: it may work later.
        BadInput: the broker refuses, for a reason that whoever started the run can change.
        RunFailed: it refuses what it did not refuse before.
    """
    from redis import exceptions

    try:
        yield
    # Refused passwords are connection errors to the client, so they come first.
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise refusal(error, url, key) from None
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise Unreachable(_said(error)) from None
    except exceptions.RedisError as error:
        raise refusal(error, url, key) from None


def refusal(error: Exception, url: str, key: str) -> HetoptError:
    """What an answer of the broker means."""
    said, where = _said(error), f"the Redis at {place_of(url)}"
    code = said.partition(" ")[0]
    known: dict[str, HetoptError] = {
        "WRONGTYPE": BadInput(
            f"{key} in {where} must be a stream, and is another type.", hint="name another key, or delete that one"
        ),
        "NOAUTH": BadInput(f"{where} asks for a password.", hint=f"give it as {PASSWORD_VARIABLE}"),
        "WRONGPASS": BadInput(f"{where} refuses the password.", hint=f"correct {PASSWORD_VARIABLE}"),
        "NOPERM": BadInput(
            f"{where} does not allow this user to work on {key}.",
            hint="allow XREADGROUP, XACK, XADD, XGROUP, XINFO, XPENDING and XTRIM on the streams",
        ),
        "NOGROUP": RunFailed(
            f"{where} has lost the stream {key}.",
            hint="run it with an append-only file (appendonly yes, appendfsync always), see docs/streams.md",
        ),
        "OOM": RunFailed(
            f"{where} has no memory left for {key}.",
            hint="raise its maxmemory, or keep fewer samples (StreamWriter(max_samples=...))",
        ),
        "READONLY": RunFailed(f"{where} is a replica and takes nothing.", hint="name the one that it follows"),
        "MISCONF": RunFailed(f"{where} cannot write to its disk and takes nothing.", hint="make room on its disk"),
    }
    if code in known:
        return known[code]
    if "AUTH" in said or "password" in said.lower() or "username" in said.lower():
        return known["WRONGPASS"] if "invalid" in said.lower() else known["NOAUTH"]
    # The client takes the first word of some answers away.
    for name, words in (
        ("OOM", "maxmemory"),
        ("NOGROUP", "o such key"),
        ("WRONGTYPE", "wrong kind of value"),
        ("READONLY", "read only replica"),
        ("NOPERM", "has no permissions"),
    ):
        if words in said:
            return known[name]
    return RunFailed(f"{where} refuses to work on {key}: {said}", hint="see its log")


def _said(error: Exception) -> str:
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return said.rpartition("of pipeline caused error: ")[2]
