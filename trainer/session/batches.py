"""Which samples of a script's own batches each worker computes: the script's order, cut into unequal slices.

A script's loader says what the batches of the whole cluster are. Rank 0 draws them, in the order in which one machine
would, and every worker loads its slice of each with the script's own dataset, collate function and loader processes.
A stream (an iterable dataset) cannot be indexed: every worker reads all of it and keeps its slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from hetopt.profiler.errors import BadInput
from hetopt.trainer.partition import largest_remainder

Shares: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[int, int]
"""Epoch, and number of a batch in it; both from 0."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one worker computes of a batch.

    Attributes:
        samples: of the batch that are this worker's; where it has none it computes some that do not count.
        batch: samples of the whole batch.
        shares: of all workers, in rank order.
    """

    samples: int
    batch: int
    shares: Shares

    @property
    def weight(self) -> float:
        """Of this worker's mean gradient in that of the batch."""
        return self.samples / self.batch

    @property
    def rows(self) -> int:
        """Samples that it computes."""
        return self.samples or min(ROWS_WITHOUT_SHARE, self.batch)


ROWS_WITHOUT_SHARE = 2
"""That a worker computes for nothing where it has none of a batch: BatchNorm cannot normalise one alone."""


class ShareTable:
    """Who takes how much of a batch, from which batch on. The same on all workers.

    Args:
        shares: of a full batch, at first.
        minimum: least share of a worker, where a batch has as many samples.
    """

    def __init__(self, shares: Shares, *, minimum: int = 1) -> None:
        self._minimum = minimum
        self._entries: list[tuple[Place, Shares]] = [((0, 0), shares)]

    @property
    def newest(self) -> Shares:
        """Of a full batch, once all that were drawn before are done."""
        return self._entries[-1][1]

    def change(self, shares: Shares, *, since: Place) -> None:
        """Use others from a batch on that no worker has drawn yet."""
        self._entries = [*self._entries[-1:], (since, shares)]

    def of(self, place: Place, samples: int) -> Shares:
        """The shares of a batch; in proportion where it is not a full one. Workers go without only where they must."""
        wanted = next(shares for since, shares in reversed(self._entries) if since <= place or since == (0, 0))
        if sum(wanted) == samples:
            return wanted
        least = min(self._minimum, samples // len(wanted))
        return largest_remainder(wanted, samples, minimum=[least] * len(wanted), maximum=[None] * len(wanted))


def own_slice(items: Sequence[Any], shares: Shares, rank: int) -> tuple[Part, Sequence[Any]]:
    """This worker's part of a batch, and the items to compute for it: never none, and for BatchNorm not one alone."""
    first = sum(shares[:rank])
    part = Part(samples=shares[rank], batch=len(items), shares=shares)
    return part, items[first : first + part.samples] or items[:ROWS_WITHOUT_SHARE]


class Slices(Sampler[list[int]]):
    """This worker's slice of every batch that rank 0 draws, a list of indices each."""

    def __init__(self, batches: Iterable[Sequence[int]], table: ShareTable, rank: int) -> None:
        self._batches = batches
        self._table = table
        self._rank = rank
        self.parts: deque[Part] = deque()
        self.drawn: Place = (-1, 0)

    def __iter__(self) -> Iterator[list[int]]:
        self.parts.clear()
        epoch = self.drawn[0] + 1
        for number, batch in enumerate(_agreed(self._batches, self._rank)):
            self.drawn = (epoch, number + 1)
            part, indices = own_slice(batch, self._table.of((epoch, number), len(batch)), self._rank)
            self.parts.append(part)
            yield list(indices)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # as a sampler's own: it may have none


def _agreed(batches: Iterable[Sequence[int]], rank: int) -> list[list[int]]:
    """The batches of an epoch as rank 0 draws them.

    Raises:
        BadInput: indices are no whole numbers.
    """
    drawn: list[list[int]] = []
    problem = 0
    if rank == 0:
        drawn = [list(batch) for batch in batches]
        problem = int(not all(isinstance(index, int) for batch in drawn for index in batch))
    head = torch.tensor([problem, len(drawn), sum(map(len, drawn))])
    dist.broadcast(head, src=0)
    problem, count, samples = head.tolist()
    if problem:
        raise BadInput(
            "The loader's sampler gives indices that are no whole numbers, which workers cannot agree on.",
            hint="give the loader a sampler of positions in the dataset",
        )
    sizes, flat = torch.empty(count, dtype=torch.int64), torch.empty(samples, dtype=torch.int64)
    if rank == 0:
        sizes = torch.tensor([len(batch) for batch in drawn], dtype=torch.int64)
        flat = torch.tensor([index for batch in drawn for index in batch], dtype=torch.int64)
    dist.broadcast(sizes, src=0)
    dist.broadcast(flat, src=0)
    return [part.tolist() for part in torch.split(flat, sizes.tolist())] if count else []


class SlicedStream(IterableDataset[Any]):
    """This worker's slices of a stream, collated, each behind its `Part`."""

    def __init__(
        self,
        stream: Iterable[Any],
        table: ShareTable,
        rank: int,
        *,
        batch_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._stream = stream
        self._table = table
        self._rank = rank
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._collate = collate
        self.drawn: Place = (-1, 0)

    def begin(self) -> None:
        """Count batches from the next epoch on."""
        self.drawn = (self.drawn[0] + 1, 0)

    def __iter__(self) -> Iterator[tuple[Part, Any]]:
        # Reader processes take turns, and each knows the shares only as they were when the epoch began.
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch = self.drawn[0]
        samples = iter(self._stream)
        number = first
        while batch := list(islice(samples, self._batch_size)):
            if len(batch) < self._batch_size and self._drop_last:
                return
            self.drawn = (epoch, number + 1)
            part, own = own_slice(batch, self._table.of((epoch, number), len(batch)), self._rank)
            yield part, self._collate(list(own))
            number += stride


def full_batch(loader: DataLoader[Any]) -> int:
    """Samples of a full batch.

    Raises:
        BadInput: nobody says.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int) or size < 1:
        raise BadInput(
            "The loader does not say how large its batches are, so that they cannot be shared out.",
            hint="give the DataLoader a batch_size, or its batch_sampler an attribute batch_size",
        )
    return size
