"""Quantisation on several scales: small elements get a finer grid, if they are small on every worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetopt.core.comm.levels import SCALE_STEP
from hetopt.trainer.comm.bits import pack_flags
from hetopt.trainer.comm.blocks import blocks
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.grid import MultiScaleGrid
from hetopt.trainer.comm.threshold import largest_magnitude


@dataclass(frozen=True, slots=True)
class MultiScale:
    """The grid of `MaxNorm`, and further ones each 16 times as fine.

    An element takes the finest scale on which its code stays within the levels of the coarsest, on every worker: one
    flag an element and further scale, agreed on by AND. Magnitudes are compared before they are rounded: deciding by
    the rounded code, as the released code does, makes the choice of scale depend on the draw, which is a bias.
    (Arxiv 2109.12497.)

    Args:
        scales: 2 or more.
    """

    scales: int = 2

    def peaks(self, flat: Tensor) -> Tensor:
        """The largest magnitude (see `Quantiser`)."""
        return flat.new_tensor([largest_magnitude(flat)])

    def grid(self, flat: Tensor, peaks: list[float], levels: int, channel: Channel) -> MultiScaleGrid:
        """Agree on who takes which scale (see `Quantiser`)."""
        packed_bytes = -(-flat.numel() // 8)
        packed = torch.empty((self.scales - 1) * packed_bytes, dtype=torch.uint8, device=flat.device)
        fits = list(torch.split(packed, packed_bytes))
        for block in blocks(flat.numel(), flat.device):
            magnitudes, place = flat[block].abs(), slice(block.start // 8, -(-block.stop // 8))
            for scale, out in enumerate(fits, start=1):
                pack_flags(magnitudes <= peaks[0] / SCALE_STEP**scale, out[place])
        channel.all_reduce(packed, "and")
        return MultiScaleGrid(peak=peaks[0], levels=levels, fits=fits)
