"""A worker's end of the group: every collective operation of an exchange goes through it, counted and timed.

For CPU tensors collectives are made of transfers between pairs of workers where gloo's own take twice their time.
gloo announces that it is ready to receive on the connection that data travel on. An announcement behind data that a
worker has begun to send waits for all of them, so both directions of a connection take turns; and its broadcast sends
to several workers at once, who hand on only when they have everything. Here receives are announced before anything is
sent, and no link carries two messages at a time. Between emulated hosts of 100 Mbit/s (2026-11-20), a megabyte each:

    hosts   slices to each other     everything to everyone     broadcast
    2       81 -> 42 ms              124 -> 85 ms               83 ms, left to gloo
    4       100 -> 64 ms             265 -> 256 ms              248 -> 130 ms
    8       107 -> 79 ms             619 -> 601 ms              435 -> 154 ms
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.comm.cost import Primitive, deals, gathers_directly, reduces_directly


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of workers in a process group; None: the default group; 1 if none is initialised."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def staging_device(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """Return the device that a tensor is sent from: the CPU for a CUDA tensor over gloo alone, else the tensor's.

    That makes groups of GPU and CPU workers possible: on the wire all of them look alike. ``group`` None: the default
    group.
    """
    backends = dist.get_backend(group)
    return torch.device("cpu") if tensor.is_cuda and "gloo" in backends and "nccl" not in backends else tensor.device


UNTIL_THE_GROUPS_TIMEOUT = datetime.timedelta(0)
"""By torch's convention."""


def _wait(works: Sequence[dist.Work | None]) -> None:
    """Wait until all transfers are done; none may be None, which torch returns to workers outside the group."""
    for work in works:
        assert work is not None, "this worker is in the group"
        work.wait(UNTIL_THE_GROUPS_TIMEOUT)


