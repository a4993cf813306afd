"""What one step of training takes of a device's memory, and its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hetopt.core.memory import StepMemory, TrainingMemory
from hetopt.profiler.probe.replica import Replica
from hetopt.profiler.probe.tensor_bytes import PeakBytes, bytes_of, count_on
from hetopt.trainer.data.fetch import Batch


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a job keeps from step to step.

    Attributes:
        parameters: of the model, trained or not.
        buffers: of the model.
        optimizers: after a step.
        gradient_bytes: of all that is trained.
    """

    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor]
    optimizers: Sequence[Optimizer]
    gradient_bytes: int

    @property
    def tensors(self) -> list[Tensor]:
        """All but the gradient."""
        return [*self.parameters, *self.buffers, *states_of(self.optimizers)]

    def with_step(self, step: StepMemory, fresh_bytes: int) -> TrainingMemory:
        """The parts, and what a step takes beside them; gradients that backward made anew in it."""
        return TrainingMemory(
            parameter_bytes=bytes_of(self.parameters),
            buffer_bytes=bytes_of(self.buffers),
            gradient_bytes=self.gradient_bytes,
            optimizer_bytes=bytes_of(states_of(self.optimizers)),
            fresh_bytes=fresh_bytes,
            steps=(step,),
        )


def states_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """What optimizers remember."""
    return [
        leaf
        for optimizer in optimizers
        for state in optimizer.state.values()
        for leaf in tree_leaves(state)
        if isinstance(leaf, Tensor)
    ]


class StepCount:
    """Counts over one step: what is computed, and what optimizers take while they update.

    The tensors of ``kept`` count as there; on a GPU also what its libraries hold, which is then part of computing.

    Args:
        device: where it happens.
        kept: by the job.
        gradient: where it lies in one buffer that is kept as well; None: backward makes it anew, and a worker copies it
            into a buffer of its own.
    """

    def __init__(self, device: torch.device, kept: Kept, gradient: Tensor | None = None) -> None:
        own = [] if gradient is None else [gradient]
        self.tensors: PeakBytes = count_on(device)
        self.tensors.hold([*kept.tensors, *own])
        self._kept, self._kept_bytes = kept, bytes_of([*kept.tensors, *own])
        self._computing = self._updating = 0
        self._fresh = 0

    def begins(self) -> None:
        """A step begins; what was counted of others is forgotten."""
        self._computing = self._updating = 0
        self.tensors.begin_phase()

    def gets(self, batch: object) -> None:
        """The samples are there."""
        self.tensors.hold(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))

    def updates(self, fresh: Iterable[Tensor | None] = ()) -> None:
        """An optimizer begins, with gradients that backward made anew."""
        self._computing = max(self._computing, self.tensors.peak_bytes - self._kept_bytes)
        self._fresh = bytes_of(fresh)
        self.tensors.begin_phase()

    def updated(self) -> None:
        """It has ended."""
        self._updating = max(self._updating, self.tensors.peak_bytes - self._kept_bytes - self._fresh)
        self.tensors.begin_phase()

    def told(self, samples: int) -> TrainingMemory:
        """What a step of so many samples took."""
        step = StepMemory(samples=samples, computing_bytes=max(1, self._computing), updating_bytes=self._updating)
        return self._kept.with_step(step, self._fresh)


def count_step(replica: Replica, batch: Batch, samples: int) -> TrainingMemory:
    """Take one step of a replica, which has taken some before, and count."""
    model: nn.Module = replica.loss.model
    kept = Kept(
        parameters=list(model.parameters()),
        buffers=list(model.buffers()),
        optimizers=[replica.optimizer],
        gradient_bytes=replica.gradient.nbytes,
    )
    count = StepCount(replica.gradient.device, kept, replica.gradient)
    count.begins()
    count.gets(batch)
    with count.tensors:
        replica.gradient.zero_()
        loss = replica.loss(batch)
        loss.backward()
        count.updates()
        replica.optimizer.step()
        count.updated()
    return count.told(samples)
