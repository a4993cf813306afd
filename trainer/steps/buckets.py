"""Parts of a flat gradient, told of one after the other while the backward pass that makes them still runs.

A hook on each parameter tells when its gradient is there, so that nothing has to wrap the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hetopt.core.comm import cost
from hetopt.core.comm.payload_bytes import VALUE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Elements of a flat gradient that travel together.

    Attributes:
        index: of the part, in the order in which parts travel.
        start: its first element.
        stop: the element behind its last.
        members: the parameters whose gradients these are.
        done: share of the whole gradient that is there with this part and those before it, in (0, 1].
    """

    index: int
    start: int
    stop: int
    members: range
    done: float


def parts_of(parameters: Sequence[nn.Parameter]) -> list[Part]:
    """Return the parts of a flat gradient from its end on: a small one first, so that something travels early.

    Args:
        parameters: float32 or complex64, in the order in which their gradients lie.
    """
    starts = [0, *accumulate(parameter.numel() * (1 + parameter.is_complex()) for parameter in parameters)]
    parts: list[Part] = []
    last = len(parameters)
    for first in reversed(range(len(parameters))):
        full = cost.BUCKET_BYTES if parts else cost.FIRST_BUCKET_BYTES
        start, stop = starts[first], starts[last]
        if VALUE_BYTES * (stop - start) >= full or first == 0:
            done = 1 - start / max(1, starts[-1])
            parts.append(Part(index=len(parts), start=start, stop=stop, members=range(first, last), done=done))
            last = first
    return parts


class Buckets:
    """Calls ``ready`` with each part of a flat gradient, in one order on all workers, once backward has made it.

    Args:
        parameters: in the order in which their gradients lie.
        ready: called with a part in the thread of the backward pass, or by `finish`.

    Attributes:
        parts: of the gradient, in the order in which they are ready.
        told: how many parts ``ready`` was called with since `arm`.
        is_armed: whether a backward pass is followed.
        is_repeated: whether a gradient was made more often than once a pass (a layer is computed again in backward).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ready: Callable[[Part], None]) -> None:
        self.parts = parts_of(parameters)
        self.told, self.is_armed, self.is_repeated = 0, False, False
        self._ready = ready
        self._part_of = {index: part for part in self.parts for index in part.members}
        self._parameters = parameters
        self._hooks: list[RemovableHandle] = []

    def arm(self, passes: int = 1) -> None:
        """Follow this many backward passes, whose gradients add up; parts are ready in the last one."""
        if not self._hooks:
            note = partial(_note_made, weakref.ref(self))  # weakly: no collector sees what hooks of parameters hold
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(note, index))  # type: ignore[no-untyped-call]  # torch's gap
                for index, parameter in enumerate(self._parameters)
            ]
        self.is_armed, self.is_repeated = True, False
        self._left = [passes] * len(self._part_of)
        self._missing = [passes * len(part.members) for part in self.parts]

    def finish(self) -> None:
        """Follow no longer; what backward left out is ready now."""
        self.is_armed = False
        while self.told < len(self.parts):
            self._tell()
        self.told = 0

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def note_made(self, index: int) -> None:
        """Note that a backward pass has made the gradient of a parameter."""
        if not self.is_armed:
            return
        if not self._left[index]:
            self.is_repeated = True
            return
        self._left[index] -= 1
        self._missing[self._part_of[index].index] -= 1
        while self.told < len(self.parts) and not self._missing[self.told]:
            self._tell()

    def _tell(self) -> None:
        part = self.parts[self.told]
        self.told += 1
        self._ready(part)


def _note_made(buckets: weakref.ref[Buckets], index: int, parameter: Tensor) -> None:
    followed = buckets()
    if followed is not None:
        followed.note_made(index)
