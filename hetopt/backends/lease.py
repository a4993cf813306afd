"""One launch of a run at a time: whoever hosts it holds a lease on its folder, which ends with its life.

The lease is a lock on an open file. The kernel lets go of it when the last process that has the file open ends, by
whatever signal, so a lease never outlives its run and nobody has to clean up after a crash.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetopt.core.errors import BadInput

LEASE_FILE = "lease"

ENDING_S = 5.0
"""How long the last processes of a run that is over may take to end."""


@contextmanager
def lease(run_dir: Path) -> Iterator[int]:
    """Hold the lease inside; a process that is given the descriptor holds it for the rest of its life.

    Raises:
        BadInput: somebody else has it, or the folder cannot be written.
    """
    try:
        descriptor = os.open(run_dir / LEASE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(f"{run_dir} cannot be written: {error.strerror}.", hint="name another folder") from None
    try:
        until_s = time.monotonic() + ENDING_S
        while not _is_taken(descriptor):
            if time.monotonic() > until_s:
                raise BadInput(f"a run is alive in {run_dir}.", hint="stop it first, or name another folder")
            time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int) -> bool:
    """Whether the lease is ours now; it is not where somebody else holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
