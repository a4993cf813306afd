"""A script's loader as a session hands it back: the same batches, or this worker's slices of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import samples_in
from hetopt.trainer.session.batches import Part, Place, ShareTable, SlicedStream, Slices
from hetopt.trainer.session.progress import Progress, Remaining, Resumed
from hetopt.trainer.session.random_state import RandomState


class SlicedLoader:
    """A script's loader, as seen by one of several workers: its slice of every batch.

    What is asked of it besides (``dataset``, ``sampler``, ...) is answered by the script's own loader.

    Args:
        loader: the script's.
        rank: whose slices.
        table: of shares.
        chance: the worker's random numbers.
        asked: called before a batch is waited for; whether it is the first of an epoch.
        begun: told the part of a batch just before the script gets it.
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
        begun: Callable[[Part], None],
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
        self._begun, self._ended = begun, ended
        self._step = 0  # of the batch that was given last
        self._window = table.window
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
                collate=loader.collate_fn,
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
                collate_fn=loader.collate_fn,
                generator=chance.own_generator(loader.generator),
                **_kept(loader),
            )
        self.progress = Progress(loader, self._own, chance=chance)

    @property
    def first_epoch(self) -> int:
        """The epoch to go on with, from 0: behind ``run.resume`` that of the checkpoint."""
        return self.progress.first_epoch

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; of this worker alone."""
        return {**self.progress.state(), "step": self._step}

    def resume(self, state: Mapping[str, Any], resumed: Resumed) -> None:
        """Go on from what `state` gave, with the random numbers of the checkpoint."""
        self.progress.resume(state, resumed)
        source = self._slices or self._stream
        assert source is not None
        source.drawn = (self.progress.epoch - self.progress.is_within, self.progress.batches)
        source.step = self._step = state["step"]

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
        if self._stream is None:
            return self._from_slices(*self.progress.begin(lambda: iter(self._own)))
        self._stream.begin(self._step - -(-self.progress.done // self._window))
        return self._from_stream(*self.progress.begin(self._begun_stream))

    def _begun_stream(self) -> Iterator[tuple[Part, Any]]:
        with self._chance.common():
            return iter(self._own)

    def _from_slices(self, batches: Iterator[Any], start: dict[str, Any]) -> Iterator[Any]:
        assert self._slices is not None
        self._enter(start)
        for batch in batches:
            self._give(self._slices.parts.popleft())
            yield batch
            self._asked(False)
        self._end()

    def _give(self, part: Part) -> None:
        self.progress.give()
        self._step = part.step
        self._begun(part)

    def _from_stream(self, batches: Iterator[tuple[Part, Any]], start: dict[str, Any]) -> Iterator[Any]:
        self._enter(start)
        coming = None
        for _ in range(self.progress.done + self._looks_ahead):  # a stream is read to be passed over
            coming = self._read(batches)
        self.progress.passes(self.progress.done)
        if not self._looks_ahead:
            coming = self._read(batches)
        while coming is not None:
            part, batch = coming
            if self._looks_ahead:
                coming = self._read(batches)
                part = replace(part, is_last=coming is None)
            self._give(part)
            yield batch
            self._asked(False)
            if not self._looks_ahead:
                coming = self._read(batches)
        self._end()

    def _enter(self, start: dict[str, Any]) -> None:
        self.progress.enter(start)
        self._asked(True)

    def _end(self) -> None:
        self.progress.end()
        self._ended()

    def _read(self, batches: Iterator[tuple[Part, Any]]) -> tuple[Part, Any] | None:
        with self._chance.common():
            return next(batches, None)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


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


class OwnLoader:
    """A loader whose batches are a single worker's; ``run`` is the session."""

    def __init__(
        self, loader: DataLoader[Any], ask: Callable[[bool], None], begun: Callable[[Part], None], *, run: object
    ) -> None:
        self.run = run
        self._loader = loader
        self._ask, self._begun = ask, begun
        self.progress = Progress(loader)

    @property
    def first_epoch(self) -> int:
        """As of `SlicedLoader`."""
        return self.progress.first_epoch

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: as much as of several workers."""
        return {**self.progress.state(), "step": 0}

    def resume(self, state: Mapping[str, Any], resumed: Resumed) -> None:
        """Go on from what `state` gave, with the random numbers of the checkpoint."""
        self.progress.resume(state, resumed)

    @property
    def drawn(self) -> Place:
        """The next batch that this worker has not drawn: nobody shares them out."""
        return 0, 0

    def __iter__(self) -> Iterator[Any]:
        # At once, as without a session.
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
        self._ask(True)
        for number in range(read):  # of a stream, which is read to be passed over
            next(batches, None)
            self.progress.passes(number + 1)
        for batch in batches:
            self.progress.give()
            samples = samples_in(batch) or size or 1
            self._begun(Part(samples=samples, batch=samples, shares=(samples,)))
            yield batch
            self._ask(False)
        self.progress.end()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
