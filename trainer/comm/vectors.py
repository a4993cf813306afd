"""Long vectors: walked in pieces that stay in a core's cache, and their sums of squares."""

from __future__ import annotations

import math
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
    """Residual that is used anew in every step: a fresh vector of this size costs as much as several passes over it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor with anything in it, the same memory whenever ``name`` is taken (and valid until then)."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel or kept.dtype != dtype or kept.device != device:
            kept = self._kept[name] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]


_SMALLEST_SAFE = 1e-30  # below, squares of single elements may have vanished in fp32


def energy(flat: Tensor) -> float:
    """Sum of squares of a 1-D fp32 tensor; NaN if it has one.

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


def kept_energy(values: Tensor, sent: Tensor) -> float:
    """``||values||^2 - ||values - sent||^2``, without the difference: ``2 values . sent - sent . sent``."""
    if values is sent:
        return energy(sent)
    if sent.numel() == 0:
        return 0.0
    pairs = [(values[block], sent[block]) for block in blocks(sent.numel(), sent.device)]
    # The same number twice, or nearly, so hardly anything cancels.
    dots = torch.stack([torch.stack((torch.dot(there, gone), torch.dot(gone, gone))) for there, gone in pairs])
    both, own = dots.double().sum(0).tolist()
    if math.isfinite(both) and _SMALLEST_SAFE < 2 * both - own < math.inf:
        return float(2 * both - own)
    return sum(float(torch.dot(2 * there.double() - gone.double(), gone.double())) for there, gone in pairs)


def take_out(flat: Tensor, sent: Tensor) -> float:
    """Subtract what was sent from a vector, in place; the energy that this takes away."""
    kept = kept_energy(flat, sent)
    flat.sub_(sent)
    return kept
