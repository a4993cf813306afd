"""A data set as a stream: its samples arrive one by one at a constant rate.

What has arrived is a function of the time, so nothing has to be kept or sent, and on a clock that only sleeping moves
the whole stream is determined. What becomes of samples that arrived and were not taken yet is arithmetic on their
running numbers.

A stream of rate S whose worker takes b samples every t seconds holds, after T steps (arXiv 2301.08897, eq. 4):
``(t S - b) T`` samples where all wait (persistence), at most b where only a batch of the newest does (truncation), and
at most ``max(S a, b)`` where those younger than ``a`` do (bounded age). Samples that a batch still lacks to be full are
never dropped: a stream that is slower than its worker loses none under any policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.core.errors import RunFailed
from hetopt.core.run_spec import BufferPolicy, Stream
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.data.cursor import Cursor, GlobalBatch, Indices, Passes, count_of, permutation


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What one worker's stream was like since this was last asked for.

    Attributes:
        buffered: most samples that waited at once.
        wait_s: time that the worker waited for samples.
        dropped: samples that were never trained on, by policy.
    """

    buffered: int = 0
    wait_s: float = 0.0
    dropped: int = 0


_ROUNDING = 1e-9  # rate times time may miss the number of the sample that arrives at that time


class Replay:
    """One worker's stream.

    Args:
        stream: what the run says.
        rank: whose.
        order: the samples of a pass, by the number of the pass; never empty.
        clock: by which samples arrive, in seconds.
        sleep: waits for so many of them.
    """

    def __init__(
        self,
        stream: Stream,
        rank: int,
        *,
        order: Callable[[int], Indices],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stream = stream
        self._rank = rank
        self._rate_per_s = stream.rates[rank]
        self._passes = Passes(order)
        self._clock, self._sleep = clock, sleep
        self._taken = 0  # or dropped
        self._dropped_before = 0
        self._dropped = 0
        self._wait_s = 0.0
        self._most_held = 0
        self._count = 1
        self._origin_s = 0.0

    def begin(self) -> None:
        """Let samples arrive from now on; where a place was set, from there."""
        self._origin_s = self._clock() - self._taken / self._rate_per_s

    def take(self, count: int) -> tuple[Indices, Indices]:
        """Return the next samples that the buffer still has, and the pass that each belongs to; wait until they arrive.

        Raises:
            RunFailed: they would take longer than the run's patience.
        """
        self._count = count
        now_s = self._clock()
        arrived, aged = self._arrived(now_s), self._aged(now_s)
        policy = self._stream.buffer
        self._most_held = max(self._most_held, held(policy, taken=self._taken, arrived=arrived, aged=aged, count=count))
        first = first_kept(policy, taken=self._taken, arrived=arrived, aged=aged, count=count)
        self._dropped += first - self._taken
        last = first + count
        if arrived < last:
            self._wait(self._origin_s + last / self._rate_per_s - now_s, count)
        self._taken = last
        self._passes.skip(first - self._passes.drawn)
        return self._passes.take(count)

    def place(self) -> Mapping[str, int]:
        """Return how far this worker's stream was taken, in samples; 0 for the streams of others."""
        return {f"taken_by_{rank}": self._taken * (rank == self._rank) for rank in range(len(self._stream.rates))}

    def go_to(self, place: Mapping[str, int]) -> None:
        """Go on from a place, summed over all workers; in proportion where it is one of another number of workers."""
        own = [value for key, value in place.items() if key.startswith("taken_by_")]
        if len(own) == len(self._stream.rates):
            self._taken = place[f"taken_by_{self._rank}"]
        else:
            self._taken = int(sum(own) * self._rate_per_s / sum(self._stream.rates))

    def flow(self) -> Flow:
        """Return what the stream was like since the last call."""
        now_s = self._clock()
        arrived = self._arrived(now_s)
        waiting = held(
            self._stream.buffer, taken=self._taken, arrived=arrived, aged=self._aged(now_s), count=self._count
        )
        flow = Flow(
            buffered=max(self._most_held, waiting),
            wait_s=self._wait_s,
            dropped=self._dropped - self._dropped_before,
        )
        self._wait_s, self._most_held, self._dropped_before = 0.0, 0, self._dropped
        return flow

    def _arrived(self, now_s: float) -> int:
        return math.floor((now_s - self._origin_s) * self._rate_per_s + _ROUNDING)

    def _aged(self, now_s: float) -> int:
        """Samples that have arrived, and are too old by now."""
        return max(0, self._arrived(now_s - self._stream.max_age_s))

    def _wait(self, wait_s: float, count: int) -> None:
        if wait_s > self._stream.patience_s:
            raise RunFailed(
                f"worker {self._rank} would wait {wait_s:.3g} s for a batch of {count}: its stream brings "
                f"{self._rate_per_s:.4g} samples a second.",
                hint="let batches follow the streams with the batch policy 'rate', or raise the stream's patience",
            )
        self._wait_s += wait_s
        self._sleep(wait_s)


def every_nth_of_all(dataset_size: int, seed: int, rank: int, workers: int) -> Callable[[int], Indices]:
    """The passes of one worker where samples are dealt out in turn: together the workers' are the whole data set."""

    def order(number: int) -> Indices:
        everything = permutation(dataset_size, seed, number)
        own = everything[rank::workers]
        return own if len(own) else everything

    return order


def first_kept(policy: BufferPolicy, *, taken: int, arrived: int, aged: int, count: int) -> int:
    """The number of the first sample that is still there when ``count`` are to be taken.

    Args:
        policy: of the buffer.
        taken: samples that were taken or dropped before: the oldest that waits has this number.
        arrived: samples that have arrived.
        aged: those of them that are too old.
        count: of the batch.
    """
    newest = max(taken, arrived - count)
    match policy:
        case "persistence":
            return taken
        case "truncation":
            return newest
        case "bounded_age":
            return min(newest, max(taken, aged))


def held(policy: BufferPolicy, *, taken: int, arrived: int, aged: int, count: int) -> int:
    """Samples that wait, where batches have ``count``."""
    return arrived - first_kept(policy, taken=taken, arrived=arrived, aged=aged, count=count)


ELSEWHERE = -1
"""Stands for a sample of another worker, whose number is not known here."""


class StreamCursor(Cursor):
    """A `Cursor` whose samples are those that arrive at this worker.

    Args:
        replay: this worker's stream.
        dataset_size: so many samples are an epoch, whichever they were.
        rank: of this worker.
        workers: how many there are.
    """

    def __init__(self, replay: Replay, *, dataset_size: int, rank: int, workers: int) -> None:
        super().__init__(dataset_size)
        self.replay = replay
        self._rank = rank
        self._workers = workers

    def take(self, shares: Sequence[int]) -> GlobalBatch:
        """Return this worker's next samples, as soon as they are there; those of others are `ELSEWHERE`."""
        total, share = count_of(shares, self._workers), shares[self._rank]
        names = np.full(total, ELSEWHERE, dtype=np.int64)
        epochs = np.zeros(total, dtype=np.int64)
        batch = GlobalBatch(
            epoch=self.epoch, position=self._position, samples=names, shares=tuple(shares), epochs=epochs
        )
        if share:
            here = slice(batch.offset(self._rank), batch.offset(self._rank) + share)
            names[here], epochs[here] = self.replay.take(share)
        self._position += total
        return batch

    def state(self) -> dict[str, int]:
        """Return where every worker's stream stands. A collective: all workers ask at the same point of the program."""
        place = self.replay.place()
        rows = gather_numbers([float(value) for value in place.values()], self._workers)
        places = {key: int(sum(column)) for key, column in zip(place, zip(*rows, strict=True), strict=True)}
        return {**super().state(), **places}

    def at(self, state: Mapping[str, int]) -> StreamCursor:
        """Return this cursor, gone to where ``state`` was taken: a stream can be read in one place only."""
        self._position = state["position"]
        self.replay.go_to(state)
        return self
