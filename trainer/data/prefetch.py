"""Reads micro-batches before they are needed, in a thread, while the device computes.

What comes next is known as long as shares stay as they are. When they change, whatever was read under the old ones is
dropped: only reading is wasted, for the cursor moves when samples are taken, not when they are read.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.data.fetch import Batch

AHEAD = 2
"""Micro-batches that are read ahead: the next one, and one more, so that a slow one is made up for by a quick one."""


class ReadAhead:
    """Reads micro-batches in one thread, in the order in which they will be asked for.

    Args:
        read: gives the samples of a micro-batch; called in the thread alone.
        upcoming: the micro-batches.
    """

    def __init__(self, read: Callable[[MicroBatch], Batch], upcoming: Iterator[MicroBatch]) -> None:
        self._read = read
        # Reading shares the cores with the computation: it takes one.
        self._thread = ThreadPoolExecutor(1, "reads-ahead", initializer=torch.set_num_threads, initargs=(1,))
        self._reading: deque[tuple[MicroBatch, Future[Batch]]] = deque()
        self.follow(upcoming)

    def follow(self, upcoming: Iterator[MicroBatch]) -> None:
        """Drop what was read, and read these from here on."""
        for _, future in self._reading:
            future.cancel()
        self._reading.clear()
        self._upcoming = upcoming
        for _ in range(AHEAD):
            self._read_one_more()

    def next(self, part: MicroBatch) -> Batch:
        """Return the samples of the next micro-batch, once they are read."""
        expected, future = self._reading.popleft()
        _check_same(expected, part)
        self._read_one_more()
        return future.result()

    def close(self) -> None:
        """Wait for the read that is under way and end the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _read_one_more(self) -> None:
        part = next(self._upcoming, None)
        if part is not None:
            self._reading.append((part, self._thread.submit(self._read, part)))


@dataclass(frozen=True, kw_only=True)
class ReadingWatch:
    """Whether reading takes long enough to be done in a thread, judged by a few steps in which it was not.

    Attributes:
        steps: how many steps are judged together.
        least_s: reading that is shorter in a step stays where it is. To hand a micro-batch from thread to thread takes
            0.05 ms (two cores, Linux 6.18, torch 2.13), and both threads share one interpreter: ten times that has to
            be at stake.
        least_part: as a part of the step's time; less is not worth another thread's caches.
        seen: time of reading and of everything, of the steps so far.
    """

    steps: int = 8
    least_s: float = 0.0005
    least_part: float = 0.02
    seen: tuple[tuple[float, float], ...] = ()

    def after(self, read_s: float, step_s: float) -> ReadingWatch:
        """The watch after one more step."""
        return replace(self, seen=(*self.seen, (read_s, step_s))[-self.steps :])

    @property
    def is_slow(self) -> bool:
        """Whether reading is worth a thread, as far as is known."""
        if len(self.seen) < self.steps:
            return False
        read_s = statistics.median(read for read, _ in self.seen)
        return read_s >= max(self.least_s, self.least_part * statistics.median(step for _, step in self.seen))


def _check_same(expected: MicroBatch, part: MicroBatch) -> None:
    if expected.epoch != part.epoch or not np.array_equal(expected.indices, part.indices):
        raise RuntimeError("other samples were read ahead than are asked for")
