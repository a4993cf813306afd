"""Laws of how many steps a target needs at each batch size: what every law offers, and the two published ones.

Notation: ``B`` is the global batch size in samples, ``S`` the optimizer steps to a target, ``E = B S`` the samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetopt.core.least_squares import non_negative

Array = NDArray[np.float64]

Z90 = 1.6448536269514722
"""Half-width of a 90 % interval in standard deviations."""

RUN_LOG_SD = 0.07
PSEUDO_RUNS = 2
"""What is known beforehand of the spread between repeats of a run: about 7 %, believed as much as two runs are."""


@dataclass(frozen=True, kw_only=True)
class PriorRun:
    """One finished run: the batch size it was trained at, and how long the target took."""

    global_batch_size: float
    steps_to_target: float

    def __post_init__(self) -> None:
        if not (0 < self.global_batch_size < math.inf and 0 < self.steps_to_target < math.inf):
            raise ValueError(
                f"a run has a batch size and steps above zero, not {self.global_batch_size}, {self.steps_to_target}"
            )


class StepsCurve(Protocol):
    """A law fitted to one job: dense steps to its target at any batch size. Arrays in, arrays out."""

    def steps(self, global_batch_size: ArrayLike) -> Array:
        """Expected steps, at the median."""
        ...

    def log_sd(self, global_batch_size: ArrayLike) -> Array:
        """Half-width of the 90 % interval of ``ln S`` of one new run, in units of `Z90`."""
        ...


class StepsLaw(Protocol):
    """A form of ``S(B)``. Peers differ in nothing else, so that held-out error can choose among them."""

    @property
    def name(self) -> str:
        """Name of the law in the literature."""
        ...

    @property
    def least_batch_sizes(self) -> int:
        """How many different batch sizes a fit needs."""
        ...

    def fit(self, runs: Sequence[PriorRun]) -> StepsCurve:
        """The law through these runs.

        Raises:
            ValueError: runs at fewer batch sizes than the law needs.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TwoPowers:
    """``S = u B^-p + v B^-q`` with ``u, v >= 0``: the form that both published laws have.

    Attributes:
        name: whose law it is.
        exponents: ``p`` and ``q``.
    """

    name: str
    exponents: tuple[float, float]

    @property
    def least_batch_sizes(self) -> int:
        """Batch sizes that a fit needs: two, as the law has two coefficients."""
        return 2

    def fit(self, runs: Sequence[PriorRun]) -> TwoPowersCurve:
        """Non-negative least squares on the relative error: slow runs do not outweigh quick ones."""
        batch, steps = columns(runs)
        if len(np.unique(batch)) < self.least_batch_sizes:
            raise ValueError(f"{self.name} needs runs at two batch sizes")
        # Scaled so that both columns are about one: steps and samples differ by many orders of magnitude.
        middle = float(np.exp(np.log(batch).mean()))
        design = np.stack([(batch / middle) ** -power for power in self.exponents], axis=1) / steps[:, None]
        coefficients = non_negative(design)
        residuals = 1 - design @ coefficients
        freedom = PSEUDO_RUNS + len(runs) - len(self.exponents)
        variance = (PSEUDO_RUNS * RUN_LOG_SD**2 + float(residuals @ residuals)) / freedom
        return TwoPowersCurve(
            exponents=self.exponents,
            middle=middle,
            coefficients=coefficients,
            covariance=np.asarray(variance * np.linalg.pinv(design.T @ design), dtype=np.float64),
            variance=variance,
            freedom=freedom,
        )


MCCANDLISH = TwoPowers(name="McCandlish", exponents=(0.0, 1.0))
"""``S = Smin + Emin / B`` (McCandlish et al. 2018): samples grow with the batch. Learning rates follow."""

SCAVENGER = TwoPowers(name="Scavenger", exponents=(1.0, 1.5))
"""``E = e + t / sqrt(B)`` (Scavenger, CCGrid 2023): samples fall with the batch. A fixed learning rate, few batches."""


@dataclass(frozen=True, kw_only=True)
class TwoPowersCurve:
    """`TwoPowers` with its coefficients and their covariance, in units of the runs' middle batch size."""

    exponents: tuple[float, float]
    middle: float
    coefficients: Array
    covariance: Array
    variance: float
    freedom: int

    def steps(self, global_batch_size: ArrayLike) -> Array:
        """``u B^-p + v B^-q``."""
        return np.asarray(self._terms(global_batch_size) @ self.coefficients)

    def log_sd(self, global_batch_size: ArrayLike) -> Array:
        """The usual prediction interval of a regression: the runs' spread, and what it leaves open about the line."""
        terms = self._terms(global_batch_size)
        steps = terms @ self.coefficients
        line = np.einsum("...i,ij,...j->...", terms, self.covariance, terms) / steps**2
        return np.asarray(student_half_width(self.freedom) / Z90 * np.sqrt(self.variance + line))

    def _terms(self, global_batch_size: ArrayLike) -> Array:
        batch = np.asarray(global_batch_size, dtype=np.float64) / self.middle
        return np.stack([batch**-power for power in self.exponents], axis=-1)


def columns(runs: Sequence[PriorRun]) -> tuple[Array, Array]:
    """Batch sizes and steps of the runs."""
    return (
        np.array([run.global_batch_size for run in runs], dtype=np.float64),
        np.array([run.steps_to_target for run in runs], dtype=np.float64),
    )


def student_half_width(freedom: float) -> float:
    """95th percentile of Student's t by the Cornish-Fisher series; within 1 % from three degrees of freedom on.

    `scipy.special.stdtrit` has it exactly, and importing it takes 7 times as long as a bare python does to start.
    """
    z = Z90
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
