"""Ternary gradients: -1, 0 or 1 times the largest magnitude of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.energy import energy
from hetopt.trainer.comm.grid import UniformGrid
from hetopt.trainer.comm.threshold import largest_magnitude

CLIP_DEVIATIONS = 2.5


class TernGrad:
    """One level, and a scale for each layer; elements beyond 2.5 standard deviations are clipped first.

    Without clipping the result is unbiased, but a single large element makes all others of its layer nearly always 0
    and sometimes enormous; what clipping takes away is lost, unless there is a memory. (Wen et al., arXiv 1705.07878.)

    Args:
        sizes: elements of the layers, in order.
        clip_deviations: absent: no clipping.
    """

    def __init__(self, sizes: Sequence[int], clip_deviations: float | None = CLIP_DEVIATIONS) -> None:
        self._sizes = [size for size in sizes if size]
        self._clip_deviations = clip_deviations

    def peaks(self, flat: Tensor) -> Tensor:
        """The largest magnitude of each layer after clipping (see `Quantiser`)."""
        return flat.new_tensor([self._peak(layer) for layer in torch.split(flat, self._sizes)])

    def grid(self, flat: Tensor, peaks: list[float], levels: int, channel: Channel) -> UniformGrid:
        """A segment for each layer (see `Quantiser`)."""
        return UniformGrid(sizes=self._sizes, peaks=peaks, levels=levels)

    def _peak(self, layer: Tensor) -> float:
        peak = largest_magnitude(layer)
        if self._clip_deviations is None or not math.isfinite(peak) or layer.numel() == 1:
            return peak
        mean = float(layer.mean())
        deviation = math.sqrt(max(0.0, energy(layer) / layer.numel() - mean * mean))
        # A layer of equal elements has no deviation, and nothing to clip.
        return min(peak, self._clip_deviations * deviation) if deviation > 1e-6 * abs(mean) else peak
