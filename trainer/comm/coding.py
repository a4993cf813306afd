"""How selected elements are written into a message: their indices and their values, each plain or in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import INDEX_BYTES, low_index_bits, packed_index_bytes
from hetopt.trainer.comm.bits import bit_values, look_up, pack_codes, pack_flags, unpack_flags
from hetopt.trainer.comm.compressor import Compressor
from hetopt.trainer.comm.payload import SparsePayload


class IndexCoding(Protocol):
    """Writes ascending indices into bytes, and reads them back; both sides know how many there are, of how many."""

    def nbytes(self, numel: int, count: int) -> int:
        """Bytes of ``count`` indices below ``numel``."""
        ...

    def write(self, indices: Tensor, numel: int, out: Tensor) -> None:
        """Into ``out``, uint8 of `nbytes`."""
        ...

    def read(self, data: Tensor, numel: int, count: int) -> Tensor:
        """The int32 indices in ``data``, uint8 of `nbytes`."""
        ...


@dataclass(frozen=True, slots=True)
class PlainIndices:
    """Four bytes each."""

    def nbytes(self, numel: int, count: int) -> int:
        """Four times the count."""
        return INDEX_BYTES * count

    def write(self, indices: Tensor, numel: int, out: Tensor) -> None:
        """As they are (see `IndexCoding`)."""
        out.copy_(indices.view(torch.uint8))

    def read(self, data: Tensor, numel: int, count: int) -> Tensor:
        """As they are (see `IndexCoding`)."""
        return data.view(torch.int32)


@dataclass(frozen=True, slots=True)
class PackedIndices:
    """Elias and Fano's code of an ascending sequence: about ``2 + log2(n / k)`` bits each instead of 32.

    The lower bits of every index are stored as they are. The upper parts only ever grow: a string of bits has a 1 for
    every index and a 0 wherever the upper part grows by one. At 1 % of the elements that is 9.4 bits an index, at 10 %
    5.6, within a bit of what any code could do for a random choice. (Elias 1974, Fano 1971.)
    """

    def nbytes(self, numel: int, count: int) -> int:
        """See `wire.packed_index_bytes`."""
        return packed_index_bytes(numel, count)

    def write(self, indices: Tensor, numel: int, out: Tensor) -> None:
        """Lower parts, then the string of upper ones (see `IndexCoding`)."""
        count, low = indices.numel(), low_index_bits(numel, indices.numel())
        split = -(-count * low // 8)
        if low:
            pack_codes(indices.bitwise_and(2**low - 1).to(torch.uint8), low, out[:split])
        flags = torch.zeros(count + (numel >> low) + 1, dtype=torch.bool, device=indices.device)
        flags[(indices >> low) + torch.arange(count, device=indices.device)] = True
        pack_flags(flags, out[split:])

    def read(self, data: Tensor, numel: int, count: int) -> Tensor:
        """Count the zeros before every one (see `IndexCoding`)."""
        low = low_index_bits(numel, count)
        split = -(-count * low // 8)
        ones = unpack_flags(data[split:], count + (numel >> low) + 1).nonzero().squeeze(1)
        upper = ones.sub_(torch.arange(count, device=data.device)).to(torch.int32)
        if not low:
            return upper
        lower = look_up(data[:split], bit_values(torch.arange(2**low, dtype=torch.int32), low).to(data.device), count)
        return upper.bitwise_left_shift_(low).bitwise_or_(lower)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementCoding:
    """Writes a sparse payload into bytes: values first, so that they lie at a multiple of four bytes, then indices."""

    indices: IndexCoding
    values: torch.dtype

    def nbytes(self, numel: int, count: int) -> int:
        """Bytes of ``count`` elements of a gradient of ``numel``, in whole words of four."""
        return -(-(count * self.values.itemsize + self.indices.nbytes(numel, count)) // 4) * 4

    def write(self, payload: SparsePayload, out: Tensor) -> None:
        """Into ``out``, uint8 of at least `nbytes`; values must fit their type, as `NarrowValues` makes them."""
        count = payload.values.numel()
        split = count * self.values.itemsize
        out[:split].view(self.values).copy_(payload.values)
        self.indices.write(
            payload.indices, payload.numel, out[split : split + self.indices.nbytes(payload.numel, count)]
        )

    def read(self, data: Tensor, numel: int, count: int) -> SparsePayload:
        """The payload of ``count`` elements that ``data`` begins with; it may share memory with it."""
        split = count * self.values.itemsize
        indices = self.indices.read(data[split : split + self.indices.nbytes(numel, count)], numel, count)
        return SparsePayload(indices=indices, values=data[:split].view(self.values).float(), numel=numel)


class NarrowValues:
    """Rounds what a compressor selects to a narrower type: then this is what was sent, and the rest is remembered."""

    def __init__(self, inner: Compressor[SparsePayload], dtype: torch.dtype) -> None:
        self._inner = inner
        self._dtype = dtype

    @property
    def name(self) -> str:
        """The inner compressor's."""
        return self._inner.name

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """The inner compressor's choice, rounded; an infinity may come of the largest numbers of fp32."""
        chosen = self._inner.compress(flat, ratio, generator)
        return SparsePayload(indices=chosen.indices, values=chosen.values.to(self._dtype).float(), numel=chosen.numel)
