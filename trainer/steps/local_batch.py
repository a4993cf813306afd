"""How the samples of one worker reach its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from hetopt.trainer.data.cursor import Cursor, Cutting, GlobalBatch, MicroBatch, upcoming
from hetopt.trainer.data.fetch import (
    Batch,
    MapDataset,
    changes_with_epoch,
    fetch,
    pinned,
    set_epoch,
    to_device,
)
from hetopt.trainer.data.prefetch import ReadAhead


@dataclass(frozen=True, kw_only=True)
class BatchReader:
    """Cuts slices into micro-batches and reads them.

    Attributes:
        dataset: the training data.
        device: where batches go.
        seed: the run's, for data that changes from epoch to epoch.
        max_samples: the largest micro-batch that fits into memory; None: any.
        unit: samples of a micro-batch, exactly; None: as many as fit.
    """

    dataset: MapDataset
    device: torch.device
    seed: int
    max_samples: int | None = None
    unit: int | None = None

    @property
    def cutting(self) -> Cutting:
        """How slices are cut; one across the end of an epoch is cut there when the data is augmented."""
        size = len(self.dataset)
        epoch_size = size if changes_with_epoch(self.dataset) else None
        return Cutting(epoch_size=epoch_size, unit=self.unit, max_samples=self.max_samples)

    def cut(self, batch: GlobalBatch, rank: int) -> list[MicroBatch]:
        """The micro-batches of one rank."""
        return self.cutting.parts(batch, rank)

    def read(self, part: MicroBatch) -> Batch:
        """The samples of a micro-batch, on the device."""
        return to_device(self.read_on_host(part), self.device)

    def read_for_later(self, part: MicroBatch) -> Batch:
        """The samples of a micro-batch on the host, ready to be moved to the device."""
        batch = self.read_on_host(part)
        return pinned(batch) if self.device.type == "cuda" else batch

    def read_on_host(self, part: MicroBatch) -> Batch:
        """The samples of a micro-batch, on the host."""
        set_epoch(self.dataset, part.epoch, self.seed)
        return fetch(self.dataset, part.indices)


class SampleFeed:
    """One worker's micro-batches, step after step.

    Args:
        reader: of the training data.
        rank: whose slices.
        cursor: where the data stands; moved by `take` alone.
        reads_ahead: whether samples are read before they are needed, from `begin` on.

    Attributes:
        cursor: where the data stands.
        learned_bound: the largest micro-batch that fits, as far as this worker had to learn it; None: it had not.
    """

    def __init__(
        self,
        *,
        reader: BatchReader,
        rank: int,
        cursor: Cursor,
        reads_ahead: bool = False,
    ) -> None:
        self._reader = reader
        self._cutting = reader.cutting
        self._rank = rank
        self.cursor = cursor
        self._reads_ahead = reads_ahead
        self._ahead: ReadAhead | None = None
        self._followed: tuple[int, ...] = ()
        self._batch: GlobalBatch | None = None
        self.learned_bound: int | None = None

    @property
    def max_samples(self) -> int | None:
        """The largest micro-batch that is tried."""
        return self._cutting.max_samples

    def first_part(self, samples: int) -> MicroBatch:
        """The largest micro-batch of a share of so many samples, of whatever samples come first in the dataset."""
        limits = (self._cutting.unit, self._cutting.max_samples)
        return MicroBatch(epoch=0, indices=range(min(samples, self.cursor.dataset_size, *(n for n in limits if n))))

    def begin(self, shares: Sequence[int]) -> None:
        """Training begins, with these shares: start to read ahead."""
        if self._reads_ahead:
            self._followed = tuple(shares)
            self._ahead = ReadAhead(self._reader.read_for_later, self._from_here(self._followed))

    def take(self, shares: Sequence[int]) -> list[MicroBatch]:
        """This worker's micro-batches of the next step; moves the cursor behind the step's samples."""
        if self._ahead is not None and tuple(shares) != self._followed:
            self._ahead.follow(self._from_here(shares))
            self._followed = tuple(shares)
        self._batch = self.cursor.take(shares)
        return self._cutting.parts(self._batch, self._rank)

    def learn_bound(self, max_samples: int) -> list[MicroBatch]:
        """From now on no micro-batch is larger; the samples of the last `take` once more, cut anew."""
        self._cutting = replace(self._cutting, max_samples=max_samples)
        self.learned_bound = max_samples
        if self._batch is None:
            return []
        parts = self._cutting.parts(self._batch, self._rank)
        if self._ahead is not None:
            self._ahead.follow(chain(parts, self._from_here(self._followed)))
        return parts

    def recall_bound(self, max_samples: int) -> None:
        """What was learned before the run was interrupted holds; 0: nothing was."""
        if max_samples and (self.max_samples is None or max_samples < self.max_samples):
            self.learn_bound(max_samples)

    def read(self, part: MicroBatch) -> Batch:
        """The samples of a micro-batch, on the device."""
        batch = self._reader.read_on_host(part) if self._ahead is None else self._ahead.next(part)
        return to_device(batch, self._reader.device)

    def close(self) -> None:
        """Stop reading micro-batches ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def _from_here(self, shares: Sequence[int]) -> Iterator[MicroBatch]:
        cursor = self.cursor.at(self.cursor.state())
        return upcoming(cursor, shares, self._cutting, self._rank)
