"""Samples that are read ahead are the samples that would have been read: none lost, none twice, errors as they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.errors import RunFailed
from hetopt.trainer.assembly import open_training_data
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.data.fetch import MapDataset
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.data.prefetch import Flag, ProcessReadAhead, ReadAhead, ReadingWatch, ThreadReadAhead
from hetopt.trainer.steps.local_batch import BatchReader, SampleFeed
from tests.disturbance import PATIENCE_S

from . import reading_task
from .reading_task import SIZE

CPU = torch.device("cpu")

shares = st.lists(st.integers(0, 9), min_size=2, max_size=2).filter(any)


def opened(name: str) -> MapDataset:
    return open_training_data(f"{reading_task.__file__}:{name}", None)


def in_thread(reader: BatchReader, parts: Iterator[MicroBatch]) -> ReadAhead:
    ahead = ThreadReadAhead(reader.read_for_later)
    ahead.follow(parts)
    return ahead


def in_process(parts: Iterator[MicroBatch], name: str = "augmented") -> ProcessReadAhead:
    return ProcessReadAhead(
        partial(open_training_data, f"{reading_task.__file__}:{name}", None),
        seed=0,
        processes=1,
        pin=False,
        upcoming=parts,
    )


def feed_of(dataset: MapDataset, rank: int, read_ahead: str, watch: ReadingWatch | None = None) -> SampleFeed:
    reader = BatchReader(dataset=dataset, device=CPU, seed=0)
    start = {"none": None, "thread": partial(in_thread, reader), "process": in_process}[read_ahead]
    return SampleFeed(reader=reader, rank=rank, cursor=SampleCursor(SIZE, 0), read_ahead=start, watch=watch)


def consume(feed: SampleFeed, steps: list[list[int]], bounds: dict[int, int] | None = None) -> list[list[int]]:
    """What a rank computes, sample and epoch; at some steps memory runs out after the first micro-batch."""
    feed.begin(steps[0])
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
    dataset = opened("augmented")
    ahead = consume(feed_of(dataset, rank, "thread"), steps, bounds)
    assert ahead == consume(feed_of(opened("augmented"), rank, "none"), steps)
    cursor = SampleCursor(SIZE, 0)
    batches = [cursor.take(split) for split in steps]
    for batch, samples in zip(batches, ahead, strict=True):
        assert [value % 1000 for value in samples] == list(batch.slices[rank])
        places = range(batch.position + batch.offset(rank), batch.position + batch.offset(rank) + len(samples))
        assert [value // 1000 for value in samples] == [place // SIZE for place in places]
    assert threading.get_ident() not in getattr(dataset, "threads", ()), "epochs are told in the reading thread alone"


def test_a_process_reads_what_a_thread_reads() -> None:
    steps, others = [[3, 4]] * 4 + [[6, 1]] * 3 + [[2, 5]] * 9, set(psutil.Process().children(recursive=True))
    assert consume(feed_of(opened("augmented"), 0, "process"), steps, {5: 2}) == consume(
        feed_of(opened("augmented"), 0, "none"), steps
    )
    loaders = [one for one in set(psutil.Process().children(recursive=True)) - others if "spawn_main" in one.cmdline()]
    assert psutil.wait_procs(loaders, PATIENCE_S)[1] == [], "no loader is left"


def whole(numbers: Sequence[int]) -> Iterator[MicroBatch]:
    return (MicroBatch(epoch=0, indices=[number]) for number in numbers)


def test_an_error_arrives_as_it_was_raised_and_a_loader_outlives_signals_until_it_is_killed() -> None:
    parts = list(whole([4, 9, 11, 2, *range(10)]))
    in_this_process = in_thread(BatchReader(dataset=opened("sour"), device=CPU, seed=0), iter(parts))
    ahead = in_process(iter(parts), "sour")
    (loader,) = [process.pid for process in ahead._results._workers]
    for reads in (in_this_process, ahead):
        reads.next(parts[0])
        reads.next(parts[1])
        with pytest.raises(Exception, match=r"^11$") as refused:
            reads.next(parts[2])
        assert (type(refused.value).__name__, refused.value.index) == ("SourError", 11)
    in_this_process.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(loader, number)
    for part in parts[3:6]:
        ahead.next(part)
    os.kill(loader, signal.SIGKILL)
    with pytest.raises(RunFailed, match="a loader process is gone"):
        list(map(ahead.next, parts[6:]))
    ahead.close()


def test_who_is_killed_while_looking_at_a_flag_keeps_nobody_waiting() -> None:
    """Of four that do nothing else, most would hold a lock if there were one."""
    context = multiprocessing.get_context("fork")  # nothing in them but this loop
    flags, at_it = [[Flag() for _ in range(4)] for _ in range(2)]
    code = "while True: flag.is_set(); at_it.set()"
    looking = [
        context.Process(target=exec, args=(code, {"flag": flag, "at_it": begun}), daemon=True)
        for flag, begun in zip(flags, at_it, strict=True)
    ]
    for process in looking:
        process.start()
    while not all(begun.is_set() for begun in at_it):
        assert all(process.is_alive() for process in looking)
        time.sleep(0.01)
    for process in looking:
        process.kill()
        process.join()
    raising = threading.Thread(target=lambda: [flag.set() for flag in flags], daemon=True)
    raising.start()
    raising.join(timeout=PATIENCE_S)
    assert not raising.is_alive()
    assert all(flag.is_set() for flag in flags)
