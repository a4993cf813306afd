"""Which samples every worker takes at a step: of one permutation an epoch, of its part of the data, or of a stream.

All ranks hold the same cursor. The permutations of successive epochs form one endless stream; a step takes the next B
positions, and rank i the i-th slice of ``b_i`` of them. What is in an epoch therefore depends on neither the shares
nor the number of workers: both may change between any two steps, and every sample still comes exactly once an epoch.

A step may span the end of an epoch. Cutting the last batch short instead would give that step another batch size
(other gradient noise, another learning rate, other compute times for the controllers) and dropping it would lose
samples; taking the rest from the next permutation keeps every step at exactly B samples.

**Partitions.** `Parts`, a function of worker and turn, is what a worker sees in its ``turn``-th pass (from 0), by
sizes, labels and the seed. All ranks hold the cursors of all workers: what a rank needs to know of the others, it
computes.

    shards      a part of the data for each worker, disjoint, in proportion to the shares
    seldp       SelSync's (2307.07950): the data is cut likewise, and every worker goes round all the cuts, each
                beginning with its own, so that at any time they work on different ones
    labels      all samples of k labels for each worker; workers with a label in common share its samples

The words of numpy's bit generators never change between releases (NEP 19); all orders and draws are made of them.

**Streams.** Samples of a data set arrive one by one at a constant rate, so what has arrived is a function of the time,
and what becomes of samples that were not taken yet is arithmetic on their running numbers. A stream of rate S whose
worker takes b samples every t seconds holds, after T steps (arXiv 2301.08897, eq. 4): ``(t S - b) T`` samples where all
wait (persistence), at most b where only a batch of the newest does (truncation), and at most ``max(S a, b)`` where
those younger than ``a`` do (bounded age). Samples that a batch still lacks to be full are never dropped: a stream that
is slower than its worker loses none under any policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.run_spec import BufferPolicy, Partition, PartitionName, Stream
from hetopt.trainer.agreement import gather_numbers

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch:
    """Samples of one step, as dataset indices in stream order, and how many of them each rank takes.

    ``samples`` are dataset indices and may be a view that must not be written to. ``epoch`` and ``position`` are those
    of the first sample: completed epochs, and samples drawn since the run began. ``epochs`` are those of each sample,
    int64; ``shares`` are the samples of each rank. The length is the number of samples of all ranks.
    """

    epoch: int
    position: int
    samples: Indices
    shares: tuple[int, ...]
    epochs: Indices

    def __len__(self) -> int:
        return len(self.samples)

    def offset(self, rank: int) -> int:
        """Return the position in the batch of the first sample of a rank."""
        return sum(self.shares[:rank])

    def slice(self, rank: int) -> Indices:
        """Return the dataset indices of one rank's samples, int64; a view that must not be written to."""
        first = self.offset(rank)
        return self.samples[first : first + self.shares[rank]]


class Cursor:
    """Base of positions in a run's stream of training samples, the same on every rank.

    ``take(shares)`` gives the next samples, ``shares[r]`` of them for rank r, and moves the cursor behind them;
    ``at(state)`` gives a cursor over the same data that continues exactly where ``state`` was taken.

    Args:
        dataset_size: samples of an epoch, at least 1.
        position: samples drawn since the run began, by all workers together.
    """

    def __init__(self, dataset_size: int, position: int = 0) -> None:
        self.dataset_size = dataset_size
        self.position = position

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.position // self.dataset_size

    def take(self, shares: Sequence[int]) -> GlobalBatch:
        """Return the next samples, ``shares[r]`` of them for rank r, and move the cursor behind them.

        Raises:
            NotImplementedError: the subclass has no ``_draw``.
        """
        samples, epochs = self._draw(shares)
        batch = GlobalBatch(
            epoch=self.epoch, position=self.position, samples=samples, shares=tuple(shares), epochs=epochs
        )
        self.position += len(samples)
        return batch

    def _draw(self, shares: Sequence[int]) -> tuple[Indices, Indices]:
        """Return the next samples of all ranks, one slice a rank, and the epoch of each."""
        raise NotImplementedError

    def state(self) -> dict[str, int]:
        """Return the cursor's position and dataset size, in samples, for a checkpoint, as plain JSON."""
        return {"dataset_size": self.dataset_size, "position": self.position}


