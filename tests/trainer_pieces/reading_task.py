"""Tasks whose data is peculiar to read; opened by name, also in other processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData

SIZE = 23


class Augmented(TensorPairs):
    """Samples that change with the epoch and remember who asked."""

    def set_epoch(self, epoch: int, seed: int, /) -> None:
        object.__setattr__(self, "epoch", epoch)
        object.__setattr__(self, "threads", {*getattr(self, "threads", ()), threading.get_ident()})

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        return rows, rows + 1000 * self.epoch


class Sour(TensorPairs):
    """Cannot be read beyond sample 10."""

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        if max(indices) > 10:
            raise SourError(max(indices))
        return super().gather(indices)


class SourError(Exception):
    """With what is needed to tell it apart."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def _task(kind: type[TensorPairs]) -> Task:
    def no_loss(model: nn.Module, batch: object) -> Tensor:
        raise NotImplementedError("these samples are only read")

    zeros = torch.zeros(SIZE)
    return Task(
        name=kind.__name__,
        model=lambda: nn.Linear(1, 1),
        data=lambda folder: TaskData(train=kind(zeros, zeros), evaluation=TensorPairs(zeros, zeros)),
        loss=no_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        evaluate=lambda model, batch: {},
        metrics=lambda sums, count: {},
        target=Target(metric="none", value=0),
        batch_size=1,
    )


def augmented() -> Task:
    return _task(Augmented)


def sour() -> Task:
    return _task(Sour)
