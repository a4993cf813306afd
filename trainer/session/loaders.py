"""A script's loader as a session hands it back: the same batches, or this worker's slices of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import samples_in
from hetopt.trainer.session.batches import Part, Place, ShareTable, SlicedStream, Slices
from hetopt.trainer.session.collating import CheckedCollate, Noted
from hetopt.trainer.session.progress import Progress, Remaining, Resumed
from hetopt.trainer.session.random_state import RandomState

PartT = TypeVar("PartT")


class Handing(Generic[PartT]):
    """When a batch counts as given to the script: as it is read, or as somebody says who reads ahead.

    A framework that fetches batches before it computes them says itself which one comes: the first of those that wait.

    Args:
        begun: told the part of a batch, and the batch, as the script gets it.
        ended: called when the last batch of an epoch was given.
        count: called for each batch that was given.
    """

    def __init__(
        self, begun: Callable[[PartT, Any], None], ended: Callable[[], None], count: Callable[[], None]
    ) -> None:
        self._begun = begun
        self._ended = ended
        self._count = count
        self._ahead: deque[PartT] | None = None  # read, and not given yet; None: nobody reads ahead
        self._is_over = False

    def read_ahead(self) -> None:
        """From here on batches are given as `give_next` says."""
        self._ahead = deque()

    def start(self) -> None:
        """An epoch begins; what was read of another is forgotten."""
        self._is_over = False
        if self._ahead:
            self._ahead.clear()

    def read(self, part: PartT, batch: Any) -> None:
        """A batch was read."""
        if self._ahead is None:
            self._give(part, batch)
        else:
            self._ahead.append(part)

    @property
    def waiting(self) -> Sequence[PartT]:
        """Of the batches that were read and not given yet."""
        return tuple(self._ahead or ())

    def give_next(self, batch: Any) -> PartT | None:
        """The script gets the first batch that was read and waits; None: none does.

        Args:
            batch: as the script gets it, which may be on another device.
        """
        if not self._ahead:
            return None
        part = self._ahead.popleft()
        self._give(part, batch)
        if self._is_over and not self._ahead:
            self._ended()
        return part

    def end(self) -> None:
        """There are no more batches to read."""
        self._is_over = True
        if not self._ahead:
            self._ended()

    def _give(self, part: PartT, batch: Any) -> None:
        self._count()
        self._begun(part, batch)


class SlicedLoader:
    """A script's loader, as seen by one of several workers: its slice of every batch.

    What is asked of it besides (``dataset``, ``sampler``, ...) is answered by the script's own loader.

    Args:
        loader: the script's.
        rank: whose slices.
        table: of shares.
        chance: the worker's random numbers.
        asked: called before a batch is waited for; whether it is the first of an epoch.
        begun: told the part of a batch, and the batch, just before the script gets it.
        ended: called when an epoch is over.
        first: gives all workers the numbers that it is given on rank 0.
        looks_ahead: whether a batch of a stream has to tell whether it is the last.
        run: the session, which functions that are only given the loader find here.

    Raises:
        BadInput: the loader has no batches.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int,
        table: ShareTable,
        *,
        chance: RandomState,
        asked: Callable[[bool], None],
        begun: Callable[[Part, Any], None],
        ended: Callable[[], None],
        first: Callable[[Sequence[int]], list[int]],
        looks_ahead: bool = False,
        run: object,
    ) -> None:
        self.run = run
        self._chance = chance
        self.progress: Progress
        self._looks_ahead = looks_ahead
        self._loader = loader
        self._asked = asked
        self.handing = Handing(begun, ended, lambda: self.progress.give())
        self._slices: Slices | None = None
        self._stream: SlicedStream | None = None
        if isinstance(loader.dataset, IterableDataset):
            if loader.batch_size is None:
                raise _no_batches()
            self._stream = SlicedStream(
                loader.dataset,
                table,
                rank,
                batch_size=loader.batch_size,
                drop_last=loader.drop_last,
                collate=CheckedCollate(loader.collate_fn),
            )
            self._own: DataLoader[Any] = DataLoader(
                self._stream, batch_size=None, collate_fn=_as_it_is, generator=loader.generator, **_kept(loader)
            )
        else:
            if loader.batch_sampler is None:
                raise _no_batches()
            self._slices = Slices(loader.batch_sampler, table, rank, first, lambda number: self.progress.passes(number))
            self._own = DataLoader(
                loader.dataset,
                batch_sampler=self._slices,
                collate_fn=CheckedCollate(loader.collate_fn),
                generator=chance.own_generator(loader.generator),
                **_kept(loader),
            )
        self.progress = Progress(loader, self._own, chance=chance)

    @property
    def first_epoch(self) -> int:
        """The epoch to go on with, from 0: behind ``run.resume`` that of the checkpoint."""
        return self.progress.first_epoch

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; of this worker alone."""
        return self.progress.state()

    def resume(self, state: Mapping[str, Any], resumed: Resumed) -> None:
        """Go on from what `state` gave, with the random numbers of the checkpoint."""
        self.progress.resume(state, resumed)
        source = self._slices or self._stream
        assert source is not None
        source.drawn = (self.progress.epoch - self.progress.is_within, self.progress.batches)

    @property
    def drawn(self) -> Place:
        """The next batch that this worker has not drawn."""
        source = self._slices or self._stream
        assert source is not None
        epoch, number = source.drawn
        # Reader processes keep their count to themselves.
        return (epoch + 1, 0) if self._stream is not None and self._own.num_workers else (max(epoch, 0), number)

    def __iter__(self) -> Iterator[Any]:
        # At once, as the script's own loader does: it draws a seed here, and its readers begin.
        return Begun(self._begin_slices if self._stream is None else self._begin_stream)

    def _begin_slices(self) -> Iterator[Any]:
        return self._from_slices(*self.progress.begin(lambda: iter(self._own)))

    def _begin_stream(self) -> Iterator[Any]:
        assert self._stream is not None
        self._stream.begin()
        return self._from_stream(*self.progress.begin(self._begun_stream))

    def _begun_stream(self) -> Iterator[tuple[Part, Any]]:
        with self._chance.common():
            return iter(self._own)

    def _from_slices(self, batches: Iterator[Any], start: dict[str, Any]) -> Iterator[Any]:
        assert self._slices is not None
        self._enter(start)
        while (read := self._next(batches)) is not _NONE:
            part, batch = _taken(self._slices.parts.popleft(), read)
            self.handing.read(part, batch)
            yield batch
            self._asked(False)
        self._end()

    def _next(self, batches: Iterator[Any]) -> Any:
        if self._loader.num_workers:  # readers draw for themselves
            return next(batches, _NONE)
        with self._chance.reads():
            return next(batches, _NONE)

    def _from_stream(self, batches: Iterator[tuple[Part, Any]], start: dict[str, Any]) -> Iterator[Any]:
        self._enter(start)
        coming = None
        for _ in range(self.progress.done + self._looks_ahead):  # a stream is read to be passed over
            coming = self._read(batches)
        self.progress.passes(self.progress.done)
        if not self._looks_ahead:
            coming = self._read(batches)
        while coming is not None:
            part, batch = _taken(*coming)
            if self._looks_ahead:
                coming = self._read(batches)
                part = replace(part, is_last=coming is None)
            self.handing.read(part, batch)
            yield batch
            self._asked(False)
            if not self._looks_ahead:
                coming = self._read(batches)
        self._end()

    def _enter(self, start: dict[str, Any]) -> None:
        self.progress.enter(start)
        self.handing.start()
        self._asked(True)

    def _end(self) -> None:
        self.progress.end()
        self.handing.end()

    def _read(self, batches: Iterator[tuple[Part, Any]]) -> tuple[Part, Any] | None:
        with self._chance.common():
            return next(batches, None)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_NONE = object()
"""In place of a batch: there is none left."""


def _taken(part: Part, batch: Any) -> tuple[Part, Any]:
    """A batch as the script gets it, and what is known of it."""
    if isinstance(batch, Noted):
        return replace(part, mixed_by=batch.mixed_by, padding=batch.padding), batch.batch
    return part, batch


def _as_it_is(item: Any) -> Any:
    return item


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    """What the script chose that has nothing to do with who computes what."""
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }


def _no_batches() -> BadInput:
    return BadInput(
        "The loader makes no batches, so there is nothing to share out among workers.",
        hint="give the DataLoader a batch_size or a batch_sampler",
    )


class Begun:
    """An epoch's batches. A loader that is begun only to see whether it can be (Lightning does it with what is no
    DataLoader) draws no random number by that.

    Args:
        begin: begins to read; the loader's seed is drawn inside.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._before = torch.get_rng_state()
        self._batches = begin()
        self._after = torch.get_rng_state()
        self._is_read = False

    def __iter__(self) -> Begun:
        return self

    def __next__(self) -> Any:
        self._is_read = True
        return next(self._batches)

    def __del__(self) -> None:
        if not self._is_read and torch.equal(torch.get_rng_state(), self._after):
            torch.set_rng_state(self._before)


