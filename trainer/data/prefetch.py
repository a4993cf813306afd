"""Reads micro-batches before they are needed, in a thread or in processes, while the device computes.

What comes next is known as long as shares stay as they are. When they change, whatever was read under the old ones is
dropped: only reading is wasted, for the cursor moves when samples are taken, not when they are read.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import RawValue
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hetopt.core.errors import RunFailed
from hetopt.trainer.data.fetch import Batch, MapDataset, fetch, pinned, set_epoch
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.failure import reason_of

AHEAD = 2
"""Micro-batches that are read ahead: the next one, and one more, so that a slow one is made up for by a quick one."""


class ThreadReadAhead:
    """Reads in one thread: right where reading lets go of the interpreter, as tensors and files do.

    Args:
        read: gives the samples of a micro-batch; called in the thread alone.
    """

    def __init__(self, read: Callable[[MicroBatch], Batch]) -> None:
        self._read = read
        # Reading shares the cores with the computation: it takes one.
        self._thread = ThreadPoolExecutor(1, "reads-ahead", initializer=torch.set_num_threads, initargs=(1,))
        self._upcoming: Iterator[MicroBatch] = iter(())
        self._reading: deque[tuple[MicroBatch, Future[Batch]]] = deque()

    def follow(self, upcoming: Iterator[MicroBatch]) -> None:
        """Drop what was read (see `ReadAhead`)."""
        for _, future in self._reading:
            future.cancel()
        self._reading.clear()
        self._upcoming = upcoming
        for _ in range(AHEAD):
            self._read_one_more()

    def next(self, part: MicroBatch) -> Batch:
        """Wait for the samples (see `ReadAhead`)."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    """One micro-batch for a loader process; requests of an older generation have been dropped."""

    generation: int
    part: MicroBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class _Answer:
    """Its samples, or what reading them raised. As a value: what is raised there arrives here as another error."""

    request: _Request
    batch: Batch = ()
    error: Exception | None = None

    def pin_memory(self) -> _Answer:
        """Called by the loader, whose own pinning would turn tuples into lists."""
        return replace(self, batch=pinned(self.batch))


class _Samples(Dataset[_Answer]):
    """The data set as a loader process sees it: opened there, and asked for whole micro-batches."""

    def __init__(self, open_dataset: Callable[[], MapDataset], seed: int) -> None:
        self._open = open_dataset
        self._seed = seed
        self._dataset: MapDataset | None = None

    def __getitem__(self, request: _Request) -> _Answer:
        try:
            if self._dataset is None:
                self._dataset = self._open()
            set_epoch(self._dataset, request.part.epoch, self._seed)
            return _Answer(request=request, batch=fetch(self._dataset, request.part.indices))
        except Exception as error:  # whatever a data set raises belongs to the training loop
            return _Answer(request=request, error=_portable(error))


class _Once(Sampler[_Request]):
    """The requests as torch's loader wants them."""

    def __init__(self, requests: Iterator[_Request]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[_Request]:
        return self._requests


class Flag:
    """An event that takes no lock, for a process that is killed while it holds one keeps it for ever.

    Loader processes look at it before every micro-batch, and the loop that misses one of them asks it as well: with
    the event of `multiprocessing` the loop would wait for the dead.
    """

    def __init__(self) -> None:
        self._raised = RawValue(ctypes.c_bool, False)

    def is_set(self) -> bool:
        return bool(self._raised.value)

    def set(self) -> None:
        self._raised.value = True


class _LoaderContext(ForkServerContext):
    """Starts loader processes. Not by fork: what trains has threads, and perhaps a GPU, that a fork would break."""

    def Event(self) -> Flag:  # type: ignore[override]  # noqa: N802  # of which torch's loader uses these two methods
        return Flag()


class ProcessReadAhead:
    """Reads in processes of torch's DataLoader: right where the samples of a data set cost Python's time.

    Returns when the first micro-batch has been read, so that start-up is over.

    Args:
        open_dataset: opens the data set in each process; picklable. Data sets themselves often are not.
        seed: the run's, for data that changes from epoch to epoch.
        processes: how many, at least one.
        pin: whether batches go into pinned memory, from where a GPU fetches them by itself.
        upcoming: what is asked for first.
    """

    def __init__(
        self,
        open_dataset: Callable[[], MapDataset],
        *,
        seed: int,
        processes: int,
        pin: bool,
        upcoming: Iterator[MicroBatch],
    ) -> None:
        self._generation = 0
        self._upcoming = upcoming
        loader: DataLoader[_Answer] = DataLoader(
            _Samples(open_dataset, seed),
            batch_size=None,
            sampler=_Once(self._requests()),
            num_workers=processes,
            prefetch_factor=AHEAD,
            collate_fn=_as_it_is,
            pin_memory=pin,
            worker_init_fn=partial(_outlive_signals, os.getpid()),
            multiprocessing_context=_LoaderContext(),
            # Its own: a loader draws a seed, and the global generator is part of the training.
            generator=torch.Generator(),
        )
        self._results = iter(loader)
        self._first: _Answer | None = None
        self._first = self._receive()

    def follow(self, upcoming: Iterator[MicroBatch]) -> None:
        """Drop what was asked for (see `ReadAhead`); it still has to be read, by whoever is at it."""
        self._upcoming = upcoming
        self._generation += 1

    def next(self, part: MicroBatch) -> Batch:
        """Wait for the samples (see `ReadAhead`)."""
        answer = self._receive()
        while answer.request.generation != self._generation:
            answer = self._receive()
        if answer.error is not None:
            raise answer.error
        _check_same(answer.request.part, part)
        return answer.batch

    def close(self) -> None:
        """End the loader processes; no batch can be read afterwards."""
        del self._results

    def _receive(self) -> _Answer:
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            answer: _Answer = next(self._results)
        except (RuntimeError, OSError, EOFError) as error:
            # The last two come of tensors in shared memory, whose keeper is gone with the process.
            raise RunFailed(
                f"a loader process is gone: {reason_of(error)}.", hint="what it said last is in the worker's log"
            ) from None
        return answer

    def _requests(self) -> Iterator[_Request]:
        while (part := next(self._upcoming, None)) is not None:
            yield _Request(generation=self._generation, part=part)


ReadAhead: TypeAlias = ThreadReadAhead | ProcessReadAhead
"""Reads micro-batches in the order in which they will be asked for."""


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


def _outlive_signals(trainer: int, worker: int) -> None:
    """Leave Ctrl-C and SIGTERM to the training process, which still needs samples for the step it is in.

    A loader process ends when that process says so, or is gone.

    Args:
        trainer: number of the training process. It is no loader's parent: that is the fork server of multiprocessing,
            which lives as long as any loader does.
        worker: number among the loader processes.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        try:
            lives = os.pidfd_open(trainer)
        except ProcessLookupError:
            os._exit(1)
        threading.Thread(target=_end_with, args=(lives,), name="ends-with-training", daemon=True).start()


def _end_with(process: int) -> None:
    select.select([process], [], [])  # readable when it has ended
    os._exit(1)


def _as_it_is(answer: Any) -> Any:
    return answer


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot travel between processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _check_same(expected: MicroBatch, part: MicroBatch) -> None:
    if expected.epoch != part.epoch or not np.array_equal(expected.indices, part.indices):
        raise RuntimeError("other samples were read ahead than are asked for")
