"""Random crops and flips whose randomness is a function of (seed, epoch, sample), not of who draws first.

Stateful generators give each worker its own stream, so an image would look different when the shares of the workers
change. Here the random bits of a sample are a hash of its coordinates, as in counter-based generators (Salmon et al.
2011); the hash is the finaliser of SplitMix64 (Steele, Lea & Flood 2014), chained once a coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Augmentation: TypeAlias = Callable[[Tensor, NDArray[np.uint64]], Tensor]
"""Images [n, channels, height, width] and 64 random bits an image -> images of the same shape."""


def random_bits(seed: int, epoch: int, indices: Sequence[int]) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample, the same whichever samples are asked for together."""
    key = np.array([seed & _MASK], dtype=np.uint64)
    key = _mix(_mix(key) ^ np.uint64(epoch & _MASK))
    return _mix(key ^ np.asarray(indices, dtype=np.int64).astype(np.uint64))


def crop_and_flip(padding: int) -> Augmentation:
    """Return the augmentation of He et al. 2016, section 4.2.

    The image is padded by ``padding`` black pixels on each side, a window of the original size is cut at a random
    place, and half of the windows are mirrored.
    """

    def augment(images: Tensor, bits: NDArray[np.uint64]) -> Tensor:
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

    return augment


def unchanged(images: Tensor, bits: NDArray[np.uint64]) -> Tensor:
    """Return the images as they are."""
    return images


def _field(bits: NDArray[np.uint64], shift: int) -> Tensor:
    """Return 16 of the 64 bits, as non-negative integers."""
    return torch.from_numpy(((bits >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


_MASK = 0xFFFF_FFFF_FFFF_FFFF
