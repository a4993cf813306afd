"""The sources of a script's batches in a session: its own loader in slices, or `Splits` of rows that it draws itself.

A loader of samples by index has its batch sampler replaced: every worker draws all batches alike and loads its slice of
each with the script's dataset, collate function and loader processes. A stream is read whole by every worker, which
keeps its slices. One cursor says where an interrupted epoch goes on: the epoch, how many of its batches the script was
given, and the random numbers that it was drawn with. It is drawn again from those, and what was done is passed over, by
which the script's own numbers are not touched.
"""

from __future__ import annotations

import copy
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hetopt.core.errors import BadInput
from hetopt.trainer.context import States
from hetopt.trainer.data.fetch import samples_in
from hetopt.trainer.script.batches import REGISTRY, CommonNumbers, Part, Place, ShareTable, mark_of, own_items

if TYPE_CHECKING:
    from hetopt.trainer.session.flow import Flow

MOST_DRAWN = 1000
"""Number of batches that are drawn from a sampler at a time, as it may never end."""


def _part_of(
    table: ShareTable, rank: int, window: int, epoch: int, steps: int, size: int, number: int, mark: int, last: bool
) -> Part:
    """Return a worker's part of a batch by its number in the epoch.

    Args:
        table: of shares.
        rank: of the worker.
        window: batches of a step.
        epoch: of the batch.
        steps: before that epoch.
        size: samples of the batch.
        number: of it in the epoch, from 0.
        mark: see `Part`.
        last: whether it is the last of the epoch.
    """
    return table.part(rank, size, (epoch, number), steps + number // window + 1, mark=mark, is_last=last)


class Slices:
    """A batch sampler that yields, of each batch of an epoch, the sample indices of this worker's slice, a list each.

    Args:
        begin: returns an iterator over the slices of one more epoch; called each time that the sampler is iterated.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


class SessionLoader:
    """A stand-in for a script's DataLoader, with its attributes, that yields this worker's slice of each batch.

    Args:
        loader: the script's.
        flow: the session, which functions that are only given the loader find as ``run``.

    Attributes:
        epoch: number of the epoch that the script is in, or was in last, from 0; -1: none yet.
        batches: number of batches of that epoch that the script was given.
        is_within: whether the script is in the middle of that epoch.
        table: of shares; None: nothing was drawn yet.

    Raises:
        BadInput: the loader makes no batches (no batch size or sampler), and there are several workers.
    """

    def __init__(self, loader: DataLoader[Any], flow: Flow) -> None:
        self.run = self._flow = flow
        self._loader = loader
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._is_alone = flow.world_size == 1
        if not self._is_alone and (loader.batch_size if self._is_stream else loader.batch_sampler) is None:
            raise BadInput(
                "The loader makes no batches, so there is nothing to share out among workers.",
                hint="give the DataLoader a batch_size or a batch_sampler",
            )
        samplers = (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler, loader)
        generators = {
            id(generator): generator for generator in (getattr(sampler, "generator", None) for sampler in samplers)
        }
        self._generators = [generator for generator in generators.values() if isinstance(generator, torch.Generator)]
        self.epoch, self.batches, self.is_within = -1, 0, False
        self.table: ShareTable | None = None
        self._entries: Any = None  # of a table that a checkpoint kept
        self._cut: Callable[..., Part] | None = None  # of the epoch that is drawn
        self._drawn_epoch, self._drawn = -1, 0  # and batches of it
        self._skip, self._step = 0, 0  # batches to pass over; step of what was given last
        self._has_begun = False  # to read what is left of an epoch
        self._start: dict[str, Any] = {}  # random numbers that the epoch was drawn with
        self._parts: deque[Part] = deque()
        has_batches = loader.batch_sampler is not None and not self._is_stream
        self._is_sliced = has_batches and type(loader).__iter__ is DataLoader.__iter__
        self._source = self._sliced() if self._is_sliced or not self._is_alone else loader

    @property
    def first_epoch(self) -> int:
        """The epoch to go on with, from 0: after ``run.resume`` the checkpoint's, else the one after the last."""
        return self.epoch + (not self.is_within)

    @property
    def drawn(self) -> Place:
        """The next batch to draw, as epoch and number; of a stream with reader processes, the next epoch's start."""
        is_hidden = self._is_stream and self._loader.num_workers > 0
        return self._drawn_epoch + is_hidden, 0 if is_hidden else self._drawn

    @property
    def passes(self) -> float:
        """The passes over the data, with fractions, as far as the script was given batches; of a stream whole ones."""
        length = operator.length_hint(self._loader) or float("inf")
        return max(0.0, self.epoch + (self.batches / length if self.is_within else 1.0))

    def state(self) -> dict[str, Any]:
        """Return this worker's position, its epoch's first random state and table of shares, for `resume`."""
        place = {"epoch": self.epoch, "batches": self.batches, "is_within": self.is_within, "step": self._step}
        return {**place, "start": self._start, "table": None if self.table is None else self.table.state()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the position that `state` returned; the next iteration yields what is left of that epoch."""
        self.epoch, self.batches, self.is_within = state["epoch"], state["batches"], state["is_within"]
        self._step, self._start, self._entries = state["step"], dict(state["start"]), state["table"]
        self._skip = self.batches if self.is_within else 0
        self._drawn_epoch = self.epoch - self.is_within

    def _sliced(self) -> DataLoader[Any]:
        """Return a copy of the script's loader that reads this worker's slices."""
        loader, sliced = self._loader, copy.copy(self._loader)
        if self._is_stream:
            self._stream = SlicedStream(loader.dataset, loader.batch_size or 1, loader.collate_fn, loader.drop_last)
            attributes = {"dataset": self._stream, "batch_size": None, "batch_sampler": None, "collate_fn": tuple}
            vars(sliced).update(attributes, drop_last=False)
        else:
            given, rank = loader.generator, self._flow.rank  # each worker's own, where the script gives one
            generator = (
                given if given is None or not rank else torch.Generator().manual_seed(given.initial_seed() + rank)
            )
            vars(sliced).update(batch_sampler=Slices(self._slices), generator=generator)
        return sliced

    def _random_now(self) -> dict[str, Any]:
        return {
            "random": States.now().vector(),
            "generators": [generator.get_state() for generator in self._generators],
        }

    def _begin_drawing(self, start: dict[str, Any] | None = None) -> None:
        """Record the random state that an epoch is drawn with, or restore the one that it was drawn with.

        ``start`` None: the state as it is now; where batches are skipped, always the recorded one.
        """
        if self._skip:
            for generator, state in zip(self._generators, self._start["generators"], strict=False):
                generator.set_state(state)
        else:
            self._start = start or self._random_now()
        self._drawn_epoch, self._drawn, self._cut = self._drawn_epoch + 1, 0, None
        self._is_first = not self._skip
        with nullcontext() if self._is_alone else self._flow.meeting():
            self._common = CommonNumbers(States.of(self._start["random"]), self._flow.world_size)

    def _alike(self) -> AbstractContextManager[None]:
        """Return a context in which all workers draw the same random numbers; alone, only of skipped batches."""
        keep, self._is_first = self._is_first and self._flow.rank == 0, False
        return nullcontext() if self._is_alone and not self._skip else self._common.drawn(keep=keep)

    def _cut_of(self, size: int) -> Callable[..., Part]:
        """Return the function that cuts an epoch's batches into parts; ``size`` is used if the loader declares none."""
        flow, loader = self._flow, self._loader
        if self.table is None:
            declared: Any = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            varies = not (isinstance(declared, int) and declared > 0)
            self.table = flow.share_out(self, size if varies else declared, self._entries, varies=varies)
        if self._cut is None:
            steps = self._step - -(-self._skip // flow.accumulate)
            self._cut = partial(_part_of, self.table, flow.rank, flow.accumulate, self._drawn_epoch, steps)
        return self._cut

    def _slices(self) -> Iterator[Any]:
        """Return the indices of this worker's samples in each batch of an epoch, without skipped batches."""
        if not self._is_alone or self._skip:
            return self._cut_slices(chain.from_iterable([self._loader.batch_sampler or ()]))
        # At once: a loader with reader processes begins twice, and a sampler may draw the order as it begins.
        start = self._random_now()
        batches = iter(self._loader.batch_sampler or ())
        has_drawn = _as_bytes(start) != _as_bytes(self._random_now())
        return self._cut_slices(batches, start if has_drawn else None)

    def _cut_slices(self, batches: Iterator[Any], start: dict[str, Any] | None = None) -> Iterator[Any]:
        """Yield this worker's items of each batch of an epoch, and queue its part; batches to skip are passed over.

        ``start``: as of `_begin_drawing`.
        """
        self._parts.clear()
        self._begin_drawing(start)
        for number, (batch, is_last) in enumerate(self._all_batches(batches)):
            cut = self._cut_of(len(batch))
            if number < self._skip:
                continue
            mark = 0 if self._is_alone else zlib.crc32(repr(batch).encode())
            self._drawn, part = number + 1, cut(len(batch), number, mark, is_last)
            self._parts.append(part)
            yield list(own_items(batch, part))

    def _all_batches(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield each batch of an epoch, drawn ahead as on rank 0, and whether it is the last (alone: always False)."""
        if self._is_alone and not self._skip:
            yield from ((batch, False) for batch in batches)  # each as it is asked for, as without a session
            return
        ahead: list[list[Any]] = []
        while True:
            with self._alike():
                ahead += map(list, islice(batches, MOST_DRAWN + 1 - len(ahead)))
            now, ahead = ahead[:MOST_DRAWN], ahead[MOST_DRAWN:]
            for index, batch in enumerate(now, start=1):
                yield batch, not ahead and index == len(now)
            if not ahead:
                return

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch at once, and return its batches; after a restored state those that it left over.

        Without gradients, or once the session has ended, nothing is shared out or counted: the batches are whole, those
        of the script's own loader.
        """
        if not torch.is_grad_enabled() or self._flow not in REGISTRY.open:
            return iter(self._loader)
        # At once, as the script's own loader does: it draws a seed here, and its readers begin.
        before, alike = States.now(), cast(AbstractContextManager[None], nullcontext())
        if self._skip and self._has_begun:  # what is left of the epoch was not asked for: another begins
            self._skip, self._drawn_epoch = 0, self.epoch
        self._has_begun = self._skip > 0
        if not self._is_sliced:
            self._begin_drawing()
            if not self._is_alone:
                self._stream.cut = self._cut_of(self._loader.batch_size or 1)
            alike = self._alike()
        with alike:
            batches = iter(self._source)
        if self._skip:
            before.use()
        return self._give(batches)

    def _give(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield an epoch's batches, and tell the session of each before and after, and of the epoch's end."""
        flow = self._flow
        flow.ask(True)
        self.epoch, self.batches = self.epoch + (not self._skip), self._skip
        self.is_within = True
        for part, batch in self._read(batches):
            self.batches, self._skip, self._step = self.batches + 1, 0, part.step
            flow.begin_part(part)
            yield batch
            flow.ask(False)
        self.is_within, self._skip = False, 0
        flow.end_data()

    def _read(self, batches: Iterator[Any]) -> Iterator[tuple[Part, Any]]:
        """Yield this worker's part of each batch, and the batch, without skipped batches.

        Whether a part is the last is known of a loader with a batch sampler, and of others when gradients are
        accumulated.
        """
        if self._is_sliced:
            yield from ((self._parts.popleft(), batch) for batch in batches)
            return
        for _ in range(self._skip):  # what has no batch sampler is read to be passed over
            self._next(batches)
        if self._is_alone:
            for number, batch in enumerate(batches):
                samples = samples_in(batch) or self._loader.batch_size or 1
                yield self._cut_of(samples)(samples, number, 0, False), batch
            return
        coming, looks_ahead = self._next(batches), self._flow.accumulate > 1
        while coming is not None:
            (part, batch), coming = coming, self._next(batches) if looks_ahead else None
            yield replace(part, is_last=looks_ahead and coming is None), batch
            coming = coming if looks_ahead else self._next(batches)

    def _next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch of an iterator, counted as drawn and with common random numbers; None: it is over."""
        self._drawn += 1
        with self._alike():
            return next(batches, None)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _as_bytes(numbers: Mapping[str, Any]) -> list[bytes]:
    return [state.numpy().tobytes() for state in (numbers["random"], *numbers["generators"])]


class SlicedStream(IterableDataset[Any]):
    """An iterable dataset that yields this worker's slice of each batch of a stream, as (`Part`, collated samples).

    Args:
        samples: the script's iterable dataset.
        batch_size: samples of a batch of all workers.
        collate: makes a batch of a list of samples, as the script's loader does.
        drop_last: whether an incomplete batch is left out.

    Attributes:
        cut: returns a batch's part by its samples, number, mark, and whether it is the last; set before each epoch.
    """

    cut: Callable[..., Part]

    def __init__(self, samples: Any, batch_size: int, collate: Callable[[list[Any]], Any], drop_last: bool) -> None:
        self._samples, self._size, self._collate, self._drops_last = samples, batch_size, collate, drop_last

    def __iter__(self) -> Iterator[tuple[Part, Any]]:
        """Yield a part and this worker's items of each batch.

        With reader processes, of every batch whose turn is theirs.
        """
        # Reader processes take turns, and each knows the shares only as they were when the epoch began.
        worker = get_worker_info()
        number, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        samples = iter(self._samples)
        while batch := list(islice(samples, self._size)):
            if len(batch) < self._size and self._drops_last:
                return
            part = self.cut(len(batch), number, mark_of(batch[0]), False)
            yield part, self._collate(list(own_items(batch, part)))
            number += stride


class Splits:
    """The numbering and shares of batches that a script draws itself and cuts by `Session.split`.

    Args:
        flow: the session.
    """

    passes = 0.0

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.table: ShareTable | None = None
        self.drawn: Place = (0, 0)
        self._entries: Any = None

    def state(self) -> dict[str, Any]:
        """Return the number of drawn batches and the table of shares, for a checkpoint."""
        return {"drawn": self.drawn[1], "table": None if self.table is None else self.table.state()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the number of drawn batches and the table of shares that `state` returned."""
        self.drawn, self._entries = (0, state["drawn"]), state["table"]

    def take(self, size: int) -> tuple[Part, slice]:
        """Return this worker's part of the next batch, of ``size`` samples, and its rows in it; counts the batch.

        Raises:
            BadInput: there are fewer samples than workers.
        """
        if self.table is None:
            self.table = self._flow.share_out(self, size, self._entries, varies=False)
        (_, number), self.drawn = self.drawn, (0, self.drawn[1] + 1)
        part = self.table.part(self._flow.rank, size, (0, number), number // self._flow.accumulate + 1)
        rows = own_items(range(size), part)
        return part, slice(rows[0], rows[-1] + 1)
