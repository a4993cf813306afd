"""A yardstick for how fast a machine is at the moment: the time of one fixed piece of arithmetic.

Shared machines and warm ones compute at two thirds of their speed an hour later. A profile keeps the yardstick of when
it was taken, so that what it predicts for the same machine can follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hetopt.core.throughput import usual_mean

REPEATS = 300

_SIDE, _MAPS = 96, 200
"""Small enough for the cache: what other programs do to the memory says little about the processor."""


def measure_yardstick_s(clock: Callable[[], float] = time.perf_counter, *, repeats: int = REPEATS) -> float:
    """Seconds that one piece of work takes now, mean without the longest tenth.

    Half of the work is the interpreter's and half is vector arithmetic of one thread, like a training step's. `REPEATS`
    take three quarters of a second: what is predicted follows it, so its own noise must be less than a prediction's.

    Args:
        clock: seconds; processor time where others may be using the processors.
        repeats: how often the work is timed, after once that is not.
    """
    matrix = np.linspace(-1.0, 1.0, _SIDE * _SIDE, dtype=np.float32).reshape(_SIDE, _SIDE)
    _work(matrix)
    times = []
    for _ in range(repeats):
        begun = clock()
        _work(matrix)
        times.append(clock() - begun)
    return usual_mean(times)


def _work(matrix: np.ndarray) -> None:
    total = 0
    for number in range(20_000):
        total += number
    for _ in range(_MAPS):
        np.tanh(matrix)
