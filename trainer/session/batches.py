"""Which samples of a script's own batches each worker computes: the script's order, cut into unequal slices.

A script's loader says what the batches of the whole cluster are. Rank 0 draws them, in the order in which one machine
would, and every worker loads its slice of each with the script's own dataset, collate function and loader processes.
A stream (an iterable dataset) cannot be indexed: every worker reads all of it and keeps its slices.
"""

from __future__ import annotations

import copy
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from hetopt.core.batch_partition import largest_remainder
from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.session.audit import Audits
from hetopt.trainer.session.random_state import States

Shares: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[int, int]
"""Epoch, and number of a batch in it; both from 0."""

MOST_DRAWN = 1000
"""Batches that are drawn at a time, as a sampler may never end."""

_MARKED_ELEMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one worker computes of a batch.

    Attributes:
        samples: of the batch that are this worker's; where it has none it computes some that do not count.
        batch: samples of the whole batch.
        first: place of its first sample in the batch.
        shares: of all workers, in rank order.
        place: of the batch.
        step: that it is of, among all of its loader, from 1.
        is_last: whether it is the last of its epoch, as far as that is known.
        is_audit: whether the leader computes the whole batch and the others share it (see `audit`).
        mark: fingerprint of the batch's first sample, where every worker reads it; 0: not known.
    """

    samples: int
    batch: int
    first: int = 0
    shares: Shares = ()
    place: Place = (0, 0)
    step: int = 0
    is_last: bool = False
    is_audit: bool = False
    mark: int = 0

    @property
    def weight(self) -> float:
        """Return the weight of this worker's mean gradient in that of the batch."""
        return self.samples / self.batch

    @property
    def rows(self) -> int:
        """Return the samples that this worker computes; without a share of the batch, a few whose weight is 0."""
        return self.samples or min(ROWS_WITHOUT_SHARE, self.batch)


ROWS_WITHOUT_SHARE = 2
"""That a worker computes for nothing where it has none of a batch: BatchNorm cannot normalise one alone."""


