from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.once import once

from .scenarios import Crew, run_crew


@pytest.fixture(scope="session")
def crew(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Crew:
    """What three workers left behind that trained all scenarios one after another; once, for all processes of tests."""
    return Crew(once("crew", run_crew, tmp_path_factory, worker_id))


@pytest.fixture
def signals() -> Iterator[None]:
    """Puts the handlers back that a worker replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
