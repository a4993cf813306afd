"""Batches of samples by their indices, and the labels of all samples, of any kind of dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from hetopt.core.errors import BadInput
from hetopt.trainer.data.cursor import Indices

Batch: TypeAlias = "Tensor | tuple[Batch, ...] | list[Batch] | dict[str, Batch]"
"""Batch of samples: tensors whose first dimension is the sample, nested as the task likes."""


class MapDataset(Protocol):
    """Protocol of datasets that return a sample by index; any map-style torch ``Dataset`` with a length is one.

    With ``gather(indices)`` it returns the collated batch of some samples in one step. (PyTorch's ``__getitems__`` is a
    list of samples still to be collated.) With ``set_epoch(epoch, seed)`` its samples change from epoch to epoch.

    A sample may depend on its index, the epoch and the run's seed, never on which other samples are fetched
    beside it or by which worker: only then do all splits of a global batch see the same inputs. Augmentation
    that draws from a global generator breaks this law (the run still works, but its inputs change with the split).
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> object:
        """Return one sample, not collated."""


def fetch(dataset: MapDataset, indices: Sequence[int] | Indices) -> Batch:
    """Return the batch of ``indices``, in that order: by the dataset's ``gather`` if it has one, else collated.

    Raises:
        BadInput: the samples cannot be collated: they are of a foreign type, or of unequal shapes.
    """
    gather = getattr(dataset, "gather", None)
    if gather is not None:
        return cast(Batch, gather(indices))
    plain = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
    many = getattr(dataset, "__getitems__", None)
    samples = [dataset[index] for index in plain] if many is None else many(plain)
    try:
        return cast(Batch, default_collate(samples))
    except (TypeError, RuntimeError) as error:  # what default_collate raises for a foreign type and for unequal sizes
        raise BadInput(
            f"The samples of {type(dataset).__name__} cannot be collated into a batch: {error}",
            hint="Return tensors of one shape from every sample, or give the dataset a gather(indices) method.",
        ) from error


def changes_with_epoch(dataset: MapDataset) -> bool:
    """Return whether a dataset's samples change from epoch to epoch (augmentation): it has ``set_epoch``."""
    return hasattr(dataset, "set_epoch")


def set_epoch(dataset: MapDataset, epoch: int, seed: int) -> None:
    """Set the epoch (from 0) and the run's seed of a dataset that has ``set_epoch``; others are left alone."""
    if changes_with_epoch(dataset):
        cast(Any, dataset).set_epoch(epoch, seed)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """Return a nested batch with its tensors on ``device``, other leaves as they are; does not wait for copies."""
    return cast(Batch, tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch))


def rows(batch: Batch, first: int, last: int) -> Batch:
    """Return the samples of a nested batch from index ``first`` up to ``last``, not copied; scalars as they are."""
    return cast(Batch, tree_map_only(Tensor, lambda tensor: tensor[first:last] if tensor.dim() else tensor, batch))


DEEPEST = 6
"""Levels of a nested batch down to which tensors are looked for: an object may hold what holds it."""


def tensors_in(batch: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in sequences, mappings and attributes of objects, ``depth`` levels deep at most."""
    if isinstance(batch, Tensor):
        yield batch
    elif depth:
        parts: Any = batch if isinstance(batch, (list, tuple)) else getattr(batch, "__dict__", {}).values()
        for part in batch.values() if isinstance(batch, Mapping) else parts:
            yield from tensors_in(part, depth - 1)


def samples_in(batch: Any) -> int:
    """Return the number of samples of a collated batch: the first tensor's length; 0: no tensor has a dimension."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)


def inputs_and_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the two tensors (inputs, targets) of a supervised batch.

    Raises:
        BadInput: the batch is anything but a sequence of two tensors.
    """
    match batch:
        case (Tensor() as inputs, Tensor() as targets):
            return inputs, targets
    raise BadInput(
        "This kind of task needs batches of two tensors, inputs and targets, and the dataset gives something else.",
        hint="Return (input, target) from the dataset, or write the task's loss and evaluate for your own batches.",
    )


@dataclass(frozen=True, eq=False)
class TensorPairs:
    """Dataset of inputs and targets in memory; sample ``i`` is row ``i`` of each.

    Attributes:
        inputs: [samples, ...].
        targets: [samples, ...].

    Raises:
        BadInput: inputs and targets differ in length.
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise BadInput(f"There are {len(self.inputs)} inputs but {len(self.targets)} targets.")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def gather(self, indices: Sequence[int] | Indices, /) -> tuple[Tensor, Tensor]:
        """Return the rows of inputs and of targets at ``indices``."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return self.inputs[rows], self.targets[rows]


_AT_A_TIME = 1024


def labels_of(dataset: MapDataset) -> Indices:
    """Return the labels, [samples], int64: the dataset's ``targets`` or ``labels``, else read sample by sample.

    A dataset that changes with the epoch is then set to epoch 0. ``targets`` or ``labels`` count where they are a
    tensor, array or list as long as the dataset.

    Raises:
        BadInput: labels are no whole numbers, or samples are not pairs of an input and a target.
    """
    for name in ("targets", "labels"):
        kept = getattr(dataset, name, None)
        if isinstance(kept, (Tensor, np.ndarray, list)) and len(kept) == len(dataset):
            return _whole_numbers(torch.as_tensor(kept), dataset)
    set_epoch(dataset, 0, 0)
    parts = []
    for first in range(0, len(dataset), _AT_A_TIME):
        indices = np.arange(first, min(first + _AT_A_TIME, len(dataset)), dtype=np.int64)
        parts.append(inputs_and_targets(fetch(dataset, indices))[1])
    return _whole_numbers(torch.cat(parts), dataset)


def _whole_numbers(targets: Tensor, dataset: MapDataset) -> Indices:
    """Return targets as int64 labels; BadInput: they are not 1-D whole numbers."""
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        raise BadInput(
            f"The samples of {type(dataset).__name__} have no labels: a target is a tensor of "
            f"{str(targets.dtype).removeprefix('torch.')} with shape {tuple(targets.shape[1:])}, not a whole number.",
            hint="use the partition 'shards' or 'seldp', which need no labels",
        )
    labels: Indices = targets.cpu().numpy().astype(np.int64, copy=False)
    return labels
