"""Batches of a DDP script in unequal shares: the samples that all ranks would read, cut by the plan.

A script's sampler gives each rank its samples (``DistributedSampler``, or the batch sampler that Accelerate makes).
Asked for every rank in turn, it tells the batch of all of them; each worker takes its share of that. So a shuffle, a
seed, ``set_epoch`` and padding mean what they mean under torchrun, whatever the sampler is.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from hetopt.trainer.session.batches import Part, ShareTable, own_items
from hetopt.trainer.session.random_state import States

_RANKS = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""Names under which samplers know how many ranks there are, and which one they are for."""

_INNER = ("sampler", "batch_sampler")
_DEPTH = 3


class Sharer(Protocol):
    """Who decides on shares while training goes on."""

    rank: int
    world_size: int

    @property
    def is_training(self) -> bool:
        """Return whether batches that are read now are trained on: else every rank reads what it would."""
        ...

    def table(self, batch_size: int) -> ShareTable:
        """Return the shares of a loader whose batches have so many samples on each rank."""
        ...

    def batch_of(self, batch_size: int) -> int:
        """Return the samples of a batch of all ranks, where the script gives each so many."""
        ...

    def drawn(self, place: tuple[int, int]) -> None:
        """Note the next batch that this worker has not drawn."""
        ...


def rank_holder(batch_sampler: object, world_size: int) -> tuple[list[str], str] | None:
    """Return where a batch sampler knows its rank: the attributes on the way to the object that does, and the name.

    Args:
        batch_sampler: of a loader.
        world_size: ranks.

    Returns:
        None where nothing in it is of one rank of so many.
    """
    way: list[str] = []
    for _ in range(_DEPTH):
        for ranks, rank in _RANKS:
            if world_size > 1 and getattr(batch_sampler, ranks, None) == world_size and hasattr(batch_sampler, rank):
                return way, rank
        inner = next((name for name in _INNER if getattr(batch_sampler, name, None) is not None), None)
        if inner is None:
            return None
        way.append(inner)
        batch_sampler = getattr(batch_sampler, inner)
    return None


def _for_rank(batch_sampler: Any, way: Sequence[str], name: str, rank: int) -> Any:
    """Return a copy of a batch sampler that gives another rank's batches."""
    made = copy.copy(batch_sampler)
    holder = made
    for step in way:
        inner = copy.copy(getattr(holder, step))
        setattr(holder, step, inner)
        holder = inner
    setattr(holder, name, rank)
    return made


def _generators(sampler: object) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for _ in range(_DEPTH):
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
        sampler = next((getattr(sampler, name) for name in _INNER if getattr(sampler, name, None) is not None), None)
    return found


class UnequalBatches(Sampler[list[int]]):
    """A worker's shares of the batches that all ranks would read; outside training, the rank's own batches.

    Args:
        batch_sampler: of the script.
        batch_size: samples of a batch on each rank.
        way: see `rank_holder`.
        name: see `rank_holder`.
        sharer: decides on shares.

    Attributes:
        parts: of the batches that were drawn and not given yet, in their order.
    """

    def __init__(self, batch_sampler: Any, batch_size: int, way: Sequence[str], name: str, sharer: Sharer) -> None:
        self._batches = batch_sampler
        self._way, self._name = way, name
        self._sharer = sharer
        self._per_rank = batch_size
        self._size = sharer.batch_of(batch_size)
        self._drops_last = bool(getattr(batch_sampler, "drop_last", False))
        self.parts: deque[Part] = deque()
        self._epoch = self._number = 0
        self._table: ShareTable | None = None

    def __len__(self) -> int:
        own, workers = len(self._batches), self._sharer.world_size
        if self._size == self._per_rank * workers:
            return own
        samples = own * self._per_rank * workers
        return samples // self._size if self._drops_last else -(-samples // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        self.parts.clear()
        return self._shares() if self._sharer.is_training else iter(self._batches)

    def _shares(self) -> Iterator[list[int]]:
        sharer = self._sharer
        if self._table is None:
            self._table = sharer.table(self._per_rank)
        epoch, self._epoch = self._epoch, self._epoch + 1
        for number, batch in enumerate(self._of_all_ranks()):
            self._number += 1
            sharer.drawn((epoch, number + 1))
            part = self._table.part(sharer.rank, len(batch), (epoch, number), self._number)
            self.parts.append(part)
            yield list(own_items(batch, part))

    def _of_all_ranks(self) -> Iterator[list[int]]:
        """Yield the batches of all ranks together, of the plan's size; the last may be smaller."""
        each = []
        before, generators = States.now(), _generators(self._batches)
        kept = [one.get_state() for one in generators]
        for rank in range(self._sharer.world_size):
            before.use()  # every rank of the script would draw the same order
            for generator, state in zip(generators, kept, strict=True):
                generator.set_state(state)
            batches = iter(_for_rank(self._batches, self._way, self._name, rank))
            first = list(islice(batches, 1))  # which draws the order
            each.append(chain(first, batches))
        waiting: list[int] = []
        for ranks in zip_longest(*each, fillvalue=()):
            waiting += chain.from_iterable(ranks)
            while len(waiting) >= self._size:
                yield waiting[: self._size]
                waiting = waiting[self._size :]
        if waiting and not (self._drops_last and self._size != self._per_rank * self._sharer.world_size):
            yield waiting
