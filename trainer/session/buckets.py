"""Sums a flat gradient part by part while the backward pass that makes it still runs, without wrapping the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from hetopt.core.comm import overlap
from hetopt.core.comm.payload_bytes import VALUE_BYTES


class Flat(Protocol):
    """A flat gradient, into which the gradients of parameters are put."""

    whole: Tensor
    ahead: int

    def put(self, weight: float, first: int, last: int) -> None:
        """Write the gradients of the parameters ``first`` to ``last - 1`` times ``weight`` to their places."""
        ...


class Buckets:
    """Sends parts of a flat gradient from its end, in one order on all workers, as soon as they are made.

    A part that was sent cannot be taken back. Where a gradient changed after that (a layer computed again in backward),
    `are_whole` says so, and all workers sum anew. The last part is sent when backward is over, with the numbers that
    lie ahead of the gradient.

    Args:
        parameters: float32 or complex64, in the order in which their gradients lie.
        flat: where they lie.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flat: Flat) -> None:
        elements = [parameter.numel() * (1 + parameter.is_complex()) for parameter in parameters]
        self._parameters, self._flat = parameters, flat
        self._bucket_of = [0] * len(elements)
        self._spans: list[tuple[int, int]] = []
        self._members: list[tuple[int, int]] = []
        stop = start = sum(elements)
        last = len(elements)
        for index in reversed(range(len(elements))):
            self._bucket_of[index] = len(self._spans)
            start -= elements[index]
            full = overlap.BUCKET_BYTES if self._spans else overlap.FIRST_BUCKET_BYTES
            if VALUE_BYTES * (stop - start) >= full or index == 0:
                self._spans.append((start, stop))
                self._members.append((index, last))
                stop, last = start, index
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note_made, index))  # type: ignore[no-untyped-call]  # torch's gap
            for index, parameter in enumerate(parameters)
        ]
        self.is_armed = False
        self._weigh: Callable[[], float] = float
        self._reach: Callable[[float], None] = lambda done: None

    def arm(self, weigh: Callable[[], float], reach: Callable[[float], None]) -> None:
        """Send what the next backward pass makes.

        Args:
            weigh: returns the weight of this worker's gradient; called when the first part is made, as it may wait.
            reach: waits until a worker that is slowed down would have made this part of the gradient (1 = all).
        """
        self._weigh, self._reach, self.is_armed = weigh, reach, True
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self._missing = [last - first for first, last in self._members]
        self._made: set[int] = set()
        self._filled, self._sent = 0, list[dist.Work]()

    def are_whole(self) -> bool:
        """Return whether what was put to its place is what ``.grad`` has now; puts what backward left out."""
        whole = all(
            parameter.grad is kept[0] and kept[0]._version == kept[1]
            for index, parameter in enumerate(self._parameters)
            if (kept := self._versions.get(index)) is not None
        )
        late = any(
            self._bucket_of[index] < self._filled and index not in self._versions and parameter.grad is not None
            for index, parameter in enumerate(self._parameters)
        )
        while self._filled < len(self._spans):
            self._fill()
        return whole and not late

    def finish(self) -> None:
        """Send the parts that are left, and wait until all are summed."""
        while len(self._sent) < len(self._spans):
            self._send()
        for work in self._sent:
            work.wait()
        self.is_armed = False

    @property
    def parts_sent(self) -> int:
        """Return how many parts of the gradient under way were sent."""
        return len(self._sent)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note_made(self, index: int, parameter: Tensor) -> None:
        if not self.is_armed or index in self._made:
            return
        self._made.add(index)
        self._missing[self._bucket_of[index]] -= 1
        while self._filled < len(self._spans) and not self._missing[self._filled]:
            self._reach(1 - self._spans[self._filled][0] / self._spans[0][1])
            self._fill()
            if self._filled < len(self._spans):  # the last waits for the numbers ahead of the gradient
                self._send()

    def _fill(self) -> None:
        first, last = self._members[self._filled]
        for index in range(first, last):
            gradient = self._parameters[index].grad
            if gradient is not None:
                self._versions[index] = (gradient, gradient._version)
        self._flat.put(self._weigh(), first, last)
        self._filled += 1

    def _send(self) -> None:
        start, stop = self._spans[len(self._sent)]
        ahead = self._flat.ahead
        work = dist.all_reduce(self._flat.whole[start + ahead if start else 0 : stop + ahead], async_op=True)
        assert work is not None  # as for every asynchronous collective of a member of the group
        self._sent.append(work)
