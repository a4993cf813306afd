"""Samples that were received and not yet trained on, as a data set whose indices continue those of the task's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetopt.trainer.data.cursor import Indices
from hetopt.trainer.data.fetch import Batch, MapDataset, each_tensor, fetch, joined, rows_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Received:
    """Samples that came together.

    Attributes:
        key: of their stream.
        ids: their names there.
        batch: one row a sample.
    """

    key: str
    ids: list[bytes]
    batch: Batch

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, count: int) -> tuple[Received, Received]:
        """The first so many, and the rest."""
        first = Received(key=self.key, ids=self.ids[:count], batch=rows_of(self.batch, 0, count))
        rest = Received(key=self.key, ids=self.ids[count:], batch=rows_of(self.batch, count, len(self)))
        return first, rest


class ReceivedSamples:
    """The samples of the present step under new indices, and those of the task's data under its own.

    Args:
        dataset: of the task: steps are warmed up with its samples, before any was received.
    """

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset
        self._waiting: deque[Received] = deque()
        self._next = len(dataset)
        self._present: tuple[int, Batch] | None = None
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> object:
        return self._dataset[index]

    def gather(self, indices: Sequence[int] | Indices, /) -> Batch:
        """The batch of these samples, received or the task's own."""
        wanted = np.asarray(indices, dtype=np.int64)
        if self._present is None or wanted[0] < len(self._dataset):
            return fetch(self._dataset, indices)
        first, batch = self._present
        if len(wanted) == self._next - first and wanted[0] == first and bool((np.diff(wanted) == 1).all()):
            return batch
        places = torch.from_numpy(wanted - first)
        return each_tensor(batch, lambda tensor: tensor[places])

    def add(self, received: Received) -> None:
        """Put samples that have arrived behind those that wait."""
        self._waiting.append(received)
        self.waiting += len(received)

    def take(self, count: int) -> tuple[Indices, list[Received]]:
        """The oldest so many of those that wait become those of the present step: their indices, and what they are."""
        taken: list[Received] = []
        left = count
        while left:
            head = self._waiting.popleft()
            if len(head) > left:
                head, rest = head.split(left)
                self._waiting.appendleft(rest)
            taken.append(head)
            left -= len(head)
        self.waiting -= count
        first = self._next
        self._next += count
        self._present = (first, joined([part.batch for part in taken]))
        return np.arange(first, first + count, dtype=np.int64), taken