class SampleCursor(Cursor):
    """Position in the endless stream of shuffled epochs over a dataset; the same on every rank, device and platform.

    Args:
        dataset_size: samples of an epoch, at least 1.
        seed: seed of the orders, the same on every rank.
        position: samples drawn since the run began, by all workers together.
    """

    def __init__(self, dataset_size: int, seed: int, *, position: int = 0) -> None:
        super().__init__(dataset_size, position)
        self._seed = seed
        self._stream = Passes(partial(permutation, dataset_size, seed), *divmod(position, dataset_size))

    def _draw(self, shares: Sequence[int]) -> tuple[Indices, Indices]:
        return self._stream.take(sum(shares))

    def at(self, state: Mapping[str, int]) -> SampleCursor:
        """Return a new cursor at a saved state, over as much data as the state names, with this cursor's seed.

        This cursor stays where it is.

        Args:
            state: as `state` returned it.
        """
        return SampleCursor(state["dataset_size"], self._seed, position=state["position"])


# Two, because samples are read ahead: one reader may be in the next epoch already.
@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> Indices:
    """Return the dataset indices of one epoch in shuffled order, read-only; the same on every platform.

    Sorting by raw random words costs a little more than a shuffle. But the words of numpy's bit generators are
    guaranteed never to change between releases and platforms (NEP 19), while its shuffles, and torch's, are not; and
    workers that disagree about the order would repeat and lose samples silently.

    Args:
        size: samples of the dataset.
        seed: seed of the run.
        epoch: number of the epoch, from 0.
    """
    order = shuffled(size, seed, epoch)
    order.setflags(write=False)
    return order


class Passes:
    """One worker's endless stream of samples, pass after pass over its data.

    Args:
        order: returns the samples of a pass, by the number of the pass; never empty.
        turn: number of the present pass, from 0.
        offset: samples of the present pass that were drawn before.

    Attributes:
        drawn: samples that were taken or skipped since this object was made.
    """

    def __init__(self, order: Callable[[int], Indices], turn: int = 0, offset: int = 0) -> None:
        self._read = order
        self._turn, self._offset = turn, offset
        self._order: Indices | None = None
        self.drawn = 0

    def skip(self, count: int) -> None:
        """Skip ``count`` samples, over as many turns as that takes, as if they had been drawn."""
        left = count
        while left >= (rest := len(self._present) - self._offset):
            left -= rest
            self._next_turn()
        self._offset += left
        self.drawn += count

    def take(self, count: int) -> tuple[Indices, Indices]:
        """Return the next ``count`` dataset indices, and for each the number of its pass, from 0; moves on.

        With ``count`` 0 both are empty.
        """
        pieces: list[Indices] = []
        turns: list[Indices] = []
        left = count
        while left:
            piece = self._present[self._offset : self._offset + left]
            pieces.append(piece)
            turns.append(np.full(len(piece), self._turn, dtype=np.int64))
            left -= len(piece)
            self._offset += len(piece)
            if self._offset == len(self._present):
                self._next_turn()
        self.drawn += count
        empty = [np.empty(0, dtype=np.int64)]
        return np.concatenate(pieces or empty), np.concatenate(turns or empty)

    @property
    def _present(self) -> Indices:
        """Order of the present pass over the samples, read when it is first needed."""
        if self._order is None:
            self._order = self._read(self._turn)
        return self._order

    def _next_turn(self) -> None:
        self._turn, self._offset, self._order = self._turn + 1, 0, None


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Dataset indices that are computed together; of one epoch where samples differ from epoch to epoch.

    Its length is the number of samples that count, so that of one that does not count is 0.

    One that does not count is computed because the other devices of a sharded model compute one more.

    Attributes:
        epoch: epoch of its samples, from 0.
        indices: places of its samples in the dataset.
        counts: whether its samples are a part of the batch.
    """

    epoch: int
    indices: Sequence[int] | Indices
    counts: bool = True

    def __len__(self) -> int:
        return len(self.indices) if self.counts else 0


def by_epoch(indices: Indices, epochs: Indices) -> list[tuple[int, Indices]]:
    """Return dataset indices cut where the epoch changes, as (epoch, indices) pairs; without indices an empty list."""
    edges = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(indices)]
    return [(int(epochs[first]), indices[first:last]) for first, last in pairwise(edges) if first < last]


def evenly(indices: Indices, max_samples: int | None) -> list[Indices]:
    """Return indices cut into as few and as equal parts as ``max_samples`` allows; without indices an empty list.

    Args:
        indices: indices to cut, in order.
        max_samples: most indices of a part; None: one part.
    """
    if len(indices) == 0:
        return []
    return np.array_split(indices, 1 if max_samples is None else -(-len(indices) // max_samples))


NEED_LABELS: tuple[PartitionName, ...] = ("labels",)

_ORDER, _LABELS, _SPLIT = range(3)
"""What a sequence of random words is for: each has its own."""


Parts: TypeAlias = Callable[[int, int], Indices]
"""Function from (worker, turn) to the data that this worker sees in that turn: dataset indices, int64, at least one."""


def fixed_parts(parts: Sequence[Indices], seed: int) -> Parts:
    """Return a function (worker, pass) -> dataset indices: a worker's part of ``parts``, shuffled anew in each pass.

    Args:
        parts: dataset indices of each worker, in rank order.
        seed: seed of the orders, the same on every rank.

    Raises:
        BadInput: a worker has no samples.
    """
    for worker, part in enumerate(parts):
        if not len(part):
            raise BadInput(
                f"the partition must give every worker a sample, and worker {worker} has none.",
                hint="use fewer workers, more data, or more labels a worker",
            )

    def order(worker: int, turn: int) -> Indices:
        return parts[worker][shuffled(len(parts[worker]), seed, _ORDER, worker, turn)]

    return order


def rotating_parts(size: int, weights: Sequence[int], seed: int) -> Parts:
    """Return a function (worker, pass) -> dataset indices: an arc of a ring of all samples, which moves on (SelDP).

    From pass to pass all arcs move on by 1/N of the ring.

    In any turn the arcs are disjoint and cover the data; a worker whose weight is too small for a sample shares one.
    With equal weights a worker's N turns are all chunks; after those the ring is shuffled anew. Unequal weights make
    arcs that are finished at the same time by workers whose shares are as unequal.

    Args:
        size: samples of the data.
        weights: weights of the workers, positive.
        seed: seed of the ring.
    """
    total, workers = sum(weights), len(weights)

    def place(before: int, step: int) -> int:
        """Return the end on the ring of the parts of so much weight: ``size * (before / total + step / N)``."""
        return size * (before * workers + step * total) // (total * workers)

    def order(worker: int, turn: int) -> Indices:
        """Return a worker's indices in one of its turns; at least one, which others may have as well."""
        turns, step = divmod(turn, workers)
        before = sum(weights[:worker])
        first, last = place(before, step), place(before + weights[worker], step)
        # A weight may be too small for a sample of its own: it has one then, in company.
        return permutation(size, seed, turns)[np.arange(first, max(last, first + 1)) % size]

    return order


