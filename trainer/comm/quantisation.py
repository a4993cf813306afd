"""Quantised gradients: whole codes on a grid that all workers share, summed on the way, or packed and gathered.

Summed: one tiny maximum to agree on a grid, then one sum of whole codes (QSGD-MaxNorm and its multi-scale forms,
TernGrad). Gathered: codes of each worker's own grid, and signs, in a few bits an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Generator, Tensor

from hetopt.core.comm.composition import GATHER
from hetopt.core.comm.payload_bytes import SCALE_STEP, summed_bits
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Compressor, Payload, Summed, Turn
from hetopt.trainer.comm.vectors import (
    Lanes,
    Workspace,
    add_looked_up,
    add_whole_bytes,
    bit_values,
    blocks,
    energy,
    largest_magnitude,
    look_up,
    mean_magnitude,
    pack_codes,
    pack_flags,
    take_out,
)

Rounding = Callable[[Tensor], Tensor]
"""Rounds 1-D fp32 to whole numbers, in place."""

SMALLEST_UNIT = torch.finfo(torch.float32).tiny
"""A grid finer than this cannot be told from zero in fp32: such a gradient is sent as zero."""


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


Grid: TypeAlias = UniformGrid | MultiScaleGrid
"""Turns values into codes (whole numbers, at most its levels in magnitude), and codes or sums of them into values."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedPayload(Payload):
    """Codes on a grid: what one worker put into an integer sum, in units of its gradient when read.

    ``grid`` None: some worker's gradient was not finite, and nothing counts as sent.
    """

    codes: Tensor
    grid: Grid | None
    lanes: Lanes

    @property
    def numel(self) -> int:  # type: ignore[override]  # as many as codes
        """Number of elements of the gradient."""
        return self.codes.numel()

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the values that the codes stand for (see `Payload`)."""
        return iter(()) if self.grid is None else self.grid.parts(self.codes)


_RANDOM_BITS = 16
_LANES = 64 // _RANDOM_BITS


def nearest(levels: Tensor) -> Tensor:
    """Round 1-D fp32, in place; halves to even."""
    return levels.round_()


class StochasticRounding:
    """``floor(x + u)`` with u uniform in [0, 1): x = 2.3 becomes 3 in three of ten cases, and 2 in the others.

    One random number of 64 bits serves four elements (drawing is most of the work). Sixteen bits alone would shift the
    mean by up to 2^-17 of a level; a second, finer number that all elements of a call share makes u uniform on all of
    [0, 1). So every element is unbiased, up to the rounding of fp32 itself, and independent of the others but for 2^-16
    of a level.
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


class MaxNorm:
    """One grid for the whole gradient: ``w / s`` apart, w the largest magnitude over all workers, s levels.

    A value x is rounded at random to a neighbouring multiple, so E[sent] = x and a coordinate's variance is at most
    ``w^2 / (4 s^2)`` on each worker. (Arxiv 2109.12497, where s is 2^q - 1; here it is whatever the width of the codes
    allows for this many workers.)

    Args:
        sizes: elements of segments with a grid each, in order; empty: the whole gradient is one.
        clip_deviations: elements further from 0 than so many standard deviations are clipped first; absent: none.
    """

    def __init__(self, sizes: Sequence[int] = (), clip_deviations: float | None = None) -> None:
        self._sizes = [size for size in sizes if size]
        self._clip_deviations = clip_deviations

    def peaks(self, flat: Tensor) -> Tensor:
        """Return the largest magnitude of each segment after clipping, fp32; NaN or infinite if the gradient is."""
        return flat.new_tensor([self._peak(segment) for segment in torch.split(flat, self._sizes or flat.numel())])

    def grid(self, flat: Tensor, peaks: list[float], levels: int, channel: Channel) -> Grid:
        """Return the grid that all workers' codes lie on, by the largest peaks over all workers."""
        return UniformGrid(sizes=self._sizes or [flat.numel()], peaks=peaks, levels=levels)

    def _peak(self, segment: Tensor) -> float:
        peak = largest_magnitude(segment)
        if self._clip_deviations is None or not math.isfinite(peak) or segment.numel() == 1:
            return peak
        mean = float(segment.mean())
        deviation = math.sqrt(max(0.0, energy(segment) / segment.numel() - mean * mean))
        # A layer of equal elements has no deviation, and nothing to clip.
        return min(peak, self._clip_deviations * deviation) if deviation > 1e-6 * abs(mean) else peak


