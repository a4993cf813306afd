"""The residual: what a worker has not sent yet, of its gradient (error feedback) or of its momentum (DGC).

Momentum correction accumulates momentum before the gradient is sparsified, so that what is sent late is not stale:

    u <- m u + g            velocity, of the local gradient
    v <- v + u              what there is to send
    send some of v;  u, v <- 0 where it was sent

With plain error feedback and momentum in the optimizer, an element that is sent after t steps weighs as if its
gradients had all come at once; here it carries the discounting they would have had. Setting u to zero where elements
were sent (factor masking) keeps stale momentum from being applied after the fact. Where everything is sent nothing is
stale: then u goes on, and the whole is momentum SGD. (Lin et al., "Deep Gradient Compression", arXiv 1712.01887,
sections 3.1 to 3.3; their released successors kept the name without these.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hetopt.core.comm.composition import CORRECTION, combine, why_not_optimised
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import group_size
from hetopt.trainer.comm.compressor import Payload, SparsePayload, State
from hetopt.trainer.comm.vectors import energy

ALIKE = "alike."
"""Keys that begin so are the same for all workers: a new worker gets a copy, where others are handed on in parts."""


class NoResidual:
    """What is not sent is forgotten; right where everything is sent."""

    def prepare(self, gradient: Tensor) -> Tensor:
        """The gradient, unchanged and not copied."""
        return gradient

    def commit(self, prepared: Tensor, sent: Payload) -> None:
        """Nothing to remember (see `Residual`)."""

    def state(self) -> State:
        """An empty state: there is no residual."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Accept the empty state only (see `Residual`)."""
        check_state(state, {})


