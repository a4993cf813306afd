"""The binary CIFAR files are read as published, and everything else that may lie in the folder is refused clearly."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import MapDataset, fetch, inputs_and_targets, set_epoch
from hetopt.trainer.tasks.cifar import CIFAR10, CIFAR100, CifarFormat, load_cifar


def records(layout: CifarFormat, count: int, seed: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    generator = np.random.default_rng(seed)
    labels = [generator.integers(0, classes, (count, 1)) for classes in layout.label_counts]
    return np.hstack([*labels, generator.integers(0, 256, (count, 3072))]).astype(np.uint8)


def write(folder: Path, layout: CifarFormat, *, train_files: int = 1, count: int = 6) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate((*layout.train_files[:train_files], *layout.evaluation_files)):
        records(layout, count, seed).tofile(folder / name)


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100])
def test_labels_and_pixels_land_where_the_format_says(tmp_path: Path, layout: CifarFormat) -> None:
    write(tmp_path, layout)
    raw = records(layout, 6, seed=1)  # the evaluation file
    images, labels = inputs_and_targets(fetch(load_cifar(layout, tmp_path).evaluation, [4, 0]))
    assert images.shape == (2, 3, 32, 32)
    assert images.dtype == torch.float32
    label_bytes = len(layout.label_counts)
    for row, index in enumerate((4, 0)):
        assert labels[row] == raw[index, label_bytes - 1]
        for colour in range(3):
            for y, x in ((0, 0), (0, 31), (17, 5), (31, 31)):
                pixel = raw[index, label_bytes + colour * 1024 + y * 32 + x] / 255
                expected = (pixel - layout.mean[colour]) / layout.standard_deviation[colour]
                assert images[row, colour, y, x].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("train_files", [1, 3, 5])
def test_all_training_files_that_are_there_are_used_and_counted(tmp_path: Path, train_files: int) -> None:
    write(tmp_path, CIFAR10, train_files=train_files)
    data = load_cifar(CIFAR10, tmp_path)
    assert len(data.train) == 6 * train_files
    assert f"{6 * train_files} training images from {train_files} of 5 files" in data.description


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100])
def test_the_archives_subfolder_is_found(tmp_path: Path, layout: CifarFormat) -> None:
    write(tmp_path / layout.folder, layout)
    assert len(load_cifar(layout, tmp_path).evaluation) == 6


def test_training_images_are_augmented_and_evaluation_images_are_not(tmp_path: Path) -> None:
    write(tmp_path, CIFAR10)
    data = load_cifar(CIFAR10, tmp_path)

    def images(dataset: MapDataset, epoch: int) -> torch.Tensor:
        set_epoch(dataset, epoch, seed=0)
        return inputs_and_targets(fetch(dataset, range(6)))[0]

    assert not torch.equal(images(data.train, 0), images(data.train, 1))
    assert torch.equal(images(data.evaluation, 0), images(data.evaluation, 1))


def test_the_real_sample(shared_data: Path) -> None:
    data = load_cifar(CIFAR10, shared_data / "cifar10")
    assert (len(data.train), len(data.evaluation)) == (10_000, 2_000)
    assert "from 1 of 5 files" in data.description
    images, labels = inputs_and_targets(fetch(data.evaluation, range(2_000)))
    assert torch.bincount(labels).tolist() == [200] * 10
    # The published statistics, of 50,000 images, describe these 2,000 closely.
    assert images.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (images.std(dim=(0, 2, 3)) - 1).abs().max() < 0.05


# --- bad input --------------------------------------------------------------------------------------------------------


def test_no_folder_given() -> None:
    with pytest.raises(BadInput, match="CIFAR-10 needs a data folder") as caught:
        load_cifar(CIFAR10, None)
    assert "`data`" in (caught.value.hint or "")
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in (caught.value.hint or "")


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        load_cifar(CIFAR10, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("layout", "present", "missing"),
    [
        (CIFAR10, (), "any of data_batch_1.bin to data_batch_5.bin and test_batch.bin"),
        (CIFAR10, ("test_batch.bin",), "missing any of data_batch_1.bin to data_batch_5.bin."),
        (CIFAR10, ("data_batch_2.bin",), "missing test_batch.bin."),
        (CIFAR100, (), "train.bin and test.bin"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, layout: CifarFormat, present: tuple[str, ...], missing: str) -> None:
    for name in present:
        records(layout, 2).tofile(tmp_path / name)
    with pytest.raises(BadInput, match=missing) as caught:
        load_cifar(layout, tmp_path)
    assert layout.evaluation_files[0] in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("layout", "name"), [(CIFAR10, "data_batch_1"), (CIFAR100, "train"), (CIFAR10, "cifar-10-batches-py/data_batch_1")]
)
def test_the_pickled_version_is_not_read(tmp_path: Path, layout: CifarFormat, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(pickle.dumps({"data": [], "labels": []}))
    with pytest.raises(BadInput, match="pickle") as caught:
        load_cifar(layout, tmp_path)
    assert "binary version" in (caught.value.hint or "")


@pytest.mark.parametrize("size", [0, 1, 3072, 3073 * 2 - 1, 3074])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    write(tmp_path, CIFAR10)
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(size))
    with pytest.raises(BadInput, match=r"data_batch_1\.bin is truncated"):
        load_cifar(CIFAR10, tmp_path)


@pytest.mark.parametrize(("layout", "column"), [(CIFAR10, 0), (CIFAR100, 0), (CIFAR100, 1)])
def test_an_impossible_label_is_damage(tmp_path: Path, layout: CifarFormat, column: int) -> None:
    write(tmp_path, layout)
    raw = records(layout, 3)
    raw[1, column] = layout.label_counts[column]
    raw.tofile(tmp_path / layout.evaluation_files[0])
    with pytest.raises(BadInput, match=f"label {layout.label_counts[column]}"):
        load_cifar(layout, tmp_path)
