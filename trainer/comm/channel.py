"""A worker's end of the group: every collective operation of an exchange goes through it, counted and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.comm.cost import Primitive, Scope, deals, gathers_directly, reduces_directly
from hetopt.trainer.comm.group import group_rank, group_size, staging_device
from hetopt.trainer.comm.pairs import Pairs

Reduction = Literal["sum", "max", "and"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "and": dist.ReduceOp.BAND}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One collective operation as it happened: the payload that this worker handed over, and how long it took here."""

    primitive: Primitive
    payload_bytes: int
    time_s: float
    scope: Scope = "network"


class Pauses:
    """Of an operation that is made of several: what a worker does between them is its own work."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.paused_s = 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Own work happens inside."""
        begun = self._now()
        yield
        self.paused_s += self._now() - begun


class Channel:
    """Collective operations between the workers of a group, during one exchange.

    Tensors are 1-D; those on a GPU travel through the host where the group is gloo's. A worker that is alone sends to
    nobody, and is counted as if it did. Times contain the wait for workers that come later.

    Args:
        group: who takes part; ``None`` is the default group, or this process alone when there is none.
        clock: seconds.
        on: the device whose work must be done before the clock is read.
        scope: whether the group spans machines, or lies inside one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on: torch.device | None = None,
        scope: Scope = "network",
    ) -> None:
        self._group = group
        self._clock = clock
        self._device = on
        self.scope: Scope = scope
        self.workers = group_size(group)
        self.rank = group_rank(group)
        self.messages: list[Message] = []

    def now(self) -> float:
        """The clock, once the device has done what it was given."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    @contextmanager
    def operation(self, primitive: Primitive, payload_bytes: int) -> Iterator[Pauses]:
        """Count and time what happens inside as one operation, without its pauses."""
        begun, pauses = self.now(), Pauses(self.now)
        yield pauses
        time_s = self.now() - begun - pauses.paused_s
        self.messages.append(Message(primitive=primitive, payload_bytes=payload_bytes, time_s=time_s, scope=self.scope))

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        """Reduce over all workers, in place; each element in one place, so that all workers hold the same bits."""
        with self.operation("all_reduce", tensor.nbytes):
            if self.workers > 1 and tensor.numel():
                # NCCL has no bitwise reductions; every group can do them on the host.
                staged = tensor.cpu() if reduction == "and" else self._staged(tensor)
                if reduction != "and" and reduces_directly(staged.nbytes, self.workers) and _in_pairs(staged):
                    # Everyone receives all vectors and reduces them in rank order, so all hold the same bits.
                    received = torch.empty(self.workers, staged.numel(), dtype=staged.dtype)
                    dist.all_to_all_single(received.view(-1), self._for_everyone(staged), group=self._group)
                    if reduction == "max":
                        torch.amax(received, 0, out=staged)
                    else:
                        torch.sum(received, 0, dtype=staged.dtype, out=staged)
                else:
                    dist.all_reduce(staged, op=_REDUCTIONS[reduction], group=self._group)
                if staged is not tensor:
                    tensor.copy_(staged)

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """What every worker brought, one row a rank; all bring the same number of elements.

        Args:
            tensor: this worker's part.
            out: where to gather, if there is a place: 1-D, of ``workers`` times the elements.
        """
        with self.operation("all_gather", tensor.nbytes):
            if self.workers == 1 or not tensor.numel():
                return tensor.expand(self.workers, -1)
            staged = self._staged(tensor)
            if out is None or staged is not tensor:
                out = torch.empty(self.workers * tensor.numel(), dtype=tensor.dtype, device=staged.device)
            self._gather(staged, out)
            return out.to(tensor.device).view(self.workers, -1)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite everyone's tensor with that of rank ``source``."""
        with self.operation("broadcast", tensor.nbytes):
            if self.workers > 1 and tensor.numel():
                staged = self._staged(tensor)
                if deals(staged.nbytes, self.workers) and _in_pairs(staged):
                    self._pairs.deal(staged, source)
                else:
                    dist.broadcast(staged, group_src=source, group=self._group)
                if staged is not tensor:
                    tensor.copy_(staged)

    def all_to_all(self, rows: Tensor, out: Tensor) -> None:
        """Send row r of ``rows`` to rank r, and receive its row for this worker as row r of ``out``. Not counted."""
        if self.workers == 1 or not rows.numel():
            out.copy_(rows)
            return
        staged = self._staged(rows)
        received = out if staged is rows else torch.empty_like(staged)
        if _in_pairs(staged) and not gathers_directly(rows[0].nbytes, self.workers):
            self._pairs.swap(staged.unbind(), received.unbind())
        else:
            dist.all_to_all_single(received, staged, group=self._group)
        if received is not out:
            out.copy_(received)

    def gather_slices(self, own: Tensor, out: Tensor) -> None:
        """Everyone's tensor, one after the other, into ``out``. Not counted."""
        if self.workers == 1 or not own.numel():
            out.copy_(own.view_as(out))
            return
        staged = self._staged(own)
        received = out if staged is own else torch.empty(out.shape, dtype=out.dtype, device=staged.device)
        self._gather(staged, received.view(-1))
        if received is not out:
            out.copy_(received)

    @property
    def _pairs(self) -> Pairs:
        return Pairs(group=self._group, rank=self.rank, workers=self.workers)

    def _gather(self, own: Tensor, out: Tensor) -> None:
        """Everyone's elements, one after the other, into ``out``; both lie where the backend wants them."""
        if not _in_pairs(own):
            dist.all_gather_single(out, own, group=self._group)
        elif gathers_directly(own.nbytes, self.workers):
            dist.all_to_all_single(out, self._for_everyone(own), group=self._group)
        else:
            parts = out.view(self.workers, -1).unbind()
            parts[self.rank].copy_(own.view(-1))
            self._pairs.circulate(parts)

    def _for_everyone(self, own: Tensor) -> Tensor:
        """The same elements for every worker, to be sent to all in one go."""
        return own.view(1, -1).repeat(self.workers, 1).view(-1)

    def _staged(self, tensor: Tensor) -> Tensor:
        return tensor.to(staging_device(tensor, self._group))


def _in_pairs(staged: Tensor) -> bool:
    """Whether the backend is one whose collectives are better made of pairs: gloo's, which has what is on the CPU."""
    return staged.device.type == "cpu"
