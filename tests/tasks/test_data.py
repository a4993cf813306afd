"""The binary CIFAR files are read as published, and everything else that may lie in the folder is refused clearly.

Penn Treebank, WikiText and plain text folders become the same windows of tokens.

The digits task: a fixed split of real data, gradients that add up over any split of a batch, a target it reaches.

A batch is the same however it is asked for: gathered, collated, or in parts.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import MapDataset, TensorPairs, fetch, inputs_and_targets, set_epoch, to_device
from hetopt.trainer.task import TaskData, evaluation_sums
from hetopt.trainer.tasks.digits import _table
from hetopt.trainer.tasks.language import build_vocabulary, encode, find_corpus, load_corpus, windows
from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.tasks.vision import (
    CLASSES,
    EVALUATION_FILE,
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


@pytest.mark.parametrize("read", [load_cifar, lambda folder: load(folder)])
def test_a_folder_is_needed(read: Callable[[Path | None], TaskData], tmp_path: Path) -> None:
    for folder, said in ((None, "needs a data folder"), (tmp_path / "nowhere", "nowhere")):
        with pytest.raises(BadInput, match=said):
            read(folder)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ((), "it holds no file"),
        (("test_batch.bin",), "it holds test_batch.bin."),
        (("data_batch_2.bin",), "it holds data_batch_2.bin."),
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
    with pytest.raises(BadInput, match="no file") as caught:
        load_cifar(tmp_path)
    assert "binary version of CIFAR-10 (not the Python one, a pickle" in (caught.value.hint or "")


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
    seed=st.integers(0, 2**63 - 1),
)
def test_any_split_of_a_batch_sees_the_same_images(order: list[int], cuts: list[int], epoch: int, seed: int) -> None:
    whole = dataset(epoch, seed).gather(order)[0]
    edges = [0, *sorted(cuts), COUNT]
    # A dataset of its own for every part, as every worker has.
    parts = [
        dataset(epoch, seed).gather(order[start:end])[0] for start, end in itertools.pairwise(edges) if start < end
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_every_image_is_a_window_of_the_padded_original() -> None:
    bits = random_bits(0, 0, COUNT)
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
    place = cropped_and_flipped(picture, random_bits(1, 2, count), 4).flatten(1).argmax(dim=1)
    rows, columns = place // 32, place % 32
    mirrored = columns > 15  # column 10 lands in 6..14, or mirrored in 17..25
    offsets = torch.where(mirrored, 31 - columns, columns) - 6
    assert abs(mirrored.float().mean().item() - 0.5) < 0.02
    for observed in (torch.bincount(rows - 12, minlength=9), torch.bincount(offsets, minlength=9)):
        assert len(observed) == 9
        assert (observed.float() / count - 1 / 9).abs().max().item() < 0.015


TRAIN = " the cat sat on the mat \n the dog sat \n\n a <unk> cat \n" * 8
OTHER = " the cow sat on the cat \n" * 6

NAMINGS = ["ptb.{}.txt", "wiki.{}.tokens", "wiki.{}.txt", "{}.txt", "{}.tokens"]


def write_corpus(folder: Path, naming: str, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for role, text in texts.items():
        (folder / naming.format(role)).write_text(text)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("inside", [".", "simple-examples/data", "wikitext-2"])
def test_every_naming_gives_the_same_samples(tmp_path: Path, naming: str, inside: str) -> None:
    write_corpus(tmp_path / inside, naming, train=TRAIN, valid=OTHER, test="not looked at")
    data = load_corpus(tmp_path, vocabulary_size=100, window=5)
    inputs, targets = inputs_and_targets(fetch(data.train, [0, 1]))
    vocabulary = build_vocabulary({w: TRAIN.split().count(w) for w in TRAIN.split()}, 100)
    words = {number: word for word, number in vocabulary.items()}
    assert [words[int(i)] for i in inputs[0]] == ["the", "cat", "sat", "on", "the"]
    assert [words[int(i)] for i in targets[0]] == ["cat", "sat", "on", "the", "mat"]
    assert [words[int(i)] for i in inputs[1]] == ["mat", "<eos>", "the", "dog", "sat"]


def test_words_outside_the_vocabulary_are_unknown_and_empty_lines_end_too(tmp_path: Path) -> None:
    write_corpus(tmp_path, "{}.txt", text="the cow\n\nunseen the")
    tokens = encode(tmp_path / "text.txt", {"<unk>": 0, "<eos>": 1, "the": 2, "cow": 3})
    assert tokens.tolist() == [2, 3, 1, 1, 0, 2, 1]


@given(
    counts=st.dictionaries(st.text("abcde", min_size=1, max_size=3), st.integers(1, 50), max_size=40),
    size=st.integers(2, 50),
)
def test_a_vocabulary_keeps_the_most_frequent_words(counts: dict[str, int], size: int) -> None:
    vocabulary = build_vocabulary(counts, size)
    assert list(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(vocabulary) == min(size, len(counts) + 2)
    assert (vocabulary["<unk>"], vocabulary["<eos>"]) == (0, 1)
    kept = [counts[word] for word in list(vocabulary)[2:]]
    assert kept == sorted(kept, reverse=True)
    dropped = [count for word, count in counts.items() if word not in vocabulary]
    assert not dropped or not kept or max(dropped) <= min(kept)
    assert vocabulary == build_vocabulary(dict(reversed(counts.items())), size)


@given(length=st.integers(2, 200), window=st.integers(1, 40))
def test_windows_cover_the_text_once_and_targets_are_one_further(length: int, window: int) -> None:
    tokens = torch.arange(length)
    if length <= window:
        with pytest.raises(BadInput, match="too few"):
            windows(tokens, window, source=Path("x"))
        return
    pairs = windows(tokens, window, source=Path("x"))
    assert torch.equal(pairs.inputs.flatten(), tokens[: len(pairs) * window])
    assert torch.equal(pairs.targets, pairs.inputs + 1)
    assert length - 1 - len(pairs) * window < window


@pytest.mark.parametrize(
    ("roles", "train", "evaluation"),
    [
        (("train", "valid", "test"), "train", "valid"),
        (("train", "test"), "train", "test"),
        (("valid", "test"), "valid", "test"),
    ],
)
def test_which_files_train_and_evaluate(tmp_path: Path, roles: tuple[str, ...], train: str, evaluation: str) -> None:
    write_corpus(tmp_path, "wiki.{}.tokens", **dict.fromkeys(roles, TRAIN))
    found = [path.name for path in find_corpus(tmp_path)]
    assert found == [f"wiki.{train}.tokens", f"wiki.{evaluation}.tokens"]


def test_the_real_sample_trains_on_valid_and_evaluates_on_test(shared_data: Path) -> None:
    data = load_corpus(shared_data / "wikitext-2", vocabulary_size=10_000, window=35)
    # 213,886 and 241,211 words and 3,760 and 4,358 line ends, in windows of 35 with one token after the last.
    assert len(data.train) == (213_886 + 3_760 - 1) // 35
    assert len(data.evaluation) == (241_211 + 4_358 - 1) // 35
    assert "/valid.txt to train" in data.description
    assert "vocabulary 10,000 of 13,777 words" in data.description
    inputs, _ = inputs_and_targets(fetch(data.evaluation, range(len(data.evaluation))))
    assert int(inputs.max()) < 10_000


# --- bad input --------------------------------------------------------------------------------------------------------


def load(folder: Path | None) -> None:
    load_corpus(folder, vocabulary_size=100, window=35)


@pytest.mark.parametrize("roles", [(), ("train",), ("test",)])
def test_no_pair_of_files(tmp_path: Path, roles: tuple[str, ...]) -> None:
    write_corpus(tmp_path, "{}.txt", **dict.fromkeys(roles, TRAIN))
    with pytest.raises(BadInput, match="no pair of text files") as caught:
        load(tmp_path)
    for name in ("ptb.train.txt", "wiki.train.tokens", "train.txt"):
        assert name in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("train", "valid", "said"),
    [
        (TRAIN.encode(), b"two words", r"valid\.txt has 3 tokens"),
        (b"", OTHER.encode(), r"train\.txt has 0 tokens"),
        (b"fine so far \xff\xfe", OTHER.encode(), r"train\.txt cannot be read: not UTF-8 text"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(tmp_path: Path, train: bytes, valid: bytes, said: str) -> None:
    (tmp_path / "train.txt").write_bytes(train)
    (tmp_path / "valid.txt").write_bytes(valid)
    with pytest.raises(BadInput, match=said):
        load(tmp_path)


TASK = load_task("digits")


@pytest.fixture(scope="module")
def data() -> TaskData:
    return TASK.data(None)


def pairs(dataset: object) -> TensorPairs:
    assert isinstance(dataset, TensorPairs)
    return dataset


def test_the_split_is_fixed_stratified_and_disjoint(data: TaskData) -> None:
    train, evaluation = pairs(data.train), pairs(data.evaluation)
    assert (len(train), len(evaluation)) == (1_438, 359)
    assert train.inputs.shape[1:] == (1, 8, 8)
    assert (float(train.inputs.min()), float(train.inputs.max())) == (0.0, 1.0)
    per_class = torch.bincount(evaluation.targets)
    assert int(per_class.max() - per_class.min()) <= 2
    seen = {tuple(image.flatten().tolist()) for image in train.inputs}
    assert not any(tuple(image.flatten().tolist()) in seen for image in evaluation.inputs)
    assert torch.equal(pairs(TASK.data(None).evaluation).inputs, evaluation.inputs)


def test_the_file_is_what_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    assert torch.equal(_table(), torch.from_numpy(np.column_stack((loaded.data, loaded.target))))


def gradient(model: nn.Module, dataset: TensorPairs, indices: list[int]) -> Tensor:
    model.zero_grad()
    torch.autograd.backward(TASK.loss(model, fetch(dataset, indices)))
    return torch.cat(
        [parameter.grad.flatten().double() for parameter in model.parameters() if parameter.grad is not None]
    )


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 47), min_size=1, max_size=4, unique=True))
def test_weighted_gradients_of_any_split_add_up_to_that_of_the_batch(data: TaskData, cuts: list[int]) -> None:
    train = pairs(data.train)
    torch.manual_seed(0)
    model = TASK.model()
    batch = list(range(0, 48 * 7, 7))
    whole = gradient(model, train, batch)
    edges = [0, *sorted(cuts), 48]
    total = torch.zeros_like(whole)
    for start, end in itertools.pairwise(edges):
        total += (end - start) / 48 * gradient(model, train, batch[start:end])
    assert float((total - whole).norm() / whole.norm()) < 1e-6


def test_the_target_is_reached_within_ten_epochs(data: TaskData) -> None:
    batch_size = 256
    torch.manual_seed(0)
    model = TASK.model()
    optimizer = TASK.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= TASK.learning_rate_scale(batch_size)
    for _ in range(10):
        order = torch.randperm(len(data.train)).tolist()
        for start in range(0, len(order), batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(TASK.loss(model, fetch(data.train, order[start : start + batch_size])))
            optimizer.step()
        sums = evaluation_sums(TASK, model, data.evaluation, range(len(data.evaluation)))
        if TASK.target.reached(TASK.metrics(sums, len(data.evaluation))):
            return
    pytest.fail("the target was not reached in ten epochs")


INPUTS = torch.arange(60, dtype=torch.float32).view(20, 3)
TARGETS = torch.arange(20)
PAIRS = TensorPairs(INPUTS, TARGETS)
INDICES = st.lists(st.integers(0, 19), min_size=1, max_size=30)


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Nested(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"point": Point(INPUTS[index], TARGETS[index]), "both": [index, float(index)], "name": f"sample {index}"}


class Ragged(Nested):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index)


class Foreign(Nested):
    def __getitem__(self, index: int) -> Any:
        return object()


@given(INDICES)
def test_gathering_collating_and_a_subset_agree(indices: list[int]) -> None:
    expected = (INPUTS[indices], TARGETS[indices])
    everything = Subset(TensorDataset(INPUTS, TARGETS), list(range(20)))
    for dataset in (PAIRS, TensorDataset(INPUTS, TARGETS), everything):
        inputs, targets = inputs_and_targets(fetch(dataset, indices))
        assert torch.equal(inputs, expected[0])
        assert torch.equal(targets, expected[1])


@given(INDICES, st.integers(0, 30))
def test_fetching_in_parts_equals_fetching_at_once(indices: list[int], cut: int) -> None:
    whole, _ = PAIRS.gather(indices)
    parts = [inputs_and_targets(fetch(PAIRS, part))[0] for part in (indices[:cut], indices[cut:]) if part]
    assert torch.equal(torch.cat(parts), whole)


def test_nested_samples_keep_their_nesting_on_the_way_to_a_device() -> None:
    batch = to_device(fetch(Nested(), [3, 1]), "meta")
    assert isinstance(batch, dict)
    point = batch["point"]
    assert isinstance(point, Point)
    assert point.x.shape == (2, 3)
    assert [part.device.type for part in (point.x, point.y, *batch["both"])] == ["meta"] * 4
    assert isinstance(batch["both"], list)
    assert batch["name"] == ["sample 3", "sample 1"], "leaves that are no tensors stay"


@pytest.mark.parametrize("dataset", [Ragged(), Foreign()])
def test_samples_that_cannot_be_collated_are_bad_input(dataset: Nested) -> None:
    with pytest.raises(BadInput, match=f"samples of {type(dataset).__name__} cannot be collated"):
        fetch(dataset, [1, 2])


def test_unequal_inputs_and_targets_are_bad_input() -> None:
    with pytest.raises(BadInput, match="20 inputs but 19 targets"):
        TensorPairs(INPUTS, TARGETS[1:])


def test_the_epoch_reaches_only_datasets_that_care() -> None:
    class Caring(TensorPairs):
        def set_epoch(self, epoch: int, seed: int, /) -> None:
            seen.append((epoch, seed))

        def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
            return super().gather(indices)

    seen: list[tuple[int, int]] = []
    set_epoch(PAIRS, 1, 7)
    set_epoch(Caring(INPUTS, TARGETS), 2, 7)
    assert seen == [(2, 7)]
