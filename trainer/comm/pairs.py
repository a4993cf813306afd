"""Collectives made of transfers between pairs of workers, for CPU tensors: where a backend's own take twice their time.

gloo announces that it is ready to receive on the connection that data travel on. An announcement behind data that a
worker has begun to send waits for all of them, so both directions of a connection take turns; and its broadcast sends
to several workers at once, who hand on only when they have everything. Here receives are announced before anything is
sent, and no link carries two messages at a time. Between rehearsed hosts of 100 Mbit/s (2026-11-20), a megabyte each:

    hosts   slices to each other     everything to everyone     broadcast
    2       81 -> 42 ms              124 -> 85 ms               83 ms, left to gloo
    4       100 -> 64 ms             265 -> 256 ms              248 -> 130 ms
    8       107 -> 79 ms             619 -> 601 ms              435 -> 154 ms
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """A worker's connections to the others of its group.

    Attributes:
        group: ``None`` is the default group.
        rank: in it.
        workers: in it, two or more.
    """

    group: dist.ProcessGroup | None
    rank: int
    workers: int

    def swap(self, rows: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Send ``rows[r]`` to rank r, and receive its row for this worker as ``out[r]``; N - 1 messages in a row."""
        out[self.rank].copy_(rows[self.rank])
        for distance in range(1, self.workers):
            to, source = (self.rank + distance) % self.workers, (self.rank - distance) % self.workers
            self._exchange(rows[to], to, out[source], source)

    def circulate(self, parts: Sequence[Tensor]) -> None:
        """Fill ``parts`` with everyone's, this worker's is there already; N - 1 messages in a row, around the ring."""
        to, source = (self.rank + 1) % self.workers, (self.rank - 1) % self.workers
        for distance in range(self.workers - 1):
            held, next_ = (self.rank - distance) % self.workers, (source - distance) % self.workers
            self._exchange(parts[held], to, parts[next_], source)

    def deal(self, flat: Tensor, source: int) -> None:
        """Overwrite everyone's ``flat`` with that of rank ``source``, in N messages: a part to each, then around.

        A link carries 2 (N - 1) / N times the vector, whatever N (van de Geijn 1991), where a tree brings it
        log2 N times over that of the source.

        Args:
            flat: 1-D, of an element a worker or more.
            source: its rank.
        """
        parts = flat.tensor_split(self.workers)
        others = [rank for rank in range(self.workers) if rank != source]
        if self.rank == source:
            _wait([dist.isend(parts[rank], group=self.group, group_dst=rank) for rank in others])
        else:
            _wait([dist.irecv(parts[self.rank], group=self.group, group_src=source)])
        self.circulate(parts)

    def _exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> None:
        # The receive first: it is announced to the other side, which must not wait behind what is sent to it.
        coming = dist.irecv(received, group=self.group, group_src=source)
        _wait([coming, dist.isend(sent, group=self.group, group_dst=to)])


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this worker is in the group"
        work.wait()
