from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterator

import pytest

from .scenarios import Crew, run_crew


@pytest.fixture(scope="session")
def crew(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Crew:
    """What three workers left behind that trained all scenarios one after another; once, for all processes of tests."""
    if worker_id == "master":
        return run_crew(tmp_path_factory.mktemp("crew"))
    folder = tmp_path_factory.getbasetemp().parent / "crew"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            run_crew(folder)
            (folder / "done").touch()
    assert (folder / "done").exists(), "the crew failed in another process"
    return Crew(folder)


@pytest.fixture
def signals() -> Iterator[None]:
    """Puts the handlers back that a worker replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
