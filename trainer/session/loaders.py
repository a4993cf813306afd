"""A script's loader as a session hands it back: the same batches, or this worker's slices of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hetopt.profiler.errors import BadInput
from hetopt.trainer.data.fetch import samples_in
from hetopt.trainer.session.batches import Part, Place, ShareTable, SlicedStream, Slices


class SlicedLoader:
    """A script's loader, as seen by one of several workers: its slice of every batch.

    What is asked of it besides (``dataset``, ``sampler``, ...) is answered by the script's own loader.

    Args:
        loader: the script's.
        rank: whose slices.
        table: of shares.
        asked: called before a batch is waited for; whether it is the first of an epoch.
        begun: told the part of a batch just before the script gets it.
        ended: called when an epoch is over.
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
        asked: Callable[[bool], None],
        begun: Callable[[Part], None],
        ended: Callable[[], None],
        run: object,
    ) -> None:
        self.run = run
        self._loader = loader
        self._asked = asked
        self._begun = begun
        self._ended = ended
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
                self._stream, batch_size=None, collate_fn=_as_it_is, **_kept(loader)
            )
        else:
            if loader.batch_sampler is None:
                raise _no_batches()
            self._slices = Slices(loader.batch_sampler, table, rank)
            self._own = DataLoader(
                loader.dataset, batch_sampler=self._slices, collate_fn=loader.collate_fn, **_kept(loader)
            )

    @property
    def drawn(self) -> Place:
        """The next batch that this worker has not drawn."""
        source = self._slices or self._stream
        assert source is not None
        epoch, number = source.drawn
        # Reader processes keep their count to themselves.
        return (epoch + 1, 0) if self._stream is not None and self._own.num_workers else (max(epoch, 0), number)

    def __iter__(self) -> Iterator[Any]:
        if self._stream is not None:
            self._stream.begin()
        self._asked(True)
        for item in self._own:
            if self._slices is not None:
                part, batch = self._slices.parts.popleft(), item
            else:
                part, batch = item
            self._begun(part)
            yield batch
            self._asked(False)
        self._ended()

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
        "generator": loader.generator,
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
        self, loader: DataLoader[Any], ask: Callable[[bool], None], begin: Callable[[int], None], *, run: object
    ) -> None:
        self.run = run
        self._loader = loader
        self._ask = ask
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        size = self._loader.batch_size
        self._ask(True)
        for batch in self._loader:
            self._begin(samples_in(batch) or size or 1)
            yield batch
            self._ask(False)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
