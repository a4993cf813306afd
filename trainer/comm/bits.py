"""Packs small unsigned numbers tightly into bytes, and turns such bytes into values by looking them up."""

from __future__ import annotations

import torch
from torch import Tensor

from hetopt.trainer.comm.blocks import BLOCK_ELEMENTS, blocks

# Multiplying eight bytes of 0 or 1 (the first is the lowest) by this collects them in the top byte, first bit lowest.
_COLLECT = 0x0102040810204080


def pack_flags(flags: Tensor, out: Tensor) -> Tensor:
    """Eight flags a byte.

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
    """The flags again, 1-D bool."""
    return look_up(packed, bit_values(torch.tensor([False, True]), 1).to(packed.device), numel)


def pack_codes(codes: Tensor, bits: int, out: Tensor) -> Tensor:
    """``8 / bits`` codes a byte, the first in the lowest bits.

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
    """For each of the 256 bytes the values that its codes stand for, ``(256, 8 / bits)``; ``values`` is one a code."""
    shifts = torch.arange(0, 8, bits)
    return values[(torch.arange(256).unsqueeze(1) >> shifts) & (2**bits - 1)]


def look_up(packed: Tensor, table: Tensor, numel: int) -> Tensor:
    """The first ``numel`` values that packed bytes stand for, by a table as `bit_values` makes it."""
    return table.index_select(0, packed.int()).view(-1)[:numel]


def add_looked_up(packed: Tensor, table: Tensor, out: Tensor) -> None:
    """Add to ``out`` the values that packed bytes stand for."""
    lanes = table.shape[1]
    for block in _byte_blocks(packed, lanes):
        part = out[block.start * lanes : block.stop * lanes]
        part.add_(look_up(packed[block], table, part.numel()))


def add_whole_bytes(codes: Tensor, first: float, unit: float, out: Tensor) -> None:
    """Add to ``out`` ``(first + code) * unit`` for codes of a byte each, quicker than by a table."""
    for block in blocks(codes.numel(), codes.device):
        out[block].add_((codes[block] + first).mul_(unit))


def _byte_blocks(packed: Tensor, lanes: int) -> list[slice]:
    step = BLOCK_ELEMENTS // lanes if packed.device.type == "cpu" else max(1, packed.numel())
    return [slice(start, min(start + step, packed.numel())) for start in range(0, packed.numel(), step)]
