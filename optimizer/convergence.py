"""How many optimizer steps a goal needs, given the global batch size and how much gradient survives compression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetopt.profiler.errors import BadInput
from hetopt.profiler.profile import NoiseSample, Pilot, Profile

Array = NDArray[np.float64]

KAPPA = 0.4
"""Critical batch size over simple noise scale: typical of image classifiers in public logs (Pollux artifact)."""

KAPPA_LOG_SD = 0.6
"""Its spread over those jobs (0.2 to 1.7). Recommenders and speech models lie far below: measure two pilots there."""

SEED_LOG_SD = 0.15
"""Spread of steps to target between repeats: leave-one-out error of 3-23 % on the same logs."""

EXTRAPOLATION_LOG_SD = 0.3
"""Added for each factor of e in batch size beyond the pilots: the form S = Smin + Emin / B is then an assumption."""

INFLATION_LOG_SD = 0.5
"""Share of the log of the compression penalty that is in doubt: 1 / gain on Smin is our mapping, not a theorem."""

MINIMUM_EFFICIENCY = 0.8
"""A run of fixed length may lose a fifth of the progress that its samples would make at the task's batch size."""

UNMEASURED_BATCH_FACTOR = 4
LARGEST_BATCH_FACTOR = 16
"""Learning-rate rules are known to break down somewhere; no batch larger than this times the task's is proposed."""

LARGEST_NOISE_SCALE = 1e12
"""Stands for a noise scale without bound, samples: arithmetic stays finite, and no batch comes near it."""

PILOT_BATCH_FACTOR = 2
"""How far above the pilots' batch sizes a target is trusted. Below them nothing is gained that is worth the doubt."""


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """What the pilots and the gradient noise say about steps to the task's target.

    Attributes:
        minimum_steps: Smin, steps with an unlimited batch; absent when no pilot reached the target.
        minimum_samples: Emin, samples with the smallest batch.
        noise_scale: Bn = tr(cov) / |G|^2 over the pilots, samples; absent when it was not measured.
        pilot_batch_sizes: batch sizes of the pilots that reached the target.
        log_sd: spread of the fit at those batch sizes.
        basis: where the figures come from, in words.
    """

    minimum_steps: float | None
    minimum_samples: float | None
    noise_scale: float | None
    pilot_batch_sizes: tuple[int, ...]
    log_sd: float
    basis: str


