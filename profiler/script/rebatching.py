"""Lets a script's own loaders give batches of another size than they were made for, and never run out.

The dataset, the order of samples, the collate function and the reader processes stay the script's: what changes is how
many indices of the sampler's stream go into a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hetopt.trainer.ddp.shares import rows_of


class Rebatched:
    """Stands where a loader's batch sampler was.

    Args:
        inner: the batch sampler.
        factor: on its batches' sizes, asked for at each batch.
        is_endless: whether to begin anew after the last batch, asked for then.

    Attributes:
        sizes: samples of each batch that was drawn and not given to the script yet; what a collate function makes of
            them may have another length.
    """

    def __init__(self, inner: Any, factor: Callable[[], float], is_endless: Callable[[], bool]) -> None:
        self._inner = inner
        self._factor = factor
        self._is_endless = is_endless
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        """Batches of indices."""
        self.sizes.clear()
        for batch in self._resized(self._batches()):
            self.sizes.append(len(batch))
            yield batch

    def _resized(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        kept: list[Any] = []
        for batch in batches:
            size = max(1, round(len(batch) * self._factor()))
            kept = [*kept, *batch]
            while len(kept) >= size:
                yield kept[:size]
                kept = kept[size:]
                size = max(1, round(len(batch) * self._factor()))
        if kept:
            yield kept

    def _batches(self) -> Iterator[list[Any]]:
        while True:
            count = 0
            for batch in self._inner:
                count += 1
                yield list(batch)
            if count == 0 or not self._is_endless():
                return

    def __len__(self) -> int:
        """As many batches as the script expects."""
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def samples_of(loader: DataLoader[Any]) -> int | None:
    """Samples of one pass over a loader's data; None: a stream does not say."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader.dataset)  # type: ignore[arg-type]  # torch's gap: not every dataset has a length
    except TypeError:
        return None


def samples_given(loader: DataLoader[Any], batch: Any) -> int:
    """Return the samples of the batch that a loader gives: indices where it draws any, else the batch's rows."""
    drawn = loader.batch_sampler
    if isinstance(drawn, Rebatched) and drawn.sizes and not isinstance(loader.dataset, IterableDataset):
        return drawn.sizes.popleft()
    return rows_of(batch) or loader.batch_size or 0


def rebatch(loader: DataLoader[Any], factor: Callable[[], float], is_endless: Callable[[], bool]) -> bool:
    """Let a loader's next pass give batches by `Rebatched`; whether it makes batches at all."""
    if loader.batch_sampler is None:
        return False
    if not isinstance(loader.batch_sampler, Rebatched):
        # A loader guards the attribute; what it iterates over is this entry.
        loader.__dict__["batch_sampler"] = Rebatched(loader.batch_sampler, factor, is_endless)
    return True
