"""Two coefficients that cannot be negative, by least squares on relative errors, robust where it is asked for.

Own code because it is on the way of every plan and every worker: `scipy.optimize.nnls` gives the same (a test compares
them), and importing it takes 14 times as long as a bare python does to start, where a whole plan may take 60 times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_ROUNDS = 30
_COLLINEAR = 1e-12  # of the product of both squared lengths


def non_negative(design: Array, weights: Array | None = None) -> Array:
    """``min sum w (X c - 1)^2`` over ``c >= 0``, for a design ``X`` [n, 2] of entries that are not negative.

    Where its columns tell the same, the first has it all.
    """
    weighted = design if weights is None else design * weights[:, None]
    gram, target = weighted.T @ design, weighted.sum(axis=0)
    first = np.array([target[0] / gram[0, 0], 0.0])
    product = float(gram[0, 0] * gram[1, 1])
    determinant = product - float(gram[0, 1]) ** 2
    if determinant <= _COLLINEAR * product:
        return first
    free = np.array([gram[1, 1] * target[0] - gram[0, 1] * target[1], gram[0, 0] * target[1] - gram[0, 1] * target[0]])
    if (free >= 0).all():
        return free / determinant
    # The squares are a bowl: if its lowest point lies beyond one axis, the lowest that is allowed lies on that axis.
    return first if free[1] < 0 else np.array([0.0, target[1] / gram[1, 1]])


def robust_non_negative(design: Array, limit: Callable[[Array], float]) -> Array:
    """The same by Huber's loss (1964): residuals beyond ``limit`` of all of them count linearly, by reweighting."""
    weights = np.ones(len(design))
    coefficients = non_negative(design)
    for _ in range(_ROUNDS):
        residuals = np.abs(design @ coefficients - 1)
        before, weights = weights, np.minimum(1.0, limit(residuals) / np.maximum(residuals, 1e-300))
        if np.array_equal(before, weights):
            break
        coefficients = non_negative(design, weights)
    return coefficients
