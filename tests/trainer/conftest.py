from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from .scenarios import Crew, run_crew


@pytest.fixture(scope="session")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    """What three workers left behind that trained all scenarios one after another."""
    return run_crew(tmp_path_factory.mktemp("crew"))


@pytest.fixture
def signals() -> Iterator[None]:
    """Puts the handlers back that a worker replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
