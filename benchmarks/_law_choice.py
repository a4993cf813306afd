"""Choosing among laws of steps to a target by the error on runs that a law has not seen, and calibrating intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from hetopt.core.memory import non_negative
from hetopt.optimizer.convergence.steps_law import (
    PSEUDO_RUNS,
    RUN_LOG_SD,
    Z90,
    Array,
    PriorRun,
    StepsCurve,
    columns,
    student_half_width,
)


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


LEAST_TO_CHOOSE = 4
"""Batch sizes below which held-out errors are too few to prefer one law over another."""

CLEARLY = 2.0
"""Standard errors by which a law must do better than the first: the best of several noisy scores flatters itself."""

COVERAGE = 0.9


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A run that was predicted from the runs at all other batch sizes.

    Attributes:
        run: what was measured.
        predicted_steps: the law's steps at its batch size.
        log_sd: the spread that the law gave with it.
    """

    run: PriorRun
    predicted_steps: float
    log_sd: float

    @property
    def log_error(self) -> float:
        """``ln(predicted steps / measured steps)`` of the run that was left out."""
        return math.log(self.predicted_steps / self.run.steps_to_target)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen law with its fit.

    Attributes:
        law: the chosen one.
        curve: its fit to all runs, with a calibrated interval where there were runs enough.
        held_out_error: median of ``|ln(predicted / measured)|`` over held-out runs; absent when none could be held out.
    """

    law: StepsLaw
    curve: StepsCurve
    held_out_error: float | None


@dataclass(frozen=True, kw_only=True)
class Widened:
    """A curve whose interval is stretched, or shrunk, by a factor that its held-out runs gave."""

    curve: StepsCurve
    factor: float

    def steps(self, global_batch_size: ArrayLike) -> Array:
        """Expected steps to the target, as the fitted curve has them."""
        return self.curve.steps(global_batch_size)

    def log_sd(self, global_batch_size: ArrayLike) -> Array:
        """Standard deviation of the log of the steps: the curve's, widened by ``factor``."""
        return self.factor * self.curve.log_sd(global_batch_size)


def hold_out(law: StepsLaw, runs: Sequence[PriorRun]) -> tuple[HeldOut, ...]:
    """Predict each batch size from all the others: repeats at one batch size leave together, or they would leak.

    Batch sizes whose absence leaves fewer than the law needs are not predicted.
    """
    sizes = sorted({run.global_batch_size for run in runs})
    if len(sizes) - 1 < law.least_batch_sizes:
        return ()
    found: list[HeldOut] = []
    for size in sizes:
        curve = law.fit([run for run in runs if run.global_batch_size != size])
        steps, log_sd = float(curve.steps(size)), float(curve.log_sd(size))
        found.extend(
            HeldOut(run=run, predicted_steps=steps, log_sd=log_sd) for run in runs if run.global_batch_size == size
        )
    return tuple(found)


def choose(laws: Sequence[StepsLaw], runs: Sequence[PriorRun]) -> Choice:
    """The first law, unless another predicts held-out batch sizes clearly better; fitted to all runs.

    Raises:
        ValueError: runs at fewer batch sizes than the first law needs.
    """
    best = laws[0]
    if len({run.global_batch_size for run in runs}) >= LEAST_TO_CHOOSE:
        for other in laws[1:]:
            if _clearly_better(hold_out(other, runs), hold_out(best, runs)):
                best = other
    held = hold_out(best, runs)
    curve: StepsCurve = best.fit(runs)
    factor = conformal_factor(held)
    return Choice(
        law=best,
        curve=curve if factor is None else Widened(curve=curve, factor=factor),
        held_out_error=float(np.median([abs(each.log_error) for each in held])) if held else None,
    )


def conformal_factor(held: Sequence[HeldOut]) -> float | None:
    """What to multiply the spread by so that `COVERAGE` of new batch sizes fall in the interval.

    Split-conformal prediction by batch size: of ``m`` scores ``|ln(predicted / measured)| / half-width`` the
    ``ceil(COVERAGE (m + 1))``-th smallest. One score a batch size, the worst of its repeats. None when they are too
    few (nine at 90 %): the quantile would be without bound, and the law's own interval is all there is.
    """
    scores: dict[float, float] = {}
    for each in held:
        size = each.run.global_batch_size
        scores[size] = max(scores.get(size, 0.0), abs(each.log_error) / (Z90 * each.log_sd))
    rank = math.ceil(COVERAGE * (len(scores) + 1))
    return sorted(scores.values())[rank - 1] if 0 < rank <= len(scores) else None


def _clearly_better(one: Sequence[HeldOut], other: Sequence[HeldOut]) -> bool:
    """Whether the first errors are smaller by more than chance would make them, pair by pair."""
    if not one or len(one) != len(other):
        return False
    saved = np.array([abs(b.log_error) - abs(a.log_error) for a, b in zip(one, other, strict=True)])
    return bool(saved.mean() > CLEARLY * saved.std(ddof=1) / math.sqrt(len(saved)))
