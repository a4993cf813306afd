"""Random numbers of several workers: own ones where they are of samples, common ones where they are of the batch.

A dataset that is read by index must not draw alike on all workers, or they would all train on the same random crops and
pairs; nor may torch, which draws for each sample in the loop (dropout, noise). A stream is read whole by every worker,
so that all of them must draw alike, or each would slice other batches. What Python and NumPy draw in the loop is nearly
always one number for the whole batch (a depth, a coin for teacher forcing, the weight of a mixture): all draw it alike,
as long as rank 0 draws nothing else by these.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.trainer.session.numpy_state import NumPyState

_SEED_STRIDE = 7919
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624
_NUMPY_SEEDS = 2**32
_NUMPY = NumPyState()


@dataclass
class States:
    """Of the three generators that scripts draw from: torch's, Python's and NumPy's."""

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> States:
        """The present states of the generators of torch, Python and NumPy."""
        return cls(torch=torch.get_rng_state(), python=random.getstate(), numpy=_NUMPY.now())

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
        self.use_in_loop()

    def use_in_loop(self) -> None:
        """The same of Python's and NumPy's alone: torch draws for each sample."""
        random.setstate(self.python)
        _NUMPY.use(self.numpy)

    def broadcast(self) -> States:
        """The states of rank 0, sent to every worker."""
        state = self.torch.clone()
        dist.broadcast(state, src=0)
        return replace(self.broadcast_in_loop(), torch=state)

    def broadcast_in_loop(self) -> States:
        """The same of Python's and NumPy's alone."""
        version, words, gauss = self.python
        kind, keys, position, has_gauss, cached = self.numpy
        floats = torch.tensor([float("nan") if gauss is None else gauss, cached], dtype=torch.float64)
        integers = torch.tensor([version, *words, *keys.tolist(), position, has_gauss], dtype=torch.int64)
        told = torch.cat([floats.view(torch.int64), integers])
        dist.broadcast(told, src=0)
        gauss, cached = told[:2].view(torch.float64).tolist()
        numbers = told[2:].tolist()
        python = (numbers[0], tuple(numbers[1 : 1 + _PYTHON_WORDS]), None if gauss != gauss else gauss)
        keys = np.array(numbers[1 + _PYTHON_WORDS : 1 + _PYTHON_WORDS + _NUMPY_WORDS], dtype=np.uint32)
        return States(torch=self.torch, python=python, numpy=(kind, keys, numbers[-2], numbers[-1], cached))


class RandomState:
    """One worker's random numbers. Rank 0 draws what it would alone.

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
        self._reading = States.now()  # of Python and NumPy, for samples that this worker reads
        self._in_loop: States | None = None  # while it reads some
        if rank:
            self.alike.use_in_loop()

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

    @contextmanager
    def reads(self) -> Iterator[None]:
        """Samples are read inside, for which each worker draws numbers of its own."""
        if not self._rank:
            yield
            return
        self._in_loop = States.now()
        self._reading.use_in_loop()
        try:
            yield
        finally:
            self._reading = States.now()
            self._in_loop.use_in_loop()
            self._in_loop = None

    def agree(self) -> None:
        """All workers draw in the loop what rank 0 does, which alone may have drawn the order of samples; all ask."""
        told = States.now().broadcast_in_loop()
        if self._in_loop is not None:
            self._in_loop = told
        elif self._rank:
            told.use_in_loop()

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        now = States.now()
        reading, own = (self._reading, now) if self._in_loop is None else (now, replace(self._in_loop, torch=now.torch))
        return {"own": own.plain(), "alike": self.alike.plain(), "reading": reading.plain()}

    def use(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `kept` gave."""
        self.alike, self._reading = States.of_plain(kept["alike"]), States.of_plain(kept["reading"])
        own = States.of_plain(kept["own"])
        own.use()
        if self._in_loop is not None:
            self._in_loop = own
            self._reading.use_in_loop()

    def own_generator(self, given: torch.Generator | None) -> torch.Generator | None:
        """In place of one that the script gave to a loader, whose reader processes are seeded from it."""
        if given is None or self._rank == 0:
            return given
        return torch.Generator().manual_seed(given.initial_seed() + _SEED_STRIDE * self._rank)
