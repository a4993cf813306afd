"""Grids of whole codes over the range of a gradient: what codes stand for, the same on every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hetopt.core.comm.levels import SCALE_STEP
from hetopt.trainer.comm.bits import bit_values, look_up
from hetopt.trainer.comm.blocks import blocks
from hetopt.trainer.comm.energy import take_out

Rounding = Callable[[Tensor], Tensor]
"""Rounds 1-D fp32 to whole numbers, in place."""

SMALLEST_UNIT = torch.finfo(torch.float32).tiny
"""A grid finer than this cannot be told from zero in fp32: such a gradient is sent as zero."""


class Grid(Protocol):
    """Turns values into codes and codes into values."""

    def encode(self, flat: Tensor, codes: Tensor, rounding: Rounding) -> None:
        """Write the codes of ``flat``: whole numbers, at most the grid's levels in magnitude."""
        ...

    def parts(self, codes: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The values that codes, or sums of codes, stand for: block by block, fp32."""
        ...


@dataclass(frozen=True, kw_only=True)
class UniformGrid:
    """``code * peak / levels``, with a peak for each segment of the gradient.

    Attributes:
        sizes: of the segments, in order; together the whole gradient.
        peaks: largest magnitude of each segment over all workers, finite.
        levels: s; codes are in -s..s.
    """

    sizes: Sequence[int]
    peaks: Sequence[float]
    levels: int

    def encode(self, flat: Tensor, codes: Tensor, rounding: Rounding) -> None:
        """Write the codes of ``flat`` (see `Grid`)."""
        for block, unit in self._pieces(flat):
            if unit < SMALLEST_UNIT:
                codes[block].zero_()
            else:
                # The largest element may come out a rounding above its level, hence the clamp; elements that were
                # clipped are above it by far.
                levels = rounding(flat[block] * (1 / unit)).clamp_(-self.levels, self.levels)
                codes[block].copy_(levels)

    def parts(self, codes: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Codes times the unit of their segment (see `Grid`)."""
        for block, unit in self._pieces(codes):
            yield block, codes[block] * (unit if unit >= SMALLEST_UNIT else 0.0)

    def _pieces(self, flat: Tensor) -> Iterator[tuple[slice, float]]:
        start = 0
        for size, peak in zip(self.sizes, self.peaks, strict=True):
            for block in blocks(size, flat.device):
                yield slice(start + block.start, start + block.stop), peak / self.levels
            start += size


@dataclass(frozen=True, kw_only=True)
class MultiScaleGrid:
    """``code * peak / (levels * 16^m)``: each element on the finest scale m that it fits on every worker.

    Attributes:
        peak: largest magnitude over all workers, finite.
        levels: s of the coarsest scale, and the bound of codes on all scales.
        fits: for m = 1, 2, ... the packed flags of the elements that fit scale m on every worker.
    """

    peak: float
    levels: int
    fits: Sequence[Tensor]

    def encode(self, flat: Tensor, codes: Tensor, rounding: Rounding) -> None:
        """Write the codes of ``flat`` (see `Grid`)."""
        if self._unit == 0:
            codes.zero_()
            return
        for block in blocks(flat.numel(), flat.device):
            levels = flat[block] * (1 / self._unit)
            for packed in self.fits:
                levels.mul_(self._factors(packed, block, float(SCALE_STEP)))
            codes[block].copy_(rounding(levels).clamp_(-self.levels, self.levels))

    def parts(self, codes: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Codes times the unit of their scale (see `Grid`)."""
        for block in blocks(codes.numel(), codes.device):
            values = codes[block] * self._unit
            for packed in self.fits:
                values.mul_(self._factors(packed, block, 1 / SCALE_STEP))
            yield block, values

    @property
    def _unit(self) -> float:
        """Of the coarsest scale; 0 where the finest would vanish in fp32."""
        unit = self.peak / self.levels
        return unit if unit >= SMALLEST_UNIT * SCALE_STEP ** len(self.fits) else 0.0

    @staticmethod
    def _factors(packed: Tensor, block: slice, factor: float) -> Tensor:
        """``factor`` where a flag is set, and 1 elsewhere."""
        table = bit_values(torch.tensor([1.0, factor]), 1).to(packed.device)
        return look_up(packed[block.start // 8 : -(-block.stop // 8)], table, block.stop - block.start)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisedPayload:
    """Codes on a grid: what one worker put into an integer sum, in units of its gradient when read."""

    codes: Tensor
    grid: Grid

    def add_to(self, flat: Tensor) -> None:
        """Add what the codes stand for to a dense vector, in place."""
        for block, values in self.grid.parts(self.codes):
            flat[block].add_(values)

    def subtract_from(self, flat: Tensor) -> float:
        """See `Payload`."""
        return sum(take_out(flat[block], values) for block, values in self.grid.parts(self.codes))

    def dense(self) -> Tensor:
        """What the codes stand for."""
        flat = torch.empty(self.codes.numel(), device=self.codes.device)
        for block, values in self.grid.parts(self.codes):
            flat[block].copy_(values)
        return flat
