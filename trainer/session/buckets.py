"""Sums a flat gradient part by part while the backward pass that makes it still runs, without wrapping the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hetopt.core.comm import overlap
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.trainer.session.flat import FlatGradients


class Buckets:
    """Parts of a gradient, from its end, as backward makes it; sent in one order on all workers.

    A part is sent as soon as the gradients in it are made, weighted; nothing is taken back then. Where a gradient turns
    out to have been changed since (part of the model is computed again in backward, or a hook of the script comes
    later), ``.grad`` has it whole: all workers sum anew. The last part is sent when backward is over, with what all
    workers are to know of the gradient then.

    Args:
        parameters: float32 or complex64, in the order in which their gradients lie.

    Attributes:
        is_spoilt: whether what was sent is not what is in ``.grad``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        elements = [parameter.numel() * (1 + parameter.is_complex()) for parameter in parameters]
        self._bucket_of = [0] * len(elements)
        self._spans: list[tuple[int, int]] = []
        self._members: list[range] = []
        self._parameters = parameters
        stop = start = sum(elements)
        last = len(elements)
        for index in reversed(range(len(elements))):
            self._bucket_of[index] = len(self._spans)
            start -= elements[index]
            full = overlap.BUCKET_BYTES if self._spans else overlap.FIRST_BUCKET_BYTES
            if VALUE_BYTES * (stop - start) >= full or index == 0:
                self._spans.append((start, stop))
                self._members.append(range(index, last))
                stop, last = start, index
        self._hooks: list[RemovableHandle] = [
            one.register_post_accumulate_grad_hook(partial(self._ready, index))  # type: ignore[no-untyped-call]  # torch's gap
            for index, one in enumerate(parameters)
        ]
        self._flat: FlatGradients | None = None
        self._weigh: Callable[[], float] = float
        self._reach: Callable[[float], None] = _nowhere
        self._made: set[int] = set()
        self._put: dict[int, tuple[Tensor, int]] = {}
        self._missing: list[int] = []
        self._parts_put = 0
        self._sent: list[dist.Work] = []
        self.is_spoilt = False

    def begin(self, flat: FlatGradients, weigh: Callable[[], float], reach: Callable[[float], None]) -> None:
        """A backward pass comes, which makes all of a gradient.

        Args:
            flat: where it is put.
            weigh: tells the weight of this worker's gradient; called once a part is made, as it may have to wait.
            reach: waits until a worker that is slowed down would have made this part of the gradient.
        """
        self._flat, self._weigh, self._reach = flat, weigh, reach
        self._made, self._put, self._parts_put, self._sent, self.is_spoilt = set(), {}, 0, [], False
        self._missing = [len(members) for members in self._members]

    def end(self) -> None:
        """Backward passes that come are not looked at."""
        self._flat = None

    def has(self, index: int, parameter: nn.Parameter) -> bool:
        """Whether the gradient of a parameter was put to its place, or is on its way from there."""
        put, gradient = self._put.get(index), parameter.grad
        if put and gradient is not None and put[0] is gradient and put[1] == gradient._version:
            return True
        self.is_spoilt |= self._is_sent(index)
        return self._is_sent(index)

    def send_rest(self, ahead: Tensor) -> None:
        """Backward is over: what it made no gradient for is zero.

        Args:
            ahead: [at most those ahead of the gradient] float32 numbers to sum with it.
        """
        assert self._flat is not None
        self._flat.whole[: len(ahead)] = ahead
        while len(self._sent) < len(self._spans):
            self._send()

    def wait(self) -> None:
        """All is summed."""
        for work in self._sent:
            work.wait()

    @property
    def parts_sent(self) -> int:
        """Of the gradient that is under way."""
        return len(self._sent)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _ready(self, index: int, parameter: Tensor) -> None:
        """Backward has made the gradient of a parameter, or more of it."""
        if self._flat is None or parameter.grad is None or self._is_sent(index):
            return
        self._missing[self._bucket_of[index]] -= index not in self._made
        self._made.add(index)
        while self._parts_put < len(self._spans) and not self._missing[self._parts_put]:
            self._reach(1 - self._spans[self._parts_put][0] / self._spans[0][1])
            self._put_part(self._members[self._parts_put])
            self._parts_put += 1
            if self._parts_put < len(self._spans):
                self._send()

    def _put_part(self, members: range) -> None:
        assert self._flat is not None
        gradients = [parameter.grad for parameter in self._parameters[members.start : members.stop]]
        self._flat.put_all(gradients, self._weigh(), first=members.start)
        self._put |= {at: (one, one._version) for at, one in zip(members, gradients, strict=True) if one is not None}

    def _is_sent(self, index: int) -> bool:
        return self._bucket_of[index] < len(self._sent)

    def _send(self) -> None:
        assert self._flat is not None
        start, stop = self._spans[len(self._sent)]
        ahead = len(self._flat.whole) - len(self._flat.single)
        # The last part takes along what lies ahead of the gradient.
        work = dist.all_reduce(self._flat.whole[start + ahead if start else 0 : stop + ahead], async_op=True)
        assert work is not None  # as for every asynchronous collective of a member of the group
        self._sent.append(work)


def _nowhere(made: float) -> None:
    """Wait for nothing."""
