"""What compression costs in steps, learned from compressed runs where there are any, and where it costs the target.

    S(B, gain) = S(B) (1 + a sqrt(1 / gain - 1))

(`hetopt.core.training_laws`, the law that training follows as well.) Gain is the share of the gradient's energy
that gets through. It says how much slower a run goes, but not that it arrives: in GraVAC's experiments (table 2) Top-k
at 0.1 % kept 80 to 90 % of an LSTM's gradient and still ended at a perplexity of 26.8 where 22 was wanted. So arriving
is a gate of its own, closed by a pilot that fell short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetopt.core.training_laws import COEFFICIENT, COEFFICIENT_SD, LEAST_GAIN
from hetopt.optimizer.convergence.steps_law import Z90

Array = NDArray[np.float64]

PILOT_LOG_SD = 0.1
"""Spread of one pilot's steps over dense ones: two runs, each 5 to 20 % off by its seed."""

FAIR_TRIAL = 1.5
"""A pilot has failed when it took this many times the steps it should have needed; before that it proves nothing."""


@dataclass(frozen=True, kw_only=True)
class BesideDense:
    """A pilot that was not dense, beside the steps that dense training needs at its batch size.

    Attributes:
        dense_steps: that the target needs there.
        steps_trained: how long it ran.
        steps_to_target: absent when it ended before the target.
    """

    dense_steps: float
    steps_trained: float
    steps_to_target: float | None

    def failed(self, inflation: ArrayLike) -> bool:
        """Return whether the pilot missed the target in more steps than so stretched a run should have needed."""
        needed = self.dense_steps * float(np.asarray(inflation))
        return self.steps_to_target is None and self.steps_trained >= FAIR_TRIAL * needed


@dataclass(frozen=True, kw_only=True)
class CompressedPilot(BesideDense):
    """A run towards the target with compression.

    Attributes:
        scheme: compressor.
        ratio: fraction of the elements that was sent, in (0, 1].
        gain: retained gradient energy, averaged over the run, in (0, 1].
    """

    scheme: str
    ratio: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """The coefficient ``c`` of ``steps / dense steps = 1 + c distance``, its spread, and its number of pilots.

    Distances are those of `distance`, by the gain of compression or by the share of the steps that end in an average.
    """

    coefficient: float = COEFFICIENT
    coefficient_sd: float = COEFFICIENT_SD
    pilots: int = 0

    def inflation(self, share: ArrayLike, workers: ArrayLike = math.inf) -> Array:
        """Return the steps over those of dense training, at least 1."""
        return np.asarray(1 + self.coefficient * distance(share, workers))

    def log_sd(self, share: ArrayLike, workers: ArrayLike = math.inf) -> Array:
        """Return the spread of ``ln`` inflation: zero in dense training, growing with the distance from it."""
        return np.asarray(self.coefficient_sd * distance(share, workers) / self.inflation(share, workers))

    @property
    def cautious_coefficient(self) -> float:
        """The upper end of the coefficient's 90 % interval."""
        return self.coefficient + Z90 * self.coefficient_sd

    def least_gain(self, inflation: float) -> float:
        """Return the least part of gradient energy with which a run takes at most ``inflation`` times the steps."""
        if self.cautious_coefficient == 0:
            return LEAST_GAIN
        return max(LEAST_GAIN, 1 / (1 + ((inflation - 1) / self.cautious_coefficient) ** 2))

    def after(self, runs: Iterable[tuple[BesideDense, Array]]) -> Penalty:
        """Return the posterior over pilots and the distance of each; those that missed the target tell nothing of it.

        Mean and deviation are summed up over a grid of ``c >= 0``: the prior is normal, cut off at 0, and measured
        inflation has a log deviation of `PILOT_LOG_SD`.
        """
        reached = [
            (pilot.steps_to_target / pilot.dense_steps, float(distance))
            for pilot, distance in runs
            if pilot.steps_to_target is not None
        ]
        if not reached:
            return self
        inflation, distance = np.array(reached).T
        mean, sd = self.coefficient, self.coefficient_sd
        coefficients = np.linspace(0.0, mean + 8 * sd, 401)
        errors = np.log(inflation / (1 + coefficients[:, None] * distance)) / PILOT_LOG_SD
        log_weight = -0.5 * (((coefficients - mean) / sd) ** 2 + (errors**2).sum(axis=1))
        weight = np.exp(log_weight - log_weight.max())
        weight /= weight.sum()
        estimate = float(weight @ coefficients)
        estimate_sd = math.sqrt(float(weight @ (coefficients - estimate) ** 2))
        return replace(self, coefficient=estimate, coefficient_sd=estimate_sd, pilots=len(reached))


def distance(share: ArrayLike, workers: ArrayLike = math.inf) -> Array:
    """Return the steps that workers drift apart between two averages: ``(1 - 1/N) sqrt(1/share - 1)``.

    With a gain in the place of the share, how far what is held back has left the model behind.
    """
    part = np.asarray(share, dtype=np.float64)
    return np.asarray((1 - 1 / np.asarray(workers, dtype=np.float64)) * np.sqrt(1 / part - 1))


@dataclass(frozen=True, kw_only=True)
class QualityGate:
    """Rules for which compression may be planned with, from accuracy pilots.

    A pilot speaks for its scheme alone: one that arrived for every ratio at least as large, one that failed for every
    ratio at least as small. Where no pilot speaks, the law does, with its wide prior, down to the least gain that it
    was seen to hold for: training measures what compression costs, and sends more when that is too much.
    """

    pilots: tuple[CompressedPilot, ...] = ()
    penalty: Penalty = field(default_factory=Penalty)

    def objection(self, *, scheme: str, ratio: float, gain: float) -> str | None:
        """Return why this compression may not be used, in one sentence; None where nothing speaks against it."""
        alike = [pilot for pilot in self.pilots if pilot.scheme == scheme]
        for pilot in alike:
            if pilot.ratio >= ratio and pilot.failed(self.penalty.inflation(pilot.gain)):
                return (
                    f"{scheme} at {pilot.ratio:g} did not reach the target in {pilot.steps_trained:.0f} steps; "
                    f"dense training needs {pilot.dense_steps:.0f}"
                )
        if gain >= LEAST_GAIN or any(pilot.ratio <= ratio and pilot.steps_to_target is not None for pilot in alike):
            return None
        return (
            f"{scheme} at {ratio:g} keeps {100 * gain:.0f} % of the gradient's energy, below {100 * LEAST_GAIN:.0f} %, "
            "and no pilot has shown that it reaches the target"
        )
