"""How a process makes sure that it never outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent_pid: int, death_signal: signal.Signals) -> None:
    """Ask the kernel to send this process ``death_signal`` when its parent ends, however that ends.

    The kernel counts the *thread* that started this process as the parent, so start processes from a thread that lives
    as long as the run. A parent that ended before the request was made is noticed too. Linux only; elsewhere nothing
    is asked for.

    Args:
        parent_pid: the process that this one must not outlive; it must be the direct parent.
        death_signal: SIGTERM lets this process end its own children first, SIGKILL is certain.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), death_signal)
