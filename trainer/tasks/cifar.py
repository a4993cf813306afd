"""The binary form of CIFAR-10 and CIFAR-100 on disk, and its images in memory.

A record is one or two label bytes (CIFAR-100: coarse, then fine) and 3,072 bytes of pixels: the red, green and blue
planes of 32x32, row by row (Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetopt.core.errors import BadInput
from hetopt.trainer.task import TaskData
from hetopt.trainer.tasks.augmentation import Augmentation, crop_and_flip, random_bits, unchanged

IMAGE_SHAPE = (3, 32, 32)
_PIXEL_BYTES = 3 * 32 * 32
_WEB_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True, kw_only=True)
class CifarFormat:
    """File names, record layout and pixel statistics of one of the two datasets.

    Attributes:
        name: what people call the dataset.
        folder: the folder that its archive unpacks to.
        pickle_names: files of the Python version, which is not read.
        label_counts: how many values each label byte of a record can take; the last is the label that is learned.
        mean, standard_deviation: of each colour over the 50,000 training images, in units of the full range 0..1.
    """

    name: str
    folder: str
    train_files: tuple[str, ...]
    evaluation_files: tuple[str, ...]
    pickle_names: tuple[str, ...]
    label_counts: tuple[int, ...]
    mean: tuple[float, float, float]
    standard_deviation: tuple[float, float, float]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.label_counts[-1]

    @property
    def record_bytes(self) -> int:
        """Bytes of one image with its labels."""
        return len(self.label_counts) + _PIXEL_BYTES


CIFAR10 = CifarFormat(
    name="CIFAR-10",
    folder="cifar-10-batches-bin",
    train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    evaluation_files=("test_batch.bin",),
    pickle_names=("data_batch_1", "cifar-10-batches-py"),
    label_counts=(10,),
    mean=(0.4914, 0.4822, 0.4465),
    standard_deviation=(0.2470, 0.2435, 0.2616),
)
CIFAR100 = CifarFormat(
    name="CIFAR-100",
    folder="cifar-100-binary",
    train_files=("train.bin",),
    evaluation_files=("test.bin",),
    pickle_names=("train", "cifar-100-python"),
    label_counts=(20, 100),
    mean=(0.5071, 0.4865, 0.4409),
    standard_deviation=(0.2673, 0.2564, 0.2762),
)


class ImageDataset:
    """Images kept as bytes, augmented and normalised when they are fetched.

    What a sample looks like depends on (seed, epoch, index) alone, so fetching [i, j] together equals fetching them
    apart.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: Sequence[float],
        standard_deviation: Sequence[float],
        augment: Augmentation = unchanged,
    ) -> None:
        """Take uint8 ``images`` [n, channels, height, width] and int64 ``labels`` [n]."""
        self._images = images
        self._labels = labels
        self._mean = torch.tensor(mean).view(-1, 1, 1) * 255
        self._scale = 1 / (torch.tensor(standard_deviation).view(-1, 1, 1) * 255)
        self._augment = augment
        self._epoch = 0
        self._seed = 0

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        images, labels = self.gather([index])
        return images[0], labels[0]

    def set_epoch(self, epoch: int, seed: int = 0, /) -> None:
        """From now on augment as in ``epoch`` of the run seeded with ``seed``."""
        self._epoch, self._seed = epoch, seed

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        """Return float32 images of about zero mean and unit variance, and their labels."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        images = self._augment(self._images[rows], random_bits(self._seed, self._epoch, indices))
        return (images.float() - self._mean) * self._scale, self._labels[rows]


def load_cifar(layout: CifarFormat, folder: Path | None) -> TaskData:
    """Open the dataset in ``folder`` or in its archive's subfolder. All training files that are there are used.

    Raises:
        BadInput: files are missing, truncated, or hold impossible labels.
    """
    if folder is None:
        raise BadInput(f"{layout.name} needs a data folder.", hint=f"give `data`. {_where(layout)}")
    if not folder.is_dir():
        raise BadInput(f"The data folder {folder} does not exist.", hint=_where(layout))
    folder = folder / layout.folder if (folder / layout.folder).is_dir() else folder
    train_files = [folder / name for name in layout.train_files if (folder / name).is_file()]
    evaluation_files = [folder / name for name in layout.evaluation_files if (folder / name).is_file()]
    if not train_files or not evaluation_files:
        raise _missing(layout, folder, train_found=bool(train_files), evaluation_found=bool(evaluation_files))
    train = _read(layout, train_files, crop_and_flip(padding=4))
    evaluation = _read(layout, evaluation_files, unchanged)
    return TaskData(
        train=train,
        evaluation=evaluation,
        description=(
            f"{layout.name} in {folder}: {len(train):,} training images from {len(train_files)} of "
            f"{len(layout.train_files)} files, {len(evaluation):,} evaluation images"
        ),
    )


def _read(layout: CifarFormat, paths: Sequence[Path], augment: Augmentation) -> ImageDataset:
    records = np.concatenate([_read_records(layout, path) for path in paths])
    label_bytes = len(layout.label_counts)
    return ImageDataset(
        torch.from_numpy(records[:, label_bytes:].reshape(-1, *IMAGE_SHAPE).copy()),
        torch.from_numpy(records[:, label_bytes - 1].astype(np.int64)),
        mean=layout.mean,
        standard_deviation=layout.standard_deviation,
        augment=augment,
    )


def _read_records(layout: CifarFormat, path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from error
    if data.size == 0 or data.size % layout.record_bytes:
        raise BadInput(
            f"{path} is truncated or not {layout.name}: its {data.size:,} bytes are not a whole number of "
            f"{layout.record_bytes:,}-byte records.",
            hint=f"Unpack the archive again. {_where(layout)}",
        )
    records = data.reshape(-1, layout.record_bytes)
    for column, count in enumerate(layout.label_counts):
        highest = int(records[:, column].max())
        if highest >= count:
            raise BadInput(
                f"{path} is damaged or not {layout.name}: it has a label {highest}, and labels end at {count - 1}.",
                hint=_where(layout),
            )
    return records


def _missing(layout: CifarFormat, folder: Path, *, train_found: bool, evaluation_found: bool) -> BadInput:
    if any((folder / name).exists() for name in layout.pickle_names):
        return BadInput(
            f"{folder} holds the Python version of {layout.name}, which is a pickle: loading one can run any code, so "
            "hetopt does not.",
            hint=f"Use the binary version. {_where(layout)}",
        )
    lacking = [
        " or ".join(names) if len(names) < 3 else f"any of {names[0]} to {names[-1]}"
        for names, found in ((layout.train_files, train_found), (layout.evaluation_files, evaluation_found))
        if not found
    ]
    return BadInput(f"{layout.name} is not complete in {folder}: missing {' and '.join(lacking)}.", hint=_where(layout))


def _where(layout: CifarFormat) -> str:
    return (
        f"Get the binary version of {layout.name} from {_WEB_PAGE}; it holds "
        f"{', '.join((*layout.train_files, *layout.evaluation_files))} in {layout.folder}/."
    )
