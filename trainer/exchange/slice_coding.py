"""How a slice of a gradient lies in a row of bytes: narrow floating point, or whole codes with a scale for each few."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hetopt.trainer.exchange.blocks import blocks
from hetopt.trainer.exchange.threshold import largest_magnitude
from hetopt.trainer.exchange.wire import SCALED_ELEMENTS, scaled_code_bytes

_TOP_EXPONENT = 15  # fp16 ends at 65504, just below 2^16
_MOST_EXPONENT = 126  # so that fp32 has the power of two itself, and its inverse
_SCALE_BYTES = 2


class SliceCoding(Protocol):
    """Rounds slices into rows and reads them back. NaN and infinity come out as something that is not finite."""

    @property
    def dtype(self) -> torch.dtype:
        """Of a row."""
        ...

    def width(self, size: int) -> int:
        """Elements of the row of a slice of ``size`` values."""
        ...

    def write(self, part: Tensor, row: Tensor) -> None:
        """Round a slice, or what there is of one, into its row."""
        ...

    def read(self, row: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
        """The first ``count`` values of a row, block by block in fp32."""
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
    def _header(self) -> int:
        """Elements before the values."""
        return int(self.dtype == torch.float16)

    def width(self, size: int) -> int:
        """See `SliceCoding`."""
        return size + self._header

    def write(self, part: Tensor, row: Tensor) -> None:
        """See `SliceCoding`."""
        exponent = _exponent(part) if self._header and part.numel() else 0
        if self._header:
            row[0] = float(exponent)
        values = row[self._header :]
        values[part.numel() :].zero_()
        for block in blocks(part.numel(), part.device):
            values[block].copy_(part[block] * 2.0**exponent if exponent else part[block])

    def read(self, row: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
        """See `SliceCoding`."""
        scale = 2.0 ** -float(row[0]) if self._header else 1.0
        values = row[self._header :]
        for block in blocks(count, row.device):
            yield block, values[block].float().mul_(scale)


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
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def width(self, size: int) -> int:
        """See `SliceCoding`."""
        return scaled_code_bytes(size, self.bits)

    def write(self, part: Tensor, row: Tensor) -> None:
        """See `SliceCoding`."""
        scales, codes = self._split(row)
        scales.zero_()
        codes.fill_(self._zero)
        for block in blocks(part.numel(), part.device):
            values = part[block]
            groups = math.ceil(values.numel() / SCALED_ELEMENTS)
            if groups * SCALED_ELEMENTS != values.numel():
                values = functional.pad(values, (0, groups * SCALED_ELEMENTS - values.numel()))
            table = values.view(groups, SCALED_ELEMENTS)
            scale = (table.abs().amax(dim=1) / self._levels).bfloat16()
            first = block.start // SCALED_ELEMENTS
            scales[first : first + groups].copy_(scale)
            unit = scale.float().unsqueeze(1)
            # Of what is not finite the scale tells; of what is too small for a scale nothing is sent.
            rounded = (table / unit).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-self._levels, self._levels).view(-1)
            start = self._bytes(block.start)
            if self.bits == 8:
                codes[start : start + rounded.numel()].copy_(rounded.to(torch.int8).view(torch.uint8))
            else:
                nibbles = (rounded + 8).to(torch.uint8).view(-1, 2)
                codes[start : start + len(nibbles)].copy_(nibbles[:, 0] | (nibbles[:, 1] << 4))

    def read(self, row: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
        """See `SliceCoding`."""
        scales, codes = self._split(row)
        for block in blocks(count, row.device):
            size = block.stop - block.start
            groups = math.ceil(size / SCALED_ELEMENTS)
            first, start = block.start // SCALED_ELEMENTS, self._bytes(block.start)
            packed = codes[start : start + self._bytes(groups * SCALED_ELEMENTS)]
            if self.bits == 8:
                values = packed.view(torch.int8).float()
            else:
                values = torch.stack((packed & 15, packed >> 4), dim=1).view(-1).float().sub_(8)
            table = values.view(groups, SCALED_ELEMENTS)
            table.mul_(scales[first : first + groups].float().unsqueeze(1))
            yield block, values[:size]

    @property
    def _zero(self) -> int:
        """The byte that stands for zeros."""
        return 0 if self.bits == 8 else 0x88

    def _bytes(self, elements: int) -> int:
        return elements * self.bits // 8

    def _split(self, row: Tensor) -> tuple[Tensor, Tensor]:
        groups = row.numel() // (_SCALE_BYTES + self._bytes(SCALED_ELEMENTS))
        return row[: _SCALE_BYTES * groups].view(torch.bfloat16), row[_SCALE_BYTES * groups :]


def _exponent(part: Tensor) -> int:
    """The power of two that lifts the largest magnitude to at least 2^14 and below 2^15; 0 if it is not finite."""
    peak = largest_magnitude(part)
    if not 0 < peak < math.inf:
        return 0
    return min(_MOST_EXPONENT, max(-_MOST_EXPONENT, _TOP_EXPONENT - math.frexp(peak)[1]))
