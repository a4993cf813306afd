"""Rounds values to whole levels: at random so that the expectation is the value itself, or to the nearest."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Generator, Tensor

from hetopt.trainer.comm.aggregation import private_generator
from hetopt.trainer.comm.blocks import Workspace
from hetopt.trainer.comm.grid import Rounding

_RANDOM_BITS = 16
_LANES = 64 // _RANDOM_BITS


class RoundingSource(Protocol):
    """Says how a worker rounds in a step."""

    @property
    def counts_steps(self) -> bool:
        """Whether it matters which step it is."""
        ...

    def of(self, rank: int, step: int, device: torch.device) -> Rounding:
        """Rounds 1-D fp32 to whole numbers, in place."""
        ...


class AtRandom:
    """Each worker for itself, anew in each step: what is sent has no bias."""

    counts_steps = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, rank: int, step: int, device: torch.device) -> Rounding:
        """With a generator of its own (see `RoundingSource`)."""
        return StochasticRounding(private_generator(self._seed, rank, step, device))


class ToNearest:
    """The same always: no value errs by more than itself, so what is remembered of the errors stays bounded."""

    counts_steps = False

    def of(self, rank: int, step: int, device: torch.device) -> Rounding:
        """`nearest` (see `RoundingSource`)."""
        return nearest


def nearest(levels: Tensor) -> Tensor:
    """Round 1-D fp32, in place; halves to even."""
    return levels.round_()


class StochasticRounding:
    """``floor(x + u)`` with u uniform in [0, 1): x = 2.3 becomes 3 in three of ten cases, and 2 in the others.

    One random number of 64 bits serves four elements (drawing is most of the work). Sixteen bits alone would shift the
    mean by up to 2^-17 of a level; a second, finer number that all elements of a call share makes u uniform on all of
    [0, 1). So every element is unbiased, up to the rounding of fp32 itself, and independent of the others but for 2^-16
    of a level.

    Args:
        generator: on the device of what is rounded.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        fine = float(torch.rand((), generator=generator, device=generator.device, dtype=torch.float64))
        self._offset = 0.5 + fine * 2.0**-_RANDOM_BITS
        self._workspace = Workspace()

    def __call__(self, levels: Tensor) -> Tensor:
        """Round 1-D fp32 ``levels``, in place; best a block at a time."""
        numel = levels.numel()
        words = self._workspace.take("words", -(-numel // _LANES), torch.int64, levels.device)
        words.random_(-(2**63), None, generator=self._generator)
        random = self._workspace.take("random", numel, torch.float32, levels.device)
        random.copy_(words.view(torch.int16)[:numel]).mul_(2.0**-_RANDOM_BITS).add_(self._offset)
        return levels.add_(random).floor_()
