"""Sums gradients in half the bytes, fp16 or bf16, with every sum made in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hetopt.trainer.exchange.aggregation import Stateless
from hetopt.trainer.exchange.blocks import Workspace, blocks
from hetopt.trainer.exchange.channel import Channel
from hetopt.trainer.exchange.energy import kept_energy
from hetopt.trainer.exchange.payload import Payload
from hetopt.trainer.exchange.threshold import largest_magnitude

_TOP_EXPONENT = 15  # fp16 ends at 65504, just below 2^16
_MOST_EXPONENT = 126  # so that fp32 has the power of two itself, and its inverse


class NarrowSum(Stateless):
    """Each worker sums one slice of everyone's gradient, in fp32 and in rank order, and hands the sum to all.

    Two steps of slices, all to all and back, move the same bytes over each link as a ring all-reduce of the narrow
    type would, in as many messages. But a ring rounds its partial sums to the narrow type N - 1 times, and in fp16 may
    overflow on the way though neither the summands nor the sum do; here a value is rounded once when it is sent and
    once when its sum is.

    bf16 has the range of fp32. fp16 has not: every slice is scaled by a power of two that puts its largest magnitude
    just below 2^15, and carries the exponent along, so nothing overflows and little underflows. NaN and infinity pass
    through as they are.

    What is remembered, where there is a memory, is the rounding of this worker's own gradient, and that of the sums of
    its slice, which nobody else knows: so what all workers count as sent is exactly what all of them received.
    """

    counts_steps = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._workspace = Workspace()

    def run(self, prepared: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Round, sum slices, round (see `Aggregation`)."""
        numel, workers = prepared.numel(), channel.workers
        slices = Slices(size=math.ceil(numel / workers), scaled=self._dtype == torch.float16)
        rows, received = (
            self._rows("rows", workers, slices, prepared),
            self._rows("received", workers, slices, prepared),
        )
        for row, part in zip(rows, slices.of(prepared, workers), strict=True):
            slices.write(part, row)
        with channel.operation("all_reduce", rows.nbytes) as operation:
            channel.all_to_all(rows, received)
            with operation.pause():
                total = self._workspace.take("total", slices.size, torch.float32, prepared.device).zero_()
                for row in received:
                    for block, values in slices.read(row):
                        total[block].add_(values)
                own = self._rows("own", 1, slices, prepared)[0]
                slices.write(total, own)
                for block, values in slices.read(own):
                    torch.sub(values, total[block], out=total[block])
            channel.gather_slices(own, received)
        for row, part in zip(received, slices.of(out, workers), strict=True):
            for block, values in slices.read(row, part.numel()):
                part[block].copy_(values)
        return NarrowPayload(rows=rows, slices=slices, numel=numel, rank=channel.rank, rounding=total)

    def _rows(self, name: str, count: int, slices: Slices, like: Tensor) -> Tensor:
        width = slices.size + slices.header
        return self._workspace.take(name, count * width, self._dtype, like.device).view(count, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """How a slice of ``size`` elements lies in a row of a narrow type; a scaled one begins with its exponent."""

    size: int
    scaled: bool

    @property
    def header(self) -> int:
        """Elements before the values."""
        return int(self.scaled)

    def of(self, flat: Tensor, workers: int) -> list[Tensor]:
        """The slices of a vector; the last ones may be shorter, or empty."""
        return [flat[rank * self.size : (rank + 1) * self.size] for rank in range(workers)]

    def write(self, part: Tensor, row: Tensor) -> None:
        """Round a slice, or what there is of one, into its row."""
        exponent = _exponent(part) if self.scaled and part.numel() else 0
        if self.scaled:
            row[0] = float(exponent)
        values = row[self.header :]
        values[part.numel() :].zero_()
        for block in blocks(part.numel(), part.device):
            values[block].copy_(part[block] * 2.0**exponent if exponent else part[block])

    def read(self, row: Tensor, count: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The first ``count`` values of a row (absent: all), block by block in fp32."""
        scale = 2.0 ** -float(row[0]) if self.scaled else 1.0
        values = row[self.header :]
        for block in blocks(self.size if count is None else count, row.device):
            yield block, values[block].float().mul_(scale)


def _exponent(part: Tensor) -> int:
    """The power of two that lifts the largest magnitude to at least 2^14 and below 2^15; 0 if it is not finite."""
    peak = largest_magnitude(part)
    if not 0 < peak < math.inf:
        return 0
    return min(_MOST_EXPONENT, max(-_MOST_EXPONENT, _TOP_EXPONENT - math.frexp(peak)[1]))


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
            for block, values in self.slices.read(row, part.numel()):
                part[block].add_(values, alpha=sign)
        own = self.slices.of(flat, len(self.rows))[self.rank]
        own.add_(self.rounding[: own.numel()], alpha=sign)
