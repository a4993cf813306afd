"""Two programs that get this machine in turns of half a second, so that both see the same machine.

A shared machine's clock changes by half within minutes, which hides a per cent however often two runs take turns. Here
one program and all that it started stands still while the other runs, and what a step takes is counted in the time that
its program really had.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

TURN_S = 0.5

Turns = list[tuple[float, float]]
"""From when until when, seconds since the epoch."""


def in_turns(programs: Mapping[str, Sequence[str]], *, within_s: float) -> dict[str, Turns]:
    """Run all of them to their ends; when each had the machine while none had ended.

    Raises:
        RuntimeError: one failed, or they took too long.
    """
    running = {name: subprocess.Popen(command, start_new_session=True) for name, command in programs.items()}
    turns: dict[str, Turns] = {name: [] for name in programs}
    for process in running.values():
        _signal(process, signal.SIGSTOP)
    deadline_s = time.monotonic() + within_s
    try:
        while any(process.poll() is None for process in running.values()):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the runs took more than {within_s:.0f} s")
            for name, process in running.items():
                together = all(each.poll() is None for each in running.values())
                began_s = time.time()
                _signal(process, signal.SIGCONT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TURN_S)
                _signal(process, signal.SIGSTOP)
                if together:
                    turns[name].append((began_s, time.time()))
    finally:
        for process in running.values():
            _signal(process, signal.SIGKILL)
            process.wait()
    failed = [name for name, process in running.items() if process.returncode]
    if failed:
        raise RuntimeError(f"{failed[0]} ended with exit code {running[failed[0]].returncode}")
    return turns


def had_s(turns: Turns, from_s: float, until_s: float) -> float:
    """How much of the time between two moments a program had."""
    return sum(max(0.0, min(end_s, until_s) - max(began_s, from_s)) for began_s, end_s in turns)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
