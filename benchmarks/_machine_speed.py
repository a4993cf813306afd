"""How fast this machine is while something runs: the yardstick of `hetopt.profiler`, read beside it.

A shared machine may change its speed by a third from one second to the next. What it was before and after a run says
little about what it was meanwhile.
"""

from __future__ import annotations

import statistics
import threading
import time
from types import TracebackType
from typing import Self

from hetopt.core.calibration_benchmark import measure_yardstick_s

EVERY_S = 0.2
"""A reading takes about 4 ms: a fiftieth of a processor."""


class SpeedMeanwhile:
    """Reads the yardstick in a thread of its own for as long as the ``with`` block takes.

    Readings are processor time: waiting for a processor that the run uses is not counted. Beside one or two busy
    processors they say what they say alone (0.99 and 1.05 times as much, medians of 40 turns).
    """

    def __init__(self) -> None:
        self._readings: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="yardstick", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def yardstick_s(self, *, since_s: float, until_s: float) -> float:
        """Mean reading between two times since the epoch; of all readings where none lies between them."""
        within = [reading_s for read_s, reading_s in self._readings if since_s <= read_s <= until_s]
        return statistics.fmean(within or [reading_s for _, reading_s in self._readings])

    def _read(self) -> None:
        while True:
            reading_s = measure_yardstick_s(time.thread_time, repeats=1)
            self._readings.append((time.time(), reading_s))
            if self._over.wait(EVERY_S):
                return
