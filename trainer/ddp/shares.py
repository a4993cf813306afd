"""Batches of a DDP script in unequal shares: the samples that all ranks would read, cut by the plan.

A script's sampler gives each rank its samples (``DistributedSampler``, or the batch sampler that Accelerate makes).
Asked for every rank in turn, it tells the batch of all of them; each worker takes its share of that. So a shuffle, a
seed, ``set_epoch`` and padding mean what they mean under torchrun, whatever the sampler is.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hetopt.trainer.script.batches import Part, ShareTable, own_items
from hetopt.trainer.script.random_state import States

if TYPE_CHECKING:
    from hetopt.trainer.ddp.script import DdpRun

_RANKS = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""Names under which samplers know how many ranks there are, and which one they are for."""

_INNER = ("sampler", "batch_sampler")
_DEPTH = 3

DEEPEST = 6
"""Nesting of a batch in which tensors are looked for: an object may hold what holds it."""


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
    """Return a copy of a batch sampler that gives another rank's batches, with generators and counters of its own."""
    copied = holder = copy.copy(batch_sampler)
    for depth in range(_DEPTH):
        if depth == len(way):
            setattr(holder, name, rank)
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            holder.generator = generator.clone_state()
        inner = next((field for field in _INNER if getattr(holder, field, None) is not None), None)
        if inner is None:
            break
        setattr(holder, inner, copy.copy(getattr(holder, inner)))
        holder = getattr(holder, inner)
    return copied


class UnequalBatches(Sampler[list[int]]):
    """A worker's shares of the batches that all ranks would read; outside training, the rank's own batches.

    Args:
        batch_sampler: of the script.
        batch_size: samples of a batch on each rank.
        way: see `rank_holder`.
        name: see `rank_holder`.
        sharer: decides on shares while training goes on.

    Attributes:
        parts: of the batches that were drawn and not given yet, in their order.
        is_trained_on: whether a training pass was over a batch of it: it is shared out from then on, though the model
            may be in evaluation mode as its loop begins.
    """

    def __init__(self, batch_sampler: Any, batch_size: int, way: Sequence[str], name: str, sharer: DdpRun) -> None:
        self._batches = batch_sampler
        self._way, self._name = way, name
        self._sharer = sharer
        is_split = getattr(batch_sampler, "split_batches", False)  # Accelerate's: the size is of all ranks together
        self._per_rank = batch_size // sharer.world_size if is_split else batch_size
        self._size = sharer.batch_of(self._per_rank)
        self._drops_last = bool(getattr(batch_sampler, "drop_last", False))
        self.parts: deque[Part] = deque()
        self.is_trained_on = False
        self._epoch = self._step = 0
        self._table: ShareTable | None = None

    def __len__(self) -> int:
        own, workers = len(self._batches), self._sharer.world_size
        if self._size == self._per_rank * workers:
            return own
        samples = own * self._per_rank * workers
        return samples // self._size if self._drops_last else -(-samples // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        self.parts.clear()
        self._sharer.forget(self)
        trains = self._sharer.is_training or (self.is_trained_on and torch.is_grad_enabled())
        return self._shares() if trains else iter(self._batches)

    def _shares(self) -> Iterator[list[int]]:
        sharer = self._sharer
        if self._table is None:
            self._table = sharer.table(self._per_rank)
        epoch, self._epoch = self._epoch, self._epoch + 1
        for number, batch in enumerate(self._of_all_ranks()):
            audits = self._table.audits
            self._step += audits is None or number % audits.accumulate == 0
            sharer.drawn((epoch, number + 1))
            part = self._table.part(sharer.rank, len(batch), (epoch, number), self._step)
            self.parts.append(part)
            yield list(own_items(batch, part))

    def _of_all_ranks(self) -> Iterator[list[int]]:
        """Yield the batches of all ranks together, of the plan's size; the last may be smaller."""
        own, before = self._sharer.rank, States.now()
        samplers = [
            self._batches if rank == own else _for_rank(self._batches, self._way, self._name, rank)
            for rank in range(self._sharer.world_size)
        ]
        each = []
        for sampler in samplers:
            before.use()  # every rank of the script would draw the same order
            batches = iter(sampler)
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


def rows_of(batch: Any) -> int:
    """Return the rows of the first tensor with any in a batch of whatever type; 0: it holds none."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)


def tensors_in(batch: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Yield the tensors of a batch: of sequences, of mappings, and of objects that hold them as attributes."""
    if isinstance(batch, Tensor):
        yield batch
    elif depth:
        parts: Any = batch if isinstance(batch, (list, tuple)) else getattr(batch, "__dict__", {}).values()
        for part in batch.values() if isinstance(batch, Mapping) else parts:
            yield from tensors_in(part, depth - 1)