class ErrorFeedback:
    """Adds the residual of earlier steps to the gradient: ``residual <- (gradient + residual) - sent``.

    The residual starts at zero and is in units of the weighted sum over workers, so a sample keeps the weight of the
    step that computed it. Eight bytes a parameter: the residual, and the buffer it swaps places with.
    """

    def __init__(self, numel: int, *, device: torch.device | None = None) -> None:
        self._residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self._prepared = torch.zeros_like(self._residual)

    def prepare(self, gradient: Tensor) -> Tensor:
        """Gradient plus residual (see `Residual`)."""
        return torch.add(gradient, self._residual, out=self._prepared)

    def commit(self, prepared: Tensor, sent: Payload) -> float:
        """Keep what was not sent (see `Residual`)."""
        if prepared is not self._prepared:
            self._prepared.copy_(prepared)
        kept = sent.subtract_from(self._prepared)
        self._residual, self._prepared = self._prepared, self._residual
        return kept

    def state(self) -> State:
        """A copy of the residual, as ``{"residual": ...}``."""
        return {"residual": self._residual.clone()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a residual (see `Residual`)."""
        check_state(state, {"residual": self._residual})
        self._residual.copy_(state["residual"])


def redistribute(states: Sequence[State], workers: int) -> list[State]:
    """The residual of each of ``workers`` workers when those with ``states`` are replaced by them.

    Old worker i hands its residual to new worker ``i mod workers``; residuals that meet add up, and additional workers
    start from zero. So the sum over workers, which is all that training can ever see, stays; and as many workers as
    before keep their residuals unchanged. What all workers have alike (`ALIKE`) is copied.
    """
    if not states or workers < 1:
        raise ValueError(f"residuals go from at least one worker to at least one, not from {len(states)} to {workers}")
    new = [
        {key: value.clone() if key.startswith(ALIKE) else torch.zeros_like(value) for key, value in states[0].items()}
        for _ in range(workers)
    ]
    for i, state in enumerate(states):
        for key, value in state.items():
            if not key.startswith(ALIKE):
                new[i % workers][key] += value
    return new


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse a state that does not fit.

    Raises:
        BadInput: its keys or shapes are not those of ``expected``.
    """
    found = {key: tuple(value.shape) for key, value in state.items()}
    wanted = {key: tuple(value.shape) for key, value in expected.items()}
    if found != wanted:
        raise BadInput(
            f"The saved residual holds {found or 'nothing'}, but this run needs {wanted or 'none'}.",
            hint="resume with the model and the compression that the checkpoint was written with",
        )


DEFAULT_MOMENTUM = 0.9


class MomentumCorrection:
    """Velocity and accumulated velocity, both cleared where they were sent. Sixteen bytes a parameter.

    The optimizer must then have no momentum of its own (see `hand_over_momentum`); with ``momentum`` 0 this is error
    feedback.

    Args:
        numel: elements of the gradient.
        momentum: m, in [0, 1).
        clip_norm: the norm that the *summed* gradient may have; None: any. Each gradient is clipped before it is
            accumulated, to ``clip_norm / sqrt(workers)``: what a worker may contribute when the parts of all are
            independent and alike.
        device: where the gradient lies.
        group: the workers; absent: the default group.
    """

    def __init__(
        self,
        numel: int,
        *,
        momentum: float = DEFAULT_MOMENTUM,
        clip_norm: float | None = None,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self._momentum = momentum
        self._clip_norm, self._group = clip_norm, group
        self._velocity = torch.zeros(numel, dtype=torch.float32, device=device)
        self._unsent = torch.zeros_like(self._velocity)
        self._next_velocity = torch.zeros_like(self._velocity)
        self._prepared = torch.zeros_like(self._velocity)

    def prepare(self, gradient: Tensor) -> Tensor:
        """The velocity accumulated so far (see `Residual`)."""
        if self._clip_norm is not None:
            most = self._clip_norm / math.sqrt(group_size(self._group))
            scale = most / max(math.sqrt(energy(gradient)), 1e-38)
            gradient = gradient * scale if scale < 1 else gradient
        torch.add(gradient, self._velocity, alpha=self._momentum, out=self._next_velocity)
        return torch.add(self._unsent, self._next_velocity, out=self._prepared)

    def commit(self, prepared: Tensor, sent: Payload) -> float:
        """Keep what was not sent, and forget the velocity of what was (see `Residual`)."""
        if prepared is not self._prepared:
            raise ValueError("only what was prepared here can be committed: a velocity belongs to it")
        kept = sent.subtract_from(self._prepared)
        if isinstance(sent, SparsePayload) and sent.indices.numel() < sent.numel:
            self._next_velocity.index_fill_(0, sent.indices.long(), 0.0)
        self._unsent, self._prepared = self._prepared, self._unsent
        self._velocity, self._next_velocity = self._next_velocity, self._velocity
        return kept

    def state(self) -> State:
        """``{"velocity": ..., "unsent": ...}``, copied."""
        return {"velocity": self._velocity.clone(), "unsent": self._unsent.clone()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over both (see `Residual`)."""
        check_state(state, {"velocity": self._velocity, "unsent": self._unsent})
        self._velocity.copy_(state["velocity"])
        self._unsent.copy_(state["unsent"])


def hand_over_momentum(optimizer: Optimizer) -> float:
    """Take the momentum out of an SGD optimizer, for the workers' residuals to have; returns what it was.

    Weight decay stays in the optimizer and then has no momentum, which is the one difference to momentum SGD that is
    left where everything is sent.

    Raises:
        BadInput: the optimizer's momentum is not one number that can be taken out.
    """
    found = {float(group.get("momentum", math.nan)) for group in optimizer.param_groups}
    nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    if len(found) != 1 or nesterov or any(math.isnan(momentum) for momentum in found):
        reason = why_not_optimised(CORRECTION, optimizer_momentum=math.nan)
        raise BadInput(
            f"{reason} It can be taken out of plain SGD with one momentum, but not out of this optimizer.",
            hint="write memory=error_feedback, which leaves the momentum in the optimizer",
        )
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    return found.pop()


def keeps_momentum(asked: Compression) -> bool:
    """Whether the workers keep the optimizer's momentum, each of its own gradients."""
    return combine(asked.name, memory=asked.memory, collective=asked.collective).memory == CORRECTION


def own_momentum(asked: Compression, optimizer: Optimizer) -> Compression:
    """The compression of a run; where the workers keep the momentum, it is taken out of the optimizer.

    Raises:
        BadInput: it cannot be, or things do not go together.
    """
    if not keeps_momentum(asked):
        return asked
    momentum = hand_over_momentum(optimizer)
    return asked if asked.momentum is not None else asked.model_copy(update={"momentum": momentum})
