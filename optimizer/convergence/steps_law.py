"""Finished runs as steps to the target by batch size, and the quantiles that prediction intervals are made with.

Notation: ``B`` is the global batch size in samples, ``S`` the optimizer steps to a target, ``E = B S`` the samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetopt.core.records import dataclass

Array = NDArray[np.float64]

Z90 = 1.6448536269514722
"""Half-width of a 90 % interval in standard deviations."""

RUN_LOG_SD = 0.07
PSEUDO_RUNS = 2
"""What is known beforehand of the spread between repeats of a run: about 7 %, believed as much as two runs are."""


@dataclass(frozen=True, kw_only=True)
class PriorRun:
    """Global batch size of a finished run, in samples, and its optimizer steps to the target."""

    global_batch_size: float
    steps_to_target: float


def student_half_width(freedom: float) -> float:
    """Return the 95th percentile of Student's t for ``freedom`` degrees of freedom, within 1 % from 3 degrees on.

    `scipy.special.stdtrit` has it exactly, and importing it takes 7 times as long as a bare python does to start.
    """
    z = Z90
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
