"""The one denominator that is read off a loss: the weight of the targets that a cross entropy is a mean over."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_SCALAR_STEPS = 16
"""Multiplications of a loss by numbers (a GradScaler's, 1 / accumulation) that are looked through."""


def cross_entropy_weight(loss: Tensor) -> Tensor | None:
    """Return the total weight of the targets of one mean cross entropy; None where the loss is anything else."""
    node: Any = loss.grad_fn
    for _ in range(_SCALAR_STEPS):
        name = "" if node is None else node.name()
        if name in ("NllLossBackward0", "NllLoss2DBackward0"):
            is_mean = node._saved_reduction == 1
            return node._saved_total_weight if is_mean else None
        if name not in ("MulBackward0", "DivBackward0", "ToCopyBackward0"):
            return None
        inputs = [inner for inner, _ in node.next_functions if inner is not None]
        if len(inputs) != 1:
            return None
        node = inputs[0]
    return None
