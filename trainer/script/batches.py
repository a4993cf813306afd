"""Which samples of a script's own batches each worker computes: the script's order, cut into unequal slices.

Every worker draws the same batches, in the order in which one machine would, and computes its part of each. Which part
that is, a table of shares says, and from which batch on.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hetopt.core.batch_partition import largest_remainder
from hetopt.trainer.script.audit import Audits
from hetopt.trainer.statistics import tensors_mark

Shares: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[int, int]
"""Epoch, and number of a batch in it; both from 0."""

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
        mark: fingerprint of the batch, or of the first sample of a stream's; 0: not known.
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

    Attributes:
        turns: whether each batch gives the shares of the one before to the next worker: what a check has, since shares
            change in a run too.
    """

    turns: ClassVar[bool] = False

    def __init__(self, shares: Shares, *, minimum: int = 1, audits: Audits | None = None) -> None:
        self._minimum = minimum
        self.audits = audits
        self._entries: list[tuple[Place, Shares]] = [((0, 0), shares)]

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
        wanted = self._wanted(place)
        return wanted if sum(wanted) == samples else self._in_proportion(wanted, samples)

    def _wanted(self, place: Place) -> Shares:
        shares = next(shares for since, shares in reversed(self._entries) if since <= place or since == (0, 0))
        turn = place[1] % len(shares) if self.turns else 0
        return shares[turn:] + shares[:turn]

    def _in_proportion(self, wanted: Shares, samples: int) -> Shares:
        """Return shares of at least the minimum; where a batch has less, the largest shares alone are of it."""
        count = max(1, min(len(wanted), samples // self._minimum))
        taking = sorted(range(len(wanted)), key=lambda rank: -wanted[rank])[:count]
        least = min(self._minimum, samples)
        minimum = [least if rank in taking else 0 for rank in range(len(wanted))]
        maximum = [None if rank in taking else 0 for rank in range(len(wanted))]
        return largest_remainder(wanted, samples, minimum=minimum, maximum=maximum)

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
        own = (0, *self._in_proportion(self._wanted(place)[1:], samples)) if is_audit else shares
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


def mark_of(sample: object) -> int:
    """Return a fingerprint of a sample's tensors and plain values: equal for equal ones."""
    mark = 0
    for leaf in tree_leaves(sample):
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            mark = zlib.crc32(leaf.reshape(-1)[:_MARKED_ELEMENTS].tobytes(), mark)
        elif isinstance(leaf, Tensor):
            mark ^= tensors_mark([leaf.detach().cpu().reshape(-1)[:_MARKED_ELEMENTS]])
        elif isinstance(leaf, (str, bytes, int, float)):
            mark = zlib.crc32(repr(leaf)[:_MARKED_ELEMENTS].encode(), mark)
    return mark
