"""The binary CIFAR files are read as published, and everything else that may lie in the folder is refused clearly."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import MapDataset, fetch, inputs_and_targets, set_epoch
from hetopt.trainer.tasks.vision import (
    CLASSES,
    EVALUATION_FILE,
    FOLDER,
    MEAN,
    STANDARD_DEVIATION,
    TRAIN_FILES,
    ImageDataset,
    cropped_and_flipped,
    load_cifar,
    random_bits,
)


def records(count: int, seed: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, (count, 1))
    return np.hstack([labels, generator.integers(0, 256, (count, 3072))]).astype(np.uint8)


def write(folder: Path, *, train_files: int = 1, count: int = 6) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate((*TRAIN_FILES[:train_files], EVALUATION_FILE)):
        records(count, seed).tofile(folder / name)


def test_labels_and_pixels_land_where_the_format_says(tmp_path: Path) -> None:
    write(tmp_path)
    raw = records(6, seed=1)  # the evaluation file
    images, labels = inputs_and_targets(fetch(load_cifar(tmp_path).evaluation, [4, 0]))
    assert images.shape == (2, 3, 32, 32)
    assert images.dtype == torch.float32
    for row, index in enumerate((4, 0)):
        assert labels[row] == raw[index, 0]
        for colour in range(3):
            for y, x in ((0, 0), (0, 31), (17, 5), (31, 31)):
                pixel = raw[index, 1 + colour * 1024 + y * 32 + x] / 255
                expected = (pixel - MEAN[colour]) / STANDARD_DEVIATION[colour]
                assert images[row, colour, y, x].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("train_files", [1, 3, 5])
def test_all_training_files_that_are_there_are_used_and_counted(tmp_path: Path, train_files: int) -> None:
    write(tmp_path, train_files=train_files)
    data = load_cifar(tmp_path)
    assert len(data.train) == 6 * train_files
    assert f"{6 * train_files} training images from {train_files} of 5 files" in data.description


def test_the_archives_subfolder_is_found(tmp_path: Path) -> None:
    write(tmp_path / FOLDER)
    assert len(load_cifar(tmp_path).evaluation) == 6


def test_training_images_are_augmented_and_evaluation_images_are_not(tmp_path: Path) -> None:
    write(tmp_path)
    data = load_cifar(tmp_path)

    def images(dataset: MapDataset, epoch: int) -> torch.Tensor:
        set_epoch(dataset, epoch, seed=0)
        return inputs_and_targets(fetch(dataset, range(6)))[0]

    assert not torch.equal(images(data.train, 0), images(data.train, 1))
    assert torch.equal(images(data.evaluation, 0), images(data.evaluation, 1))


def test_the_real_sample(shared_data: Path) -> None:
    data = load_cifar(shared_data / "cifar10")
    assert (len(data.train), len(data.evaluation)) == (10_000, 2_000)
    assert "from 1 of 5 files" in data.description
    images, labels = inputs_and_targets(fetch(data.evaluation, range(2_000)))
    assert torch.bincount(labels).tolist() == [200] * 10
    # The published statistics, of 50,000 images, describe these 2,000 closely.
    assert images.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (images.std(dim=(0, 2, 3)) - 1).abs().max() < 0.05


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_folder_is_needed(tmp_path: Path) -> None:
    for folder, said in ((None, "CIFAR-10 needs a data folder"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(BadInput, match=said):
            load_cifar(folder)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ((), "any of data_batch_1.bin to data_batch_5.bin and test_batch.bin"),
        (("test_batch.bin",), "missing any of data_batch_1.bin to data_batch_5.bin."),
        (("data_batch_2.bin",), "missing test_batch.bin."),
    ],
)
def test_missing_files_are_named(tmp_path: Path, present: tuple[str, ...], missing: str) -> None:
    for name in present:
        records(2).tofile(tmp_path / name)
    with pytest.raises(BadInput, match=missing) as caught:
        load_cifar(tmp_path)
    assert EVALUATION_FILE in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["data_batch_1", "cifar-10-batches-py/data_batch_1"])
def test_the_pickled_version_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(pickle.dumps({"data": [], "labels": []}))
    with pytest.raises(BadInput, match="pickle") as caught:
        load_cifar(tmp_path)
    assert "binary version" in (caught.value.hint or "")


@pytest.mark.parametrize("size", [0, 1, 3072, 3073 * 2 - 1, 3074])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    write(tmp_path)
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(size))
    with pytest.raises(BadInput, match=r"data_batch_1\.bin is truncated"):
        load_cifar(tmp_path)


def test_an_impossible_label_is_damage(tmp_path: Path) -> None:
    write(tmp_path)
    raw = records(3)
    raw[1, 0] = CLASSES
    raw.tofile(tmp_path / EVALUATION_FILE)
    with pytest.raises(BadInput, match=f"label {CLASSES}"):
        load_cifar(tmp_path)


# --- Augmentation is a function of seed, epoch and sample: how samples are grouped never changes it


COUNT = 24
IMAGES = torch.randint(1, 256, (COUNT, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(COUNT)


def dataset(epoch: int = 0, seed: int = 0) -> ImageDataset:
    made = ImageDataset(IMAGES, LABELS, padding=4)
    made.set_epoch(epoch, seed)
    return made


@given(
    order=st.permutations(range(COUNT)),
    cuts=st.lists(st.integers(0, COUNT), max_size=5),
    epoch=st.integers(0, 1000),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_split_of_a_batch_sees_the_same_images(order: list[int], cuts: list[int], epoch: int, seed: int) -> None:
    whole = dataset(epoch, seed).gather(order)[0]
    edges = [0, *sorted(cuts), COUNT]
    # A dataset of its own for every part, as every worker has.
    parts = [
        dataset(epoch, seed).gather(order[start:end])[0] for start, end in itertools.pairwise(edges) if start < end
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_epochs_and_seeds_look_different() -> None:
    first = dataset().gather(range(COUNT))[0]
    for other in (dataset(epoch=1), dataset(seed=1)):
        assert not torch.equal(first, other.gather(range(COUNT))[0])


def test_every_image_is_a_window_of_the_padded_original() -> None:
    bits = random_bits(0, 0, range(COUNT))
    augmented = cropped_and_flipped(IMAGES, bits, 4)
    padded = torch.nn.functional.pad(IMAGES, (4, 4, 4, 4))
    for original, result in zip(padded, augmented, strict=True):
        windows = [original[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
        assert any(torch.equal(result, window) or torch.equal(result, window.flip(-1)) for window in windows)


def test_offsets_and_flips_are_evenly_spread() -> None:
    count = 20_000
    # One bright pixel in the middle shows where the window was cut: a 9x9 square of places, mirrored or not.
    picture = torch.zeros(count, 1, 32, 32, dtype=torch.uint8)
    picture[:, :, 16, 10] = 1
    place = cropped_and_flipped(picture, random_bits(1, 2, range(count)), 4).flatten(1).argmax(dim=1)
    rows, columns = place // 32, place % 32
    mirrored = columns > 15  # column 10 lands in 6..14, or mirrored in 17..25
    offsets = torch.where(mirrored, 31 - columns, columns) - 6
    assert abs(mirrored.float().mean().item() - 0.5) < 0.02
    for observed in (torch.bincount(rows - 12, minlength=9), torch.bincount(offsets, minlength=9)):
        assert len(observed) == 9
        assert (observed.float() / count - 1 / 9).abs().max().item() < 0.015
