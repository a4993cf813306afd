"""Walks a long vector in pieces that stay in a core's cache, so that several passes cost one trip to memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""1 MiB of fp32. Shorter pieces lose more to calls than the cache saves."""


def blocks(numel: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover ``numel`` elements in order. A GPU gets all of them at once: there, calls are what costs."""
    step = BLOCK_ELEMENTS if device.type == "cpu" else max(1, numel)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def row_blocks(rows: int, size: int, device: torch.device) -> Iterator[slice]:
    """The same over rows of ``size`` elements that lie one after the other: some whole rows, or a part of one row."""
    if device.type != "cpu" or size <= BLOCK_ELEMENTS:
        together = size * (rows if device.type != "cpu" else BLOCK_ELEMENTS // max(1, size))
        for start in range(0, rows * size, max(1, together)):
            yield slice(start, min(start + together, rows * size))
        return
    for row in range(rows):
        for block in blocks(size, device):
            yield slice(row * size + block.start, row * size + block.stop)


class Workspace:
    """Memory that is used anew in every step: a fresh vector of this size costs as much as several passes over it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor with anything in it, the same memory whenever ``name`` is taken (and valid until then)."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel or kept.dtype != dtype or kept.device != device:
            kept = self._kept[name] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]
