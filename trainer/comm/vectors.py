"""Arithmetic on long vectors: in pieces that fit a core's cache, sums of squares, and packing of flags and codes.

`Lanes` packs codes into words that backends can sum. Backends sum int8 and int32, neither 4 nor 16 bits. Two codes
share a word as ``high * 2^bits + (low + bias)``: with a bias of s for codes in -s..s the low lane is never negative,
and while N s fits a lane (`payload_bytes.LARGEST_SUM`) the sum over N workers neither carries nor overflows, at any
point on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""Elements of a piece: 1 MiB of fp32. Shorter pieces lose more to calls than the cache saves."""


def blocks(numel: int, device: torch.device, most: int = BLOCK_ELEMENTS) -> Iterator[slice]:
    """Yield slices that cover ``numel`` elements in order, of at most ``most`` each on a CPU; on a GPU one slice."""
    step = most if device.type == "cpu" else max(1, numel)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Place of a block of a matrix, of whole rows or a part of one: rows, columns, and elements in row-major order.

    Attributes:
        rows: rows of the matrix.
        columns: columns of the matrix; all of them, unless the block is a part of one row.
        flat: elements in row-major order.
    """

    rows: slice
    columns: slice
    flat: slice


def row_blocks(rows: int, size: int, device: torch.device) -> Iterator[RowBlock]:
    """Yield blocks that cover a [rows, size] matrix: as many whole rows as fit a CPU's cache, or pieces of a row."""
    if device.type == "cpu" and size > BLOCK_ELEMENTS:
        for row in range(rows):
            for columns in blocks(size, device):
                flat = slice(row * size + columns.start, row * size + columns.stop)
                yield RowBlock(rows=slice(row, row + 1), columns=columns, flat=flat)
    elif size:
        together = BLOCK_ELEMENTS // size if device.type == "cpu" else rows
        for first in range(0, rows, together):
            last = min(first + together, rows)
            yield RowBlock(rows=slice(first, last), columns=slice(0, size), flat=slice(first * size, last * size))


class Workspace:
    """Buffers by name, reused in every step: a fresh vector of this size costs as much as several passes over it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised 1-D tensor of ``numel`` elements; its memory is reused whenever ``name`` is taken.

        The next call with this name overwrites it.
        """
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel or kept.dtype != dtype or kept.device != device:
            kept = self._kept[name] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]


_SMALLEST_SAFE = 1e-30  # below, squares of single elements may have vanished in fp32


def energy(flat: Tensor) -> float:
    """Return the sum of squares of a 1-D fp32 tensor; NaN if an element is; 0 if there is none.

    Blocks are summed in fp32, where a dot product costs a fifth of a copy, and block sums in double precision. Where
    squares leave the range of fp32 everything is done again in double precision.
    """
    if flat.numel() == 0:
        return 0.0
    dots = [torch.dot(flat[block], flat[block]) for block in blocks(flat.numel(), flat.device)]
    total = float(torch.stack(dots).double().sum())
    if _SMALLEST_SAFE < total < math.inf or math.isnan(total):
        return total
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2


class GradientNorms:
    """Squared norms of one step's gradient: of this worker's weighted part, and of the sum over all workers.

    Nothing is measured until `ask` is called with True.

    A worker that trains alone computes its samples in groups, whose parts ``w_j`` stand for those of workers.
    """

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self.ask(False)

    def ask(self, wanted: bool) -> None:
        """Begin a step, with both norms at 0; until the next, they are measured only if ``wanted``."""
        self.is_asked, self._local, self._summed = wanted, 0.0, 0.0
        self._groups, self._before = 0, None

    def add_own(self, parts: Iterable[Tensor], *, first: bool) -> None:
        """Add 1-D parts of this worker's gradient, not yet summed over workers; does nothing unless asked.

        The ``first`` parts begin it anew.

        Args:
            parts: 1-D pieces of the gradient, of any floating type.
            first: whether these begin the gradient anew: what was added before is forgotten.
        """
        if self.is_asked and not self._groups:
            self._local = (0.0 if first else self._local) + _energies(parts)

    def add_group(self, flat: Tensor, part: float) -> None:
        """Add the gradient that ``flat`` has gained since the last group.

        ``flat`` is 1-D and copied. From then on `add_own` does nothing in this step.

        Args:
            flat: gradient summed over the groups so far.
            part: part of the worker's samples that this group has, in (0, 1].
        """
        self._local += energy(flat if self._before is None else flat - self._before) / part
        self._groups, self._before = self._groups + 1, flat.clone()

    def add_summed(self, parts: Iterable[Tensor]) -> None:
        """Add 1-D parts of the gradient summed over all workers; does nothing unless asked."""
        if self.is_asked:
            self._summed += _energies(parts)

    def divide(self, factor: float) -> None:
        """Divide both squared norms by ``factor`` squared, for a gradient that is scaled down by ``factor``."""
        self._local, self._summed = self._local / factor**2, self._summed / factor**2

    def take(self, samples: int) -> tuple[float, ...] | None:
        """Return the step's norms, and stop measuring until `ask` is called again.

        Args:
            samples: samples of this worker in the step.

        Returns:
            This worker's squared norm (of groups: ``sum_j |w_j|^2 / p_j``, ``p_j`` a group's part of the samples), that
            of the sum, ``samples``, and the number of groups, 1 without any. None: not asked for, or the sum's norm is
            zero or not finite.
        """
        norms = (
            (self._local, self._summed, float(samples), max(1.0, self._groups)) if 0 < self._summed < math.inf else None
        )
        self.ask(False)
        return norms


def _energies(parts: Iterable[Tensor]) -> float:
    return sum(energy(part.float() if part.itemsize < 4 else part) for part in parts)