class OwnLoader:
    """A loader whose batches are a single worker's; ``run`` is the session."""

    def __init__(
        self, loader: DataLoader[Any], ask: Callable[[bool], None], begin: Callable[[int, Any], None], *, run: object
    ) -> None:
        self.run = run
        self._loader = loader
        self._ask = ask
        self.progress = Progress(loader)
        self.handing = Handing(begin, lambda: None, self.progress.give)

    @property
    def first_epoch(self) -> int:
        """As of `SlicedLoader`."""
        return self.progress.first_epoch

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self.progress.state()

    def resume(self, state: Mapping[str, Any], resumed: Resumed) -> None:
        """Go on from what `state` gave, with the random numbers of the checkpoint."""
        self.progress.resume(state, resumed)

    @property
    def drawn(self) -> Place:
        """The next batch that this worker has not drawn: nobody shares them out."""
        return 0, 0

    def __iter__(self) -> Iterator[Any]:
        return Begun(self._begin_epoch)  # at once, as without a session

    def _begin_epoch(self) -> Iterator[Any]:
        loader, read = self._loader, self.progress.done
        is_indexed = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
        if read and is_indexed and loader.batch_sampler is not None:
            read = 0
            loader = DataLoader(
                loader.dataset,
                batch_sampler=Remaining(loader.batch_sampler, self.progress),
                collate_fn=loader.collate_fn,
                generator=loader.generator,
                **_kept(loader),
            )
        return self._counted(*self.progress.begin(lambda: iter(loader)), read)

    def _counted(self, batches: Iterator[Any], start: dict[str, Any], read: int) -> Iterator[Any]:
        size = self._loader.batch_size
        self.progress.enter(start)
        self.handing.start()
        self._ask(True)
        for number in range(read):  # of a stream, which is read to be passed over
            next(batches, None)
            self.progress.passes(number + 1)
        for batch in batches:
            self.handing.read(samples_in(batch) or size or 1, batch)
            yield batch
            self._ask(False)
        self.progress.end()
        self.handing.end()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
