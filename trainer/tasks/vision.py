"""The bundled image task: the 20-layer residual network of section 4.2 on CIFAR-10 (He, Zhang, Ren & Sun, CVPR 2016).

The target is 80 % accuracy, that of the gradient-compression literature, which is modest: ResNet-20 ends at 91.25 %
after 164 epochs (table 6). It is meant for the full training set; a part of it may not be enough to get there.

BatchNorm follows the paper, so the gradient of a batch depends on how it is split over workers (each normalises by its
own share), as in any data-parallel training of these networks.

On disk a record is a label byte and 3,072 bytes of pixels: the red, green and blue planes of 32x32, row by row
(Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html).

Random crops and flips are a function of (seed, epoch, sample), not of who draws first: a generator for each worker
would make images look different when shares change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hetopt.core.errors import BadInput
from hetopt.core.paths import read_bytes
from hetopt.trainer.task import Target, Task, TaskData
from hetopt.trainer.tasks.recipes import classification, sgd, step_decay


@lru_cache(maxsize=2)  # samples are read ahead: one reader may be in the next epoch already
def random_bits(seed: int, epoch: int, samples: int) -> NDArray[np.uint64]:
    """Return 64 random bits for each of ``samples`` samples, uint64 [samples]; the same on every platform.

    Args:
        seed: seed of the run.
        epoch: number of the epoch, from 0.
        samples: number of samples of the dataset.
    """
    return np.random.PCG64(np.random.SeedSequence((seed, epoch, _CROPS))).random_raw(samples)


def cropped_and_flipped(images: Tensor, bits: NDArray[np.uint64], padding: int) -> Tensor:
    """Return images, each padded with zeros, cut to its size at random, and mirrored in half of the cases, by ``bits``.

    As He et al. 2016, section 4.2, augment them.

    Args:
        images: [n, channels, height, width].
        bits: random bits of each image, [n] uint64.
        padding: pixels added at every edge before the cut.
    """
    count, _, height, width = images.shape
    padded = functional.pad(images, (padding, padding, padding, padding))
    # A 16-bit field scaled down to 0..2*padding: each offset is hit equally often to within 2^-16.
    top = _field(bits, 16) * (2 * padding + 1) >> 16
    left = _field(bits, 32) * (2 * padding + 1) >> 16
    mirrored = (_field(bits, 48) & 1).bool()
    rows = top[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = left[:, None] + torch.where(mirrored[:, None], width - 1 - columns, columns)
    sample = torch.arange(count)[:, None, None]
    # Indexing around the channel dimension puts it last.
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()


def _field(bits: NDArray[np.uint64], shift: int) -> Tensor:
    """Return 16 of the 64 bits, as non-negative integers."""
    return torch.from_numpy(((bits >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64))


_CROPS = 0xC20B5
"""Tells these random words from those that order the samples of the same epoch."""


CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
FOLDER = "cifar-10-batches-bin"
"""Folder that the archive unpacks to."""

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
EVALUATION_FILE = "test_batch.bin"
MEAN, STANDARD_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation of each colour over the 50,000 training images, in units of the full range 0..1."""

_WHERE = (
    "Get the binary version of CIFAR-10 (not the Python one, a pickle, which could run any code when "
    "it is read) from https://www.cs.toronto.edu/~kriz/cifar.html; it holds "
    f"{', '.join((*TRAIN_FILES, EVALUATION_FILE))} in {FOLDER}/."
)


class ImageDataset:
    """A dataset of images kept as bytes, normalised as CIFAR-10 and (``padding`` above 0) augmented when fetched.

    What a sample looks like depends on (seed, epoch, index) alone, so fetching [i, j] together equals fetching them
    apart.

    Args:
        images: uint8, [n, channels, height, width].
        labels: int64, [n].
        padding: pixels added at every edge before a random cut of the old size; 0: images are not augmented.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, padding: int = 0) -> None:
        self._images = images
        self._labels = labels
        self._mean = torch.tensor(MEAN).view(-1, 1, 1) * 255
        self._scale = 1 / (torch.tensor(STANDARD_DEVIATION).view(-1, 1, 1) * 255)
        self._padding = padding
        self._epoch = 0
        self._seed = 0

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        images, labels = self.gather([index])
        return images[0], labels[0]

    def set_epoch(self, epoch: int, seed: int = 0, /) -> None:
        """Set the epoch, from 0, and the run's seed, by which samples are augmented from now on."""
        self._epoch, self._seed = epoch, seed

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        """Return float32 images [n, channels, height, width] of about zero mean and unit variance, and labels [n].

        With padding, cropped and flipped at random, as of the epoch and seed.
        """
        rows = torch.as_tensor(indices, dtype=torch.int64)
        images = self._images[rows]
        if self._padding:
            bits = random_bits(self._seed, self._epoch, len(self))[rows.numpy()]
            images = cropped_and_flipped(images, bits, self._padding)
        return (images.float() - self._mean) * self._scale, self._labels[rows]


