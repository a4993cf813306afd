"""Sums quantised gradients on the way: one tiny maximum to agree on a grid, then one sum of whole codes."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from hetopt.core.comm.levels import summed_bits
from hetopt.trainer.comm.aggregation import Stateless
from hetopt.trainer.comm.blocks import Workspace
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.grid import Grid, QuantisedPayload
from hetopt.trainer.comm.lanes import Lanes
from hetopt.trainer.comm.payload import Payload, SparsePayload
from hetopt.trainer.comm.rounding import RoundingSource


class Quantiser(Protocol):
    """Chooses the grid that all workers' codes lie on."""

    def peaks(self, flat: Tensor) -> Tensor:
        """What this worker's grid would have to span, one fp32 a segment; NaN or infinite if the gradient is."""
        ...

    def grid(self, flat: Tensor, peaks: list[float], levels: int, channel: Channel) -> Grid:
        """The common grid.

        Args:
            flat: this worker's gradient.
            peaks: the largest over all workers, finite.
            levels: s, the most that a code may be.
            channel: to agree on more, if need be.
        """
        ...


class QuantisedSum(Stateless):
    """All-reduce of whole codes, which add up without rounding: every worker reads the same sum off the same grid.

    The codes are as wide, and the levels as many, as the number of workers allows without overflow (see
    `levels.summed_bits`). A gradient that is not finite on one worker makes the whole sum NaN on all; then nothing
    counts as sent.

    Args:
        quantiser: chooses the grid.
        bits: of a code on the wire; absent: 8, or what the levels need.
        levels: absent: as many as fit.
        rounding: of values to levels.
    """

    def __init__(
        self, quantiser: Quantiser, *, rounding: RoundingSource, bits: int | None = None, levels: int | None = None
    ) -> None:
        self._quantiser = quantiser
        self._rounding = rounding
        self._bits = bits
        self._levels = levels
        self._lanes: dict[tuple[int, int], Lanes] = {}
        self._workspace = Workspace()

    @property
    def counts_steps(self) -> bool:
        """Where rounding is at random."""
        return self._rounding.counts_steps

    def run(self, prepared: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Agree on a grid, round, sum (see `Aggregation`)."""
        bits, levels = summed_bits(channel.workers, bits=self._bits, levels=self._levels)
        # A maximum may lose a NaN on its way, infinity it does not.
        peaks = torch.nan_to_num(self._quantiser.peaks(prepared), nan=math.inf, posinf=math.inf)
        channel.all_reduce(peaks, "max")
        common = [float(peak) for peak in peaks.tolist()]
        if not all(math.isfinite(peak) for peak in common):
            out.fill_(math.nan)
            return SparsePayload(
                indices=out.new_empty(0, dtype=torch.int32), values=out.new_empty(0), numel=out.numel()
            )
        grid = self._quantiser.grid(prepared, common, levels, channel)
        lanes = self._lanes.setdefault((bits, levels), Lanes(bits, levels))
        codes = self._workspace.take("codes", prepared.numel(), lanes.code_dtype, prepared.device)
        grid.encode(prepared, codes, self._rounding.of(channel.rank, step, prepared.device))
        words = lanes.pack(codes)
        channel.all_reduce(words)
        for block, values in grid.parts(lanes.unpack(words, codes.numel(), channel.workers)):
            out[block].copy_(values)
        return QuantisedPayload(codes=codes, grid=grid)
