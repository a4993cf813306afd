"""Random numbers of several workers: each has its own streams, as under DistributedDataParallel.

What a worker draws (augmentation, dropout, noise) belongs to its own samples. Orders of samples are drawn by rank 0,
and a stream that every worker reads whole is read with common numbers, or each worker would slice other batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_SEED_STRIDE = 7919
_NUMPY_SEEDS = 2**32


@dataclass
class States:
    """The states of the three generators that scripts draw from: torch's, Python's and NumPy's."""

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> States:
        """Return the present states."""
        return cls(torch=torch.get_rng_state(), python=random.getstate(), numpy=np.random.get_state())

    def plain(self) -> dict[str, Any]:
        """Return the same as tensors, tuples and numbers."""
        kind, keys, *rest = self.numpy
        numpy = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
        return {"torch": self.torch, "python": self.python, "numpy": numpy}

    @classmethod
    def of_plain(cls, kept: Mapping[str, Any]) -> States:
        """Return the states that `plain` gave."""
        kind, keys, *rest = kept["numpy"]
        return cls(torch=kept["torch"], python=kept["python"], numpy=(kind, keys.numpy().astype(np.uint32), *rest))

    def use(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class RandomState:
    """One worker's random numbers. Rank 0 draws what it would alone; the others are seeded by their rank.

    Attributes:
        common_state: what all workers draw from inside `common`.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        seed = torch.tensor([int(torch.randint(2**31, (), generator=_copy_of_generator()))])
        dist.broadcast(seed, src=0)
        own = States.now()
        _seed_all(int(seed))
        self.common_state = States.now()
        own.use()
        if rank:
            _seed_all(int(seed) + _SEED_STRIDE * rank)

    @contextmanager
    def common(self) -> Iterator[None]:
        """Draw the same on all workers inside."""
        own = States.now()
        self.common_state.use()
        try:
            yield
        finally:
            self.common_state = States.now()
            own.use()

    def kept(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"own": States.now().plain(), "common": self.common_state.plain()}

    def use(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `kept` gave."""
        self.common_state = States.of_plain(kept["common"])
        States.of_plain(kept["own"]).use()

    def own_generator(self, given: torch.Generator | None) -> torch.Generator | None:
        """Return what stands for a loader's generator on this worker: its reader processes are seeded from it."""
        if given is None or self._rank == 0:
            return given
        return torch.Generator().manual_seed(given.initial_seed() + _SEED_STRIDE * self._rank)


def _copy_of_generator() -> torch.Generator:
    """Return a generator that stands where torch's own does, and may be drawn from without moving that."""
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state())
    return copy


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
