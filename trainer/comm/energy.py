"""Sums of squares of long vectors, and what of them a payload keeps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hetopt.trainer.comm.blocks import blocks

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
