"""How a process learns that it is to end: by a signal that it remembers, or because whoever started it is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

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


class StopSignal:
    """Remembers the first SIGTERM or SIGINT, for a process that looks when it can end well; None until then."""

    def __init__(self) -> None:
        self._number: int | None = None

    def listen(self) -> None:
        """Take both as wishes from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def __call__(self) -> int | None:
        return self._number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
