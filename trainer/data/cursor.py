"""Which samples every worker takes at a step: one shuffled permutation an epoch, read by one global cursor.

All ranks hold the same cursor. The permutations of successive epochs form one endless stream; a step takes the next B
positions, and rank i the i-th slice of ``b_i`` of them. What is in an epoch therefore depends on neither the shares
nor the number of workers: both may change between any two steps, and every sample still comes exactly once an epoch.

A step may span the end of an epoch. Cutting the last batch short instead would give that step another batch size
(other gradient noise, another learning rate, other compute times for the controllers) and dropping it would lose
samples; taking the rest from the next permutation keeps every step at exactly B samples.

And how one worker's slice of a step is cut into what is computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetopt.core.errors import BadInput

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch:
    """One step's samples, in the order of the stream, and how many of them each rank takes.

    ``samples`` are dataset indices and may be a view that must not be written to. ``epoch`` and ``position`` are those
    of the first sample: completed epochs, and samples drawn since the run began. ``epochs`` are those of each sample
    where every worker counts its own; None: epochs follow from the position.
    """

    epoch: int
    position: int
    samples: Indices
    shares: tuple[int, ...]
    epochs: Indices | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def offset(self, rank: int) -> int:
        """Where the slice of a rank begins in the batch."""
        return sum(self.shares[:rank])

    def slice(self, rank: int) -> Indices:
        """The samples of one rank."""
        first = self.offset(rank)
        return self.samples[first : first + self.shares[rank]]

    @property
    def slices(self) -> tuple[tuple[int, ...], ...]:
        """The samples of every rank."""
        return tuple(tuple(self.slice(rank).tolist()) for rank in range(len(self.shares)))


class Cursor:
    """A place in the samples of a run, the same on every rank.

    Args:
        dataset_size: samples that are an epoch.
        position: samples drawn since the run began.
    """

    def __init__(self, dataset_size: int, *, position: int = 0) -> None:
        self.dataset_size = dataset_size
        self._position = position

    @property
    def position(self) -> int:
        """Samples drawn since the run began, by all workers together."""
        return self._position

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.position // self.dataset_size

    def take(self, shares: Sequence[int]) -> GlobalBatch:
        """The next samples, ``shares[r]`` of them for rank r; moves the cursor behind them."""
        raise NotImplementedError

    def state(self) -> dict[str, int]:
        """Where the cursor stands, as plain JSON."""
        return {"dataset_size": self.dataset_size, "position": self.position}

    def at(self, state: Mapping[str, int]) -> Cursor:
        """A cursor over the same data that continues exactly where ``state`` was taken."""
        raise NotImplementedError


def count_of(shares: Sequence[int], workers: int | None = None) -> int:
    """Samples of a step.

    Raises:
        ValueError: there are none, or not as many shares as workers.
    """
    if sum(shares) < 1 or min(shares) < 0 or len(shares) != (workers or len(shares)):
        raise ValueError(f"a step needs at least one sample and no negative share, not {list(shares)}")
    return sum(shares)


class SampleCursor(Cursor):
    """A place in the endless stream of shuffled epochs over a dataset; the same on every rank, device and platform."""

    def __init__(self, dataset_size: int, seed: int, *, position: int = 0) -> None:
        if dataset_size < 1:
            raise BadInput("The training data is empty.", hint="check the task's data")
        if seed < 0:
            raise BadInput(f"`seed` must be at least 0, got {seed}.", hint="for example `seed=1`")
        if position < 0:
            raise ValueError(f"position must not be negative, not {position}")
        super().__init__(dataset_size, position=position)
        self._seed = seed

    def take(self, shares: Sequence[int]) -> GlobalBatch:
        """The next ``sum(shares)`` samples of the stream, one slice a rank (see `Cursor`)."""
        first, epoch = self._position, self.epoch
        last = first + count_of(shares)
        samples = self._read(first, last)
        while (reached := first + len(samples)) < last:
            samples = np.concatenate([samples, self._read(reached, last)])
        self._position = last
        return GlobalBatch(epoch=epoch, position=first, samples=samples, shares=tuple(shares))

    def state(self) -> dict[str, int]:
        """As of `Cursor`, with the seed."""
        return {**super().state(), "seed": self._seed}

    def at(self, state: Mapping[str, int]) -> SampleCursor:
        """A cursor of the state's own data and seed (see `Cursor`)."""
        return SampleCursor(state["dataset_size"], state["seed"], position=state["position"])

    def _read(self, first: int, last: int) -> Indices:
        """Positions ``first`` to ``last`` of the stream, cut at the end of the epoch of ``first``."""
        epoch, offset = divmod(first, self.dataset_size)
        return permutation(self.dataset_size, self._seed, epoch)[offset : offset + last - first]


# Two, because samples are read ahead: one reader may be in the next epoch already.
@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> Indices:
    """The shuffled order of one epoch, read-only: a pure function of its arguments, everywhere.

    Sorting by raw random words costs a little more than a shuffle. But the words of numpy's bit generators are
    guaranteed never to change between releases and platforms (NEP 19), while its shuffles, and torch's, are not; and
    workers that disagree about the order would repeat and lose samples silently.
    """
    words = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    order = np.argsort(words, kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


class Passes:
    """One worker's samples, pass after pass.

    Args:
        order: the samples of a pass, by the number of the pass; never empty.

    Attributes:
        drawn: samples that were taken or skipped.
    """

    def __init__(self, order: Callable[[int], Indices]) -> None:
        self._read = order
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
            self._order = self._read(self._turn)
        return self._order

    def _next_turn(self) -> None:
        self._turn, self._offset, self._order = self._turn + 1, 0, None


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
