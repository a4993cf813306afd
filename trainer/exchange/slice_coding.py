"""How a slice of a gradient lies in a row of bytes: narrow floating point, or whole codes with a scale for each few."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hetopt.trainer.exchange.blocks import row_blocks
from hetopt.trainer.exchange.threshold import largest_magnitude
from hetopt.trainer.exchange.wire import SCALED_ELEMENTS, scaled_code_bytes

_TOP_EXPONENT = 15  # fp16 ends at 65504, just below 2^16
_MOST_EXPONENT = 126  # so that fp32 has the power of two itself, and its inverse
_SCALE_BYTES = 2


class SliceCoding(Protocol):
    """Rounds slices into rows and reads them back. NaN and infinity come out as something that is not finite.

    All slices have the same size, a multiple of ``group``. They lie one after the other in a flat vector,
    which may end before the last of them does: what is missing counts as zeros. As many of them as stay in the cache
    are rounded at once: of small gradients, calls are what costs.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of a row."""
        ...

    @property
    def group(self) -> int:
        """Elements that are rounded together."""
        ...

    def width(self, size: int) -> int:
        """Elements of the row of a slice of ``size`` values."""
        ...

    def write(self, flat: Tensor, rows: Tensor, size: int) -> None:
        """Round the slices of a vector into the rows of a matrix."""
        ...

    def read(self, rows: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """The values of all rows, one after the other as in the vector: some whole rows or a part of one, in fp32."""
        ...


@dataclass(frozen=True, slots=True)
class NarrowFloats:
    """Values in fp16 or bf16.

    bf16 has the range of fp32. fp16 has not: every slice is scaled by a power of two that puts its largest magnitude
    just below 2^15, and carries the exponent along, so nothing overflows and little underflows. NaN and infinity pass
    through as they are.
    """

    dtype: torch.dtype

    @property
    def group(self) -> int:
        """See `SliceCoding`."""
        return 1

    @property
    def _header(self) -> int:
        """Elements before the values."""
        return int(self.dtype == torch.float16)

    def width(self, size: int) -> int:
        """See `SliceCoding`."""
        return size + self._header

    def write(self, flat: Tensor, rows: Tensor, size: int) -> None:
        """See `SliceCoding`."""
        exponents = [_exponent(flat[place * size : (place + 1) * size]) for place in range(len(rows) * self._header)]
        if self._header:
            rows[:, 0] = torch.tensor(exponents, dtype=rows.dtype)
        powers = self._powers(rows, 1)
        for block in row_blocks(len(rows), size, flat.device):
            table = _padded(flat, block).view(-1, min(size, block.stop - block.start))
            those, columns = self._place(block, size)
            rows[those, columns].copy_(table if powers is None else table * powers[those])

    def read(self, rows: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """See `SliceCoding`."""
        powers = self._powers(rows, -1)
        for block in row_blocks(len(rows), size, rows.device):
            those, columns = self._place(block, size)
            values = rows[those, columns].float()
            yield block, (values if powers is None else values.mul_(powers[those])).view(-1)

    def _powers(self, rows: Tensor, sign: int) -> Tensor | None:
        """What each row's values are multiplied by, on the way in (1) or out (-1)."""
        if not self._header:
            return None
        return torch.tensor([[2.0 ** (sign * exponent)] for exponent in rows[:, 0].tolist()], device=rows.device)

    def _place(self, block: slice, size: int) -> tuple[slice, slice]:
        """The rows and the columns that hold a block."""
        first, begin = divmod(block.start, size)
        length = min(size, block.stop - block.start)
        begin += self._header
        return slice(first, first + (block.stop - block.start) // length), slice(begin, begin + length)


@dataclass(frozen=True, slots=True)
class ScaledCodes:
    """Whole codes of 8 or 4 bits, to the nearest, each `SCALED_ELEMENTS` of them with a scale of their own in bf16.

    A scale is the largest magnitude over the largest code, so an outlier coarsens only the few values beside it. (As in
    the gradient exchange of ZeRO++, arXiv 2306.10209, but what rounding leaves is remembered and sent later.) Scales
    come first in a row, then the codes, two to a byte where they have 4 bits.
    """

    bits: int

    @property
    def dtype(self) -> torch.dtype:
        """See `SliceCoding`."""
        return torch.uint8

    @property
    def group(self) -> int:
        """See `SliceCoding`."""
        return SCALED_ELEMENTS

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def width(self, size: int) -> int:
        """See `SliceCoding`."""
        return scaled_code_bytes(size, self.bits)

    def write(self, flat: Tensor, rows: Tensor, size: int) -> None:
        """See `SliceCoding`."""
        for block in row_blocks(len(rows), size, flat.device):
            scales, codes = self._place(rows, block, size)
            table = _padded(flat, block).view(*scales.shape, SCALED_ELEMENTS)
            scale = (table.abs().amax(dim=2) / self._levels).bfloat16()
            scales.copy_(scale)
            # Of what is not finite the scale tells; of what is too small for a scale nothing is sent.
            rounded = (table / scale.float().unsqueeze(2)).nan_to_num_(0.0, 0.0, 0.0).round_()
            rounded.clamp_(-self._levels, self._levels)
            if self.bits == 8:
                codes.copy_(rounded.view(len(codes), -1).to(torch.int8).view(torch.uint8))
            else:
                nibbles = rounded.add_(8).to(torch.uint8).view(len(codes), -1, 2)
                torch.bitwise_or(nibbles[..., 0], nibbles[..., 1] << 4, out=codes)

    def read(self, rows: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """See `SliceCoding`."""
        for block in row_blocks(len(rows), size, rows.device):
            scales, codes = self._place(rows, block, size)
            if self.bits == 8:
                values = codes.view(torch.int8).float()
            else:
                values = torch.stack((codes & 15, codes >> 4), dim=2).float().sub_(8)
            table = values.view(*scales.shape, SCALED_ELEMENTS)
            yield block, table.mul_(scales.float().unsqueeze(2)).view(-1)

    def _place(self, rows: Tensor, block: slice, size: int) -> tuple[Tensor, Tensor]:
        """The scales and the codes of a block: rows by groups, and rows by bytes."""
        first, begin = divmod(block.start, size)
        length = min(size, block.stop - block.start)
        those = rows[first : first + (block.stop - block.start) // length]
        groups, head = length // SCALED_ELEMENTS, _SCALE_BYTES * (size // SCALED_ELEMENTS)
        scaled, coded = _SCALE_BYTES * (begin // SCALED_ELEMENTS), head + begin * self.bits // 8
        scales = those[:, scaled : scaled + _SCALE_BYTES * groups].view(torch.bfloat16)
        return scales, those[:, coded : coded + length * self.bits // 8]


def _padded(flat: Tensor, block: slice) -> Tensor:
    """A block of a vector, zeros where it has ended."""
    values = flat[block]
    missing = block.stop - block.start - values.numel()
    return functional.pad(values, (0, missing)) if missing else values


def _exponent(part: Tensor) -> int:
    """The power of two that lifts the largest magnitude to at least 2^14 and below 2^15; 0 if it is not finite."""
    peak = largest_magnitude(part) if part.numel() else 0.0
    if not 0 < peak < math.inf:
        return 0
    return min(_MOST_EXPONENT, max(-_MOST_EXPONENT, _TOP_EXPONENT - math.frexp(peak)[1]))
