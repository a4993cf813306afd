"""The two published laws of steps to a target, for comparison: ``S = u B^-p + v B^-q`` with ``u, v >= 0``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hetopt.core.memory import non_negative
from hetopt.optimizer.convergence.steps_law import PriorRun

MCCANDLISH = (0.0, 1.0)
"""``S = Smin + Emin / B`` (McCandlish et al. 2018): samples grow with the batch. Learning rates follow."""

SCAVENGER = (1.0, 1.5)
"""``E = e + t / sqrt(B)`` (Scavenger, CCGrid 2023): samples fall with the batch. A fixed learning rate, few batches."""


def two_powers(runs: Sequence[PriorRun], exponents: tuple[float, float]) -> Callable[[float], float]:
    """Return a function from batch size to steps: non-negative least squares on the relative error."""
    batch = np.array([run.global_batch_size for run in runs])
    steps = np.array([run.steps_to_target for run in runs])
    # Scaled so that both columns are about one: steps and samples differ by many orders of magnitude.
    middle, powers = float(np.exp(np.log(batch).mean())), np.array(exponents)
    coefficients = non_negative((batch[:, None] / middle) ** -powers / steps[:, None])
    return lambda size: float((size / middle) ** -powers @ coefficients)
