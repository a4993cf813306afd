"""Lays small integers side by side in words that any backend can sum, so that no lane ever runs into its neighbour.

Backends sum int8 and int32, neither 4 nor 16 bits. Two codes share a word as ``high * 2^bits + (low + bias)``: with a
bias of s for codes in -s..s the low lane is never negative, and while N s fits a lane (`levels.LARGEST_SUM`) the sum
over N workers neither carries nor overflows, at any point on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetopt.trainer.comm.blocks import Workspace


class Lanes:
    """Packs codes for summing, and unpacks their sums.

    Args:
        bits: of a lane: 4, 8, 16 or 32.
        levels: s; codes are in -s..s.
    """

    def __init__(self, bits: int, levels: int) -> None:
        self._bits = bits
        self._levels = levels
        self._words = torch.int8 if bits <= 8 else torch.int32
        self._workspace = Workspace()

    @property
    def code_dtype(self) -> torch.dtype:
        """The type that codes come in: the smallest whole one that holds them, and their sums."""
        return self._words

    def pack(self, codes: Tensor) -> Tensor:
        """The words of the codes; not the codes' own memory."""
        numel, device = codes.numel(), codes.device
        if self._bits in (8, 32):
            return self._workspace.take("words", numel, self._words, device).copy_(codes)
        half = (numel + 1) // 2
        words = self._workspace.take("words", half, self._words, device)
        words[: numel - half].copy_(codes[half:])
        words[numel - half :].zero_()
        return words.mul_(1 << self._bits).add_(codes[:half]).add_(self._levels)

    def unpack(self, words: Tensor, numel: int, workers: int) -> Tensor:
        """Sums of the codes from the sums of the words over ``workers`` workers."""
        if self._bits in (8, 32):
            return words
        sums = self._workspace.take("sums", numel, self._words, words.device)
        half = words.numel()
        torch.bitwise_and(words, (1 << self._bits) - 1, out=sums[:half]).sub_(workers * self._levels)
        # The shift rounds towards minus infinity, past whatever the low lane holds.
        torch.bitwise_right_shift(words[: numel - half], self._bits, out=sums[half:])
        return sums
