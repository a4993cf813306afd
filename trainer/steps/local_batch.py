"""How the samples of one worker reach its steps: read ahead by a thread, and mixed with those of other workers.

What comes next is known as long as shares stay as they are. When they change, whatever was read under the old ones is
dropped: only reading is wasted, for the cursor moves when samples are taken, not when they are read.

**Data injection** (SelSync, 2307.07950; ScaDLES, 2301.08897). In a step ``ceil(alpha N)`` of the N workers give every
other a copy of a part beta of the samples they have drawn. A worker draws ``b / (1 + ceil(alpha N) beta)`` samples for
a batch of b, so that what it computes stays about as much. Samples travel as the bytes of their tensors, over the group
that gradients take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hetopt.core.batch_partition import first_shares
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_spec import Injection, RunSpec
from hetopt.trainer.agreement import gather_texts
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.data.cursor import AnyCursor, GlobalBatch, Indices, MicroBatch, by_epoch, evenly, shuffled
from hetopt.trainer.data.fetch import (
    Batch,
    MapDataset,
    changes_with_epoch,
    fetch,
    set_epoch,
    to_device,
)


def drawn_samples(injection: Injection, shares: Sequence[int]) -> tuple[int, ...]:
    """Return the samples that each worker draws for local batch sizes ``shares``; copies from others make them up.

    Every worker draws at least one.
    """
    factor = 1 + _givers(injection, len(shares)) * injection.samples
    return tuple(max(1, round(share / factor)) for share in shares)


def given_samples(injection: Injection, drawn: Sequence[int], *, seed: int, position: int) -> tuple[int, ...]:
    """Return the drawn samples that each worker gives to every other in a step, by rank; 0: it does not give.

    Args:
        injection: rule of how many workers give how much.
        drawn: samples that each worker has drawn, in rank order.
        seed: seed of the run.
        position: samples that were drawn before this step; who gives is drawn anew in each.
    """
    givers = set(shuffled(len(drawn), seed, 0x1217EC7, position)[: _givers(injection, len(drawn))].tolist())
    return tuple(
        max(1, round(injection.samples * samples)) if rank in givers else 0 for rank, samples in enumerate(drawn)
    )


def samples_of_step(spec: RunSpec) -> int:
    """Return the samples that all workers together draw in the run's first step, copies handed on not counted.

    Raises:
        BadInput: the batch cannot be shared out among the workers.
    """
    if spec.injection is None or len(spec.workers) == 1:
        return spec.global_batch_size
    return sum(drawn_samples(spec.injection, first_shares(spec)))


def _givers(injection: Injection, workers: int) -> int:
    return math.ceil(injection.workers * workers - 1e-9)


class Injector:
    """Exchange of samples between workers (data injection), so that each computes some of the others' samples.

    Args:
        injection: rule of how many workers give how much.
        seed: seed of the run.
    """

    def __init__(self, injection: Injection, seed: int) -> None:
        self.injection = injection
        self._seed = seed
        self._channel = Channel()
        self._layout: str | None = None
        self._samples = 0

    def mix(self, batches: Sequence[Batch], drawn: Sequence[int], position: int) -> tuple[Batch, tuple[int, ...]]:
        """Return this worker's samples followed by the samples that it is given, and each worker's number of both.

        All must call it.

        Args:
            batches: micro-batches of what this worker has drawn, on the host.
            drawn: samples that each worker has drawn, in rank order.
            position: samples that were drawn before this step, by all workers.

        Raises:
            BadInput: samples are not tensors, or those of other workers have another shape or type.
        """
        channel = self._channel
        given = given_samples(self.injection, drawn, seed=self._seed, position=position)
        leaves = [torch.cat(column) for column in zip(*map(_tensors, batches), strict=True)]
        self._check(leaves)
        parts = [[leaf] for leaf in leaves]
        sizes = [leaf[0].nbytes for leaf in leaves]
        for giver, count in enumerate(given):
            if not count:
                continue
            if giver == channel.rank:
                channel.broadcast(torch.cat([leaf[:count].flatten().view(torch.uint8) for leaf in leaves]), giver)
                continue
            received = torch.empty(count * sum(sizes), dtype=torch.uint8)
            channel.broadcast(received, giver)
            pieces = torch.split(received, [count * size for size in sizes])
            for part, leaf, piece in zip(parts, leaves, pieces, strict=True):
                part.append(piece.clone().view(leaf.dtype).view(count, *leaf.shape[1:]))
        self._samples += sum(given) * (channel.workers - 1)
        mixed = iter([torch.cat(part) for part in parts])
        held = tuple(count + sum(given) - gift for count, gift in zip(drawn, given, strict=True))
        return tree_map_only(Tensor, lambda _: next(mixed), batches[0]), held

    def event(self) -> Event:
        """Return the field ``injection``: samples and bytes handed over, and seconds here, since the last call."""
        counters = {
            "samples": self._samples,
            "sent_bytes": sum(message.payload_bytes for message in self._channel.messages)
            * (self._channel.workers - 1),
            "time_s": round(sum(message.time_s for message in self._channel.messages), 6),
        }
        self._samples, self._channel.messages = 0, []
        return {"injection": counters}

    def _check(self, leaves: Sequence[Tensor]) -> None:
        """Check in the first step, with all workers, that all samples look alike: bytes cannot be told apart else."""
        layout = " ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}" for leaf in leaves)
        seen = {self._layout, layout} if self._layout else set(gather_texts(layout, self._channel.workers))
        if len(seen) > 1:
            raise BadInput(
                f"data injection needs samples of one shape, got {' and '.join(sorted(seen))}.",
                hint="give all samples one shape, or train without injection",
            )
        self._layout = layout


def _tensors(batch: Batch) -> list[Tensor]:
    """Return a batch's tensors, in order; BadInput: it holds something else as well."""
    leaves = tree_leaves(batch)
    others = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)}
    if others:
        raise BadInput(
            f"data injection needs samples of tensors, got a {' and a '.join(sorted(others))}.",
            hint="make samples of tensors only",
        )
    return cast(list[Tensor], leaves)


