"""How fast a machine is now, and how busy other programs keep it: a fixed piece of arithmetic on two clocks.

speed        processor time of the arithmetic     of the machine: by it, steps of a profile are compared
contention   its wall over its processor time     of the others: what widens the intervals of predictions
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from pydantic import Field, NonNegativeFloat

from hetopt.core.artifact import Record

REPEATS = 12
"""Repetitions of the arithmetic in one measurement: 30 ms together, about as long as a step. Who computes for longer
without a pause has to wait for more."""

READINGS, IN_A_READING = 5, 5
PAUSE_S = 0.05
"""Seconds of pause before each measurement, as steps pause for each other; and a moment in which others rest does not
speak for all."""

_SIDE, _MAPS = 96, 200
"""Small enough for the cache: what other programs do to the memory says little about the processor."""


class MachineReading(Record):
    """How busy other programs kept a machine's processors when a run was launched.

    Attributes:
        contention: wall time over processor time of a fixed piece of arithmetic, at least 1; 1: nothing else computed.
        contention_log_sd: scatter between readings: standard deviation of the log of ``contention``.
    """

    contention: float = Field(ge=1, description="wall over processor time of that arithmetic")
    contention_log_sd: NonNegativeFloat = Field(description="scatter between readings: standard deviation of the log")


def read_machine() -> MachineReading:
    """Measure this machine's processor contention, by computing and pausing for some two seconds."""
    contention_logs = []
    for _ in range(READINGS):
        wall_s = processor_s = 0.0
        for _ in range(IN_A_READING):
            time.sleep(PAUSE_S)
            begun_s, used_s = time.perf_counter(), time.thread_time()
            measure_yardstick_s()
            wall_s += time.perf_counter() - begun_s
            processor_s += time.thread_time() - used_s
        contention_logs.append(max(0.0, math.log(wall_s / processor_s)))
    return MachineReading(
        contention=math.exp(statistics.fmean(contention_logs)),
        contention_log_sd=statistics.stdev(contention_logs),
    )


def measure_yardstick_s(clock: Callable[[], float] = time.thread_time) -> float:
    """Return the processor time, in seconds, of a fixed piece of arithmetic: the mean without the longest tenth.

    Half of the work is the interpreter's and half is vector arithmetic of one thread, like a training step's.

    Args:
        clock: returns seconds of processor time of this thread; another clock measures that time instead.
    """
    matrix = np.linspace(-1.0, 1.0, _SIDE * _SIDE, dtype=np.float32).reshape(_SIDE, _SIDE)
    _work(matrix)
    times = []
    for _ in range(REPEATS):
        begun = clock()
        _work(matrix)
        times.append(clock() - begun)
    return usual_mean(times)


def _work(matrix: np.ndarray) -> None:
    """Do the fixed arithmetic: a loop of the interpreter, then hyperbolic tangents of a matrix."""
    total = 0
    for number in range(20_000):
        total += number
    for _ in range(_MAPS):
        np.tanh(matrix)


NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""


def relative_spread(samples_s: Sequence[float]) -> float:
    """Return the relative standard deviation of timings, as their scaled median absolute deviation over the median.

    Raises:
        statistics.StatisticsError: there are no timings.
    """
    median = statistics.median(samples_s)
    return NORMAL_MAD * statistics.median(abs(sample - median) for sample in samples_s) / median


def usual_mean(samples_s: Sequence[float]) -> float:
    """Return the mean of timings without the longest tenth (none of fewer than ten is dropped).

    It is what a run pays on average, hiccups of every few steps included. Collectives scatter by whole time slices of
    the operating system, which a median would not see.
    """
    ordered = sorted(samples_s)
    return statistics.fmean(ordered[: len(ordered) - len(ordered) // 10])


if __name__ == "__main__":
    print(read_machine().model_dump_json())
