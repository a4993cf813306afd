"""What one step of training takes of a device's memory, and its parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetopt.core.memory import StepMemory, TrainingMemory
from hetopt.profiler.probe.replica import Replica
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


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the storages of tensors that operators make inside the context, until the last tensor on each is gone.

    Views share a storage, which counts once. A tensor that was there before counts where it was given to `hold`. What
    an operator takes for itself while it runs, such as the scratch space of a convolution, makes no tensor and is not
    seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._device = device
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._live = self._peak = 0
        self._is_paused = False

    @property
    def live_bytes(self) -> int:
        """Held by tensors now."""
        return self._live

    @property
    def peak_bytes(self) -> int:
        """The most that was held at a time since the last `begin_phase`."""
        return self._peak

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are there already."""
        for storage in self._storages(tensors):
            self._see(storage, storage.nbytes())

    def begin_phase(self) -> None:
        """Forget the peak."""
        self._peak = self._live

    def pause(self, is_paused: bool) -> None:
        """Leave out what happens elsewhere, such as reading samples on the host."""
        self._is_paused = is_paused

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        for storage in self._storages(tree_leaves((args, kwargs))):
            self._see(storage, 0)  # of before, unless it is known
        made = func(*args, **(kwargs or {}))
        for storage in self._storages(tree_leaves(made)):
            self._see(storage, storage.nbytes())
        return made

    def _storages(self, values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
        for value in values:
            if isinstance(value, Tensor) and value.device.type == self._device.type:
                yield from (part.untyped_storage() for part in _strided(value))

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), size
            self._live += size
        elif (counted := self._known[key][1]) and size > counted:  # grown in place
            self._known[key] = self._known[key][0], size
            self._live += size - counted
        self._peak = max(self._peak, self._live)

    def _forget(self, key: int) -> None:
        self._live -= self._known.pop(key)[1]


class AllocatedBytes:
    """What the allocator of a GPU says, scratch space of operators included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def live_bytes(self) -> int:
        """Held now."""
        return int(torch.cuda.memory_allocated(self._device))

    @property
    def peak_bytes(self) -> int:
        """The most that was held at a time since the last `begin_phase`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Nothing: the allocator knows of all."""

    def begin_phase(self) -> None:
        """Forget the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def pause(self, is_paused: bool) -> None:
        """Nothing: the host's memory is not the GPU's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is to be undone."""


PeakBytes: TypeAlias = TensorBytes | AllocatedBytes
"""What is counted between its beginning and its end as a context."""


def count_on(device: torch.device) -> PeakBytes:
    """The count that fits a device."""
    return AllocatedBytes(device) if device.type == "cuda" else TensorBytes(device)


def bytes_of(values: Iterable[object]) -> int:
    """Of all tensors among values; those on one storage count once."""
    storages = {
        part.untyped_storage()._cdata: part.untyped_storage().nbytes()
        for value in values
        if isinstance(value, Tensor)
        for part in _strided(value)
    }
    return sum(storages.values())


def _strided(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors with a storage that it consists of."""
    if tensor.layout == torch.strided:
        return (tensor,)
    return (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else ()
