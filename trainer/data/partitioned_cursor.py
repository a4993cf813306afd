"""Where every worker stands in its own stream of samples, where the data is partitioned.

All ranks hold the cursors of all workers, as they hold the one cursor of a run without partition: whatever a rank needs
to know of the others, it can compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetopt.trainer.data.cursor import Cursor, GlobalBatch, Indices, count_of
from hetopt.trainer.data.partitions import Parts


class PartitionedCursor(Cursor):
    """A place in the stream of each worker: its passes over its parts, one after the other.

    Args:
        parts: what the workers see.
        dataset_size: samples of the data: an epoch is over when as many were drawn, whichever they were.
        weights: of the workers, for a place that was told for another number of them.
        positions: samples that each worker has drawn so far; absent: none.
    """

    def __init__(
        self, parts: Parts, dataset_size: int, *, weights: Sequence[int], positions: Sequence[int] | None = None
    ) -> None:
        super().__init__(dataset_size)
        self._parts = parts
        self._weights = tuple(weights)
        self._streams = [_Stream(parts, worker) for worker in range(parts.workers)]
        for stream, position in zip(self._streams, positions or (), strict=positions is not None):
            stream.skip(position)

    @property
    def position(self) -> int:
        """Samples drawn since the run began, by all workers together."""
        return sum(stream.drawn for stream in self._streams)

    def take(self, shares: Sequence[int]) -> GlobalBatch:
        """The next samples of every worker's own; moves the cursors behind them."""
        count_of(shares, len(self._streams))
        epoch, position = self.epoch, self.position
        taken = [stream.take(count) for stream, count in zip(self._streams, shares, strict=True)]
        return GlobalBatch(
            epoch=epoch,
            position=position,
            samples=np.concatenate([samples for samples, _ in taken]),
            shares=tuple(shares),
            epochs=np.concatenate([turns for _, turns in taken]),
        )

    def state(self) -> dict[str, int]:
        """As of `Cursor`, with where each worker stands."""
        own = {f"drawn_by_{worker}": stream.drawn for worker, stream in enumerate(self._streams)}
        return {**super().state(), **own}

    def at(self, state: Mapping[str, int]) -> PartitionedCursor:
        """A cursor that continues where ``state`` was taken.

        Where that was with another number of workers, parts are others, too: each worker begins as deep in its own as
        its weight says.
        """
        own = [state[key] for key in sorted(state) if key.startswith("drawn_by_")]
        keys = [f"drawn_by_{worker}" for worker in range(self._parts.workers)]
        if len(own) == len(keys) and all(key in state for key in keys):
            drawn = [state[key] for key in keys]
        else:
            drawn = [state["position"] * weight // sum(self._weights) for weight in self._weights]
        return PartitionedCursor(self._parts, self._dataset_size, weights=self._weights, positions=drawn)


class _Stream:
    """One worker's samples, pass after pass."""

    def __init__(self, parts: Parts, worker: int) -> None:
        self._parts = parts
        self._worker = worker
        self._turn = 0
        self._offset = 0
        self._order: Indices | None = None
        self.drawn = 0

    def skip(self, count: int) -> None:
        """Go on as if so many had been drawn."""
        left = count
        while left >= (rest := len(self._present) - self._offset):
            left -= rest
            self._next_turn()
        self._offset += left
        self.drawn += count

    def take(self, count: int) -> tuple[Indices, Indices]:
        """The next samples, and the pass that each belongs to."""
        found: list[Indices] = []
        turns: list[Indices] = []
        left = count
        while left:
            piece = self._present[self._offset : self._offset + left]
            found.append(piece)
            turns.append(np.full(len(piece), self._turn, dtype=np.int64))
            left -= len(piece)
            self._offset += len(piece)
            if self._offset == len(self._present):
                self._next_turn()
        self.drawn += count
        empty = [np.empty(0, dtype=np.int64)]
        return np.concatenate(found or empty), np.concatenate(turns or empty)

    @property
    def _present(self) -> Indices:
        if self._order is None:
            self._order = self._parts.order(self._worker, self._turn)
        return self._order

    def _next_turn(self) -> None:
        self._turn, self._offset, self._order = self._turn + 1, 0, None
