"""Quantisation relative to the largest magnitude of all workers: QSGD-MaxNorm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.grid import UniformGrid
from hetopt.trainer.comm.threshold import largest_magnitude


@dataclass(frozen=True, slots=True)
class MaxNorm:
    """One grid for the whole gradient: ``w / s`` apart, w the largest magnitude over all workers, s levels.

    A value x is rounded at random to a neighbouring multiple, so E[sent] = x and a coordinate's variance is at most
    ``w^2 / (4 s^2)`` on each worker. (Arxiv 2109.12497, where s is 2^q - 1; here it is whatever the width of the codes
    allows for this many workers.)
    """

    def peaks(self, flat: Tensor) -> Tensor:
        """The largest magnitude (see `Quantiser`)."""
        return flat.new_tensor([largest_magnitude(flat)])

    def grid(self, flat: Tensor, peaks: list[float], levels: int, channel: Channel) -> UniformGrid:
        """One segment (see `Quantiser`)."""
        return UniformGrid(sizes=[flat.numel()], peaks=peaks, levels=levels)