Reduction = Literal["sum", "max", "and"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "and": dist.ReduceOp.BAND}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Record of one collective operation: its kind, the bytes that this worker handed over, and the seconds here.

    Attributes:
        primitive: kind of the operation.
        payload_bytes: bytes that this worker handed over.
        time_s: seconds here, with the wait for workers that came later.
    """

    primitive: Primitive
    payload_bytes: int
    time_s: float


class Channel:
    """One worker's collective operations in a process group; ``messages`` keeps bytes and seconds of each.

    Within `operation` the messages of `all_to_all` and `gather_slices` are kept as one; elsewhere theirs are not.

    Attributes ``workers`` and ``rank`` are the size of the group and this worker's place in it (1 and 0 where it is
    alone).

    Tensors are 1-D (rows per rank for `all_to_all`); those on a GPU travel through the host where the group is gloo's.
    A worker that is alone sends to nobody, and is counted as if it did. Times contain the wait for workers that come
    later.

    Args:
        group: process group that takes part; None: the default group, or this process alone where there is none.
        clock: returns seconds.
        on: device whose queued work is waited for before the clock is read; None: nothing is waited for.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on: torch.device | None = None,
    ) -> None:
        self._group = group
        self._clock = clock
        self._device = on
        self.workers = group_size(group)
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.messages: list[Message] = []

    def now(self) -> float:
        """Return the present time in seconds by the channel's clock, after waiting for the queued work of its GPU."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    @contextmanager
    def operation(self, primitive: Primitive, payload_bytes: int) -> Iterator[list[float]]:
        """Record the block inside as one collective operation.

        Seconds added to the yielded list do not count as its time.

        A block that raises is not recorded.

        Args:
            primitive: kind of the operation.
            payload_bytes: bytes that this worker hands over.

        Yields:
            An empty list, for seconds of this worker's own work within the block.
        """
        begun, own_work_s = self.now(), list[float]()
        yield own_work_s
        time_s = self.now() - begun - sum(own_work_s)
        self.messages.append(Message(primitive=primitive, payload_bytes=payload_bytes, time_s=time_s))

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        """Replace a tensor, in place, by its sum, max or bitwise AND over all workers, the same bits on each.

        All call it.

        Args:
            tensor: 1-D; the result afterwards.
            reduction: "sum", "max", or "and" (bitwise, of whole numbers).
        """
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
        """Return every worker's 1-D tensor, [workers, elements], in rank order; all must call it, with equal lengths.

        Args:
            tensor: this worker's part, 1-D; it may be empty, if on all workers.
            out: memory to gather into, 1-D, of ``workers`` times the elements; None: new memory. A worker that is alone
                does not use it: the result is a view of ``tensor``.
        """
        with self.operation("all_gather", tensor.nbytes):
            if self.workers == 1 or not tensor.numel():
                return tensor.expand(self.workers, -1)
            if out is None:
                out = tensor.new_empty(self.workers * tensor.numel())
            self.gather_slices(tensor, out)
            return out.view(self.workers, -1)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite every worker's tensor, in place, with that of rank ``source``; all workers must call it.

        Among one worker nothing is sent. Returns once the tensor is there.
        """
        with self.operation("broadcast", tensor.nbytes):
            if self.workers > 1 and tensor.numel():
                staged = self._staged(tensor)
                if deals(staged.nbytes, self.workers) and _in_pairs(staged):
                    self._deal(staged, source)
                else:
                    dist.broadcast(staged, group_src=source, group=self._group)
                if staged is not tensor:
                    tensor.copy_(staged)

    def all_to_all(self, rows: Tensor, out: Tensor) -> None:
        """Send row r of ``rows`` to rank r; receive rank r's row as row r of ``out``. All must call it.

        Not kept in ``messages``: the caller does that with `operation`.
        """
        self._carry(rows, out, self._swap)

    def gather_slices(self, tensor: Tensor, out: Tensor) -> None:
        """Write every worker's tensor into ``out``, by rank; all must call it, with equal lengths.

        Not kept in ``messages``: the caller does that with `operation`.
        """
        self._carry(tensor, out, self._gather)

    def _carry(self, tensor: Tensor, out: Tensor, operation: Callable[[Tensor, Tensor], None]) -> None:
        """Do an operation of all workers from ``tensor`` to ``out``, both where the backend wants them; alone, copy."""
        if self.workers == 1 or not tensor.numel():
            out.copy_(tensor.view_as(out))
            return
        staged = self._staged(tensor)
        received = out if staged is tensor else torch.empty(out.shape, dtype=out.dtype, device=staged.device)
        operation(staged, received)
        if received is not out:
            out.copy_(received)

    def _gather(self, tensor: Tensor, out: Tensor) -> None:
        """Gather every worker's elements, in rank order, into ``out``; both lie where the backend wants them.

        Every worker must call it with as many elements; the way depends on their size alone.
        """
        out = out.view(-1)
        if not _in_pairs(tensor):
            dist.all_gather_single(out, tensor, group=self._group)
        elif gathers_directly(tensor.nbytes, self.workers):
            dist.all_to_all_single(out, self._for_everyone(tensor), group=self._group)
        else:
            parts = out.view(self.workers, -1).unbind()
            parts[self.rank].copy_(tensor.view(-1))
            self._circulate(parts)

    def _swap(self, rows: Tensor, out: Tensor) -> None:
        """Send ``rows[r]`` to rank r, and receive its row for this worker as ``out[r]``; N - 1 messages in a row."""
        if not _in_pairs(rows) or gathers_directly(rows[0].nbytes, self.workers):
            dist.all_to_all_single(out, rows, group=self._group)
            return
        out[self.rank].copy_(rows[self.rank])
        for distance in range(1, self.workers):
            to, source = (self.rank + distance) % self.workers, (self.rank - distance) % self.workers
            self._exchange(rows[to], to, out[source], source)

    def _circulate(self, parts: Sequence[Tensor]) -> None:
        """Fill ``parts`` with every worker's (its own is there already); N - 1 messages in a row, around the ring."""
        to, source = (self.rank + 1) % self.workers, (self.rank - 1) % self.workers
        for distance in range(self.workers - 1):
            held, next_ = (self.rank - distance) % self.workers, (source - distance) % self.workers
            self._exchange(parts[held], to, parts[next_], source)

    def _deal(self, flat: Tensor, source: int) -> None:
        """Overwrite everyone's ``flat`` with that of rank ``source``, in N messages: a part to each, then around.

        A link carries 2 (N - 1) / N times the vector, whatever N (van de Geijn 1991), where a tree brings it
        log2 N times over that of the source.

        Args:
            flat: 1-D, at least one element for each worker.
            source: rank whose values all get.
        """
        parts = flat.tensor_split(self.workers)
        others = [rank for rank in range(self.workers) if rank != source]
        if self.rank == source:
            _wait([dist.isend(parts[rank], group=self._group, group_dst=rank) for rank in others])
        else:
            _wait([dist.irecv(parts[self.rank], group=self._group, group_src=source)])
        self._circulate(parts)

    def _exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> None:
        # The receive first: it is announced to the other side, which must not wait behind what is sent to it.
        coming = dist.irecv(received, group=self._group, group_src=source)
        _wait([coming, dist.isend(sent, group=self._group, group_dst=to)])

    def _for_everyone(self, tensor: Tensor) -> Tensor:
        """Repeat a tensor's elements once for every worker, to be sent to all in one go."""
        return tensor.view(1, -1).repeat(self.workers, 1).view(-1)

    def _staged(self, tensor: Tensor) -> Tensor:
        return tensor.to(staging_device(tensor, self._group))


def _in_pairs(staged: Tensor) -> bool:
    """Return whether collectives are better made of pairs: gloo's are, which carries what is on the CPU."""
    return staged.device.type == "cpu"