class ShareTable:
    """Who takes how much of a batch, from which batch on. The same on all workers.

    Args:
        shares: of a full batch, at first.
        minimum: least share of a worker, where a batch has as many samples.
        audits: which batches are computed twice; None: none is.
    """

    def __init__(self, shares: Shares, *, minimum: int = 1, audits: Audits | None = None) -> None:
        self._minimum = minimum
        self.audits = audits
        self._entries: list[tuple[Place, Shares]] = [((0, 0), shares)]

    @property
    def window(self) -> int:
        """Return the batches of a step."""
        return 1 if self.audits is None else self.audits.accumulate

    @property
    def newest(self) -> Shares:
        """Of a full batch, once all that were drawn before are done."""
        return self._entries[-1][1]

    def state(self) -> list[tuple[Place, Shares]]:
        """What a checkpoint keeps."""
        return list(self._entries)

    def resume(self, entries: Sequence[tuple[Place, Shares]]) -> None:
        """Go on with what `state` gave."""
        self._entries = [(tuple(place), tuple(shares)) for place, shares in entries]  # type: ignore[misc]  # of two

    def change(self, shares: Shares, *, since: Place) -> None:
        """Use others from a batch on that no worker has drawn yet."""
        self._entries = [*self._entries[-1:], (since, shares)]

    def of(self, place: Place, samples: int) -> Shares:
        """Return the shares of a batch; in proportion where it is not a full one. Workers go without only where they
        must."""
        wanted = next(shares for since, shares in reversed(self._entries) if since <= place or since == (0, 0))
        if sum(wanted) == samples:
            return wanted
        return self._in_proportion(wanted, samples)

    def _in_proportion(self, wanted: Sequence[int], samples: int) -> Shares:
        least = min(self._minimum, samples // len(wanted))
        return largest_remainder(wanted, samples, minimum=[least] * len(wanted), maximum=[None] * len(wanted))

    def part(self, rank: int, samples: int, place: Place, step: int, *, mark: int = 0, is_last: bool = False) -> Part:
        """Return a worker's part of a batch.

        Args:
            rank: of the worker.
            samples: of the batch.
            place: of the batch.
            step: that the batch is of, among all of its loader, from 1.
            mark: see `Part`.
            is_last: whether the batch is the last of its epoch.
        """
        shares = self.of(place, samples)
        changed = place == self._entries[-1][0]
        is_audit = self.audits is not None and self.audits.is_due(step, samples, changed=changed)
        own = (0, *self._in_proportion(shares[1:], samples)) if is_audit else shares
        first = sum(own[:rank])
        return Part(
            samples=samples if is_audit and rank == 0 else own[rank],
            batch=samples,
            first=first,
            shares=shares,
            place=place,
            step=step,
            is_last=is_last,
            is_audit=is_audit,
            mark=mark,
        )


def own_items(items: Sequence[Any], part: Part) -> Sequence[Any]:
    """Return the items of a batch that a worker computes: never none, and for BatchNorm not one alone."""
    return items[part.first : part.first + part.samples] or items[:ROWS_WITHOUT_SHARE]


class Slices(Sampler[list[int]]):
    """This worker's slice of every batch that rank 0 draws, a list of indices each.

    Args:
        batches: the script's.
        table: of shares.
        rank: whose slices.
        first: gives all workers the numbers that it is given on rank 0.
        passes: whether a batch of the epoch is passed over.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[int]],
        table: ShareTable,
        rank: int,
        first: Callable[[Sequence[int]], list[int]],
        passes: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._batches = batches
        self._passes = passes
        self._table = table
        self._rank = rank
        self._first = first
        self.parts: deque[Part] = deque()
        self.drawn: Place = (-1, 0)
        self.step = 0  # that the batch that was shared out last is of

    def __iter__(self) -> Iterator[list[int]]:
        # At once: a loader with reader processes begins twice, and a sampler may draw the order as it begins.
        return self._own(iter(self._batches) if self._rank == 0 else iter(()))

    def _own(self, source: Iterator[Sequence[int]]) -> Iterator[list[int]]:
        self.parts.clear()
        epoch = self.drawn[0] + 1
        for number, (batch, is_last) in enumerate(self._agreed(source)):
            self.drawn = (epoch, number + 1)
            if self._passes(number):
                continue
            self.step += number % self._table.window == 0
            part = self._table.part(self._rank, len(batch), (epoch, number), self.step, is_last=is_last)
            self.parts.append(part)
            yield list(own_items(batch, part))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # as a sampler's own: it may have none

    def _agreed(self, source: Iterator[Sequence[int]]) -> Iterator[tuple[list[int], bool]]:
        """The batches of an epoch as rank 0 draws them, and which is the last."""
        ahead: list[list[int]] = []
        more = True
        while more:
            if self._rank == 0:
                ahead.extend(list(batch) for batch in islice(source, MOST_DRAWN + 1 - len(ahead)))
            drawn, more = self._told(ahead[:MOST_DRAWN], len(ahead) > MOST_DRAWN)
            ahead = ahead[MOST_DRAWN:]
            for number, batch in enumerate(drawn):
                yield batch, not more and number + 1 == len(drawn)

    def _told(self, drawn: list[list[int]], more: bool) -> tuple[list[list[int]], bool]:
        """What rank 0 has drawn, and whether there is more.

        Raises:
            BadInput: indices are no whole numbers.
        """
        indices = list(chain.from_iterable(drawn))
        are_whole = all(issubclass(kind, int) for kind in set(map(type, indices)))
        own = [more, len(drawn), *map(len, drawn), *indices] if are_whole else [_NOT_WHOLE]
        goes_on, *numbers = self._first(own if self._rank == 0 else [])
        if goes_on == _NOT_WHOLE:
            raise BadInput(
                "The loader's sampler gives indices that are no whole numbers, which workers cannot agree on.",
                hint="give the loader a sampler of positions in the dataset",
            )
        count, *numbers = numbers
        coming = iter(numbers[count:])
        return [list(islice(coming, size)) for size in numbers[:count]], bool(goes_on)


_NOT_WHOLE = -1


class Splits:
    """A worker's rows of batches that a script draws itself.

    Args:
        table: of shares.
        rank: whose rows.

    Attributes:
        drawn: the next batch.
    """

    def __init__(self, table: ShareTable, rank: int) -> None:
        self._table = table
        self._rank = rank
        self.drawn: Place = (0, 0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the script draws the batches, by its own random numbers."""
        return {"drawn": self.drawn[1]}

    def resume(self, state: Mapping[str, Any], resumed: object) -> None:
        """Go on from what `state` gave."""
        self.drawn = (0, state["drawn"])

    def take(self, size: int) -> tuple[Part, slice]:
        """This worker's part of the next batch, and its place in it."""
        place, self.drawn = self.drawn, (0, self.drawn[1] + 1)
        part = self._table.part(self._rank, size, place, place[1] // self._table.window + 1)
        rows = own_items(range(size), part)
        return part, slice(rows[0], rows[-1] + 1)


_MOST_DIMENSIONS = 16


def drawn_by_first(batch: int | Tensor, workers: int) -> int | Tensor:
    """What rank 0 has drawn as a batch, or the number of its samples; all workers ask.

    Raises:
        BadInput: some have drawn another kind of thing.
    """
    shape = [batch] if isinstance(batch, int) else [len(batch.shape), *batch.shape]
    numbers = [float(isinstance(batch, int)), *shape, *[0] * (_MOST_DIMENSIONS - len(shape))]
    rows = gather_numbers(numbers, workers)
    if any(row != rows[0] for row in rows):
        counts = " and ".join(f"{row[1 if row[0] else 2]:g}" for row in rows)
        raise BadInput(
            f"run.split was given batches of {counts} samples, or of other shapes, on workers 0 to {workers - 1}.",
            hint="give it the same on every worker: the batch of all of them",
        )
    if isinstance(batch, int):
        return batch
    told = batch.detach().cpu().contiguous()
    dist.broadcast(told, src=0)
    return told.to(batch.device)


def mark_of(sample: object) -> int:
    """A fingerprint of a sample: equal for equal ones; 0 for what has no plain values."""
    if isinstance(sample, Tensor):
        flat = sample.detach().reshape(-1)[:_MARKED_ELEMENTS].cpu().contiguous()
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
    if isinstance(sample, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(sample.reshape(-1)[:_MARKED_ELEMENTS]).tobytes())
    if isinstance(sample, (str, bytes, int, float)):
        return zlib.crc32(repr(sample)[:_MARKED_ELEMENTS].encode())
    if isinstance(sample, Mapping):
        return zlib.crc32(repr([mark_of(sample[key]) for key in sorted(sample, key=str)]).encode())
    if isinstance(sample, (list, tuple)):
        return zlib.crc32(repr([mark_of(one) for one in sample[:_MARKED_ELEMENTS]]).encode())
    return 0


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
        self.step = 0  # of the last batch before this epoch

    def begin(self, step: int) -> None:
        """Begin the next epoch, behind so many steps."""
        self.step = step
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
            place = (epoch, number)
            step = self.step + number // self._table.window + 1
            part = self._table.part(self._rank, len(batch), place, step, mark=mark_of(batch[0]))
            yield part, self._collate(list(own_items(batch, part)))
            number += stride


def declared_batch(loader: DataLoader[Any]) -> int | None:
    """Return the samples of a full batch that a loader declares; None: its batch sampler declares none."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def full_batch(loader: DataLoader[Any], first: Callable[[Sequence[int]], list[int]]) -> int:
    """Samples of a full batch; where nobody says, of the first that rank 0 would draw.

    Args:
        loader: of the script; all workers ask.
        first: gives all workers the numbers that it is given on rank 0.

    Raises:
        BadInput: the loader gives none, or only by being changed.
    """
    declared = declared_batch(loader)
    if declared is not None:
        return declared
    (size,) = first([_first_batch(loader)])
    if size < 1:
        raise BadInput(
            "The loader does not say how large its batches are, so that they cannot be shared out.",
            hint="give the DataLoader a batch_size, or its batch_sampler an attribute batch_size",
        )
    return size


def _first_batch(loader: DataLoader[Any]) -> int:
    """Samples of the first batch of a copy of the loader's batch sampler, which draws no random number by that; 0: it
    cannot be copied, or gives none."""
    data = loader.dataset
    try:
        copied: Any = copy.deepcopy(loader.batch_sampler, {id(data): data})
    except (TypeError, NotImplementedError, RuntimeError, pickle.PicklingError):  # it holds what cannot be copied
        return 0
    before = States.now()
    try:
        return len(list(next(iter(copied), ())))
    finally:
        before.use()
