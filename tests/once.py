"""What is expensive to make is made once for all processes of tests, and left in a folder for each of them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def once(name: str, make: Callable[[Path], object], factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that ``make`` has filled, here or in another process of tests.

    Args:
        name: of the folder, the same in all processes.
        make: is given the empty folder.
        factory: pytest's own.
        worker_id: of pytest-xdist: ``master`` where there is one process.
    """
    if worker_id == "master":
        folder = factory.mktemp(name)
        make(folder)
        return folder
    folder = factory.getbasetemp().parent / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            make(folder)
            (folder / ".made").touch()
    assert (folder / ".made").exists(), f"{name} could not be made in another process"
    return folder