AHEAD = 2
"""Micro-batches that are read ahead: the next one, and one more, so that a quick one makes up for a slow one."""


class ReadAhead:
    """Thread that reads micro-batches ahead, in the order in which they will be asked for.

    Args:
        read: returns the samples of a micro-batch; called in the thread alone.
    """

    def __init__(self, read: Callable[[MicroBatch], Batch]) -> None:
        self._read = read
        # Reading shares the cores with the computation: it takes one.
        self._thread = ThreadPoolExecutor(1, "reads-ahead", initializer=torch.set_num_threads, initargs=(1,))
        self._reading: deque[tuple[MicroBatch, Future[Batch]]] = deque()

    def follow(self, upcoming: Iterator[MicroBatch]) -> None:
        """Drop what was read ahead, and begin to read the micro-batches that ``upcoming`` yields.

        Reads that have begun go on, and are not used.
        """
        for _, future in self._reading:
            future.cancel()
        self._reading.clear()
        self._upcoming = upcoming
        for _ in range(AHEAD):
            self._read_one_more()

    def next(self, part: MicroBatch) -> Batch:
        """Return the samples of ``part``, which must be the next micro-batch in order; waits until it is read.

        What ``read`` raised in the thread is raised here.

        Raises:
            RuntimeError: another micro-batch is the next in order.
            IndexError: no further micro-batch is to come.
        """
        expected, future = self._reading.popleft()
        if expected.epoch != part.epoch or not np.array_equal(expected.indices, part.indices):
            raise RuntimeError("other samples were read ahead than are asked for")
        self._read_one_more()
        return future.result()

    def close(self) -> None:
        """Wait for the read that is under way and end the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _read_one_more(self) -> None:
        """Begin to read the next micro-batch in the thread; do nothing where none is left."""
        part = next(self._upcoming, None)
        if part is not None:
            self._reading.append((part, self._thread.submit(self._read, part)))


@dataclass(frozen=True, kw_only=True)
class BatchReader:
    """Reader of a worker's slice of each global batch, cut into micro-batches.

    Attributes:
        dataset: the training data.
        device: device where batches go.
        seed: seed of the run, for data that changes from epoch to epoch.
        max_samples: samples of the largest micro-batch that fits into memory; None: any fits.
        unit: samples of a micro-batch, exactly (the last may be smaller); None: as many as fit.
        ranks: number of workers that compute equally many micro-batches, as devices of a sharded model do.
    """

    dataset: MapDataset
    device: torch.device
    seed: int
    max_samples: int | None = None
    unit: int | None = None
    ranks: int = 1

    def cut(self, batch: GlobalBatch, rank: int) -> list[MicroBatch]:
        """Return a rank's slice as few equal micro-batches in stream order; a sharded model's padded with empty ones.

        Without samples of its own a rank has no micro-batch.

        One across the end of an epoch is cut there when the data is augmented.
        """
        parts = self._of_rank(batch, rank)
        if self.ranks > 1:
            most = max(len(self._of_rank(batch, other)) for other in range(self.ranks))
            parts += [replace(parts[-1], counts=False)] * (most - len(parts))
        return parts

    def _of_rank(self, batch: GlobalBatch, rank: int) -> list[MicroBatch]:
        """Return a rank's slice as micro-batches, without padding; a new copy of its indices."""
        # A copy: the reader of a data set may do with its indices what it likes, the permutation is everybody's.
        indices = batch.slice(rank).copy()
        if not changes_with_epoch(self.dataset):
            return [MicroBatch(epoch=batch.epoch, indices=part) for part in self._cut(indices)]
        first = batch.offset(rank)
        pieces = by_epoch(indices, batch.epochs[first : first + len(indices)])
        return [MicroBatch(epoch=epoch, indices=part) for epoch, piece in pieces for part in self._cut(piece)]

    def _cut(self, indices: Indices) -> list[Indices]:
        """Cut indices evenly into parts of ``max_samples`` at most, none of which crosses a multiple of ``unit``."""
        if self.unit is None or len(indices) <= self.unit:
            return evenly(indices, self.max_samples)
        units = [indices[first : first + self.unit] for first in range(0, len(indices), self.unit)]
        return [part for unit in units for part in evenly(unit, self.max_samples)]

    def read(self, part: MicroBatch) -> Batch:
        """Read a micro-batch's samples, and return them on the device; does not wait for the copy.

        Raises:
            BadInput: the samples cannot be collated.
        """
        return to_device(self.read_on_host(part), self.device)

    def read_for_later(self, part: MicroBatch) -> Batch:
        """Return the samples of a micro-batch, read into host memory, pinned where the device is a GPU.

        Raises:
            BadInput: the samples cannot be collated.
        """
        batch = self.read_on_host(part)
        return tree_map_only(Tensor, Tensor.pin_memory, batch) if self.device.type == "cuda" else batch

    def read_on_host(self, part: MicroBatch) -> Batch:
        """Return the samples of a micro-batch, read into host memory.

        Raises:
            BadInput: the samples cannot be collated.
        """
        set_epoch(self.dataset, part.epoch, self.seed)
        return fetch(self.dataset, part.indices)


