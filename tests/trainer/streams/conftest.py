from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.streams.redis_server import DURABLE, MISSING, PROGRAM, RedisServer

_keys = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that all tests share, each with keys of its own."""
    pytest.importorskip("redis", reason="needs redis-py: pip install -e '.[streams]'")
    if PROGRAM is None:
        pytest.skip(MISSING)
    started = RedisServer(tmp_path_factory.mktemp("redis"), *DURABLE)
    yield started
    started.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts a Redis with options of one's own."""
    pytest.importorskip("redis", reason="needs redis-py: pip install -e '.[streams]'")
    if PROGRAM is None:
        pytest.skip(MISSING)
    started: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        started.append(RedisServer(tmp_path / f"redis-{len(started)}", *options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def key() -> str:
    """A key that no other test has."""
    return f"test-{next(_keys)}"
