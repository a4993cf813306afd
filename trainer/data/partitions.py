"""Which samples each worker sees, and in which order: a pure function of sizes, labels and the seed.

Everything that a worker sees is passes over parts. `Parts.order(worker, turn)` is what it sees in its ``turn``-th
pass (from 0); what it sees in all of them, one after the other, is an endless stream.

    shards      a part of the data for each worker, disjoint, in proportion to the shares
    seldp       SelSync's (2307.07950): the data is cut likewise, and every worker goes round all the cuts, each
                beginning with its own, so that at any time they work on different ones
    labels      all samples of k labels for each worker; workers with a label in common share its samples

The words of numpy's bit generators never change between releases (NEP 19); all orders and draws are made of them.

Where every worker stands in its own stream of samples, where the data is partitioned.

All ranks hold the cursors of all workers, as they hold the one cursor of a run without partition: whatever a rank needs
to know of the others, it can compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from hetopt.core.errors import BadInput
from hetopt.core.synchronization import Partition, PartitionName
from hetopt.trainer.data.cursor import Cursor, GlobalBatch, Indices, Passes, count_of, permutation

NAMES: dict[PartitionName, str] = {
    "global": "one shuffled order for all, each sample once an epoch, whoever takes it",
    "shards": "each worker has a part of its own",
    "seldp": "workers go round the parts, at any time on different ones (SelSync)",
    "labels": "each worker has samples of a few labels only",
}
NEED_LABELS: tuple[PartitionName, ...] = ("labels",)

_ORDER, _LABELS, _SPLIT = range(3)
"""What a sequence of random words is for: each has its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedParts:
    """Every worker has the same samples in all its passes, shuffled anew in each.

    Attributes:
        parts: of each worker, in rank order.
        seed: of the orders.

    Raises:
        BadInput: a worker has no samples.
    """

    parts: tuple[Indices, ...]
    seed: int

    def __post_init__(self) -> None:
        for worker, part in enumerate(self.parts):
            if not len(part):
                raise BadInput(
                    f"the partition must give every worker a sample, and worker {worker} has none.",
                    hint="use fewer workers, or more labels a worker",
                )

    @property
    def workers(self) -> int:
        """Number of workers: one for each part."""
        return len(self.parts)

    def order(self, worker: int, turn: int) -> Indices:
        """The worker's part, shuffled (see `Parts`)."""
        part = self.parts[worker]
        words = _words(len(part), self.seed, _ORDER, worker, turn)
        return part[np.argsort(words, kind="stable")]


@dataclass(frozen=True, kw_only=True, eq=False)
class RotatingParts:
    """SelDP: a ring of all samples, cut into an arc for each worker; from turn to turn all move on by 1/N of the ring.

    In any turn the arcs are disjoint and cover the data. With equal weights a worker's N turns are all chunks; after
    those the ring is shuffled anew. Unequal weights make arcs that are finished at the same time by workers whose
    shares are as unequal.

    Attributes:
        size: samples of the data.
        weights: of the workers, positive.
        seed: of the ring.
    """

    size: int
    weights: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        _check_enough(self.size, self.weights)

    @property
    def workers(self) -> int:
        """Number of workers: one for each weight."""
        return len(self.weights)

    def order(self, worker: int, turn: int) -> Indices:
        """The arc where the worker is (see `Parts`)."""
        turns, step = divmod(turn, self.workers)
        ring = permutation(self.size, self.seed, turns)
        before = sum(self.weights[:worker])
        first, last = self._place(before, step), self._place(before + self.weights[worker], step)
        # A weight may be too small for a sample of its own: it has one then, in company.
        return ring[np.arange(first, max(last, first + 1)) % self.size]

    def _place(self, before: int, step: int) -> int:
        """Where on the ring those of so much weight end: ``size * (before / total + step / N)``."""
        total, count = sum(self.weights), self.workers
        return self.size * (before * count + step * total) // (total * count)


Parts: TypeAlias = FixedParts | RotatingParts
"""The data as every worker sees it: its ``order`` of dataset indices in each turn, int64, at least one; read-only."""


def make_parts(
    partition: Partition, *, size: int, weights: Sequence[int], seed: int, labels: Indices | None = None
) -> Parts | None:
    """The parts that a rule makes; None: none, there is one order for all (``global``).

    Args:
        partition: the rule.
        size: samples of the data.
        weights: how fast each worker goes through samples (its share of a batch), in rank order.
        seed: of all randomness.
        labels: of each sample, where the rule needs them.

    Raises:
        BadInput: a worker is left without a sample, or there are too few labels.
    """
    match partition.name:
        case "global":
            return None
        case "seldp":
            return RotatingParts(size=size, weights=tuple(weights), seed=seed)
        case "shards":
            _check_enough(size, weights)
            whole = permutation(size, seed, 0)
            return FixedParts(parts=_cut(whole, weights), seed=seed)
        case "labels":
            if labels is None or len(labels) != size:
                raise ValueError(f"{partition.name} needs a label for each of the {size} samples")
            return FixedParts(parts=label_skew(labels, len(weights), partition.labels, seed), seed=seed)


def label_skew(labels: Indices, workers: int, each: int, seed: int) -> tuple[Indices, ...]:
    """Samples of so many labels for each worker; of labels that several have, each has an equal part.

    Labels are dealt out in turn, so that as many as possible have an owner. Where all have, every sample is somebody's.

    Raises:
        BadInput: there are fewer labels than a worker is to have.
    """
    kinds = np.unique(labels)
    if each > len(kinds):
        raise BadInput(
            f"the labels of a worker must be at most the {len(kinds)} of the data, got {each}.",
            hint="ask for fewer labels a worker",
        )
    dealt = kinds[np.argsort(_words(len(kinds), seed, _LABELS), kind="stable")]
    owners: dict[int, list[int]] = {place: [] for place in range(len(kinds))}
    for worker in range(workers):
        for number in range(each):
            owners[(worker * each + number) % len(kinds)].append(worker)
    held: list[list[Indices]] = [[] for _ in range(workers)]
    for place, those in owners.items():
        if those:
            parts = _cut(_of_label(labels, dealt[place], seed), [1] * len(those))
            for worker, part in zip(those, parts, strict=True):
                held[worker].append(part)
    return tuple(np.concatenate(parts) for parts in held)


def _of_label(labels: Indices, label: int, seed: int) -> Indices:
    """The samples of a label, shuffled."""
    those = np.flatnonzero(labels == label).astype(np.int64, copy=False)
    return those[np.argsort(_words(len(those), seed, _SPLIT, int(label) & 0xFFFFFFFF), kind="stable")]


def _cut(whole: Indices, weights: Sequence[int]) -> tuple[Indices, ...]:
    """Cut in proportion to weights."""
    total = sum(weights)
    edges = [len(whole) * before // total for before in accumulate(weights, initial=0)]
    return tuple(whole[first:last] for first, last in pairwise(edges))


def _words(count: int, *key: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Random words; the same for the same key, everywhere."""
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)


def _check_enough(size: int, weights: Sequence[int]) -> None:
    if size < len(weights):
        raise BadInput(
            f"{size} samples cannot be divided among {len(weights)} workers.", hint="use fewer workers or more data"
        )


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
        self._streams = [Passes(partial(parts.order, worker)) for worker in range(parts.workers)]
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
        return PartitionedCursor(self._parts, self.dataset_size, weights=self._weights, positions=drawn)