class SampleFeed:
    """Source of one worker's micro-batches, step after step.

    Args:
        reader: reader of the training data.
        rank: rank whose slices are taken.
        cursor: position in the data; moved by `take` alone.
        reads_ahead: whether samples are read before they are needed, from the first `take` on.
        injector: exchange of samples with other workers; None: nobody hands any on.

    Attributes:
        cursor: position in the data.
        sizes: samples of the last step, of each worker, in rank order; empty before the first.
        learned_bound: samples of the largest micro-batch that fits, as this worker had to learn; None: it had not.
    """

    def __init__(
        self,
        *,
        reader: BatchReader,
        rank: int,
        cursor: AnyCursor,
        reads_ahead: bool = False,
        injector: Injector | None = None,
    ) -> None:
        self._reader = reader
        self._rank = rank
        self.cursor = cursor
        self._injector = injector
        self._mixed: Batch | None = None
        self.sizes: tuple[int, ...] = ()
        self._ahead = ReadAhead(reader.read_for_later) if reads_ahead else None
        self._followed: Sequence[int] = ()
        self._batch: GlobalBatch | None = None
        self.learned_bound: int | None = None

    @property
    def max_samples(self) -> int | None:
        """The largest micro-batch that is tried, in samples; None: there is no limit."""
        return self._reader.max_samples

    def drawn(self, shares: Sequence[int]) -> tuple[int, ...]:
        """Return the samples that each worker draws for local batch sizes ``shares``; fewer if others give some."""
        return tuple(shares) if self._injector is None else drawn_samples(self._injector.injection, shares)

    def event(self) -> Event:
        """Return the event's fields on samples handed on between workers since the last call; empty: no injection."""
        return {} if self._injector is None else self._injector.event()

    def first_part(self, samples: int) -> MicroBatch:
        """Return the largest micro-batch of a local batch of ``samples``, made of the data set's first samples.

        It is of epoch 0, and smaller where the data has fewer samples.
        """
        limits = (self._reader.unit, self._reader.max_samples)
        return MicroBatch(epoch=0, indices=range(min(samples, self.cursor.dataset_size, *(n for n in limits if n))))

    def take(self, shares: Sequence[int]) -> list[MicroBatch]:
        """Return this worker's micro-batches of the next step, ``shares[r]`` samples for rank r, and move the cursor.

        With data injection all workers must call it.

        Raises:
            BadInput: with data injection: samples are not tensors, or not of one shape.
            RunFailed: samples of a stream would take longer to arrive than its patience.
        """
        drawn = self.drawn(shares)
        if self._ahead is not None and drawn != self._followed:
            self._ahead.follow(self._from_here(drawn))
            self._followed = drawn
        self._batch, self._mixed, self.sizes = self.cursor.take(drawn), None, drawn
        if self._injector is not None:
            batches = [self._on_host(part) for part in self._parts(self._batch)]
            self._mixed, self.sizes = self._injector.mix(batches, drawn, self._batch.position)
        return self._parts(self._batch)

    def learn_bound(self, max_samples: int) -> list[MicroBatch]:
        """Limit micro-batches to ``max_samples`` samples from now on; return those of the last `take`, cut anew.

        Before the first `take` the list is empty.
        """
        self._reader = replace(self._reader, max_samples=max_samples)
        self.learned_bound = max_samples
        if self._batch is None:
            return []
        parts = self._parts(self._batch)
        if self._ahead is not None:
            unread = parts if self._mixed is None else []
            self._ahead.follow(chain(unread, self._from_here(self._followed)))
        return parts

    def recall_bound(self, max_samples: int) -> None:
        """Lower the limit of samples per micro-batch to one learned before an interruption, never raise it; 0: none."""
        if max_samples and (self.max_samples is None or max_samples < self.max_samples):
            self.learn_bound(max_samples)

    def read(self, part: MicroBatch) -> Batch:
        """Return the samples of a micro-batch of the last `take`, on the device.

        Where samples are read ahead, micro-batches must be asked for in order.

        Raises:
            BadInput: the samples cannot be collated.
            RuntimeError: another micro-batch is the next in order.
        """
        return to_device(self._on_host(part), self._reader.device)

    def close(self) -> None:
        """Stop the thread that reads micro-batches ahead, if there is one."""
        if self._ahead is not None:
            self._ahead.close()

    def _on_host(self, part: MicroBatch) -> Batch:
        """Return the samples of a micro-batch, on the host: mixed, read ahead (waited for) or read now."""
        if self._mixed is not None:
            return cast(Batch, tree_map_only(Tensor, lambda tensor: tensor[part.indices], self._mixed))
        if self._ahead is not None and self._batch is not None:
            return self._ahead.next(part)
        return self._reader.read_on_host(part)

    def _parts(self, batch: GlobalBatch) -> list[MicroBatch]:
        """Return this worker's micro-batches; of mixed samples each has some of all workers."""
        if self._mixed is None:
            return self._reader.cut(batch, self._rank)
        size = self.sizes[self._rank]
        count = -(-size // len(self.first_part(size)))
        return [MicroBatch(epoch=batch.epoch, indices=np.arange(part, size, count)) for part in range(count)]

    def _from_here(self, shares: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches in all steps to come, as long as shares stay."""
        cursor, reader = self.cursor.at(self.cursor.state()), self._reader
        steps = (reader.cut(cursor.take(shares), self._rank) for _ in (repeat(None) if shares[self._rank] else ()))
        return chain.from_iterable(steps)