def load_cifar(folder: Path | None) -> TaskData:
    """Return CIFAR-10 from ``folder`` or its archive's subfolder, with as many of the training files as are there.

    Args:
        folder: folder of the data; None: none was given, which is refused.

    Raises:
        BadInput: no folder is given, no training file or not the test file is there, or a file is truncated or holds
            impossible labels.
    """
    if folder is None:
        raise BadInput("CIFAR-10 needs a data folder.", hint=f"give `data`. {_WHERE}")
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    train_files = [folder / name for name in TRAIN_FILES if (folder / name).is_file()]
    if not train_files or not (folder / EVALUATION_FILE).is_file():
        there = ", ".join(name for name in (*TRAIN_FILES, EVALUATION_FILE) if (folder / name).is_file())
        raise BadInput(
            f"CIFAR-10 is not complete in {folder}: of the binary version it holds {there or 'no file'}.", hint=_WHERE
        )
    train = _read(train_files, padding=4)
    evaluation = _read([folder / EVALUATION_FILE])
    return TaskData(
        train=train,
        evaluation=evaluation,
        description=(
            f"CIFAR-10 in {folder}: {len(train):,} training images from {len(train_files)} of "
            f"{len(TRAIN_FILES)} files, {len(evaluation):,} evaluation images"
        ),
    )


def _read(paths: Sequence[Path], *, padding: int = 0) -> ImageDataset:
    """Return the images of files, one after the other; errors as of `_read_records`."""
    records = np.concatenate([_read_records(path) for path in paths])
    images = torch.from_numpy(records[:, 1:].reshape(-1, *IMAGE_SHAPE).copy())
    return ImageDataset(images, torch.from_numpy(records[:, 0].astype(np.int64)), padding=padding)


def _read_records(path: Path) -> NDArray[np.uint8]:
    """Return a file's records, [n, `RECORD_BYTES`]: the label, then the pixels.

    Raises:
        BadInput: the file cannot be read, is empty or truncated, or has labels that cannot be.
    """
    data = np.frombuffer(read_bytes(path), dtype=np.uint8)
    if data.size == 0 or data.size % RECORD_BYTES:
        raise BadInput(
            f"{path} is truncated or not CIFAR-10: its {data.size:,} bytes are not a whole number of "
            f"{RECORD_BYTES:,}-byte records.",
            hint=f"Unpack the archive again. {_WHERE}",
        )
    records = data.reshape(-1, RECORD_BYTES)
    highest = int(records[:, 0].max())
    if highest >= CLASSES:
        raise BadInput(
            f"{path} is damaged or not CIFAR-10: it has a label {highest}, and labels end at {CLASSES - 1}.",
            hint=_WHERE,
        )
    return records


class ZeroPadShortcut(nn.Module):
    """A shortcut without parameters (option A): every ``stride``-th pixel, and new channels filled with zeros.

    Args:
        inputs: channels of the images.
        outputs: channels of the result, at least as many.
        stride: distance of the pixels that are kept.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.new_channels = outputs - inputs
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        """Return images [n, inputs, h, w] as [n, outputs, h / stride, w / stride]."""
        strided = images[:, :, :: self.stride, :: self.stride]
        before = self.new_channels // 2
        return functional.pad(strided, (0, 0, 0, 0, before, self.new_channels - before))


class ResidualBlock(nn.Module):
    """A residual block of two 3x3 convolutions with BatchNorm and a shortcut: relu(body(x) + shortcut(x)).

    The shortcut has no parameters: it takes each ``stride``-th pixel, and adds channels of zeros (option A).

    Args:
        inputs: channels of the images.
        width: channels of the result, at least as many.
        stride: stride of the first convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        is_alike = inputs == width and stride == 1
        self.shortcut = nn.Identity() if is_alike else ZeroPadShortcut(inputs, width, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Return [n, width, h / stride, w / stride] for images [n, inputs, h, w]."""
        return functional.relu(self.body(images) + self.shortcut(images))


class ResNet20(nn.Module):
    """A residual network of 20 layers: a 3x3 convolution, three stages of three blocks, global average, linear layer.

    269,722 parameters for 10 classes. Implementations that project their shortcuts (option B) count 272,474; the
    paper's CIFAR networks use option A everywhere, "0.27M".

    Args:
        classes: number of classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        self.blocks = nn.Sequential(
            *(ResidualBlock(before, width, width // before) for before, width in pairwise(widths))
        )
        self.head = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [n, classes] of images [n, 3, h, w]."""
        features: Tensor = self.blocks(self.stem(images)).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits


def resnet20_cifar10() -> Task:
    """Return the task `resnet20-cifar10`: ResNet-20 to 80 % accuracy, by its paper's recipe (64k steps of 128).

    0.27 million parameters; the learning rate drops at 32k and 48k steps."""
    return classification(
        name="resnet20-cifar10",
        model=partial(ResNet20, CLASSES),
        data=load_cifar,
        optimizer=sgd(0.1, weight_decay=1e-4),
        schedule=step_decay(82, 123, factor=0.1),
        usual_epochs=164,
        target=Target(metric="accuracy", value=0.80),
        batch_size=128,
    )