class StepsModel(Protocol):
    """Steps that a goal needs. Arrays in, arrays out; batch sizes in samples, gain in (0, 1]."""

    @property
    def source(self) -> str:
        """Where the figure comes from, in words."""
        ...

    def steps(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Expected steps."""
        ...

    def log_sd(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Standard deviation of the log of (true / expected) steps."""
        ...


@dataclass(frozen=True, kw_only=True)
class TargetSteps:
    """Steps to the task's target.

        S(B, gain) = Smin / gain + Emin / B + check / (2 B)        (McCandlish et al. 2018 at gain 1)

    The noise term is left alone by error feedback; the deterministic term grows with what compression holds back. A run
    notices its target only when it evaluates, every ``check`` samples, on average half of that later.
    """

    convergence: Convergence
    minimum_steps: float
    minimum_samples: float
    check_every_samples: float = 0.0

    @property
    def source(self) -> str:
        """Where the figure comes from."""
        return self.convergence.basis

    def steps(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Expected steps to the target."""
        batch, kept = np.asarray(global_batch_size, dtype=np.float64), np.asarray(gain, dtype=np.float64)
        samples = self.minimum_samples + self.check_every_samples / 2
        return np.maximum(1.0, self.minimum_steps / kept + samples / batch)

    def log_sd(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Spread: between seeds, of the shape in B away from the pilots, and of the compression penalty."""
        batch = np.asarray(global_batch_size, dtype=np.float64)
        inflation = np.log(self.steps(batch, gain) / self.steps(batch, 1.0))
        shape = self._shape_log_sd(batch)
        return np.sqrt(self.convergence.log_sd**2 + shape**2 + (INFLATION_LOG_SD * inflation) ** 2)

    def _shape_log_sd(self, batch: Array) -> Array:
        pilots = self.convergence.pilot_batch_sizes
        if len(pilots) == 1:
            # d ln S / d ln kappa, with S anchored at the one pilot: zero there, growing away from it.
            critical = self.minimum_samples / self.minimum_steps
            return np.asarray(KAPPA_LOG_SD * np.abs(critical / (batch + critical) - critical / (pilots[0] + critical)))
        beyond = np.maximum(np.log(batch / max(pilots)), np.log(min(pilots) / batch))
        return np.asarray(EXTRAPOLATION_LOG_SD * np.maximum(0.0, beyond))


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """Steps of a run of a given number of passes over the data."""

    epochs: float
    dataset_size: int

    @property
    def source(self) -> str:
        """Where the figure comes from."""
        return f"{self.epochs:g} epochs of {self.dataset_size} samples, as asked for"

    def steps(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """``ceil(epochs * dataset_size / B)``, whatever the compression."""
        batch, _ = np.broadcast_arrays(np.asarray(global_batch_size, dtype=np.float64), gain)
        # 1e-9: 3.0000000001 from floating-point division is 3 steps, not 4.
        return np.maximum(1.0, np.ceil(self.epochs * self.dataset_size / batch - 1e-9))

    def log_sd(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Nothing is in doubt."""
        return np.zeros(np.broadcast_shapes(np.shape(global_batch_size), np.shape(gain)))


@dataclass(frozen=True, kw_only=True)
class FixedSteps:
    """A given number of steps."""

    count: int

    @property
    def source(self) -> str:
        """Where the figure comes from."""
        return f"{self.count} steps, as asked for"

    def steps(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Always the same."""
        return np.full(np.broadcast_shapes(np.shape(global_batch_size), np.shape(gain)), float(self.count))

    def log_sd(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Nothing is in doubt."""
        return np.zeros(np.broadcast_shapes(np.shape(global_batch_size), np.shape(gain)))


def fit_convergence(profile: Profile) -> Convergence:
    """Use the best evidence there is: pilots at two batch sizes, one pilot and the noise scale, or neither."""
    noise = noise_scale(profile.noise)
    by_batch = _steps_by_batch(profile.pilots)
    pilots = tuple(sorted(by_batch))
    if len(pilots) >= 2:
        minimum_steps, minimum_samples = fit_steps(pilots, [by_batch[size] for size in pilots])
        fitted = [minimum_steps + minimum_samples / size for size in pilots]
        residuals = [math.log(by_batch[size] / value) for size, value in zip(pilots, fitted, strict=True)]
        log_sd = math.hypot(SEED_LOG_SD, math.sqrt(sum(r * r for r in residuals) / len(residuals)))
        basis = f"pilots that reached the target at batch sizes {', '.join(map(str, pilots))}"
        return Convergence(
            minimum_steps=minimum_steps,
            minimum_samples=minimum_samples,
            noise_scale=noise,
            pilot_batch_sizes=pilots,
            log_sd=log_sd,
            basis=basis,
        )
    if pilots and noise is not None:
        critical = KAPPA * min(noise, LARGEST_NOISE_SCALE)
        minimum = by_batch[pilots[0]] / (1 + critical / pilots[0])
        return Convergence(
            minimum_steps=minimum,
            minimum_samples=minimum * critical,
            noise_scale=noise,
            pilot_batch_sizes=pilots,
            log_sd=SEED_LOG_SD,
            basis=f"a pilot that reached the target at batch size {pilots[0]} and the measured noise scale",
        )
    return Convergence(
        minimum_steps=None,
        minimum_samples=None,
        noise_scale=noise,
        pilot_batch_sizes=(),
        log_sd=SEED_LOG_SD,
        basis="no pilot reached the target",
    )


def fit_steps(global_batch_sizes: Sequence[int], steps: Sequence[float]) -> tuple[float, float]:
    """``Smin, Emin >= 0`` of ``S = Smin + Emin / B`` by non-negative least squares on the relative error."""
    batch, count = np.asarray(global_batch_sizes, dtype=np.float64), np.asarray(steps, dtype=np.float64)
    first, second = 1 / count, 1 / (batch * count)
    aa, ab, bb = float(first @ first), float(first @ second), float(second @ second)
    a, b = float(first.sum()), float(second.sum())
    determinant = aa * bb - ab * ab
    if determinant > 1e-15 * aa * bb:
        minimum_steps, minimum_samples = (bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant
        if minimum_steps >= 0 and minimum_samples >= 0:
            return minimum_steps, minimum_samples
    edges = [(a / aa, 0.0), (0.0, b / bb)]
    return min(edges, key=lambda x: float(((x[0] * first + x[1] * second - 1) ** 2).sum()))


def noise_scale(samples: Sequence[NoiseSample]) -> float | None:
    """Harmonic mean over progress of Bn = V / |G|^2, samples; infinite when no mean gradient shows in the noise.

    The harmonic mean averages |G|^2 / V, where a negative estimate of |G|^2 does no harm: clipping first would bias it.
    """
    usable = [sample for sample in samples if sample.gradient_variance > 0]
    if not usable:
        return None
    inverse = sum(sample.gradient_square / sample.gradient_variance for sample in usable) / len(usable)
    return 1 / inverse if inverse > 0 else math.inf


def target_steps(convergence: Convergence, *, check_every_samples: float = 0.0) -> TargetSteps:
    """The steps model of a run to the task's target, which is looked for every ``check_every_samples``.

    Raises:
        BadInput: the profile says how batch sizes compare, but not how many steps any of them needs.
    """
    if convergence.minimum_steps is None or convergence.minimum_samples is None:
        raise BadInput(
            "The profile cannot say how many steps the target needs, because no pilot run reached it.",
            hint="give the length of the run with --epochs or --steps, or profile again with a larger --time-budget",
        )
    return TargetSteps(
        convergence=convergence,
        minimum_steps=max(convergence.minimum_steps, 1e-9),
        minimum_samples=max(convergence.minimum_samples, 1e-9),
        check_every_samples=check_every_samples,
    )


def statistical_efficiency(global_batch_size: float, reference: float, noise: float) -> float:
    """Progress a sample at one batch size relative to another: ``(Bn + B0) / (Bn + B)`` (Pollux, OSDI 2021)."""
    return 1.0 if math.isinf(noise) else (noise + reference) / (noise + global_batch_size)


def batch_range(convergence: Convergence, task_batch_size: int, *, to_target: bool) -> tuple[int, int]:
    """Smallest and largest global batch size worth proposing.

    To a target, S(B) says what a batch size costs, so the limit is how far the pilots can be trusted. A run of fixed
    length has no such price: there the batch may grow from the task's own while samples keep 80 % of their worth. A
    smaller one would need more steps and leave what the learning rate was tuned for, for nothing.
    """
    pilots = convergence.pilot_batch_sizes
    if to_target and len(pilots) > 1:
        low, high = min(pilots), max(pilots) * PILOT_BATCH_FACTOR
    elif to_target and pilots:
        low, high = pilots[0] // UNMEASURED_BATCH_FACTOR, pilots[0] * UNMEASURED_BATCH_FACTOR
    elif convergence.noise_scale is None:
        low, high = task_batch_size, task_batch_size * UNMEASURED_BATCH_FACTOR
    else:
        low, largest = task_batch_size, task_batch_size * LARGEST_BATCH_FACTOR
        noise = min(convergence.noise_scale, LARGEST_NOISE_SCALE)
        efficient = (noise + task_batch_size) / MINIMUM_EFFICIENCY - noise
        high = int(min(largest, efficient))
    return max(1, low), max(1, low, high)


def _steps_by_batch(pilots: Sequence[Pilot]) -> dict[int, float]:
    """Geometric mean over seeds of the steps to the target, for each batch size that reached it."""
    found: dict[int, list[float]] = {}
    for pilot in pilots:
        if pilot.steps_to_target is not None:
            found.setdefault(pilot.global_batch_size, []).append(math.log(pilot.steps_to_target))
    return {size: math.exp(sum(logs) / len(logs)) for size, logs in found.items()}
