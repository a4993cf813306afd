"""How one worker's slice of a global batch is cut into micro-batches and fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hetopt.trainer.data.cursor import GlobalBatch
from hetopt.trainer.data.fetch import Batch, EpochDataset, MapDataset, fetch, to_device


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Samples that are computed together; all of one epoch."""

    epoch: int
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, kw_only=True)
class BatchReader:
    """Cuts slices into micro-batches and reads them.

    Attributes:
        dataset: the training data.
        device: where batches go.
        seed: the run's, for data that changes from epoch to epoch.
        max_samples: the largest micro-batch that fits into memory; None: any.
    """

    dataset: MapDataset
    device: torch.device
    seed: int
    max_samples: int | None = None

    def cut(self, batch: GlobalBatch, rank: int) -> list[MicroBatch]:
        """The micro-batches of one rank: as few as memory allows, as equal as integers allow.

        A slice across the end of an epoch is cut there when the samples of the two epochs differ (augmentation).
        """
        indices = batch.slices[rank]
        offset = sum(len(part) for part in batch.slices[:rank])
        pieces: list[tuple[int, Sequence[int]]] = [(batch.epoch, indices)]
        if isinstance(self.dataset, EpochDataset):
            pieces = _by_epoch(indices, batch.position + offset, len(self.dataset))
        return [
            MicroBatch(epoch=epoch, indices=part)
            for epoch, piece in pieces
            for part in _evenly(piece, self.max_samples)
        ]

    def read(self, part: MicroBatch) -> Batch:
        """The samples of a micro-batch, on the device."""
        if isinstance(self.dataset, EpochDataset):
            self.dataset.set_epoch(part.epoch, self.seed)
        return to_device(fetch(self.dataset, part.indices), self.device)


def _by_epoch(indices: Sequence[int], position: int, dataset_size: int) -> list[tuple[int, Sequence[int]]]:
    pieces: list[tuple[int, Sequence[int]]] = []
    while len(indices):
        epoch, offset = divmod(position, dataset_size)
        taken = min(len(indices), dataset_size - offset)
        pieces.append((epoch, indices[:taken]))
        indices, position = indices[taken:], position + taken
    return pieces


def _evenly(indices: Sequence[int], max_samples: int | None) -> list[Sequence[int]]:
    if len(indices) == 0:
        return []
    if max_samples is None or len(indices) <= max_samples:
        return [indices]
    count = -(-len(indices) // max_samples)
    edges = [len(indices) * i // count for i in range(count + 1)]
    return [indices[first:last] for first, last in pairwise(edges)]
