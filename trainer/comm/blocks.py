"""Walks a long vector in pieces that stay in a core's cache, so that several passes cost one trip to memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""1 MiB of fp32. Shorter pieces lose more to calls than the cache saves."""


def blocks(numel: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover ``numel`` elements in order. A GPU gets all of them at once: there, calls are what costs."""
    step = BLOCK_ELEMENTS if device.type == "cpu" else max(1, numel)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Some whole rows of a matrix, or a part of one, and where their elements lie when rows follow each other."""

    rows: slice
    columns: slice
    flat: slice


def row_blocks(rows: int, size: int, device: torch.device) -> Iterator[RowBlock]:
    """The same over ``rows`` rows of ``size`` elements: as many rows at once as fit, or each in pieces."""
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
    """Memory that is used anew in every step: a fresh vector of this size costs as much as several passes over it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor with anything in it, the same memory whenever ``name`` is taken (and valid until then)."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel or kept.dtype != dtype or kept.device != device:
            kept = self._kept[name] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]
