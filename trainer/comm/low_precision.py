"""Gradients in a half, a quarter or an eighth of the bytes, with every sum made in fp32.

A slice of a gradient lies in a row of bytes: low-precision floating point, or whole codes with a scale for each few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from hetopt.core.comm.payload_bytes import SCALED_ELEMENTS, scaled_code_bytes, slice_elements
from hetopt.trainer.comm.compressor import Compressor, Payload, Turn
from hetopt.trainer.comm.vectors import RowBlock, Workspace, largest_magnitude, row_blocks

_TOP_EXPONENT = 15  # fp16 ends at 65504, just below 2^16
_MOST_EXPONENT = 126  # so that fp32 has the power of two itself, and its inverse
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class LowPrecisionFloats:
    """Coding of the slices of a gradient as fp16 or bf16 values, a slice a row.

    bf16 has the range of fp32. fp16 has not: every slice is scaled by a power of two that puts its largest magnitude
    just below 2^15, and carries the exponent along, so nothing overflows and little underflows. NaN and infinity pass
    through as they are.

    Attributes:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        group: number that a slice's elements must be a multiple of.
    """

    dtype: torch.dtype

    group: ClassVar[int] = 1
    """Number of elements that are rounded together."""

    @property
    def _header(self) -> int:
        """The elements of a row before its values."""
        return int(self.dtype == torch.float16)

    def width(self, size: int) -> int:
        """Return the elements of a row that holds ``size`` values; fp16 has one more, the exponent."""
        return size + self._header

    def write(self, flat: Tensor, rows: Tensor, size: int) -> None:
        """Round a flat vector into ``rows``, [slices, width], ``size`` values a row; rows are overwritten.

        Args:
            flat: 1-D fp32; elements missing from the last slices count as zeros.
            rows: [slices, width], of type ``dtype``; overwritten.
            size: values in a slice.
        """
        powers = None
        if self._header:
            exponents = [_exponent(flat[place * size : (place + 1) * size]) for place in range(len(rows))]
            rows[:, 0] = torch.tensor(exponents, dtype=rows.dtype)
            powers = _powers(exponents, rows.device)
        values = rows[:, self._header :]
        for block in row_blocks(len(rows), size, flat.device):
            table = _table(flat, block)
            values[block.rows, block.columns].copy_(table if powers is None else table * powers[block.rows])

    def read(self, rows: Tensor, size: int) -> Iterator[tuple[RowBlock, Tensor]]:
        """Yield all rows decoded, block by block: the block's place, and its fp32 values, [rows, columns].

        Args:
            rows: [slices, width], as `write` left them.
            size: values in a slice.
        """
        powers = _powers([-exponent for exponent in rows[:, 0].tolist()], rows.device) if self._header else None
        low = rows[:, self._header :]
        for block in row_blocks(len(rows), size, rows.device):
            values = low[block.rows, block.columns].to(torch.float32, memory_format=torch.contiguous_format)
            yield block, values if powers is None else values.mul_(powers[block.rows])


@dataclass(frozen=True, slots=True)
class ScaledCodes:
    """Coding of the slices of a gradient as integers of 8 or 4 bits, `SCALED_ELEMENTS` of them with a bf16 scale.

    A scale is the largest magnitude over the largest code, so an outlier coarsens only the few values beside it. (As in
    the gradient exchange of ZeRO++, arXiv 2306.10209, but what rounding leaves is kept and sent later.) Scales
    come first in a row, then the codes, two to a byte where they have 4 bits.

    Attributes:
        bits: bits of a code, 8 or 4.
        dtype: dtype of rows, always uint8.
        group: number that a slice's elements must be a multiple of.
    """

    bits: int

    dtype: ClassVar[torch.dtype] = torch.uint8
    group: ClassVar[int] = SCALED_ELEMENTS

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def width(self, size: int) -> int:
        """Return the bytes of a row that holds ``size`` values, scales included."""
        return scaled_code_bytes(size, self.bits)

    def write(self, flat: Tensor, rows: Tensor, size: int) -> None:
        """Round a flat vector into ``rows``, [slices, width] uint8, ``size`` values a row; rows are overwritten.

        Args:
            flat: 1-D fp32; elements missing from the last slices count as zeros.
            rows: [slices, width] uint8; overwritten.
            size: values in a slice, a multiple of ``group``.
        """
        for block in row_blocks(len(rows), size, flat.device):
            scales, codes = self._place(rows, block, size)
            table = _table(flat, block).view(*scales.shape, SCALED_ELEMENTS)
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

    def read(self, rows: Tensor, size: int) -> Iterator[tuple[RowBlock, Tensor]]:
        """Yield all rows decoded, block by block: the block's place, and its fp32 values, [rows, columns].

        Args:
            rows: [slices, width], as `write` left them.
            size: values in a slice.
        """
        for block in row_blocks(len(rows), size, rows.device):
            scales, codes = self._place(rows, block, size)
            if self.bits == 8:
                values = codes.view(torch.int8).float()
            else:
                values = torch.stack((codes & 15, codes >> 4), dim=2).float().sub_(8)
            table = values.view(*scales.shape, SCALED_ELEMENTS)
            yield block, table.mul_(scales.float().unsqueeze(2)).view(len(codes), -1)

    def _place(self, rows: Tensor, block: RowBlock, size: int) -> tuple[Tensor, Tensor]:
        """Return the views of a block's scales and codes: rows by groups, and rows by bytes."""
        all_scales = _SCALE_BYTES * (size // SCALED_ELEMENTS)
        scales = _stretched(block.columns, _SCALE_BYTES, SCALED_ELEMENTS)
        codes = _stretched(block.columns, self.bits, 8)
        return (
            rows[block.rows, :all_scales][:, scales].view(torch.bfloat16),
            rows[block.rows, all_scales:][:, codes],
        )


SliceCoding: TypeAlias = LowPrecisionFloats | ScaledCodes
"""Rounds slices into rows and reads them back. NaN and infinity come out as something that is not finite.

All slices have the same size, a multiple of ``group``. They lie one after the other in a flat vector, which may end
before the last of them does: what is missing counts as zeros. As many of them as stay in the cache are rounded at once:
of small gradients, calls are what costs.
"""


def _stretched(columns: slice, units: int, elements: int) -> slice:
    """Return the slice of units that holds a slice of elements, where ``units`` hold ``elements``."""
    return slice(columns.start * units // elements, columns.stop * units // elements)


def _table(flat: Tensor, block: RowBlock) -> Tensor:
    """Return a block of a vector as rows by columns, zeros where it has ended."""
    values = flat[block.flat]
    missing = block.flat.stop - block.flat.start - values.numel()
    padded = functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, block.columns.stop - block.columns.start)


def _powers(exponents: Sequence[float], device: torch.device) -> Tensor:
    """Return powers of two, one for each row, shape (rows, 1)."""
    return torch.tensor([[2.0**exponent] for exponent in exponents], device=device)


def _exponent(part: Tensor) -> int:
    """Return the power of two that lifts the largest magnitude into [2^14, 2^15); 0 if that is 0 or not finite."""
    peak = largest_magnitude(part) if part.numel() else 0.0
    if not 0 < peak < math.inf:
        return 0
    return min(_MOST_EXPONENT, max(-_MOST_EXPONENT, _TOP_EXPONENT - math.frexp(peak)[1]))


class LowPrecision(Compressor["LowPrecisionPayload"]):
    """Compressor to fp16, bf16, int8 or int4, cut into a slice for each worker, which sums it in fp32.

    Args:
        coding: how slices are rounded and laid out.
    """

    def __init__(self, coding: SliceCoding) -> None:
        self.coding = coding
        self._workspace = Workspace()

    def encode(self, flat: Tensor, turn: Turn) -> LowPrecisionPayload:
        """Return the gradient rounded to low precision, one row for the slice of each worker.

        The payload's memory is reused by the next call. Nothing is communicated.
        """
        numel, workers = flat.numel(), turn.channel.workers
        size = slice_elements(numel, workers, group=self.coding.group)
        rows = self.rows("rows", workers, size, flat)
        self.coding.write(flat, rows, size)
        return LowPrecisionPayload(rows=rows, size=size, coding=self.coding, numel=numel, rank=turn.channel.rank)

    def rows(self, name: str, count: int, size: int, like: Tensor) -> Tensor:
        """Return memory for ``count`` coded slices of ``size`` values, reused whenever ``name`` is the same."""
        width = self.coding.width(size)
        return self._workspace.take(name, count * width, self.coding.dtype, like.device).view(count, width)

    def total(self, size: int, like: Tensor) -> Tensor:
        """Return fp32 zeros for the sum of a slice, [size], on the device of ``like``; memory is reused."""
        return self._workspace.take("total", size, torch.float32, like.device).zero_()


class SlicedAllReduce:
    """All-reduce in low precision: each worker sums one slice in fp32, in rank order, and sends the sum to all.

    Two steps of slices, all to all and back, move the same bytes over each link as a ring all-reduce of the smaller
    type would, in as many messages. But a ring rounds its partial sums to that type N - 1 times, and may overflow on
    the way though neither the summands nor the sum do; here a value is rounded once when it is sent and once when its
    sum is.

    The residual, where there is one, is the rounding of this worker's own gradient, and that of the sums of its slice,
    which nobody else knows: so what all workers count as sent is exactly what all of them received.
    """

    def run(self, compressor: LowPrecision, flat: Tensor, out: Tensor, turn: Turn) -> LowPrecisionPayload:
        """Write the sum of all workers' gradients, rounded, into ``out``.

        Return this worker's payload. All must call it.

        Args:
            compressor: one of low precision.
            flat: 1-D fp32, not empty; left as it is, unless it shares memory with ``out``.
            out: 1-D fp32, as long; overwritten.
            turn: this worker's channel, step and seed.
        """
        channel, coding = turn.channel, compressor.coding
        payload = compressor.encode(flat, turn)
        rows, size = payload.rows, payload.size
        received = compressor.rows("received", channel.workers, size, flat)
        with channel.operation("all_reduce", rows.nbytes) as own_work_s:
            channel.all_to_all(rows, received)
            begun_s = channel.now()
            total = compressor.total(size, flat)
            for block, values in coding.read(received, size):
                for part in values:
                    total[block.columns].add_(part)
            sum_codes = compressor.rows("own", 1, size, flat)
            coding.write(total, sum_codes, size)
            for block, values in coding.read(sum_codes, size):
                torch.sub(values[0], total[block.columns], out=total[block.columns])
            own_work_s.append(channel.now() - begun_s)
            channel.gather_slices(sum_codes[0], received)
        for block, values in coding.read(received, size):
            part = out[block.flat]
            part.copy_(values.view(-1)[: part.numel()])
        return replace(payload, rounding=total)


@dataclass(frozen=True, kw_only=True, eq=False)
class LowPrecisionPayload(Payload):
    """A gradient in low precision, [slices, width], and what rounding the sums of this rank's slice added to them.

    Attributes:
        rows: coded slices of the gradient, [slices, width], one for each worker.
        size: values in a slice.
        coding: how they are read.
        numel: elements of the gradient.
        rank: rank of this worker, whose slice ``rounding`` is of.
        rounding: rounded sum less sum of this worker's slice, [size]; None: not exchanged yet.
    """

    rows: Tensor
    size: int
    coding: SliceCoding
    numel: int
    rank: int
    rounding: Tensor | None = None

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the flat gradient, 1-D fp32 values sent for it) in order.

        This rank's slice counts the rounding of its sums as sent. Each is read while it is in the cache.
        """
        first = self.rank * self.size
        for block, table in self.coding.read(self.rows, self.size):
            begin, end = block.flat.start, min(block.flat.stop, self.numel)
            values = table.view(-1)[: max(0, end - begin)]
            own_begin, own_end = max(begin, first), min(end, first + self.size)
            if self.rounding is not None and own_begin < own_end:
                values[own_begin - begin : own_end - begin].add_(self.rounding[own_begin - first : own_end - first])
            yield slice(begin, end), values
