"""A group of workers that are threads: the same collective operations, over shared memory instead of a network.

For laws over many group sizes and many steps, where starting processes would take most of the time. Integer sums are
made in the type that travels, as a backend makes them, so that an overflow would show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Chain, Payload, Residual


class ThreadGroup:
    """What the threads of a group share."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.barrier = threading.Barrier(workers)
        self.slots: list[torch.Tensor | None] = [None] * workers

    def everyones(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A copy of what each worker brought to this meeting."""
        self.slots[rank] = tensor
        self.barrier.wait(timeout=300)
        brought = [slot.clone() for slot in self.slots if slot is not None]
        self.barrier.wait(timeout=300)
        return brought

    def channel(self, rank: int) -> Channel:
        return ThreadChannel(self, rank)


class ThreadChannel(Channel):
    """One thread's end of its group."""

    def __init__(self, shared: ThreadGroup, rank: int) -> None:
        super().__init__()
        self._shared = shared
        self.workers, self.rank = shared.workers, rank

    def all_reduce(self, tensor, reduction="sum"):
        with self.operation("all_reduce", tensor.nbytes):
            first, *others = self._shared.everyones(self.rank, tensor)
            combine = {"sum": torch.add, "max": torch.maximum, "and": torch.bitwise_and}[reduction]
            for other in others:
                first = combine(first, other)
            tensor.copy_(first)

    def all_gather(self, tensor, out=None):
        with self.operation("all_gather", tensor.nbytes):
            return torch.stack(self._shared.everyones(self.rank, tensor))

    def broadcast(self, tensor, source):
        with self.operation("broadcast", tensor.nbytes):
            tensor.copy_(self._shared.everyones(self.rank, tensor)[source])

    def all_to_all(self, rows, out):
        out.copy_(torch.stack([each[self.rank] for each in self._shared.everyones(self.rank, rows)]))

    def gather_slices(self, own, out):
        out.copy_(torch.stack(self._shared.everyones(self.rank, own)).view_as(out))


class Crew:
    """Workers with a residual and a chain each, who exchange step after step."""

    def __init__(self, workers: int, make: Callable[[], tuple[Residual, Chain]]) -> None:
        self.residuals, self.chains = zip(*(make() for _ in range(workers)), strict=True)
        self._group = ThreadGroup(workers)
        self.step = 0
        self.sent_bytes: list[int] = []

    def exchange(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """One step: each worker's gradient in, what each holds afterwards out."""

        def work(rank: int) -> tuple[torch.Tensor, int]:
            channel = self._group.channel(rank)
            try:
                flat = gradients[rank].clone()
                prepared = self.residuals[rank].prepare(flat)
                sent: Payload = self.chains[rank].run(prepared, flat, channel, self.step)
                self.residuals[rank].commit(sent)
            except BaseException:
                self._group.barrier.abort()
                raise
            return flat, sum(message.payload_bytes for message in channel.messages)

        with ThreadPoolExecutor(self._group.workers) as pool:
            results = list(pool.map(work, range(self._group.workers)))
        self.step += 1
        self.sent_bytes = [sent for _, sent in results]
        return [flat for flat, _ in results]

    def held_back(self) -> torch.Tensor:
        """All residuals together, in double precision."""
        states = [residual.state() for residual in self.residuals]
        return sum(state.get("residual", state.get("unsent", torch.zeros(1))).double() for state in states)
