"""Sums gradients in a half, a quarter or an eighth of the bytes, with every sum made in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetopt.trainer.exchange.aggregation import Stateless
from hetopt.trainer.exchange.blocks import Workspace
from hetopt.trainer.exchange.channel import Channel
from hetopt.trainer.exchange.energy import kept_energy
from hetopt.trainer.exchange.payload import Payload
from hetopt.trainer.exchange.slice_coding import SliceCoding
from hetopt.trainer.exchange.wire import slice_elements


class NarrowSum(Stateless):
    """Each worker sums one slice of everyone's gradient, in fp32 and in rank order, and hands the sum to all.

    Two steps of slices, all to all and back, move the same bytes over each link as a ring all-reduce of the narrow
    type would, in as many messages. But a ring rounds its partial sums to the narrow type N - 1 times, and may overflow
    on the way though neither the summands nor the sum do; here a value is rounded once when it is sent and once when
    its sum is.

    What is remembered, where there is a memory, is the rounding of this worker's own gradient, and that of the sums of
    its slice, which nobody else knows: so what all workers count as sent is exactly what all of them received.

    Args:
        coding: of slices.
    """

    counts_steps = False

    def __init__(self, coding: SliceCoding) -> None:
        self._coding = coding
        self._workspace = Workspace()

    def run(self, prepared: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Round, sum slices, round (see `Aggregation`)."""
        numel, workers = prepared.numel(), channel.workers
        slices = Slices(size=slice_elements(numel, workers), coding=self._coding)
        rows, received = (
            self._rows("rows", workers, slices, prepared),
            self._rows("received", workers, slices, prepared),
        )
        for row, part in zip(rows, slices.of(prepared, workers), strict=True):
            self._coding.write(part, row)
        with channel.operation("all_reduce", rows.nbytes) as operation:
            channel.all_to_all(rows, received)
            with operation.pause():
                total = self._workspace.take("total", slices.size, torch.float32, prepared.device).zero_()
                for row in received:
                    for block, values in self._coding.read(row, slices.size):
                        total[block].add_(values)
                own = self._rows("own", 1, slices, prepared)[0]
                self._coding.write(total, own)
                for block, values in self._coding.read(own, slices.size):
                    torch.sub(values, total[block], out=total[block])
            channel.gather_slices(own, received)
        for row, part in zip(received, slices.of(out, workers), strict=True):
            for block, values in self._coding.read(row, part.numel()):
                part[block].copy_(values)
        return NarrowPayload(rows=rows, slices=slices, numel=numel, rank=channel.rank, rounding=total)

    def _rows(self, name: str, count: int, slices: Slices, like: Tensor) -> Tensor:
        width = self._coding.width(slices.size)
        return self._workspace.take(name, count * width, self._coding.dtype, like.device).view(count, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """A gradient cut into slices of ``size`` elements, one for each worker."""

    size: int
    coding: SliceCoding

    def of(self, flat: Tensor, workers: int) -> list[Tensor]:
        """The slices of a vector; the last ones may be shorter, or empty."""
        return [flat[rank * self.size : (rank + 1) * self.size] for rank in range(workers)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NarrowPayload:
    """A whole gradient as it was rounded, in rows of slices, and what rounding its sums added to this rank's slice."""

    rows: Tensor
    slices: Slices
    numel: int
    rank: int
    rounding: Tensor

    def add_to(self, flat: Tensor) -> None:
        """Add the rounded gradient to a dense vector, in place."""
        self._add(flat, sign=1)

    def subtract_from(self, flat: Tensor) -> None:
        """Subtract the rounded gradient from a dense vector, in place."""
        self._add(flat, sign=-1)

    def dense(self) -> Tensor:
        """The rounded gradient."""
        flat = torch.zeros(self.numel, device=self.rows.device)
        self.add_to(flat)
        return flat

    def kept_energy(self, prepared: Tensor) -> float:
        """See `Payload`."""
        return kept_energy(prepared, self.dense())

    def _add(self, flat: Tensor, *, sign: int) -> None:
        for row, part in zip(self.rows, self.slices.of(flat, len(self.rows)), strict=True):
            for block, values in self.slices.coding.read(row, part.numel()):
                part[block].add_(values, alpha=sign)
        own = self.slices.of(flat, len(self.rows))[self.rank]
        own.add_(self.rounding[: own.numel()], alpha=sign)
