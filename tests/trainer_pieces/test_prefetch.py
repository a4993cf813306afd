"""Samples that are read ahead are the samples that would have been read: none lost, none twice, errors as they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hetopt.trainer.data.cursor import MicroBatch, SampleCursor
from hetopt.trainer.data.fetch import MapDataset, TensorPairs
from hetopt.trainer.steps.local_batch import BatchReader, ReadAhead, SampleFeed

CPU = torch.device("cpu")
SIZE = 23

shares = st.lists(st.integers(0, 9), min_size=2, max_size=2).filter(any)


class Augmented(TensorPairs):
    """Samples that change with the epoch and remember who asked."""

    def set_epoch(self, epoch: int, seed: int, /) -> None:
        object.__setattr__(self, "epoch", epoch)
        object.__setattr__(self, "threads", {*getattr(self, "threads", ()), threading.get_ident()})

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        return rows, rows + 1000 * self.epoch


class Sour(TensorPairs):
    """Cannot be read beyond sample 10."""

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        if max(indices) > 10:
            raise SourError(max(indices))
        return super().gather(indices)


class SourError(Exception):
    pass


def opened(kind: type[TensorPairs] = Augmented) -> TensorPairs:
    return kind(torch.zeros(SIZE), torch.zeros(SIZE))


def feed_of(dataset: MapDataset, rank: int, *, ahead: bool) -> SampleFeed:
    reader = BatchReader(dataset=dataset, device=CPU, seed=0)
    return SampleFeed(reader=reader, rank=rank, cursor=SampleCursor(SIZE, 0), reads_ahead=ahead)


def consume(feed: SampleFeed, steps: list[list[int]], bounds: dict[int, int] | None = None) -> list[list[int]]:
    """What a rank computes, sample and epoch; at some steps memory runs out after the first micro-batch."""
    computed = []
    for number, split in enumerate(steps):
        parts = feed.take(split)
        if bounds and number in bounds and parts:
            feed.read(parts[0])
            parts = feed.learn_bound(bounds[number])
        computed.append([int(value) for part in parts for value in feed.read(part)[1]])
    feed.close()
    return computed


@given(
    steps=st.lists(shares, min_size=1, max_size=12),
    bounds=st.dictionaries(st.integers(0, 11), st.integers(1, 5), max_size=2),
    rank=st.integers(0, 1),
)
def test_reading_ahead_changes_nothing(steps: list[list[int]], bounds: dict[int, int], rank: int) -> None:
    dataset = opened()
    ahead = consume(feed_of(dataset, rank, ahead=True), steps, bounds)
    assert ahead == consume(feed_of(opened(), rank, ahead=False), steps)
    cursor = SampleCursor(SIZE, 0)
    batches = [cursor.take(split) for split in steps]
    for batch, samples in zip(batches, ahead, strict=True):
        assert [value % 1000 for value in samples] == batch.slice(rank).tolist()
        places = range(batch.position + batch.offset(rank), batch.position + batch.offset(rank) + len(samples))
        assert [value // 1000 for value in samples] == [place // SIZE for place in places]
    assert threading.get_ident() not in getattr(dataset, "threads", ()), "epochs are told in the reading thread alone"


def test_an_error_arrives_as_it_was_raised() -> None:
    parts = [MicroBatch(epoch=0, indices=[number]) for number in (4, 9, 11, 2)]
    ahead = ReadAhead(BatchReader(dataset=opened(Sour), device=CPU, seed=0).read_for_later)
    ahead.follow(iter(parts))
    ahead.next(parts[0])
    ahead.next(parts[1])
    with pytest.raises(SourError, match=r"^11$"):
        ahead.next(parts[2])
    ahead.next(parts[3])
    ahead.close()
