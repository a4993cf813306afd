"""A vision model of your own: a small residual network on real handwritten digits, shifted at random while it trains.

    hetopt profile examples/vision.py:task -o vision.json

What is particular here: samples that change from epoch to epoch. They are drawn from the epoch, the run's seed and the
sample's index alone, so that every cluster trains on the same ones however a batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData
from hetopt.trainer.tasks.recipes import classification, sgd

EVALUATED_IMAGES = 297


class Block(nn.Module):
    """Two convolutions and the way around them (He et al. 2016), normalised inside a sample (Wu & He 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)])

    def forward(self, images: Tensor) -> Tensor:
        """Return the block's output, of the input's shape [n, channels, 8, 8]."""
        inside = functional.relu(self.norms[0](self.first(images)))
        return functional.relu(images + self.norms[1](self.second(inside)))


def model() -> nn.Module:
    """Return the network, [n, 1, 8, 8] -> [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), Block(32), Block(32), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10)
    )


class Shifted(TensorPairs):
    """Images shifted by up to one pixel, in other directions in every epoch."""

    _epoch, _seed = 0, 0

    def set_epoch(self, epoch: int, seed: int, /) -> None:
        """Set the epoch and seed that determine the shifts."""
        object.__setattr__(self, "_epoch", epoch)
        object.__setattr__(self, "_seed", seed)

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        """Return the images of these indices, each randomly shifted, and their labels."""
        images, labels = super().gather(indices)
        moves = [np.random.default_rng((self._seed, self._epoch, int(index))).integers(-1, 2, 2) for index in indices]
        moved = [torch.roll(image, tuple(map(int, move)), (1, 2)) for image, move in zip(images, moves, strict=True)]
        return torch.stack(moved), labels

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        images, labels = self.gather([index])
        return images[0], labels[0]


def data(folder: Path | None) -> TaskData:
    """Return 1,500 images to train on and 297 to evaluate on, scaled to 0..1."""
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target)
    return TaskData(
        train=Shifted(images[:-EVALUATED_IMAGES], labels[:-EVALUATED_IMAGES]),
        evaluation=TensorPairs(images[-EVALUATED_IMAGES:], labels[-EVALUATED_IMAGES:]),
    )


task: Task = classification(
    name="vision",
    model=model,
    data=data,
    optimizer=sgd(0.05),
    target=Target(metric="accuracy", value=0.95),
    batch_size=64,
)
