"""Random numbers of several workers: each has its own streams, as under DistributedDataParallel.

What a worker draws (augmentation, dropout, noise) belongs to its own samples. Orders of samples, and streams that every
worker reads whole, are drawn alike: with the numbers of rank 0 as an epoch begins, which are those of one machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_SEED_STRIDE = 7919
_NUMPY_SEEDS = 2**32
_WORDS = 625, 624
"""Of the states of Python's and NumPy's Mersenne twisters; four numbers more stand behind them."""


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

    def vector(self) -> Tensor:
        """Return the same as float64 numbers, which checkpoints keep and workers send."""
        _, words, gauss = self.python
        _, keys, place, has_gauss, cached = self.numpy
        rest = [float("nan") if gauss is None else gauss, place, has_gauss, cached]
        return torch.cat([torch.tensor([*words, *keys, *rest], dtype=torch.float64), self.torch.double()])

    @classmethod
    def of(cls, vector: Tensor) -> States:
        """Return the states that `vector` gave."""
        words, keys, rest, own = torch.split(vector, [*_WORDS, 4, len(vector) - sum(_WORDS) - 4])
        gauss, place, has_gauss, cached = rest.tolist()
        python = (3, tuple(map(int, words.tolist())), None if gauss != gauss else gauss)
        numpy = ("MT19937", keys.numpy().astype(np.uint32), int(place), int(has_gauss), cached)
        return cls(torch=own.byte(), python=python, numpy=numpy)

    def use(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def draw_by_rank(rank: int) -> None:
    """Seed this worker's generators by its rank; rank 0 draws what it would alone."""
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state())
    seed = torch.tensor([int(torch.randint(2**31, (), generator=copy))])
    dist.broadcast(seed, src=0)
    if rank:
        own = int(seed) + _SEED_STRIDE * rank
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own % _NUMPY_SEEDS)


class CommonNumbers:
    """Random numbers that all workers draw alike in an epoch.

    Args:
        states: to begin with; those of rank 0 count.
        world_size: workers.
    """

    def __init__(self, states: States, world_size: int) -> None:
        vector = states.vector()
        if world_size > 1:
            dist.broadcast(vector, src=0)
        self._states = States.of(vector)

    @contextmanager
    def drawn(self, *, keep: bool = False) -> Iterator[None]:
        """Draw them inside.

        Args:
            keep: whether this worker goes on with them, too, as one machine would.
        """
        own = States.now()
        self._states.use()
        try:
            yield
        finally:
            self._states = States.now()
            if not keep:
                own.use()
