"""Random numbers of several workers: own ones where samples are drawn by index, common ones where a stream is read.

A dataset that is read by index must not draw alike on all workers, or they would all train on the same random crops and
pairs. A stream is read whole by every worker, so that all of them must draw alike, or each would slice other batches.
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
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624
_NUMPY_SEEDS = 2**32


@dataclass
class States:
    """Of the three generators that scripts draw from: torch's, Python's and NumPy's."""

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> States:
        """The present states of the generators of torch, Python and NumPy."""
        return cls(torch=torch.get_rng_state(), python=random.getstate(), numpy=np.random.get_state())

    def plain(self) -> dict[str, Any]:
        """The same as tensors, tuples and numbers."""
        kind, keys, *rest = self.numpy
        return {
            "torch": self.torch,
            "python": self.python,
            "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        }

    @classmethod
    def of_plain(cls, kept: Mapping[str, Any]) -> States:
        """The states that `plain` gave."""
        kind, keys, *rest = kept["numpy"]
        return cls(torch=kept["torch"], python=kept["python"], numpy=(kind, keys.numpy().astype(np.uint32), *rest))

    def use(self) -> None:
        """Set the generators of torch, Python and NumPy to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def broadcast(self) -> States:
        """The states of rank 0, sent to every worker."""
        version, words, gauss = self.python
        kind, keys, position, has_gauss, cached = self.numpy
        state = self.torch.clone()
        integers = torch.tensor([version, *words, *keys.tolist(), position, has_gauss], dtype=torch.int64)
        floats = torch.tensor([float("nan") if gauss is None else gauss, cached], dtype=torch.float64)
        for one in (state, integers, floats):
            dist.broadcast(one, src=0)
        told = integers.tolist()
        gauss, cached = floats.tolist()
        python = (told[0], tuple(told[1 : 1 + _PYTHON_WORDS]), None if gauss != gauss else gauss)
        keys = np.array(told[1 + _PYTHON_WORDS : 1 + _PYTHON_WORDS + _NUMPY_WORDS], dtype=np.uint32)
        return States(torch=state, python=python, numpy=(kind, keys, told[-2], told[-1], cached))


class RandomState:
    """One worker's random numbers; from here on each worker draws its own. Rank 0 draws what it would alone.

    Attributes:
        alike: what all workers draw from where they must draw the same.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.alike = States.now().broadcast()
        if rank:
            own = _SEED_STRIDE * rank
            torch.manual_seed(torch.initial_seed() + own)
            random.seed(random.getrandbits(64) + own)
            np.random.seed((int(np.random.randint(_NUMPY_SEEDS, dtype=np.uint64)) + own) % _NUMPY_SEEDS)

    @contextmanager
    def common(self) -> Iterator[None]:
        """All workers draw the same inside."""
        own = States.now()
        self.alike.use()
        try:
            yield
        finally:
            self.alike = States.now()
            own.use()

    def own_generator(self, given: torch.Generator | None) -> torch.Generator | None:
        """In place of one that the script gave to a loader, whose reader processes are seeded from it."""
        if given is None or self._rank == 0:
            return given
        return torch.Generator().manual_seed(given.initial_seed() + _SEED_STRIDE * self._rank)