class MultiScale(MaxNorm):
    """The grid of `MaxNorm`, and further ones each 16 times as fine.

    An element takes the finest scale on which its code stays within the levels of the coarsest, on every worker: one
    flag an element and further scale, agreed on by AND. Magnitudes are compared before they are rounded: deciding by
    the rounded code, as the released code does, makes the choice of scale depend on the draw, which is a bias.
    (Arxiv 2109.12497.)

    Args:
        scales: 2 or more.
    """

    def __init__(self, scales: int = 2) -> None:
        super().__init__()
        self._scales = scales

    def grid(self, flat: Tensor, peaks: list[float], levels: int, channel: Channel) -> Grid:
        """Agree on who takes which scale (see `MaxNorm`)."""
        packed_bytes = -(-flat.numel() // 8)
        packed = torch.empty((self._scales - 1) * packed_bytes, dtype=torch.uint8, device=flat.device)
        fits = list(torch.split(packed, packed_bytes))
        for block in blocks(flat.numel(), flat.device):
            magnitudes, place = flat[block].abs(), slice(block.start // 8, -(-block.stop // 8))
            for scale, out in enumerate(fits, start=1):
                pack_flags(magnitudes <= peaks[0] / SCALE_STEP**scale, out[place])
        channel.all_reduce(packed, "and")
        return MultiScaleGrid(peak=peaks[0], levels=levels, fits=fits)


class TernGrad(MaxNorm):
    """One level, and a scale for each layer; elements beyond 2.5 standard deviations are clipped first.

    Without clipping the result is unbiased, but a single large element makes all others of its layer nearly always 0
    and sometimes enormous; what clipping takes away is lost, unless there is a residual.
    (Wen et al., arXiv 1705.07878.)
    """

    def __init__(self, sizes: Sequence[int], clip_deviations: float | None = 2.5) -> None:
        super().__init__(sizes, clip_deviations)


class Quantised(Summed[QuantisedPayload]):
    """Whole codes on a common grid, which add up without rounding: every worker reads the same sum off the same grid.

    The codes are as wide, and the levels as many, as the number of workers allows without overflow (see
    `levels.summed_bits`). A gradient that is not finite on one worker makes the whole sum NaN on all; then nothing
    counts as sent.

    Rounding at random makes sums unbiased where there is no residual. It also errs by more than the value where that is
    small against the grid, and a residual of such errors grows without end. With a residual, values are rounded to
    nearest: that never errs by more than the value, as error feedback requires.

    Args:
        quantiser: chooses the grid.
        at_random: how values are rounded to levels.
        bits: of a code on the wire; absent: 8, or what the levels need.
        levels: absent: as many as fit.
    """

    def __init__(
        self, quantiser: MaxNorm, *, at_random: bool, bits: int | None = None, levels: int | None = None
    ) -> None:
        self._quantiser = quantiser
        self.counts_steps = at_random
        self._bits = bits
        self._levels = levels
        self._lanes: dict[tuple[int, int], Lanes] = {}
        self._workspace = Workspace()

    def encode(self, flat: Tensor, turn: Turn) -> QuantisedPayload:
        """Agree on a grid, and round (see `Compressor`)."""
        bits, levels = summed_bits(turn.channel.workers, bits=self._bits, levels=self._levels)
        # A maximum may lose a NaN on its way, infinity it does not.
        peaks = torch.nan_to_num(self._quantiser.peaks(flat), nan=math.inf, posinf=math.inf)
        turn.channel.all_reduce(peaks, "max")
        common = [float(peak) for peak in peaks.tolist()]
        lanes = self._lanes.setdefault((bits, levels), Lanes(bits, levels))
        codes = self._workspace.take("codes", flat.numel(), lanes.code_dtype, flat.device)
        if not all(math.isfinite(peak) for peak in common):
            return QuantisedPayload(codes=codes.zero_(), grid=None, lanes=lanes)
        grid = self._quantiser.grid(flat, common, levels, turn.channel)
        grid.encode(flat, codes, StochasticRounding(turn.private(flat.device)) if self.counts_steps else nearest)
        return QuantisedPayload(codes=codes, grid=grid, lanes=lanes)

    def wire(self, payload: QuantisedPayload, out: Tensor) -> Tensor:
        """Codes side by side in words (see `Summed`)."""
        return payload.lanes.pack(payload.codes)

    def decode(self, payload: QuantisedPayload, total: Tensor, out: Tensor, turn: Turn) -> None:
        """Read the sums of codes off the grid (see `Summed`)."""
        if payload.grid is None:
            out.fill_(math.nan)
            return
        codes = payload.lanes.unpack(total, payload.codes.numel(), turn.channel.workers)
        for block, values in payload.grid.parts(codes):
            out[block].copy_(values)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPayload(Payload):
    """Codes of ``bits`` each that stand for ``code_values[code] * unit``, with a unit for each segment.

    ``packed``: uint8; every segment begins with a new byte. A unit that is not finite makes its segment NaN.
    """

    packed: Tensor
    units: Tensor
    code_values: tuple[float, ...]
    sizes: Sequence[int]

    @property
    def numel(self) -> int:  # type: ignore[override]  # of all segments
        """Number of elements of the gradient."""
        return sum(self.sizes)

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
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


class Packed(Compressor[PackedPayload]):
    """Quantises on each worker's own grid and packs the codes: where they are gathered, no grid need be shared.

    Codes are not summed before they are values again, so levels do
    not shrink as workers are added (as they do in `Quantised`); the bytes that everyone receives grow instead.

    Args:
        name: the compressor's.
        quantiser: tells the span of each segment.
        sizes: of the segments, in order.
        bits: of a code: 2, 4 or 8.
        levels: s, at most ``2^(bits - 1) - 1``.
        at_random: how values are rounded, see `Quantised`.
    """

    combines: ClassVar[tuple[str, ...]] = (GATHER,)

    def __init__(
        self, name: str, quantiser: MaxNorm, *, sizes: Sequence[int], bits: int, levels: int, at_random: bool
    ) -> None:
        self.name = name
        self.counts_steps = at_random
        self._quantiser = quantiser
        self._sizes = [size for size in sizes if size]
        self._bits = bits
        self._levels = levels
        # Codes -s..s are stored with s added; what is left over of the width stands for 0.
        values = range(-levels, levels + 1)
        self._code_values = (*(float(value) for value in values), *[0.0] * (2**bits - len(values)))

    def encode(self, flat: Tensor, turn: Turn) -> PackedPayload:
        """Everything, rounded at random or to nearest (see `Compressor`)."""
        peaks = self._quantiser.peaks(flat)
        usable = torch.nan_to_num(peaks, nan=0.0, posinf=0.0).tolist()
        grid = UniformGrid(sizes=self._sizes, peaks=usable, levels=self._levels)
        codes = torch.empty(flat.numel(), dtype=torch.int16, device=flat.device)
        grid.encode(flat, codes, StochasticRounding(turn.private(flat.device)) if self.counts_steps else nearest)
        biased = codes.add_(self._levels).to(torch.uint8)
        packed = [
            pack_codes(part, self._bits, part.new_empty(-(-part.numel() * self._bits // 8)))
            for part in torch.split(biased, self._sizes)
        ]
        units = torch.where(torch.isfinite(peaks), peaks / self._levels, math.nan)
        return PackedPayload(packed=torch.cat(packed), units=units, code_values=self._code_values, sizes=self._sizes)


class Sign(Compressor[PackedPayload]):
    """Sends one bit an element, its sign, and the mean magnitude of all of them: ``mean(|g|) sign(g)``.

    Of all multiples of the signs this is the closest to the gradient. A zero goes as positive; a gradient of zeros has
    a mean of zero. (Karimireddy et al., arXiv 1901.09847; signs alone: Bernstein et al., arXiv 1802.04434.)
    """

    name = "sign"
    combines: ClassVar[tuple[str, ...]] = (GATHER,)

    def encode(self, flat: Tensor, turn: Turn) -> PackedPayload:
        """The signs of all elements (see `Compressor`)."""
        packed = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
        for block in blocks(flat.numel(), flat.device):
            pack_flags(flat[block] >= 0, packed[block.start // 8 : -(-block.stop // 8)])
        mean = flat.new_tensor([mean_magnitude(flat)])
        return PackedPayload(packed=packed, units=mean, code_values=(-1.0, 1.0), sizes=[flat.numel()])


class PackedAllGather:
    """One all-gather of bytes; payloads are unpacked and added in rank order, so all workers hold the same bits."""

    name = GATHER

    def run(self, compressor: Compressor[PackedPayload], flat: Tensor, out: Tensor, turn: Turn) -> PackedPayload:
        """Gather, and sum on arrival (see `Collective`)."""
        payload = compressor.encode(flat, turn)
        messages = turn.channel.all_gather(payload.message())
        out.zero_()
        for message in messages:
            payload.read(message).add_to(out)
        return payload
