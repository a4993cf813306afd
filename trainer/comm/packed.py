"""Gradients in a few bits an element, packed into bytes, to be gathered: quantised values, and signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Generator, Tensor

from hetopt.trainer.comm.bits import add_looked_up, add_whole_bytes, bit_values, pack_codes, pack_flags
from hetopt.trainer.comm.blocks import blocks
from hetopt.trainer.comm.energy import take_out
from hetopt.trainer.comm.grid import UniformGrid
from hetopt.trainer.comm.rounding import StochasticRounding, nearest
from hetopt.trainer.comm.threshold import excess


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedPayload:
    """Codes of ``bits`` each that stand for ``code_values[code] * unit``, with a unit for each segment.

    ``packed``: uint8; every segment begins with a new byte. A unit that is not finite makes its segment NaN.
    """

    packed: Tensor
    units: Tensor
    code_values: tuple[float, ...]
    sizes: Sequence[int]

    @property
    def bits(self) -> int:
        """Of a code."""
        return (len(self.code_values) - 1).bit_length()

    def message(self) -> Tensor:
        """The payload as bytes: units in fp32, then codes."""
        return torch.cat((self.units.view(torch.uint8), self.packed))

    def read(self, message: Tensor) -> PackedPayload:
        """Another worker's payload of the same gradient, from the message that it sent."""
        head = self.units.nbytes
        # A copy: fp32 must begin at a multiple of four bytes.
        units = message[:head].clone().view(torch.float32)
        return PackedPayload(packed=message[head:], units=units, code_values=self.code_values, sizes=self.sizes)

    def add_to(self, flat: Tensor) -> None:
        """Add the values to a dense vector, in place."""
        table = bit_values(torch.tensor(self.code_values), self.bits).to(flat.device)
        start = byte = 0
        for size, unit in zip(self.sizes, self.units.tolist(), strict=True):
            stop = byte + -(-size * self.bits // 8)
            part = flat[start : start + size]
            if self.bits == 8:
                add_whole_bytes(self.packed[byte:stop], self.code_values[0], unit, part)
            else:
                add_looked_up(self.packed[byte:stop], table * unit, part)
            start, byte = start + size, stop

    def subtract_from(self, flat: Tensor) -> float:
        """See `Payload`."""
        return take_out(flat, self.dense())

    def dense(self) -> Tensor:
        """The values."""
        flat = torch.zeros(sum(self.sizes), device=self.packed.device)
        self.add_to(flat)
        return flat


class Quantised(Protocol):
    """What tells the peaks of a gradient's segments, such as `MaxNorm` and `TernGrad`."""

    def peaks(self, flat: Tensor) -> Tensor:
        """One fp32 a segment; NaN or infinite if the gradient is."""
        ...


class PackedQuantiser:
    """Quantises on each worker's own grid and packs the codes: where they are gathered, no grid need be shared.

    Codes are not summed before they are values again, so levels do
    not shrink as workers are added (as they do in `QuantisedSum`); the bytes that everyone receives grow instead.

    Args:
        name: the compressor's.
        peaks: the span of each segment.
        sizes: of the segments, in order.
        bits: of a code: 2, 4 or 8.
        levels: s, at most ``2^(bits - 1) - 1``.
    """

    def __init__(self, name: str, peaks: Quantised, *, sizes: Sequence[int], bits: int, levels: int) -> None:
        self.name = name
        self._peaks = peaks
        self._sizes = [size for size in sizes if size]
        self._bits = bits
        self._levels = levels
        # Codes -s..s are stored with s added; what is left over of the width stands for 0.
        values = range(-levels, levels + 1)
        self._code_values = (*(float(value) for value in values), *[0.0] * (2**bits - len(values)))

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> PackedPayload:
        """Everything, rounded at random; without a generator, to nearest (see `Compressor`)."""
        peaks = self._peaks.peaks(flat)
        usable = torch.nan_to_num(peaks, nan=0.0, posinf=0.0).tolist()
        grid = UniformGrid(sizes=self._sizes, peaks=usable, levels=self._levels)
        codes = torch.empty(flat.numel(), dtype=torch.int16, device=flat.device)
        grid.encode(flat, codes, StochasticRounding(generator) if generator is not None else nearest)
        biased = codes.add_(self._levels).to(torch.uint8)
        packed = [
            pack_codes(part, self._bits, part.new_empty(-(-part.numel() * self._bits // 8)))
            for part in torch.split(biased, self._sizes)
        ]
        units = torch.where(torch.isfinite(peaks), peaks / self._levels, math.nan)
        return PackedPayload(packed=torch.cat(packed), units=units, code_values=self._code_values, sizes=self._sizes)


@dataclass(frozen=True, slots=True)
class SignCompressor:
    """Sends one bit an element, its sign, and the mean magnitude of all of them: ``mean(|g|) sign(g)``.

    Of all multiples of the signs this is the closest to the gradient. A zero goes as positive; a gradient of zeros has
    a mean of zero. (Karimireddy et al., arXiv 1901.09847; signs alone: Bernstein et al., arXiv 1802.04434.)
    """

    name: ClassVar[str] = "sign"

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> PackedPayload:
        """All signs (see `Compressor`)."""
        packed = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
        for block in blocks(flat.numel(), flat.device):
            pack_flags(flat[block] >= 0, packed[block.start // 8 : -(-block.stop // 8)])
        mean = flat.new_tensor([excess(flat, 0.0) / flat.numel()])
        return PackedPayload(packed=packed, units=mean, code_values=(-1.0, 1.0), sizes=[flat.numel()])
