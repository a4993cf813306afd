"""Augmentation is a function of seed, epoch and sample: how samples are grouped never changes it."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetopt.trainer.tasks.cifar import ImageDataset, crop_and_flip, random_bits, unchanged

COUNT = 24
IMAGES = torch.randint(1, 256, (COUNT, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(COUNT)


def dataset(epoch: int = 0, seed: int = 0) -> ImageDataset:
    made = ImageDataset(
        IMAGES, LABELS, mean=(0.5, 0.5, 0.5), standard_deviation=(0.25, 0.25, 0.25), augment=crop_and_flip(4)
    )
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


def test_fetching_two_together_equals_fetching_them_apart() -> None:
    images, labels = dataset(3).gather([5, 9])
    for row, index in enumerate((5, 9)):
        image, label = dataset(3)[index]
        assert torch.equal(images[row], image)
        assert labels[row] == label


def test_epochs_and_seeds_look_different() -> None:
    first = dataset().gather(range(COUNT))[0]
    for other in (dataset(epoch=1), dataset(seed=1)):
        assert not torch.equal(first, other.gather(range(COUNT))[0])


def test_every_image_is_a_window_of_the_padded_original() -> None:
    bits = random_bits(0, 0, range(COUNT))
    augmented = crop_and_flip(4)(IMAGES, bits)
    padded = torch.nn.functional.pad(IMAGES, (4, 4, 4, 4))
    for original, result in zip(padded, augmented, strict=True):
        windows = [original[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
        assert any(torch.equal(result, window) or torch.equal(result, window.flip(-1)) for window in windows)


def test_offsets_and_flips_are_evenly_spread() -> None:
    count = 20_000
    # One bright pixel in the middle shows where the window was cut: a 9x9 square of places, mirrored or not.
    picture = torch.zeros(count, 1, 32, 32, dtype=torch.uint8)
    picture[:, :, 16, 10] = 1
    place = crop_and_flip(4)(picture, random_bits(1, 2, range(count))).flatten(1).argmax(dim=1)
    rows, columns = place // 32, place % 32
    mirrored = columns > 15  # column 10 lands in 6..14, or mirrored in 17..25
    offsets = torch.where(mirrored, 31 - columns, columns) - 6
    assert abs(mirrored.float().mean().item() - 0.5) < 0.02
    for observed in (torch.bincount(rows - 12, minlength=9), torch.bincount(offsets, minlength=9)):
        assert len(observed) == 9
        assert (observed.float() / count - 1 / 9).abs().max().item() < 0.015


def test_bits_are_even_and_unrelated_between_neighbours() -> None:
    bits = random_bits(0, 0, range(4096))
    ones = np.unpackbits(bits.view(np.uint8)).reshape(4096, 64).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.04
    assert len(np.unique(bits)) == 4096
    assert not np.array_equal(random_bits(1, 0, range(64)), random_bits(0, 1, range(64)))


def test_unchanged_is_the_identity() -> None:
    assert torch.equal(unchanged(IMAGES, random_bits(0, 0, range(COUNT))), IMAGES)
