"""Exact Top-k over the whole gradient: the elements of largest magnitude, found without sorting all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hetopt.trainer.exchange.compressor import SparsePayload
from hetopt.trainer.exchange.wire import MAX_INDEXED_ELEMENTS, Collective, kept_elements, wire_bytes

SAMPLE_SIZE = 65_536
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class TopKCompressor:
    """Sends the ``kept_elements(numel, ratio)`` largest magnitudes of the fused gradient, in ascending order of index.

    One selection over all parameters, not one a layer: a per-layer k starves layers with large gradients (arXiv
    2312.02493).
    """

    name: ClassVar[str] = "topk"
    collective: ClassVar[Collective] = "all_gather"

    def compress(self, flat: torch.Tensor, ratio: float, generator: torch.Generator | None) -> SparsePayload:
        """Keep the largest magnitudes; the same gradient always gives the same payload."""
        indices = largest_magnitudes(flat, kept_elements(flat.numel(), ratio))
        return SparsePayload(indices=indices.to(torch.int32), values=flat.index_select(0, indices), numel=flat.numel())

    def decompress(self, payload: SparsePayload) -> torch.Tensor:
        """Zeros but for the sent elements."""
        flat = torch.zeros(payload.numel, dtype=payload.values.dtype, device=payload.values.device)
        payload.add_to(flat)
        return flat

    def wire_bytes(self, numel: int, ratio: float) -> int:
        """Eight bytes a kept element."""
        return wire_bytes(self.name, numel, ratio)


def largest_magnitudes(flat: torch.Tensor, k: int) -> torch.Tensor:
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
        survivors, magnitudes = _above(flat, _sampled_threshold(flat, k))
        if len(survivors) >= k:
            return survivors[_top_mask(magnitudes, k)]
    return _top_mask(flat.abs(), k).nonzero().squeeze(1)


def _sampled_threshold(flat: torch.Tensor, k: int) -> float:
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


def _above(flat: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and magnitudes of all elements not below the threshold (NaN included), chunk by chunk in cache."""
    indices, magnitudes = [], []
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        chunk = flat[start : start + CHUNK_ELEMENTS].abs()
        passed = chunk.lt(threshold).logical_not_().nonzero().squeeze(1)
        magnitudes.append(chunk.index_select(0, passed))
        indices.append(passed.add_(start))
    return torch.cat(indices), torch.cat(magnitudes)


def _top_mask(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """True at the k largest magnitudes; a NaN counts as the largest, so that it is sent and seen."""
    mask = torch.zeros(magnitudes.numel(), dtype=torch.bool, device=magnitudes.device)
    mask[torch.topk(magnitudes, k, sorted=False).indices] = True
    return mask