def make_parts(
    partition: Partition, *, size: int, weights: Sequence[int], seed: int, labels: Indices | None = None
) -> Parts | None:
    """Return the function (worker, pass) -> dataset indices of a partition; None for ``global``: one order for all.

    Args:
        partition: rule by which the data is cut.
        size: samples of the data.
        weights: how fast each worker goes through samples (its share of a batch), in rank order.
        seed: seed of all randomness.
        labels: label of each sample, [size] int64; None: the rule needs none (only ``labels`` does).

    Raises:
        BadInput: a worker is left without a sample, or there are too few labels.
    """
    match partition.name:
        case "global":
            return None
        case "seldp":
            return rotating_parts(size, tuple(weights), seed)
        case "shards":
            return fixed_parts(_cut(permutation(size, seed, 0), weights), seed)
        case "labels":
            assert labels is not None, "whoever asks has read them"
            return fixed_parts(label_skew(labels, len(weights), partition.labels, seed), seed)


def label_skew(labels: Indices, workers: int, each: int, seed: int) -> tuple[Indices, ...]:
    """Return the dataset indices of each worker, of ``each`` labels; workers with a label in common divide it.

    Labels are dealt out in turn, so that as many as possible have an owner. Where all have, every sample is somebody's.

    Args:
        labels: label of each sample, [samples].
        workers: number of workers.
        each: labels that a worker has.
        seed: seed of all randomness.

    Raises:
        BadInput: there are fewer labels than a worker is to have.
    """
    kinds = np.unique(labels)
    if each > len(kinds):
        raise BadInput(
            f"the labels of a worker must be at most the {len(kinds)} of the data, got {each}.",
            hint="ask for fewer labels a worker",
        )
    dealt = kinds[shuffled(len(kinds), seed, _LABELS)]
    held: list[list[Indices]] = [[] for _ in range(workers)]
    for place, label in enumerate(dealt[: workers * each]):
        owners = [turn // each for turn in range(place, workers * each, len(kinds))]  # the label's turns to be dealt
        those = np.flatnonzero(labels == label).astype(np.int64, copy=False)
        mixed = those[shuffled(len(those), seed, _SPLIT, int(label) & 0xFFFFFFFF)]
        for worker, part in zip(owners, _cut(mixed, [1] * len(owners)), strict=True):
            held[worker].append(part)
    return tuple(np.concatenate(parts) for parts in held)


def _cut(whole: Indices, weights: Sequence[int]) -> tuple[Indices, ...]:
    """Cut indices in proportion to weights."""
    total = sum(weights)
    edges = [len(whole) * before // total for before in accumulate(weights, initial=0)]
    return tuple(whole[first:last] for first, last in pairwise(edges))


def shuffled(count: int, *key: int) -> Indices:
    """Return the numbers from 0 to ``count`` - 1 in a random order, the same for the same key everywhere."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class PartitionedCursor(Cursor):
    """Position in each worker's stream of samples: passes over that worker's part of the data.

    Args:
        parts: function from (worker, pass) to the dataset indices that the worker sees in that pass.
        dataset_size: samples of the data: an epoch is over when as many were drawn, whichever they were.
        weights: weights of the workers; they share out a position that was saved with another number of workers.
        positions: samples that each worker has drawn so far; None: none.
    """

    def __init__(
        self, parts: Parts, dataset_size: int, *, weights: Sequence[int], positions: Sequence[int] | None = None
    ) -> None:
        super().__init__(dataset_size, sum(positions or ()))
        self._parts = parts
        self._weights = tuple(weights)
        self._streams = [Passes(partial(parts, worker)) for worker in range(len(weights))]
        for stream, position in zip(self._streams, positions or (), strict=positions is not None):
            stream.skip(position)

    def _draw(self, shares: Sequence[int]) -> tuple[Indices, Indices]:
        taken = [stream.take(count) for stream, count in zip(self._streams, shares, strict=True)]
        return np.concatenate([samples for samples, _ in taken]), np.concatenate([turns for _, turns in taken])

    def state(self) -> dict[str, int]:
        """Return the samples drawn by all and by each worker, for a checkpoint, as plain JSON."""
        return {
            **super().state(),
            **{f"drawn_by_{worker}": stream.drawn for worker, stream in enumerate(self._streams)},
        }

    def at(self, state: Mapping[str, int]) -> PartitionedCursor:
        """Return a new cursor over the same data that continues where ``state`` was taken.

        Where that was with another number of workers, parts are others, too: each worker begins as deep in its own as
        its weight says.
        """
        drawn = [state["position"] * weight // sum(self._weights) for weight in self._weights]
        if sum(key.startswith("drawn_by_") for key in state) == len(drawn):
            drawn = [state[f"drawn_by_{worker}"] for worker in range(len(drawn))]
        return PartitionedCursor(self._parts, self.dataset_size, weights=self._weights, positions=drawn)


_ROUNDING = 1e-9  # rate times time may miss the number of the sample that arrives at that time

ELSEWHERE = -1
"""Index in the place of a sample of another worker, whose number is not known here."""


class StreamCursor(Cursor):
    """Cursor over samples that arrive at this worker in real time, at its stream's rate.

    Args:
        stream: rates, buffer policy and patience of the run's streams.
        rank: rank of this worker.
        order: returns the samples of a pass, by the number of the pass; never empty.
        dataset_size: samples that count as an epoch, whichever they are.
        clock: returns the seconds by which samples arrive.
        sleep: waits for so many seconds.

    Attributes:
        taken: running number of this worker's next sample: those before it were taken or dropped.
    """

    def __init__(
        self,
        stream: Stream,
        rank: int,
        *,
        order: Callable[[int], Indices],
        dataset_size: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(dataset_size)
        self._stream = stream
        self._rank = rank
        self._rate_per_s = stream.rates[rank]
        self._passes = Passes(order)
        self._clock, self._sleep = clock, sleep
        self.taken = 0
        self._dropped_before = 0
        self._dropped = 0
        self._wait_s = 0.0
        self._most_held = 0
        self._count = 1
        self._origin_s = 0.0

    def begin(self) -> None:
        """Start the stream's clock: samples behind those already taken arrive from now on."""
        self._origin_s = self._clock() - self.taken / self._rate_per_s

    def arriving(self, count: int) -> tuple[Indices, Indices]:
        """Take the next ``count`` samples that the buffer kept, waiting till they arrive; return them and their passes.

        Raises:
            RunFailed: they would take longer to arrive than the stream's patience.
        """
        self._count = count
        now_s = self._clock()
        arrived, aged = self._arrived(now_s), self._aged(now_s)
        first = first_kept(self._stream.buffer, taken=self.taken, arrived=arrived, aged=aged, count=count)
        self._most_held = max(self._most_held, arrived - first)
        self._dropped += first - self.taken
        last = first + count
        if arrived < last:
            self._wait(self._origin_s + last / self._rate_per_s - now_s, count)
        self.taken = last
        self._passes.skip(first - self._passes.drawn)
        return self._passes.take(count)

    def _draw(self, shares: Sequence[int]) -> tuple[Indices, Indices]:
        """Return this worker's samples and their epochs in their places; of the others stand `ELSEWHERE` and epoch 0.

        It waits for samples that have not arrived.
        """
        names = np.full(sum(shares), ELSEWHERE, dtype=np.int64)
        epochs = np.zeros_like(names)
        if share := shares[self._rank]:
            first = sum(shares[: self._rank])
            names[first : first + share], epochs[first : first + share] = self.arriving(share)
        return names, epochs

    def state(self) -> dict[str, int]:
        """Return the samples that every worker took from its stream, for a checkpoint; all workers must call it."""
        rows = gather_numbers([float(self.taken)], len(self._stream.rates))
        return {**super().state(), **{f"taken_by_{rank}": int(taken) for rank, (taken,) in enumerate(rows)}}

    def at(self, state: Mapping[str, int]) -> StreamCursor:
        """Move this cursor to where ``state`` was taken, and return it: a stream can be read in one place only.

        Where that was with another number of workers, what they had taken is shared out by rate.

        Args:
            state: as `state` returned it.
        """
        self.position, rates = state["position"], self._stream.rates
        taken = [value for key, value in state.items() if key.startswith("taken_by_")]
        is_alike = len(taken) == len(rates)
        self.taken = state[f"taken_by_{self._rank}"] if is_alike else int(sum(taken) * self._rate_per_s / sum(rates))
        return self

    def flow(self) -> dict[str, float]:
        """Return the most samples that waited, seconds waited and samples dropped since the last call, by field."""
        now_s = self._clock()
        arrived = self._arrived(now_s)
        first = first_kept(
            self._stream.buffer, taken=self.taken, arrived=arrived, aged=self._aged(now_s), count=self._count
        )
        flow = {
            "stream_buffered": float(max(self._most_held, arrived - first)),
            "stream_wait_s": self._wait_s,
            "stream_dropped": float(self._dropped - self._dropped_before),
        }
        self._wait_s, self._most_held, self._dropped_before = 0.0, 0, self._dropped
        return flow

    def _arrived(self, now_s: float) -> int:
        return math.floor((now_s - self._origin_s) * self._rate_per_s + _ROUNDING)

    def _aged(self, now_s: float) -> int:
        """Return the number of samples that have arrived, and are too old by now."""
        return max(0, self._arrived(now_s - self._stream.max_age_s))

    def _wait(self, wait_s: float, count: int) -> None:
        """Sleep ``wait_s``; RunFailed, at once, if that is longer than the stream's patience."""
        if wait_s > self._stream.patience_s:
            raise RunFailed(
                f"worker {self._rank} would wait {wait_s:.3g} s for a batch of {count}: its stream brings "
                f"{self._rate_per_s:.4g} samples a second.",
                hint="let batches follow the streams with the batch policy 'rate', or raise the stream's patience",
            )
        self._wait_s += wait_s
        self._sleep(wait_s)


def every_nth_of_all(dataset_size: int, seed: int, rank: int, workers: int) -> Callable[[int], Indices]:
    """Return a function from a pass to dataset indices: every ``workers``-th of the shuffled epoch, from ``rank`` on.

    Where the data has fewer samples than workers, a worker that would have none has all of them.

    Args:
        dataset_size: samples of an epoch.
        seed: seed of the orders, the same on every rank.
        rank: rank of this worker.
        workers: number of workers.
    """

    def order(number: int) -> Indices:
        """Return every worker-th index of an epoch; all of them where that would be none."""
        everything = permutation(dataset_size, seed, number)
        dealt = everything[rank::workers]
        return dealt if len(dealt) else everything

    return order


def first_kept(policy: BufferPolicy, *, taken: int, arrived: int, aged: int, count: int) -> int:
    """Return the running number of the first sample that a stream's buffer still has when ``count`` are taken.

    Samples from this number on that have arrived wait in the buffer.

    Args:
        policy: rule of the buffer: ``persistence``, ``truncation`` or ``bounded_age``.
        taken: samples that were taken or dropped before: the oldest that waits has this number.
        arrived: samples that have arrived.
        aged: samples that have arrived and are too old.
        count: samples that are about to be taken.
    """
    newest = max(taken, arrived - count)
    kept = {"persistence": taken, "truncation": newest, "bounded_age": min(newest, max(taken, aged))}
    return kept[policy]


AnyCursor: TypeAlias = SampleCursor | PartitionedCursor | StreamCursor
