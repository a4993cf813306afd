"""Where a loss stopped being finite: which worker met it first, in which step, and over which samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hetopt.trainer.agreement import gather_texts
from hetopt.trainer.data.cursor import Indices
from hetopt.trainer.data.fetch import Batch, MapDataset, fetch, leaves_of
from hetopt.trainer.data.micro_batch import MicroBatch

MOST_STEPS = 500
"""That are remembered: several control periods."""

MOST_NAMED = 5
"""Samples; the others are counted."""


class LossRecord:
    """The losses of this worker's last steps, with the samples of each; asking for one waits for the device."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Tensor, list[Sequence[int] | Indices]]] = deque(maxlen=MOST_STEPS)

    def add(self, step: int, loss_sum: Tensor, parts: Sequence[MicroBatch]) -> None:
        """One more step.

        Args:
            step: its number.
            loss_sum: over the worker's samples, on the device.
            parts: those samples.
        """
        self._steps.append((step, loss_sum, [part.indices for part in parts]))

    def first_broken(self) -> tuple[int, tuple[int, ...]] | None:
        """The first step whose loss is not finite, and its samples; None: there is none."""
        for step, loss_sum, parts in self._steps:
            if not bool(torch.isfinite(loss_sum)):
                return step, tuple(int(index) for part in parts for index in part)
        return None


def where_it_broke(record: LossRecord, dataset: MapDataset | None, *, rank: int, world_size: int) -> str:
    """In words that follow "the loss is nan". Called by all ranks together, which are told the same.

    Args:
        record: of this worker.
        dataset: the training data by index, to look for the samples at fault; None: they have no index.
        rank: of this worker.
        world_size: workers.
    """
    found = record.first_broken()
    own = ""
    if found is not None:
        step, samples = found
        own = f"{step}|{_told(samples, dataset)}"
    texts = gather_texts(own, world_size)
    broken = [
        (int(text.partition("|")[0]), number, text.partition("|")[2]) for number, text in enumerate(texts) if text
    ]
    if not broken:
        return ""
    step, number, samples_told = min(broken)
    return f" on worker {number} at step {step}{samples_told}"


def _told(samples: Sequence[int], dataset: MapDataset | None) -> str:
    if dataset is None:
        return ""
    at_fault = [index for index in samples if _holds_what_is_not_finite(fetch(dataset, [index]))]
    if at_fault:
        holds = "holds a value that is" if len(at_fault) == 1 else "hold values that are"
        return f": {_named(at_fault)} of the training data {holds} not finite"
    return f", over {_named(samples)} of the training data"


def _named(samples: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in samples[:MOST_NAMED])
    more = f" and {len(samples) - MOST_NAMED} more" if len(samples) > MOST_NAMED else ""
    return f"{'sample' if len(samples) == 1 else 'samples'} {shown}{more}"


def _holds_what_is_not_finite(batch: Batch) -> bool:
    tensors = (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return not all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
