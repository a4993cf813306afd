"""Squared norms of the gradients of groups of samples, read off while a step is computed.

The noise of a gradient shows in how far the gradients of parts of a batch differ (`hetopt.core.gradient_noise`). Where
several workers train, each one's samples are a group; a single worker has its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class NoiseSums:
    """What one step tells about the noise of the gradient, as doubles on the device.

    Attributes:
        groups: how many groups this worker's samples were computed in.
        weighted_square_norm: ``sum_j b_j |g_j|^2`` over these groups, ``g_j`` being the mean over ``b_j`` samples.
        mean_square_norm: ``|g|^2`` of the mean gradient over the whole batch, the same on every rank.
    """

    groups: int
    weighted_square_norm: Tensor
    mean_square_norm: Tensor


class MicroBatchGroups:
    """Every micro-batch of a worker is a group: its gradient is what it adds to the flat buffer."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._before = torch.zeros_like(flat)
        self._factor = 1.0
        self.begin(1.0)

    def begin(self, factor: float) -> None:
        """A step begins, whose micro-batches add ``factor * samples * mean gradient`` to the buffer, from zero."""
        self._factor = factor
        self._before.zero_()
        self.count = 0
        self.weighted_square_norm = torch.zeros((), dtype=torch.float64, device=self._flat.device)

    def add(self, samples: float | Tensor) -> None:
        """The gradient of a micro-batch of so many samples (or of what the loss counts) was added to the buffer."""
        torch.sub(self._flat, self._before, out=self._before)
        self.count += 1
        self.weighted_square_norm += weighted_square_norm(square_norm([self._before]), self._factor, samples)
        self._before.copy_(self._flat)


def weighted_square_norm(square: Tensor, factor: float, samples: float | Tensor) -> Tensor:
    """``b |g|^2`` of a group of ``b`` samples whose contribution ``factor * b * g`` has this squared norm."""
    if isinstance(samples, Tensor):  # what a loss counts, which may be nothing
        return torch.where(samples > 0, square / (factor**2 * samples), 0.0)
    return square / (factor**2 * samples)


def square_norm(pieces: Iterable[Tensor]) -> Tensor:
    """``|x|^2`` of a vector in pieces, summed in double precision; one number on the device."""
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).square().sum()
