"""How one worker's slice of a step is cut into what is computed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetopt.trainer.data.cursor import Cursor, GlobalBatch, Indices


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Samples that are computed together; all of one epoch where samples differ from epoch to epoch."""

    epoch: int
    indices: Sequence[int] | Indices

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """The rules of cutting.

    Attributes:
        epoch_size: samples of an epoch, where samples of different epochs must not be mixed (augmentation); None: they
            may be.
        unit: samples of a micro-batch, exactly, but for what is left over; None: as many as fit.
        max_samples: the most that fit into memory; None: any number.
    """

    epoch_size: int | None = None
    unit: int | None = None
    max_samples: int | None = None

    def parts(self, batch: GlobalBatch, rank: int) -> list[MicroBatch]:
        """The micro-batches of one rank, in the order of the stream: as few and as equal as the rules allow."""
        # A copy: the reader of a data set may do with its indices what it likes, the permutation is everybody's.
        indices = batch.slice(rank).copy()
        if self.epoch_size is None:
            return [MicroBatch(epoch=batch.epoch, indices=part) for part in self._cut(indices)]
        if batch.epochs is not None:
            first = batch.offset(rank)
            pieces = _by_own_epoch(indices, batch.epochs[first : first + len(indices)])
        else:
            pieces = _by_epoch(indices, batch.position + batch.offset(rank), self.epoch_size)
        return [MicroBatch(epoch=epoch, indices=part) for epoch, piece in pieces for part in self._cut(piece)]

    def _cut(self, indices: Indices) -> list[Indices]:
        if self.unit is None or len(indices) <= self.unit:
            return _evenly(indices, self.max_samples)
        units = [indices[first : first + self.unit] for first in range(0, len(indices), self.unit)]
        return [part for unit in units for part in _evenly(unit, self.max_samples)]


def _by_epoch(indices: Indices, position: int, epoch_size: int) -> list[tuple[int, Indices]]:
    pieces: list[tuple[int, Indices]] = []
    while len(indices):
        epoch, offset = divmod(position, epoch_size)
        taken = min(len(indices), epoch_size - offset)
        pieces.append((epoch, indices[:taken]))
        indices, position = indices[taken:], position + taken
    return pieces


def _by_own_epoch(indices: Indices, epochs: Indices) -> list[tuple[int, Indices]]:
    """Cut where the epoch changes."""
    edges = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(indices)]
    return [(int(epochs[first]), indices[first:last]) for first, last in pairwise(edges) if first < last]


def _evenly(indices: Indices, max_samples: int | None) -> list[Indices]:
    if len(indices) == 0:
        return []
    if max_samples is None or len(indices) <= max_samples:
        return [indices]
    count = -(-len(indices) // max_samples)
    edges = [len(indices) * i // count for i in range(count + 1)]
    return [indices[first:last] for first, last in pairwise(edges)]


def upcoming(cursor: Cursor, shares: Sequence[int], cutting: Cutting, rank: int) -> Iterator[MicroBatch]:
    """The micro-batches of one rank in all steps to come, as long as shares stay; moves the cursor."""
    while shares[rank]:
        yield from cutting.parts(cursor.take(shares), rank)
