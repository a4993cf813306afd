"""What sending whole gradients in fewer bytes costs this job in steps, from the trials that its profile holds.

    with a residual       gain as measured; the law of `hetopt.core.training_laws` does the rest
    without               (1 + c e) / s,  e from the measured variance q at the levels that so many workers leave

Codes that are summed have the fewer levels the more workers there are: between the levels that were tried the log of
``q`` is interpolated in the log of the levels, and beyond them it falls with their square, as the error of a uniform
grid does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.options import KEPT, LOSSLESS, has_levels, timed_as
from hetopt.core.comm.payload_bytes import summed_bits
from hetopt.core.errors import BadInput
from hetopt.core.profile import ExchangeTrial
from hetopt.core.run_spec import Compression
from hetopt.core.training_laws import NOISE_COEFFICIENT, NOISE_COEFFICIENT_SD

LEAST_VARIANCE = 1e-12
"""Stands for none, so that its log is finite."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Noise that a compression without a residual adds, and signal that it keeps, by the levels of its codes.

    Attributes:
        levels: that were tried, ascending; (1,) where they do not follow the workers.
        variances: ``q`` at each.
        signals: ``s`` at each.
    """

    levels: tuple[int, ...]
    variances: tuple[float, ...]
    signals: tuple[float, ...]

    def variance(self, levels: int) -> float:
        """Return the rounding variance ``q`` at so many levels."""
        at, known = math.log(levels), np.log(self.levels)
        log_variances = np.log(np.maximum(self.variances, LEAST_VARIANCE))
        beyond = max(0.0, at - float(known[-1]))
        return float(np.exp(np.interp(at, known, log_variances) - 2 * beyond))

    def signal(self, levels: int) -> float:
        """Return the retained signal ``s`` at so many levels."""
        return float(np.interp(math.log(levels), np.log(self.levels), self.signals))


@dataclass(frozen=True, kw_only=True)
class ExchangeLosses:
    """Gains and rounding of each compression, from the trials of a profile; empty: there were none.

    Attributes:
        gains: of ways with a residual, by what they are timed as.
        roundings: of ways without, likewise.
        noise_scale: of the job, samples; None: not known.
        batch_size: the task's own. Noise weighs less in a larger one.
    """

    gains: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    roundings: Mapping[str, Rounding] = field(default_factory=lambda: MappingProxyType({}))
    noise_scale: float | None = None
    batch_size: int = 1

    def gain(self, way: Compression) -> float | None:
        """Return the gradient energy that a compression of all elements retains; None: not known."""
        if way.name in LOSSLESS:
            return KEPT[way.name]
        key = timed_as(way)
        if key in self.gains:
            return self.gains[key]
        return 1.0 if key in self.roundings else KEPT.get(way.name)

    def stretch(self, way: Compression, workers: int) -> tuple[float, float]:
        """Return steps with rounded gradients over those of exact sums, and the standard deviation of their log."""
        rounding = self.roundings.get(timed_as(way))
        if rounding is None or workers < 2:
            return 1.0, 0.0
        levels = summed_bits(workers, bits=way.bits, levels=way.levels)[1] if has_levels(way) else 1
        noise = added_noise(
            rounding.variance(levels), noise_scale=self.noise_scale, batch_size=self.batch_size, workers=workers
        )
        inflation = noise_inflation(noise, rounding.signal(levels))
        return inflation, NOISE_COEFFICIENT_SD * noise / (1 + NOISE_COEFFICIENT * noise)


def exchange_losses(trials: Sequence[ExchangeTrial], *, noise_scale: float | None, batch_size: int) -> ExchangeLosses:
    """Return the losses of each compression in the trials; those that this version does not have are skipped."""
    gains: dict[str, float] = {}
    tried: dict[str, list[tuple[int, float, float]]] = {}
    for trial in trials:
        try:
            way = parse_compression(trial.compression)
        except BadInput:  # of another version, which had more methods
            continue
        if trial.gain is not None:
            gains[timed_as(way)] = min(1.0, trial.gain)
        if trial.variance is not None:
            tried.setdefault(timed_as(way), []).append((way.levels or 1, trial.variance, trial.signal))
    roundings = {
        key: Rounding(levels=levels, variances=variances, signals=signals)
        for key, rows in tried.items()
        for levels, variances, signals in [tuple(zip(*sorted(rows), strict=True))]
    }
    return ExchangeLosses(gains=gains, roundings=roundings, noise_scale=noise_scale, batch_size=batch_size)


def added_noise(variance: float, *, noise_scale: float | None, batch_size: float, workers: int) -> float:
    """Return ``e``: energy that rounding adds to the summed gradient, over its energy; at most ``variance``.

    Args:
        variance: ``q`` of one worker's gradient, at least 0.
        noise_scale: ``Bn`` in samples; None: not known, and then the gradient counts as all noise.
        batch_size: ``B``, samples of all workers.
        workers: ``n``, with equal parts of the batch.
    """
    if noise_scale is None:
        return variance
    return variance * (noise_scale + batch_size / workers) / (noise_scale + batch_size)


def noise_inflation(noise: float, signal: float = 1.0) -> float:
    """Return steps with gradients that were rounded and forgotten over steps of dense training, at least 1.

    Args:
        noise: ``e`` of `added_noise`.
        signal: ``s``, in (0, 1].
    """
    return (1 + NOISE_COEFFICIENT * noise) / signal
