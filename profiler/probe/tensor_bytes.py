"""Bytes of the tensors that are alive, and the most there were: what a device has to hold, counted on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
