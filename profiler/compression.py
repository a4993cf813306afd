"""How much of a gradient's energy Top-k keeps, at every ratio, from one sorted pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def retained_energy(flat: Tensor, kept: Sequence[int]) -> tuple[float, ...]:
    """Energy ``sum of the k largest squares`` of ``flat`` for every ``k`` in ``kept``, in the order of ``kept``.

    One selection of the largest ``k`` and one cumulative sum in double precision serve every smaller ``k`` as well.
    Divided by the whole energy this is the compression gain of GraVAC (Tyagi and Swany 2023) and, as Top-k is an
    orthogonal projection, one minus the contraction that error-feedback theory speaks of.

    Args:
        flat: one-dimensional tensor of ``n`` elements, not empty.
        kept: how many elements are kept, each in ``1..n``.

    Raises:
        ValueError: ``flat`` is empty or not flat, or a count is outside ``1..n``.
    """
    if flat.dim() != 1 or flat.numel() == 0:
        raise ValueError("energy is taken of a flat tensor that is not empty")
    elements = flat.numel()
    if any(not 1 <= count <= elements for count in kept):
        raise ValueError(f"counts of kept elements must be in 1..{elements}")
    flat = flat.detach()
    whole = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    largest = max((count for count in kept if count < elements), default=0)
    if largest == 0:
        return tuple(whole for _ in kept)
    prefix = torch.topk(flat.abs(), largest).values.to(torch.float64).square_().cumsum_(0)
    positions = torch.tensor([min(count, largest) - 1 for count in kept], device=flat.device)
    partial = prefix[positions].tolist()
    # Rounding may lift a prefix over the whole, which was summed in another order.
    return tuple(whole if count == elements else min(part, whole) for count, part in zip(kept, partial, strict=True))


def gain(kept_energy: float, whole_energy: float) -> float:
    """Kept energy as a fraction of the whole. Of a gradient that is zero nothing is lost: the gain is 1."""
    return 1.0 if whole_energy <= 0 else min(1.0, kept_energy / whole_energy)


def monotone(values: Sequence[float]) -> tuple[float, ...]:
    """The closest non-decreasing sequence in least squares (pool adjacent violators, Ayer et al. 1955).

    Keeping more elements never loses energy; means over different residuals can still cross by a little.
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, left_count), (right, right_count) = blocks[-2:]
            count = left_count + right_count
            blocks[-2:] = [((left * left_count + right * right_count) / count, count)]
    return tuple(value for value, count in blocks for _ in range(count))
