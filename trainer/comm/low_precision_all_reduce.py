"""Sums gradients in a half, a quarter or an eighth of the bytes, with every sum made in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hetopt.core.comm.payload_bytes import slice_elements
from hetopt.trainer.comm.aggregation import Stateless
from hetopt.trainer.comm.blocks import Workspace
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.energy import take_out
from hetopt.trainer.comm.payload import Payload
from hetopt.trainer.comm.slice_coding import SliceCoding


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
        coding = self._coding
        size = slice_elements(numel, workers, group=coding.group)
        rows, received = self._rows("rows", workers, size, prepared), self._rows("received", workers, size, prepared)
        coding.write(prepared, rows, size)
        with channel.operation("all_reduce", rows.nbytes) as operation:
            channel.all_to_all(rows, received)
            with operation.pause():
                total = self._workspace.take("total", size, torch.float32, prepared.device).zero_()
                for block, values in coding.read(received, size):
                    for part in values:
                        total[block.columns].add_(part)
                own = self._rows("own", 1, size, prepared)
                coding.write(total, own, size)
                for block, values in coding.read(own, size):
                    torch.sub(values[0], total[block.columns], out=total[block.columns])
            channel.gather_slices(own[0], received)
        for block, values in coding.read(received, size):
            part = out[block.flat]
            part.copy_(values.view(-1)[: part.numel()])
        return NarrowPayload(rows=rows, size=size, coding=coding, numel=numel, rank=channel.rank, rounding=total)

    def _rows(self, name: str, count: int, size: int, like: Tensor) -> Tensor:
        width = self._coding.width(size)
        return self._workspace.take(name, count * width, self._coding.dtype, like.device).view(count, width)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NarrowPayload:
    """A whole gradient as it was rounded, in rows of slices, and what rounding its sums added to this rank's slice."""

    rows: Tensor
    size: int
    coding: SliceCoding
    numel: int
    rank: int
    rounding: Tensor

    def add_to(self, flat: Tensor) -> None:
        """Add the rounded gradient to a dense vector, in place."""
        for place, values in self._parts():
            flat[place].add_(values)

    def subtract_from(self, flat: Tensor) -> float:
        """See `Payload`."""
        return sum(take_out(flat[place], values) for place, values in self._parts())

    def dense(self) -> Tensor:
        """The rounded gradient."""
        flat = torch.zeros(self.numel, device=self.rows.device)
        self.add_to(flat)
        return flat

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """What was sent, a part of the gradient after the other, while it is in the cache."""
        first = self.rank * self.size
        for block, table in self.coding.read(self.rows, self.size):
            begin, end = block.flat.start, min(block.flat.stop, self.numel)
            values = table.view(-1)[: max(0, end - begin)]
            own_begin, own_end = max(begin, first), min(end, first + self.size)
            if own_begin < own_end:
                values[own_begin - begin : own_end - begin].add_(self.rounding[own_begin - first : own_end - first])
            yield slice(begin, end), values
