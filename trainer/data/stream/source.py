"""What every source of arriving samples offers, and what it tells about the flow.

The time by which samples arrive: the real one in runs, one that only sleeping moves in tests and simulations.

The place of a run in streams: each worker knows its own samples, and all know how many were taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.data.cursor import Cursor, GlobalBatch, Indices, count_of


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What one worker's stream was like since this was last asked for.

    Attributes:
        rate_per_s: samples a second that arrived, lately; -1: not watched for long enough.
        buffered: most samples that waited at once.
        wait_s: time that the worker waited for samples.
        dropped: samples that were never trained on, by policy.
        repeated: samples that were delivered again after a crash, whether they were then trained on or dropped.
    """

    rate_per_s: float = -1.0
    buffered: int = 0
    wait_s: float = 0.0
    dropped: int = 0
    repeated: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """Samples of one step: their names in the source's data set, and the pass that each belongs to."""

    names: Indices
    epochs: Indices


class Source(Protocol):
    """Where one worker's samples come from as they arrive."""

    def begin(self) -> None:
        """Samples arrive from now on, where a place was set from there."""

    def take(self, count: int) -> Taken:
        """The next samples, at least one; waits until they are there.

        Raises:
            RunFailed: they do not come.
        """

    def place(self) -> Mapping[str, int]:
        """How far this worker's streams were taken, under names that all workers have; 0 for streams of others."""

    def go_to(self, place: Mapping[str, int]) -> None:
        """Go on where `place`, summed over all workers, was taken; before `begin`."""

    def committed(self, place: Mapping[str, int], *, is_last: bool = False) -> None:
        """A complete checkpoint holds what was taken up to this place (of all workers, see `go_to`).

        The one before it is kept, for the case that this one turns out damaged: what was taken since then may have to
        be delivered again, but after the last.
        """

    def flow(self) -> Flow:
        """What it was like since the last call."""

    def close(self) -> None:
        """Let go of what the source holds."""


class RateMeter:
    """Samples a second over a sliding time.

    Args:
        window_s: length of the time that counts.
        least_s: below this nothing is said.
    """

    def __init__(self, *, window_s: float, least_s: float) -> None:
        self._window_s = window_s
        self._least_s = least_s
        self._marks: deque[tuple[float, int]] = deque()

    def see(self, now_s: float, arrived: int) -> None:
        """So many samples had arrived by now, all in all."""
        if not self._marks or now_s - self._marks[-1][0] >= self._window_s / 64:
            self._marks.append((now_s, arrived))
        # One mark before the window stays: the window's first is then known to be full.
        while len(self._marks) > 2 and now_s - self._marks[1][0] >= self._window_s:
            self._marks.popleft()

    def rate_per_s(self, now_s: float, arrived: int) -> float:
        """Over the window up to now; -1: not known yet."""
        self.see(now_s, arrived)
        begun_s, before = self._marks[0]
        elapsed_s = now_s - begun_s
        return (arrived - before) / elapsed_s if elapsed_s >= self._least_s else -1.0


ELSEWHERE = -1
"""Stands for a sample of another worker, whose name is not known here."""


class StreamCursor(Cursor):
    """A `Cursor` whose samples are those that arrive at this worker.

    Args:
        source: this worker's.
        dataset_size: so many samples are an epoch, whichever they were.
        rank: of this worker.
        workers: how many there are.

    Attributes:
        told: the last answer of `state`.
    """

    def __init__(self, source: Source, *, dataset_size: int, rank: int, workers: int) -> None:
        super().__init__(dataset_size)
        self._source = source
        self._rank = rank
        self._workers = workers
        self.told: Mapping[str, int] = {}

    def take(self, shares: Sequence[int]) -> GlobalBatch:
        """This worker's next samples, as soon as they are there; those of others are `ELSEWHERE`."""
        total, own = count_of(shares, self._workers), shares[self._rank]
        names = np.full(total, ELSEWHERE, dtype=np.int64)
        epochs = np.zeros(total, dtype=np.int64)
        batch = GlobalBatch(
            epoch=self.epoch, position=self._position, samples=names, shares=tuple(shares), epochs=epochs
        )
        if own:
            taken, first = self._source.take(own), batch.offset(self._rank)
            names[first : first + own] = taken.names
            epochs[first : first + own] = taken.epochs
        self._position += total
        return batch

    def state(self) -> dict[str, int]:
        """Where every worker's stream stands. A collective: all workers ask at the same point of the program."""
        own = self._source.place()
        rows = gather_numbers([float(value) for value in own.values()], self._workers)
        places = {key: int(sum(column)) for key, column in zip(own, zip(*rows, strict=True), strict=True)}
        self.told = {**super().state(), **places}
        return dict(self.told)

    def at(self, state: Mapping[str, int]) -> StreamCursor:
        """This cursor, gone to where ``state`` was taken: a stream can be read in one place only."""
        self._position = state["position"]
        self._source.go_to(state)
        return self
