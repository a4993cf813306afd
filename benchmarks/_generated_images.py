"""ResNet-20 on generated images of CIFAR-10's shape: its computation and its gradient, without a download."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Task, TaskData
from hetopt.trainer.tasks.vision import resnet20_cifar10

SAMPLES, EVALUATED = 10_000, 100


def _data(folder: Path | None) -> TaskData:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES + EVALUATED, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (SAMPLES + EVALUATED,), generator=generator)
    train = TensorPairs(images[:SAMPLES], labels[:SAMPLES])
    return TaskData(train=train, evaluation=TensorPairs(images[SAMPLES:], labels[SAMPLES:]))


def task() -> Task:
    """The bundled task with that data."""
    return replace(resnet20_cifar10(), name="generated-images", data=_data)
