"""Small jobs for benchmarks of time, one of which is so small that eight workers share a core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData
from hetopt.trainer.tasks.digits import CLASSES, digits_data
from hetopt.trainer.tasks.recipes import classification, sgd
from hetopt.trainer.tasks.vision import ResNet20

SAMPLES = 960
"""Few, so that policies that decide once an epoch decide every ten steps of 96 samples."""


def small_network() -> nn.Module:
    """Return a network [n, 1, 8, 8] -> [n, 10] of 4,810 parameters; a step takes under a millisecond."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def few_digits(folder: Path | None) -> TaskData:
    """Return the first 960 training images, and the evaluation images.

    Raises:
        ImportError: as of `digits_data`.
    """
    whole = digits_data(folder)
    assert isinstance(whole.train, TensorPairs)
    return TaskData(
        train=TensorPairs(whole.train.inputs[:SAMPLES], whole.train.targets[:SAMPLES]), evaluation=whole.evaluation
    )


def task() -> Task:
    """Return the task of a small network on few digits."""
    return classification(
        name="few-digits",
        model=small_network,
        data=few_digits,
        optimizer=sgd(0.1),
        target=Target(metric="accuracy", value=0.9),
        batch_size=96,
    )


def broad_digits() -> Task:
    """Return the task of a network of 320 thousand parameters (1.3 MB of gradient), one or two milliseconds a step."""
    return classification(
        name="broad-digits",
        model=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 240), nn.ReLU(), nn.Linear(240, CLASSES)
        ),
        data=digits_data,
        optimizer=sgd(0.05),
        target=Target(metric="accuracy", value=0.9),
        batch_size=64,
    )


def noise() -> Task:
    """Return the task of the smallest network on random images: nothing is read, and nothing imported that reads."""
    return _random_images("noise", small_network, shape=(1, 8, 8))


def resnet() -> Task:
    """Return the task of ResNet-20 (1.1 MB of gradient) on images of CIFAR's shape."""
    return _random_images("resnet20-random", lambda: ResNet20(CLASSES))


def wide() -> Task:
    """Return the task of a network of 4 million parameters (17 MB of gradient) that computes and sends equally long."""
    return _random_images(
        "wide-random",
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
        ),
    )


def _images(count: int, evaluated: int, shape: tuple[int, ...], folder: Path | None) -> TaskData:
    """Return images of noise with labels drawn at random, the same at every call; the folder is not read."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count + evaluated, *shape, generator=generator)
    labels = torch.randint(CLASSES, (count + evaluated,), generator=generator)
    return TaskData(
        train=TensorPairs(images[:count], labels[:count]), evaluation=TensorPairs(images[count:], labels[count:])
    )


def _random_images(name: str, model: Callable[[], nn.Module], shape: tuple[int, ...] = (3, 32, 32)) -> Task:
    return classification(
        name=name,
        model=model,
        data=partial(_images, 512, 16, shape),
        optimizer=sgd(0.01),
        target=Target(metric="accuracy", value=0.9),
        batch_size=32,
    )
