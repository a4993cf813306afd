"""How much each worker's loss counts in that of the batch: by samples, unless the script or the loss says otherwise.

Of a batch of B samples worker i has n_i. With L_i the mean loss of its samples, the loss of the batch is

    L = sum_i (n_i / B) L_i

A loss that is a mean over something else (tokens that are not padding, classes with weights) counts by its own
denominator d_i in the place of n_i, and a loss that is a sum counts as it is. Scripts say so; the denominator of one
cross entropy is read off it, since losses over tokens are common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import Tensor

from hetopt.core.errors import BadInput
from hetopt.trainer.cross_entropy import cross_entropy_weight
from hetopt.trainer.session.batches import Part

Weight: TypeAlias = "float | Tensor | Literal['sum']"
"""What a loss is a mean over on this worker, or ``"sum"``."""

SUM = -1.0
"""The denominator that stands for a loss that is a sum."""


def denominator_of(loss: Tensor, weight: Weight | None) -> float:
    """Return what this worker's loss is a mean over; NaN where neither the script nor a cross entropy says it.

    Args:
        loss: scalar, before its backward pass.
        weight: what the script says; None: nothing.

    Raises:
        BadInput: the weight is negative or not finite, or another text than ``"sum"``.
    """
    if weight is None:
        found = cross_entropy_weight(loss)
        return math.nan if found is None else float(found)
    if isinstance(weight, str):
        if weight != "sum":
            raise BadInput(f"`weight` must be a number or 'sum', got {weight!r}.", hint="see run.backward")
        return SUM
    number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise BadInput(
            f"`weight` must be a finite number of at least 0, got {number:g}.",
            hint="give what the loss of this worker's part is a mean over: its samples, or its tokens",
        )
    return number


def weights_of(samples: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return how much each worker's loss counts: the losses of all workers, so weighted, add up to that of the batch.

    Args:
        samples: of each worker's part, in rank order; a worker without a part has 0, and its loss counts nothing.
        denominators: of each worker's loss, as `denominator_of` returned them.

    Raises:
        BadInput: some workers' losses are sums and others' are means; all workers raise it.
    """
    counted = [own for own, size in zip(denominators, samples, strict=True) if size]
    sums = [own == SUM for own in counted]
    if any(sums):
        if not all(sums):
            raise BadInput(
                "Some workers' losses are sums (weight='sum'), and others' are means.",
                hint="call run.backward with the same kind of weight on all workers",
            )
        return [float(size > 0) for size in samples]
    by_samples = any(math.isnan(own) for own in counted)
    own = [float(size and (size if by_samples else by)) for size, by in zip(samples, denominators, strict=True)]
    total = sum(own)
    return [one / total if total else 0.0 for one in own]


def loss_factor(weight: Weight | None, part: Part) -> float:
    """Return the factor on a loss that only its own worker steps by: a sum is scaled up to the whole batch's."""
    return part.batch / part.samples if weight == "sum" and part.samples else 1.0
