"""`digits`: scikit-learn's handwritten digits (real, 8x8 pixels, no download) and a small convolutional network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData
from hetopt.trainer.tasks.recipes import classification, sgd

CLASSES = 10
_EVALUATION_EVERY = 5
_EVALUATION_OFFSET = 2


def digits_network() -> nn.Module:
    """Return a new network for images [n, 1, 8, 8], with logits [n, 10]: 98,250 parameters, convolutional.

    To train it takes about 0.2 ms a sample and CPU core. It normalises by groups of channels (Wu & He 2018), inside a
    sample, so that the gradient of a batch does not depend on how the batch is split over workers.
    """
    return nn.Sequential(
        *_convolution(1, 32),
        *_convolution(32, 64),
        nn.MaxPool2d(2),
        *_convolution(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 2 * 2, CLASSES),
    )


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU(inplace=True)


def digits_data(folder: Path | None) -> TaskData:
    """Return scikit-learn's digits, [1, 8, 8] in 0..1: 1,438 to train and 359 to evaluate; ``folder`` is not used.

    The split is fixed and stratified: of each class every fifth image evaluates. Pixels are scaled from 0..16 to 0..1.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    table = _table()
    images = table[:, :-1].float().div(16).reshape(-1, 1, 8, 8)
    labels = table[:, -1].long()
    evaluates = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        of_class = (labels == label).nonzero().flatten()
        evaluates[of_class[_EVALUATION_OFFSET::_EVALUATION_EVERY]] = True
    train = TensorPairs(images[~evaluates], labels[~evaluates])
    evaluation = TensorPairs(images[evaluates], labels[evaluates])
    return TaskData(
        train=train,
        evaluation=evaluation,
        description=f"scikit-learn digits: {len(train):,} training and {len(evaluation):,} evaluation images",
    )


def _table() -> Tensor:
    """Return [1,797, 65]: 64 pixels from 0 to 16, row by row, and the class.

    Read from the file that scikit-learn brings along. To ask scikit-learn for it would import scipy in every worker:
    most of a second, a third of what a worker of a small run computes in all.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None:
        import sklearn  # noqa: F401  # raises ImportError
    assert package is not None and package.origin is not None  # noqa: PT018
    return torch.from_numpy(np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=","))


def digits() -> Task:
    """Return the task `digits`: 98 % accuracy on 8x8 digits, after 2 to 8 epochs at global batches of 32 to 256."""
    return classification(
        name="digits",
        model=digits_network,
        data=digits_data,
        optimizer=sgd(0.005),
        target=Target(metric="accuracy", value=0.98),
        batch_size=64,
        usual_epochs=20,
    )
