"""The label of every sample of a data set, whatever kind of data set it is."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hetopt.core.errors import BadInput
from hetopt.trainer.data.cursor import Indices
from hetopt.trainer.data.fetch import MapDataset, fetch, inputs_and_targets, set_epoch

_AT_A_TIME = 1024


def labels_of(dataset: MapDataset) -> Indices:
    """The labels, [samples], int64: the data set's ``targets`` or ``labels`` where it has them, else read one by one.

    Raises:
        BadInput: samples are not pairs of an input and a whole number.
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
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        raise BadInput(
            f"The samples of {type(dataset).__name__} have no labels: a target is a tensor of "
            f"{str(targets.dtype).removeprefix('torch.')} with shape {tuple(targets.shape[1:])}, not a whole number.",
            hint="use the partition 'shards' or 'seldp', which need no labels",
        )
    labels: Indices = targets.cpu().numpy().astype(np.int64, copy=False)
    return labels
