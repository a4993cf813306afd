"""A task that trains in a second: ten Gaussian clouds in sixteen dimensions and a two-layer network."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, TaskData
from hetopt.trainer.tasks.recipes import classification, sgd


def data(folder: Path | None) -> TaskData:
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(10, 16, generator=generator) * 2

    def clouds(count: int) -> TensorPairs:
        labels = torch.randint(10, (count,), generator=generator)
        return TensorPairs(centres[labels] + 2.2 * torch.randn(count, 16, generator=generator), labels)

    return TaskData(train=clouds(800), evaluation=clouds(200))


task = classification(
    name="clouds",
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)),
    data=data,
    optimizer=sgd(0.003),
    target=Target(metric="accuracy", value=0.85),
    batch_size=16,
)