def largest_magnitude(flat: Tensor) -> float:
    """Return the largest ``|x|`` of a 1-D fp32 tensor, not empty; NaN if an element is."""
    low, high = torch.aminmax(flat)
    # max() of Python would take either side of a comparison with NaN; torch keeps the NaN.
    return float(torch.maximum(-low, high))


def mean_magnitude(flat: Tensor) -> float:
    """Return the mean ``|x|`` of a 1-D fp32 tensor, not empty; block sums are added in double precision."""
    sums = [flat[block].abs().sum() for block in blocks(flat.numel(), flat.device)]
    return float(torch.stack(sums).double().sum()) / flat.numel()


# Multiplying eight bytes of 0 or 1 (the first is the lowest) by this collects them in the top byte, first bit lowest.
_COLLECT = 0x0102040810204080


def pack_flags(flags: Tensor, out: Tensor) -> Tensor:
    """Pack 1-D bool flags into ``out``, uint8, eight a byte, the first in the lowest bit; return ``out``.

    Args:
        flags: 1-D bool.
        out: uint8, ``ceil(n / 8)`` bytes; overwritten. Flags that are missing from the last byte read False.
    """
    whole = flags.numel() // 8
    for block in blocks(whole, flags.device):
        words = flags[block.start * 8 : block.stop * 8].view(torch.int64)
        out[block].copy_(words.mul(_COLLECT).bitwise_right_shift_(56).bitwise_and_(0xFF))
    rest = flags[whole * 8 :]
    if rest.numel():
        out[whole] = (rest.to(torch.uint8) << torch.arange(rest.numel(), device=rest.device).to(torch.uint8)).sum()
    return out


def unpack_flags(packed: Tensor, numel: int) -> Tensor:
    """Return the first ``numel`` flags of bytes that `pack_flags` wrote, 1-D bool."""
    return look_up(packed, bit_values(torch.tensor([False, True]), 1).to(packed.device), numel)


def pack_codes(codes: Tensor, bits: int, out: Tensor) -> Tensor:
    """Pack uint8 codes into ``out``, ``8 / bits`` a byte, the first in the lowest bits; return ``out``.

    Args:
        codes: 1-D uint8, each below ``2^bits``.
        bits: 2, 4 or 8.
        out: uint8, ``ceil(n bits / 8)`` bytes; overwritten.
    """
    if bits == 8:
        return out.copy_(codes)
    lanes = 8 // bits
    out.zero_()
    for lane in range(lanes):
        part = codes[lane::lanes]
        out[: part.numel()].bitwise_or_(part << lane * bits)
    return out


def bit_values(values: Tensor, bits: int) -> Tensor:
    """Return the values of the codes packed in each of the 256 bytes, [256, 8 / bits]; ``values`` is by code."""
    shifts = torch.arange(0, 8, bits)
    return values[(torch.arange(256).unsqueeze(1) >> shifts) & (2**bits - 1)]


def look_up(packed: Tensor, table: Tensor, numel: int) -> Tensor:
    """Return the first ``numel`` values that packed bytes stand for, 1-D, by a table of `bit_values`.

    Args:
        packed: uint8.
        table: table as `bit_values` returns it.
        numel: number of values.
    """
    return table.index_select(0, packed.int()).view(-1)[:numel]


def add_looked_up(packed: Tensor, table: Tensor, out: Tensor) -> None:
    """Add the values that packed bytes stand for to ``out``, in place, by a table of `bit_values`."""
    lanes = table.shape[1]
    for block in blocks(packed.numel(), packed.device, BLOCK_ELEMENTS // lanes):
        part = out[block.start * lanes : block.stop * lanes]
        part.add_(look_up(packed[block], table, part.numel()))


class Lanes:
    """Packing of small integer codes into words that an all-reduce can sum, and unpacking of the sums.

    Codes of 8 and 32 bits are words of their own; of 4 and 16 bits two share one.

    Args:
        bits: bits of a lane: 4, 8, 16 or 32.
        levels: s; codes are in -s..s.

    Attributes:
        code_dtype: type that codes and their sums come in: int8 up to 8 bits, else int32.
    """

    def __init__(self, bits: int, levels: int) -> None:
        self._bits = bits
        self._levels = levels
        self.code_dtype = torch.int8 if bits <= 8 else torch.int32
        self._workspace = Workspace()

    def pack(self, codes: Tensor) -> Tensor:
        """Return codes packed one or two to a word of `code_dtype`, in memory that the next call reuses."""
        numel, device = codes.numel(), codes.device
        if self._bits in (8, 32):
            return self._workspace.take("words", numel, self.code_dtype, device).copy_(codes)
        half = (numel + 1) // 2
        words = self._workspace.take("words", half, self.code_dtype, device)
        words[: numel - half].copy_(codes[half:])
        words[numel - half :].zero_()
        return words.mul_(1 << self._bits).add_(codes[:half]).add_(self._levels)

    def unpack(self, words: Tensor, numel: int, workers: int) -> Tensor:
        """Return the sums of the codes, [numel], from words summed over ``workers`` workers; may be their memory.

        Args:
            words: words as `pack` made them, summed over the workers.
            numel: number of codes.
            workers: number of workers that were summed.
        """
        if self._bits in (8, 32):
            return words
        sums = self._workspace.take("sums", numel, self.code_dtype, words.device)
        half = words.numel()
        torch.bitwise_and(words, (1 << self._bits) - 1, out=sums[:half]).sub_(workers * self._levels)
        # The shift rounds towards minus infinity, past whatever the low lane holds.
        torch.bitwise_right_shift(words[: numel - half], self._bits, out=sums[half:])
        return sums
