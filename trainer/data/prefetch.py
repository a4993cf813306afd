"""Reads micro-batches before they are needed, in a thread, while the device computes.

What comes next is known as long as shares stay as they are. When they change, whatever was read under the old ones is
dropped: only reading is wasted, for the cursor moves when samples are taken, not when they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

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


def _check_same(expected: MicroBatch, part: MicroBatch) -> None:
    if expected.epoch != part.epoch or not np.array_equal(expected.indices, part.indices):
        raise RuntimeError("other samples were read ahead than are asked for")
