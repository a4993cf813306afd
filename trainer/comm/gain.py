"""How much of a gradient's energy the largest elements hold, at every ratio: from one selection and one sort."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetopt.trainer.comm.energy import energy
from hetopt.trainer.comm.topk import largest_magnitudes

_SAMPLE = 65_536
_EXACT_UP_TO = 4 * _SAMPLE
_SELECTED_PART = 0.02


def kept_energies(flat: Tensor, counts: Sequence[int], kept: Tensor | None = None) -> tuple[float, ...]:
    """Energy of the k largest magnitudes of ``flat``, for each k in ``counts``.

    One sort serves all counts: Top-k is an orthogonal projection, so energies of nested selections are prefix sums. Of
    a long vector only the largest elements are sorted; those below them are all small, and a random sample tells how
    their energy is spread to within a percent of it.

    Args:
        flat: 1-D fp32, finite.
        counts: each between 0 and the number of elements.
        kept: the largest elements of ``flat`` if somebody has selected them already, in any order.
    """
    numel = flat.numel()
    if numel <= _EXACT_UP_TO:
        kept = flat
    elif kept is None or kept.numel() == 0:
        exact = [count for count in counts if 0 < count <= _SELECTED_PART * numel]
        kept = flat.index_select(0, largest_magnitudes(flat, max(exact))) if exact else flat.new_empty(0)
    whole, known = energy(flat), kept.numel()
    top = _prefix(kept.abs())
    top_energy = float(top[-1]) if known else 0.0
    tail = _prefix(_sample_below(flat, kept)) if any(known < count < numel for count in counts) else top
    energies: list[float] = []
    for count in counts:
        if count >= numel:
            energies.append(whole)
        elif count <= known:
            energies.append(min(whole, float(top[count - 1]) if count else 0.0))
        else:
            # Of the sampled elements the same part is among the ``count`` largest as of all that are not in ``kept``.
            place = max(1, round((count - known) / (numel - known) * tail.numel()))
            part = float(tail[place - 1] / tail[-1]) if tail[-1] > 0 else 1.0
            energies.append(min(whole, top_energy + part * max(0.0, whole - top_energy)))
    return tuple(energies)


def _prefix(magnitudes: Tensor) -> Tensor:
    """Energies of the largest 1, 2, ... magnitudes, in double precision."""
    return magnitudes.sort(descending=True).values.double().square_().cumsum_(0)


def _sample_below(flat: Tensor, kept: Tensor) -> Tensor:
    """Magnitudes of a random sample of the elements that are not in ``kept``."""
    places = torch.randint(flat.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(flat.numel()))
    sample = flat.index_select(0, places.to(flat.device)).abs_()
    below = sample[sample < kept.abs().min()] if kept.numel() else sample
    return below if below.numel() else sample
