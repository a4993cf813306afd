"""Quantised gradients: whole codes on a grid that all workers share, summed on the way, or packed and gathered.

Summed: one tiny maximum to agree on a grid, then one sum of whole codes (QSGD-MaxNorm and its multi-scale forms).
Gathered: codes of each worker's own grid, and signs, in a few bits an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import SCALE_STEP, summed_bits
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Compressor, Payload, Summed, Turn
from hetopt.trainer.comm.vectors import (
    Lanes,
    Workspace,
    add_looked_up,
    bit_values,
    blocks,
    largest_magnitude,
    look_up,
    mean_magnitude,
    pack_codes,
    pack_flags,
)

Rounding = Callable[[Tensor], Tensor]
"""Function that rounds a 1-D fp32 tensor to whole numbers, in place, and returns it."""

SMALLEST_UNIT = torch.finfo(torch.float32).tiny
"""Smallest distance of a grid's values: a finer one cannot be told from zero in fp32, and such a gradient is sent as
zero."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values that integer codes stand for: ``code * peak / (levels * 16^m)``, m the scale of the element.

    Attributes:
        peak: largest magnitude over all workers, finite.
        levels: s; codes are in -s..s, on all scales.
        fits: for m = 1, 2, ... the packed flags of the elements that fit scale m on every worker; each is on the finest
            that it fits. Empty: there is one scale.
    """

    peak: float
    levels: int
    fits: Sequence[Tensor] = ()

    @classmethod
    def agreed(cls, flat: Tensor, *, peak: float, levels: int, scales: int, channel: Channel) -> Grid:
        """Return the grid that all workers share, with each element's scale agreed on; all workers must call it.

        An element takes the finest scale on which its code stays within the levels of the coarsest, on every worker:
        one flag an element and further scale, agreed on by AND. Magnitudes are compared before they are rounded:
        deciding by the rounded code, as the released code does, makes the choice of scale depend on the draw, which is
        a bias. (Arxiv 2109.12497.)

        Args:
            flat: this worker's gradient, 1-D fp32.
            peak: largest magnitude over all workers, finite.
            levels: s; codes are in -s..s.
            scales: number of scales; with 1 nothing is communicated.
            channel: channel to the other workers.
        """
        if scales == 1:
            return cls(peak=peak, levels=levels)
        packed_bytes = -(-flat.numel() // 8)
        packed = torch.empty((scales - 1) * packed_bytes, dtype=torch.uint8, device=flat.device)
        fits = list(torch.split(packed, packed_bytes))
        for block in blocks(flat.numel(), flat.device):
            magnitudes, place = flat[block].abs(), slice(block.start // 8, -(-block.stop // 8))
            for scale, out in enumerate(fits, start=1):
                pack_flags(magnitudes <= peak / SCALE_STEP**scale, out[place])
        channel.all_reduce(packed, "and")
        return cls(peak=peak, levels=levels, fits=fits)

    def encode(self, flat: Tensor, codes: Tensor, rounding: Rounding) -> None:
        """Write the integer codes of ``flat`` into ``codes``, [elements], rounded by ``rounding``.

        Elements are clamped to the largest level; on a grid without extent all codes are 0.
        """
        if self._unit == 0:
            codes.zero_()
            return
        for block in blocks(flat.numel(), flat.device):
            levels = flat[block] * (1 / self._unit)
            for packed in self.fits:
                levels.mul_(self._factors(packed, block, float(SCALE_STEP)))
            # The largest element may come out a rounding above its level.
            codes[block].copy_(rounding(levels).clamp_(-self.levels, self.levels))

    def parts(self, codes: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice, 1-D fp32 values) of codes or of sums of codes, in order: codes times their scale's unit."""
        for block in blocks(codes.numel(), codes.device):
            values = codes[block] * self._unit
            for packed in self.fits:
                values.mul_(self._factors(packed, block, 1 / SCALE_STEP))
            yield block, values

    @property
    def _unit(self) -> float:
        """The unit of the coarsest scale; 0 where the finest would vanish in fp32."""
        unit = self.peak / self.levels
        return unit if unit >= SMALLEST_UNIT * SCALE_STEP ** len(self.fits) else 0.0

    @staticmethod
    def _factors(packed: Tensor, block: slice, factor: float) -> Tensor:
        """Return ``factor`` where a flag is set, and 1 elsewhere."""
        table = bit_values(torch.tensor([1.0, factor]), 1).to(packed.device)
        return look_up(packed[block.start // 8 : -(-block.stop // 8)], table, block.stop - block.start)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedPayload(Payload):
    """Integer codes of one worker's gradient on the workers' common grid, to be summed.

    ``grid`` None: some worker's gradient was not finite, and nothing counts as sent.

    Attributes:
        codes: one an element, integers.
        grid: values that the codes stand for; None: some worker's gradient was not finite, and nothing counts as sent.
        lanes: packs the codes into words.
    """

    codes: Tensor
    grid: Grid | None
    lanes: Lanes

    @property
    def numel(self) -> int:  # type: ignore[override]  # as many as codes
        """Number of elements of the gradient."""
        return self.codes.numel()

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the gradient, fp32 values of its codes) in order; nothing where ``grid`` is None."""
        return iter(()) if self.grid is None else self.grid.parts(self.codes)


_RANDOM_BITS = 16
_LANES = 64 // _RANDOM_BITS


def nearest(levels: Tensor) -> Tensor:
    """Round 1-D fp32 values, in units of a grid, to the nearest integer, in place; halves to even."""
    return levels.round_()


class StochasticRounding:
    """Unbiased rounding ``floor(x + u)``, u uniform in [0, 1): 2.3 becomes 3 in three of ten cases, else 2.

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
        """Round 1-D fp32 ``levels`` at random, in place, and return them; best a block at a time."""
        numel = levels.numel()
        words = self._workspace.take("words", -(-numel // _LANES), torch.int64, levels.device)
        words.random_(-(2**63), None, generator=self._generator)
        random = self._workspace.take("random", numel, torch.float32, levels.device)
        random.copy_(words.view(torch.int16)[:numel]).mul_(2.0**-_RANDOM_BITS).add_(self._offset)
        return levels.add_(random).floor_()


class Quantised(Summed[QuantisedPayload]):
    """Compressor to integer codes on a grid that all workers share, which an all-reduce sums without rounding.

    The grid is ``w / s`` apart, w the largest magnitude over all workers, s levels, and each further scale 16 times as
    fine. Rounded at random to a neighbouring multiple, E[sent] = x and a coordinate's variance is at most
    ``w^2 / (4 s^2)`` on each worker. (Arxiv 2109.12497, where s is 2^q - 1; here codes are as wide, and the levels as
    many, as the number of workers allows without overflow, see `payload_bytes.summed_bits`.) A gradient that is not
    finite on one worker makes the whole sum NaN on all; then nothing counts as sent.

    Rounding at random makes sums unbiased where there is no residual. It also errs by more than the value where that is
    small against the grid, and a residual of such errors grows without end. With a residual, values are rounded to
    nearest: that never errs by more than the value, as error feedback requires.

    Args:
        at_random: whether values are rounded at random to a neighbouring level (without bias), or to the nearest.
        scales: number of scales of the grid.
        bits: width of a code on the wire; None: 8, or what the levels need.
        levels: s; None: as many as fit.
    """

    def __init__(self, *, at_random: bool, scales: int = 1, bits: int | None = None, levels: int | None = None) -> None:
        self._scales = scales
        self._at_random = at_random
        self._bits = bits
        self._levels = levels
        self._lanes: dict[tuple[int, int], Lanes] = {}
        self._workspace = Workspace()

    def encode(self, flat: Tensor, turn: Turn) -> QuantisedPayload:
        """Agree with all workers on a grid, and return the gradient's codes on it; all workers must call it.

        The payload's memory is reused by the next call.

        Raises:
            BadInput: the sum over so many workers does not fit codes of the asked bits or levels.
        """
        bits, levels = summed_bits(turn.channel.workers, bits=self._bits, levels=self._levels)
        # A maximum may lose a NaN on its way, infinity it does not.
        largest = torch.nan_to_num(flat.new_tensor([largest_magnitude(flat)]), nan=math.inf, posinf=math.inf)
        turn.channel.all_reduce(largest, "max")
        peak = float(largest)
        lanes = self._lanes.setdefault((bits, levels), Lanes(bits, levels))
        codes = self._workspace.take("codes", flat.numel(), lanes.code_dtype, flat.device)
        if not math.isfinite(peak):
            return QuantisedPayload(codes=codes.zero_(), grid=None, lanes=lanes)
        grid = Grid.agreed(flat, peak=peak, levels=levels, scales=self._scales, channel=turn.channel)
        grid.encode(flat, codes, StochasticRounding(turn.private(flat.device)) if self._at_random else nearest)
        return QuantisedPayload(codes=codes, grid=grid, lanes=lanes)

    def wire(self, payload: QuantisedPayload, out: Tensor) -> Tensor:
        """Return the codes packed side by side into words, to be all-reduced in place."""
        return payload.lanes.pack(payload.codes)

    def decode(self, payload: QuantisedPayload, total: Tensor, out: Tensor, turn: Turn) -> None:
        """Write the values of the summed codes into ``out``; all NaN if any worker's gradient was not finite.

        Args:
            payload: what this worker sent, with the common grid.
            total: packed codes, summed over the workers.
            out: 1-D fp32, [numel]; overwritten.
            turn: this worker's channel.
        """
        if payload.grid is None:
            out.fill_(math.nan)
            return
        codes = payload.lanes.unpack(total, payload.codes.numel(), turn.channel.workers)
        for block, values in payload.grid.parts(codes):
            out[block].copy_(values)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPayload(Payload):
    """Payload of codes of a few bits that stand for ``code_values[code] * unit``; a unit of NaN makes all NaN.

    Attributes:
        packed: codes, uint8, several to a byte.
        unit: value of one level, fp32, [1]; NaN: the gradient was not finite.
        code_values: level that each code stands for, by code.
        numel: elements of the gradient.
    """

    packed: Tensor
    unit: Tensor
    code_values: tuple[float, ...]
    numel: int

    def message(self) -> Tensor:
        """Return the payload as a uint8 message: the unit in fp32, then the packed codes."""
        return torch.cat((self.unit.view(torch.uint8), self.packed))

    def read(self, message: Tensor) -> PackedPayload:
        """Return another worker's payload, of a gradient as long as this one, read from its message."""
        head = self.unit.nbytes
        # A copy: fp32 must begin at a multiple of four bytes.
        unit = message[:head].clone().view(torch.float32)
        return replace(self, packed=message[head:], unit=unit)

    def add_to(self, flat: Tensor, sign: int = 1) -> None:
        """Add the values of the codes to a flat vector, in place; ``sign`` -1 subtracts them."""
        bits = (len(self.code_values) - 1).bit_length()
        table = bit_values(torch.tensor(self.code_values), bits).to(flat.device)
        add_looked_up(self.packed, table * (sign * float(self.unit)), flat)


class Packed(Compressor[PackedPayload]):
    """Compressor to codes of 2, 4 or 8 bits on a grid of each worker, to be gathered rather than summed.

    Codes are not summed before they are values again, so levels do
    not shrink as workers are added (as they do in `Quantised`); the bytes that everyone receives grow instead.

    Args:
        bits: width of a code: 2, 4 or 8.
        levels: s, at most ``2^(bits - 1) - 1``.
        at_random: whether values are rounded at random (see `Quantised`), or to the nearest level.
    """

    def __init__(self, *, bits: int, levels: int, at_random: bool) -> None:
        self._at_random = at_random
        self._bits = bits
        self._levels = levels
        # Codes -s..s are stored with s added; what is left over of the width stands for 0.
        values = range(-levels, levels + 1)
        self._code_values = (*(float(value) for value in values), *[0.0] * (2**bits - len(values)))

    def encode(self, flat: Tensor, turn: Turn) -> PackedPayload:
        """Return the gradient rounded to packed codes on this worker's grid, without communication.

        Where an element is not finite, the unit, and with it every decoded value, is NaN.
        """
        peak = largest_magnitude(flat)
        grid = Grid(peak=peak if math.isfinite(peak) else 0.0, levels=self._levels)
        codes = torch.empty(flat.numel(), dtype=torch.int16, device=flat.device)
        grid.encode(flat, codes, StochasticRounding(turn.private(flat.device)) if self._at_random else nearest)
        biased = codes.add_(self._levels).to(torch.uint8)
        packed = pack_codes(biased, self._bits, biased.new_empty(-(-biased.numel() * self._bits // 8)))
        unit = flat.new_tensor([peak / self._levels if math.isfinite(peak) else math.nan])
        return PackedPayload(packed=packed, unit=unit, code_values=self._code_values, numel=flat.numel())


class Sign(Compressor[PackedPayload]):
    """Compressor to one bit an element, the sign, and one mean magnitude: ``mean(|g|) sign(g)``.

    Of all multiples of the signs this is the closest to the gradient. A zero goes as positive; a gradient of zeros has
    a mean of zero. (Karimireddy et al., arXiv 1901.09847; signs alone: Bernstein et al., arXiv 1802.04434.)
    """

    def encode(self, flat: Tensor, turn: Turn) -> PackedPayload:
        """Return the signs of all elements, 0 as positive, and their mean magnitude as the unit."""
        packed = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
        for block in blocks(flat.numel(), flat.device):
            pack_flags(flat[block] >= 0, packed[block.start // 8 : -(-block.stop // 8)])
        mean = flat.new_tensor([mean_magnitude(flat)])
        return PackedPayload(packed=packed, unit=mean, code_values=(-1.0, 1.0), numel=flat.numel())


class PackedAllGather:
    """Collective that gathers all workers' packed payloads and adds them in rank order, to the same bits on each."""

    def run(self, compressor: Compressor[PackedPayload], flat: Tensor, out: Tensor, turn: Turn) -> PackedPayload:
        """Compress ``flat``, gather, write the sum into ``out``; return this worker's payload. All must call it.

        Args:
            compressor: one to packed codes.
            flat: 1-D fp32, not empty; left as it is.
            out: 1-D fp32, as long; overwritten.
            turn: this worker's channel, step and seed.
        """
        payload = compressor.encode(flat, turn)
        messages = turn.channel.all_gather(payload.message())
        out.zero_()
        for message in messages:
            payload.read(message).add_to(out)
        return payload
