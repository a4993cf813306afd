"""Exact Top-k over the whole gradient: the elements of largest magnitude, found without sorting all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import MAX_INDEXED_ELEMENTS, kept_elements
from hetopt.trainer.comm.blocks import blocks
from hetopt.trainer.comm.payload import SparsePayload

SAMPLE_SIZE = 65_536

_WORD = 8
_ALL_TRUE = 0x0101010101010101  # eight of torch's one-byte truths


@dataclass(frozen=True, slots=True)
class TopKCompressor:
    """Sends the ``kept_elements(numel, ratio)`` largest magnitudes of the fused gradient, in ascending order of index.

    One selection over all parameters, not one a layer: a per-layer k starves layers with large gradients (arXiv
    2312.02493).
    """

    name: ClassVar[str] = "topk"

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """Keep the largest magnitudes; the same gradient always gives the same payload."""
        return select(flat, largest_magnitudes(flat, kept_elements(flat.numel(), ratio)))


def select(flat: Tensor, indices: Tensor) -> SparsePayload:
    """The payload of these elements, as they are."""
    return SparsePayload(indices=indices.to(torch.int32), values=flat.index_select(0, indices), numel=flat.numel())


def largest_magnitudes(flat: Tensor, k: int) -> Tensor:
    """Ascending int64 indices of k elements with the largest ``|value|``: the same magnitudes that `torch.topk` finds.

    `torch.topk` on a CPU carries an index along with every element. Instead, a threshold that about k elements and a
    safety margin should pass is read off a sample; one pass keeps the elements that do pass, and `torch.topk` chooses
    among those few. The number of survivors is checked: when the sample misled, `torch.topk` sees everything after
    all. A GPU selects fast enough on its own.
    """
    numel = flat.numel()
    if not 1 <= k <= numel <= MAX_INDEXED_ELEMENTS:
        raise ValueError(f"between 1 and {numel} elements can be kept, of at most {MAX_INDEXED_ELEMENTS}, not {k}")
    if flat.device.type == "cpu" and numel > 2 * SAMPLE_SIZE and k <= numel // 4:
        survivors, magnitudes = not_below(flat, sampled_threshold(flat, k))
        if len(survivors) >= k:
            return survivors[top_mask(magnitudes, k)]
    return top_mask(flat.abs(), k).nonzero().squeeze(1)


def sampled_threshold(flat: Tensor, k: int) -> float:
    """A magnitude that k elements exceed in all likelihood, though not many more than k.

    Among m sampled elements the number that belongs to the k largest is nearly Poisson with mean k m / n; five standard
    deviations above it leave one failure in about three million. Places are pseudo-random, since a stride could fall in
    step with the layout of a layer, and drawn from a generator of their own: the same gradient, the same selection.
    """
    numel = flat.numel()
    generator = torch.Generator().manual_seed(numel)
    places = torch.randint(numel, (SAMPLE_SIZE,), generator=generator)
    expected = k * SAMPLE_SIZE / numel
    rank = min(SAMPLE_SIZE, math.ceil(expected + 5.0 * math.sqrt(expected) + 5.0))
    return float(torch.topk(flat.index_select(0, places).abs_(), rank).values[-1])


def not_below(flat: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Ascending indices and magnitudes of all elements not below the threshold (NaN included), in one pass."""
    indices, magnitudes = [], []
    crowded = flat.device.type != "cpu"
    for block in blocks(flat.numel(), flat.device):
        chunk = flat[block].abs()
        below = chunk.lt(threshold)
        passed = below.logical_not_().nonzero().squeeze(1) if crowded else _few_false(below)
        if flat.device.type == "cpu":
            crowded = passed.numel() * _WORD * 3 > chunk.numel()
        magnitudes.append(chunk.index_select(0, passed))
        indices.append(passed.add_(block.start))
    return torch.cat(indices), torch.cat(magnitudes)


def _few_false(flags: Tensor) -> Tensor:
    """Indices of the False among many True: eight at a time, a word that is all True is passed over with one look."""
    whole = flags.numel() // _WORD * _WORD
    words = flags[:whole].view(torch.int64).bitwise_xor_(_ALL_TRUE)
    hit = words.nonzero().squeeze(1)
    inside = flags[:whole].view(torch.uint8).view(-1, _WORD).index_select(0, hit).view(-1).nonzero().squeeze(1)
    found = hit.index_select(0, inside >> 3).mul_(_WORD).add_(inside.bitwise_and_(7))
    if whole == flags.numel():
        return found
    return torch.cat((found, flags[whole:].logical_not().nonzero().squeeze(1).add_(whole)))


def top_mask(magnitudes: Tensor, k: int) -> Tensor:
    """True at the k largest magnitudes; a NaN counts as the largest, so that it is sent and seen."""
    mask = torch.zeros(magnitudes.numel(), dtype=torch.bool, device=magnitudes.device)
    mask[torch.topk(magnitudes, k, sorted=False).indices] = True
    return mask
