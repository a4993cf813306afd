"""The jobs of `benchmarks.time_to_target`: siblings of the published models that two cores train in minutes.

Each has the published model's shape and trains on real data, but it is narrower, or its images are smaller, until whole
runs fit: methods differ most while little is learned. The learning rate is constant, so that the length of a run does
not decide how soon it is good. What a job evaluates on is cut to what can be looked at often.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetopt.trainer.data.fetch import MapDataset, TensorPairs, fetch, inputs_and_targets, set_epoch
from hetopt.trainer.task import Target, Task, TaskData
from hetopt.trainer.tasks.language import LSTMLanguageModel, find_corpus, windows
from hetopt.trainer.tasks.recipes import language_model, sgd
from hetopt.trainer.tasks.vision import resnet20_cifar10

CHARACTERS, CHARACTER_WINDOW, EVALUATED_WINDOWS = 96, 32, 800
"""Different ones, the first stands for all that are rare; in a sample; and samples to evaluate on."""


def convnet() -> Task:
    """Return the task of three convolutions on a fifth of CIFAR-10 at 16x16 pixels, and its mirror: 0.1 MB of gradient.

    Trained until its accuracy no longer rises.
    """
    bundled = resnet20_cifar10()
    return replace(bundled, model=partial(plain_convnet, 10), data=load_mirrored)


@functools.cache
def load_mirrored(folder: Path | None) -> TaskData:
    """Return images of 16x16 pixels, mirrored as well for training; read once for all runs of a process.

    Raises:
        BadInput: the folder has no such data, or is None.
    """
    whole = resnet20_cifar10().data(folder)
    train, evaluation = (_at_16_pixels(each) for each in (whole.train, whole.evaluation))
    mirrored = TensorPairs(torch.cat((train.inputs, train.inputs.flip(3))), train.targets.repeat(2))
    return replace(whole, train=mirrored, evaluation=evaluation)


def characters() -> Task:
    """Return the task of a one-layer LSTM on the characters of WikiText-2's validation text: 0.4 MB of gradient.

    Where words are so few that counting them does as well, letters are enough: it beats counts of four in a row.
    """
    return language_model(
        name="characters",
        model=partial(
            LSTMLanguageModel, vocabulary_size=CHARACTERS, width=96, layers=1, dropout=0.0, initial_range=0.1
        ),
        data=load_characters,
        optimizer=sgd(2.0, momentum=0.9, max_gradient_norm=0.25),
        target=Target(metric="perplexity", value=5.0, higher_is_better=False),
        batch_size=64,
    )


@functools.cache
def load_characters(folder: Path | None) -> TaskData:
    """Return windows of `CHARACTER_WINDOW` characters: validation text to train on, test text to evaluate on.

    Read once for all runs of a process.

    Raises:
        BadInput: the folder has no such text, or is None.
    """
    files = find_corpus(folder)
    texts = [file.read_text(encoding="utf-8") for file in files]
    numbers = {letter: number for number, (letter, _) in enumerate(Counter(texts[0]).most_common(CHARACTERS - 1), 1)}
    train, evaluation = (
        windows(torch.tensor([numbers.get(letter, 0) for letter in text]), CHARACTER_WINDOW, source=files[0])
        for text in (texts[0], texts[1][: (EVALUATED_WINDOWS + 1) * CHARACTER_WINDOW])
    )
    return TaskData(train=train, evaluation=evaluation, description=f"{CHARACTERS} characters of {files[0].name}")


def plain_convnet(classes: int, width: int = 16) -> nn.Module:
    """Return three convolutions with batch norm, each of twice the channels: [n, 3, height, width] -> [n, classes]."""
    layers: list[nn.Module] = []
    channels = 3
    for outputs in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2) if outputs < 4 * width else nn.AdaptiveAvgPool2d(1))
        channels = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


class Halved:
    """Images at half their height and width."""

    def __init__(self, whole: MapDataset) -> None:
        self._whole = whole

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        images, labels = self.gather([index])
        return images[0], labels[0]

    def set_epoch(self, epoch: int, seed: int, /) -> None:
        """Set the epoch of the whole images."""
        set_epoch(self._whole, epoch, seed)

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        """Return the images of these indices, each pixel the mean of four, and their labels."""
        images, labels = inputs_and_targets(fetch(self._whole, indices))
        return functional.avg_pool2d(images, 2), labels


def _at_16_pixels(images: MapDataset | None) -> TensorPairs:
    """Return all images at half size, without the random moves and mirroring of training."""
    assert images is not None
    set_epoch(images, 0, 0)
    return TensorPairs(*Halved(images).gather(range(len(images))))
