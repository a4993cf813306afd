"""The place of a run in streams: each worker knows its own samples, and all know how many were taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.data.cursor import Cursor, GlobalBatch, count_of
from hetopt.trainer.data.stream.source import Source

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
