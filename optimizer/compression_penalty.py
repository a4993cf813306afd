"""What compression costs in steps, learned from compressed runs where there are any, and where it costs the target.

    S(B, gain) = S(B) (rho / gain^q + 1 - rho)

with ``rho`` the share of the steps that averaging more samples would not save (`hetopt.profiler.inflation`, where
``q = 1``). Gain is the share of the gradient's energy that gets through. It says how much slower a run goes, but not
that it arrives: in GraVAC's experiments (table 2) Top-k at 0.1 % kept 80 to 90 % of an LSTM's gradient and still ended
at a perplexity of 26.8 where 22 was wanted. So arriving is a gate of its own, opened by an accuracy pilot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

EXPONENT = 1.0
EXPONENT_SD = 0.5
"""Prior of ``q``: 1 is what contraction arguments give (Stich and Karimireddy 2020), an assumption about one model."""

PILOT_LOG_SD = 0.1
"""Spread of one pilot's steps over dense ones: two runs, each 5 to 20 % off by its seed."""

UNPROVEN_GAIN = 0.7
"""Gain below which only an accuracy pilot opens the gate: the lower of GraVAC's two thresholds."""

FAIR_TRIAL = 1.5
"""A pilot has failed when it took this many times the steps it should have needed; before that it proves nothing."""


@dataclass(frozen=True, kw_only=True)
class CompressedPilot:
    """A run towards the target with compression.

    Attributes:
        scheme: compressor.
        ratio: fraction of the elements that was sent, in (0, 1].
        gain: retained gradient energy, averaged over the run, in (0, 1].
        deterministic_share: rho at its batch size, in [0, 1].
        dense_steps: what the target needs at its batch size without compression.
        steps_trained: how long it ran.
        steps_to_target: absent when it ended before the target.
    """

    scheme: str
    ratio: float
    gain: float
    deterministic_share: float
    dense_steps: float
    steps_trained: float
    steps_to_target: float | None

    def __post_init__(self) -> None:
        if not (0 < self.ratio <= 1 and 0 < self.gain <= 1 and 0 <= self.deterministic_share <= 1):
            raise ValueError("a pilot's ratio and gain are in (0, 1] and its deterministic share in [0, 1]")
        if not (0 < self.dense_steps < math.inf and 0 < self.steps_trained < math.inf):
            raise ValueError("a pilot's steps are above zero")
        if self.steps_to_target is not None and not 0 < self.steps_to_target <= self.steps_trained:
            raise ValueError("a pilot reaches the target within the steps that it was trained for")


@dataclass(frozen=True, kw_only=True)
class CompressionPenalty:
    """``q`` and how sure it is."""

    exponent: float = EXPONENT
    exponent_sd: float = EXPONENT_SD

    def __post_init__(self) -> None:
        if not (0 <= self.exponent < math.inf and 0 <= self.exponent_sd < math.inf):
            raise ValueError("the exponent of the gain and its spread are finite and not negative")

    def inflation(self, gain: ArrayLike, deterministic_share: ArrayLike) -> Array:
        """Compressed over dense steps, at least 1; gain in (0, 1], share in [0, 1]."""
        return _inflation(self.exponent, gain, deterministic_share)

    def log_sd(self, gain: ArrayLike, deterministic_share: ArrayLike) -> Array:
        """Spread of ``ln`` inflation: zero without compression, growing with what is held back."""
        kept, share = np.asarray(gain, dtype=np.float64), np.asarray(deterministic_share, dtype=np.float64)
        stretched = share * kept**-self.exponent
        return np.asarray(self.exponent_sd * -np.log(kept) * stretched / (stretched + 1 - share))


UNFITTED = CompressionPenalty()
"""The penalty before any compressed run was seen."""


@dataclass(frozen=True, kw_only=True)
class QualityGate:
    """Which compression may be planned with, going by accuracy pilots.

    A pilot speaks for its scheme alone: one that arrived for every ratio at least as large, one that failed for every
    ratio at least as small.
    """

    pilots: tuple[CompressedPilot, ...] = ()
    penalty: CompressionPenalty = UNFITTED

    def objection(self, *, scheme: str, ratio: float, gain: float) -> str | None:
        """Why this compression may not be used, in one sentence; None where nothing speaks against it."""
        own = [pilot for pilot in self.pilots if pilot.scheme == scheme]
        for pilot in own:
            if pilot.ratio >= ratio and self._failed(pilot):
                return (
                    f"{scheme} at {pilot.ratio:g} did not reach the target in {pilot.steps_trained:.0f} steps; "
                    f"dense training needs {pilot.dense_steps:.0f}"
                )
        if gain >= UNPROVEN_GAIN or any(pilot.ratio <= ratio and pilot.steps_to_target is not None for pilot in own):
            return None
        return (
            f"{scheme} at {ratio:g} keeps {gain:.0%} of the gradient's energy, below {UNPROVEN_GAIN:.0%}, "
            "and no pilot has shown that it reaches the target"
        )

    def _failed(self, pilot: CompressedPilot) -> bool:
        needed = pilot.dense_steps * float(self.penalty.inflation(pilot.gain, pilot.deterministic_share))
        return pilot.steps_to_target is None and pilot.steps_trained >= FAIR_TRIAL * needed


def fit_penalty(pilots: Sequence[CompressedPilot]) -> CompressionPenalty:
    """Posterior mean and spread of ``q`` over the pilots that reached the target; the prior where there is none."""
    exponents = np.linspace(0.0, EXPONENT + 4 * EXPONENT_SD, 301)
    log_weight = -0.5 * ((exponents - EXPONENT) / EXPONENT_SD) ** 2
    reached = [(pilot, pilot.steps_to_target) for pilot in pilots if pilot.steps_to_target is not None]
    if not reached:
        return UNFITTED
    for pilot, steps in reached:
        expected = pilot.dense_steps * _inflation(exponents, pilot.gain, pilot.deterministic_share)
        log_weight -= 0.5 * (np.log(steps / expected) / PILOT_LOG_SD) ** 2
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    mean = float(weight @ exponents)
    return CompressionPenalty(exponent=mean, exponent_sd=math.sqrt(float(weight @ (exponents - mean) ** 2)))


def _inflation(exponent: ArrayLike, gain: ArrayLike, deterministic_share: ArrayLike) -> Array:
    share = np.asarray(deterministic_share, dtype=np.float64)
    return np.asarray(share * np.asarray(gain, dtype=np.float64) ** -np.asarray(exponent) + 1 - share)
