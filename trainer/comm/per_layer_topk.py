"""Top-k of each layer by itself: what most implementations do, and what starves the layers that learn most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.payload import SparsePayload
from hetopt.trainer.comm.topk import largest_magnitudes, select


class PerLayerTopKCompressor:
    """Sends ``kept_elements(size, ratio)`` largest magnitudes of every layer, in ascending order of index.

    Args:
        sizes: elements of the layers, in the order in which they lie in the gradient.
    """

    name: ClassVar[str] = "topk_per_layer"

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = [size for size in sizes if size]

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """Keep the largest of each layer; the same gradient always gives the same payload."""
        start, indices = 0, []
        for layer in torch.split(flat, self._sizes):
            indices.append(largest_magnitudes(layer, kept_elements(len(layer), ratio)).add_(start))
            start += len(layer)
        return select(flat, torch.cat(indices))
