"""Elements not below a threshold: how many they are, which they are, and what is quick to ask in a search for one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hetopt.trainer.comm.blocks import BLOCK_ELEMENTS, blocks
from hetopt.trainer.comm.payload import SparsePayload
from hetopt.trainer.comm.topk import not_below, select

_FEW = 1 / 16


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Ascending indices and magnitudes of the elements whose magnitude is not below some threshold; NaN never is."""

    indices: Tensor
    magnitudes: Tensor

    @classmethod
    def of(cls, flat: Tensor, threshold: float) -> Survivors:
        """Those of a whole gradient."""
        return cls(*not_below(flat, threshold))

    def above(self, threshold: float) -> Survivors:
        """Those that are left at a higher threshold."""
        stay = self.magnitudes.lt(threshold).logical_not_()
        return Survivors(self.indices[stay], self.magnitudes[stay])

    def payload(self, flat: Tensor) -> SparsePayload:
        """They themselves."""
        return select(flat, self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class ThresholdSearch:
    """Answers how many elements are not below a threshold, again and again.

    Counting is one pass over a gradient, taking elements out is several. So a search counts, and takes out only what it
    ends with, or once they are few, those that all thresholds to come must choose among.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._few: Survivors | None = None

    def count(self, threshold: float) -> int:
        """Elements not below the threshold."""
        return count_not_below(self._flat if self._few is None else self._few.magnitudes, threshold)

    def take(self, threshold: float) -> Survivors:
        """Those elements."""
        return Survivors.of(self._flat, threshold) if self._few is None else self._few.above(threshold)

    def never_below(self, threshold: float, count: int) -> None:
        """From now on only higher thresholds are asked for than this one, which ``count`` elements pass."""
        among = self._flat.numel() if self._few is None else len(self._few)
        if count <= _FEW * among:
            self._few = self.take(threshold)


def count_not_below(flat: Tensor, threshold: float) -> int:
    """How many elements of 1-D fp32 have a magnitude that is not below the threshold."""
    if flat.device.type != "cpu":
        return int(flat.abs().lt(threshold).logical_not_().sum())
    # A CPU compares into fp32 several times as fast as into truths; a block's sum of ones is exact in fp32.
    ones, below = torch.empty(min(BLOCK_ELEMENTS, flat.numel())), 0
    for block in blocks(flat.numel(), flat.device):
        below += int(torch.lt(flat[block].abs(), threshold, out=ones[: block.stop - block.start]).sum())
    return flat.numel() - below


def excess(flat: Tensor, threshold: float) -> float:
    """Sum of ``max(0, |x| - threshold)`` over 1-D fp32. Blocks are summed in fp32, block sums in double precision."""
    sums = [flat[block].abs().sub_(threshold).clamp_(min=0).sum() for block in blocks(flat.numel(), flat.device)]
    return float(torch.stack(sums).double().sum())


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Mean and largest magnitude of a gradient; NaN or infinite if an element is."""

    mean: float
    largest: float

    @classmethod
    def of(cls, flat: Tensor) -> Magnitudes:
        """Those of 1-D fp32, not empty."""
        return cls(mean=excess(flat, 0.0) / flat.numel(), largest=largest_magnitude(flat))

    @property
    def spread(self) -> bool:
        """Whether a threshold between the two can tell elements apart: all are finite, and they differ."""
        return math.isfinite(self.largest) and self.largest > self.mean * (1 + 1e-6)


def largest_magnitude(flat: Tensor) -> float:
    """``max |x|`` of 1-D fp32, not empty; NaN if an element is."""
    low, high = torch.aminmax(flat)
    # max() of Python would take either side of a comparison with NaN; torch keeps the NaN.
    return float(torch.maximum(-low, high))
