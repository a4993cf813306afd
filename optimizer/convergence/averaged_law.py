"""The default law of optimizer steps to a target by batch size: an average of curves, weighted by their fit to runs.

    S(B) = A (1/B + 1/Bcrit)^g,        1/2 <= g <= 1

is McCandlish's law at ``g = 1`` (``Smin = A / Bcrit``, ``Emin = A``), a power of the batch size as ``Bcrit`` grows, and
between the two where larger batches lose more than their noise accounts for, because schedules and learning rates were
tuned at one batch size. At every ``g`` more batch needs neither more steps nor fewer samples. A handful of runs, each 5
to 20 % off by its seed, cannot pick one such curve, and the best-fitting one extrapolates badly; so none is picked.
With ``ln S`` normal around the curve, ``ln A`` flat and the spread's prior an inverse gamma, a ``(Bcrit, g)`` has a
weight in closed form (the evidence of a linear model), and a forecast is the weighted median over all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetopt.core.training_laws import KAPPA
from hetopt.optimizer.convergence.steps_law import (
    PSEUDO_RUNS,
    RUN_LOG_SD,
    Z90,
    Array,
    PriorRun,
    student_half_width,
)

KAPPA_LOG_SDS = (1.0, 2.5)
"""Prior of the log of critical batch size over noise scale, around `KAPPA`: as likely within the order of magnitude as
anywhere."""

EARLY_GROWTH = 3.0
EARLY_LOG_SDS = (1.5, 3.0)
"""By what a noise scale that was read at the beginning of training is multiplied, and how wide the prior then is: noise
grows while a model learns (McCandlish et al. 2018). Of the first reading of public runs, growth by 1, 2, 4 and 8 left
intervals of steps at 2 to 16 times the batch size that held 67, 93, 95, 95 % of CIFAR-10, 98, 98, 93, 86 % of BERT and
92, 86, 82, 82 % of a recommender; with `KAPPA_LOG_SDS` 45 to 95, 62 to 98 and 70 to 85 % (`benchmarks.convergence`,
protocol *early*; without `SAYS_NOTHING`, with which growth by 3 leaves 95, 98 and 94 %)."""

SAYS_NOTHING = 0.01
"""Density, beside those of `KAPPA_LOG_SDS`, of a noise scale that says nothing of the critical batch size, one in about
25. Without it a noise scale a million times too large is believed against six runs without spread, and steps at twice
the largest batch size come out 41 % too low; with it 4 % too high. Over public logs it moves no median error by 1 %."""

BENT_LOG_SCALE = 0.02
"""Half-Cauchy scale of ``ln 1/g``: nearly McCandlish's law unless the runs say otherwise, and then free to bend."""

NODES = (97, 33)
NEGLIGIBLE = 1e-4
"""Of the heaviest curve's weight: lighter ones are dropped, which no forecast notices."""


def averaged_curve(
    runs: Sequence[PriorRun],
    *,
    noise_scale: ArrayLike | None = None,
    noise_steps: ArrayLike = 1.0,
    kappa: float = KAPPA,
    log_sds: tuple[float, float] = KAPPA_LOG_SDS,
) -> AveragedCurve:
    """Fit steps to the target by batch size, as weighted curves, to ``runs`` and a noise scale.

    Args:
        runs: finished runs, one at least.
        noise_scale: gradient noise scale in samples, at one time or over a run of the smallest batch size; None: not
            measured. It stands in for runs at more batch sizes, and counts beside them: over public logs the mean error
            of steps at a batch size left out, by two, three and four runs without it and with it, is 9, 7.0 and 6.1 and
            8, 6.6 and 5.8 % for BERT, 25, 17.8 and 15.0 and 21, 16.7 and 14.6 % for CIFAR-10, 12, 8.8 and 8.0 and 9,
            8.2 and 7.6 % for a recommender (`benchmarks.convergence` has those of two).
        noise_steps: steps of that run for which each noise scale stands.
        kappa: prior median of (critical batch size / noise scale).
        log_sds: standard deviations of two equally likely normal priors of the log of that ratio.
    """
    batch = np.array([run.global_batch_size for run in runs], dtype=np.float64)
    steps = np.array([run.steps_to_target for run in runs], dtype=np.float64)
    critical, log_prior = _critical_batch_sizes(batch, noise_scale, noise_steps, kappa, log_sds)
    # Runs at one batch size cannot show a bend: allowing for one, steps from one run of three public jobs, each by the
    # two others' kappa, are 5, 29 and 14 % off in the median, and else 6, 11 and 10 %.
    bends = NODES[1] if len(np.unique(batch)) > 1 else 1
    bend = np.linspace(0.0, math.asinh(math.log(2) / BENT_LOG_SCALE), bends)
    power = np.exp(-BENT_LOG_SCALE * np.sinh(bend))
    # Half-Cauchy density of ln 1/g, times the width of each node on this grid: cosh / (1 + sinh^2).
    log_weight = (log_prior[:, None] - np.log(np.cosh(bend))).ravel()
    critical, power = (each.ravel() for each in np.meshgrid(critical, power, indexing="ij"))

    offsets = np.log(steps)[:, None] - power * np.log(1 / batch[:, None] + 1 / critical)
    scale = offsets.mean(axis=0)
    squares = PSEUDO_RUNS * RUN_LOG_SD**2 + ((offsets - scale) ** 2).sum(axis=0)
    freedom = PSEUDO_RUNS + len(runs) - 1
    log_weight -= freedom / 2 * np.log(squares)
    weight = np.exp(log_weight - log_weight.max())
    kept = weight > NEGLIGIBLE
    weight = weight[kept] / weight[kept].sum()
    return AveragedCurve(
        critical=critical[kept],
        power=power[kept],
        log_scale=scale[kept],
        weight=weight,
        # The spread of one more run: around the curve, and of the curve's own height.
        run_variance=float(weight @ squares[kept]) / freedom * (1 + 1 / len(runs)),
        freedom=freedom,
    )


def _critical_batch_sizes(
    batch: Array, noise_scale: ArrayLike | None, noise_steps: ArrayLike, kappa: float, log_sds: tuple[float, float]
) -> tuple[Array, Array]:
    """Return nodes of the critical batch size in samples, evenly spaced in a log, and the log prior of each, [nodes].

    Without a noise scale the prior is flat in the log. Else steps at another batch size are the integral of a step's
    worth over the run, ``sum_i w_i (1/B + 1/c_i) / (1/B0 + 1/c_i)`` for ``w_i`` steps with the critical batch size
    ``c_i``, kappa times the noise scale. That is the law of one critical batch size, ``sum_i p_i c_i / sum_i p_i`` with
    ``p_i = w_i / (c_i + B0)``.
    """
    low, high = math.log(batch.min() / 100), math.log(batch.max() * 1000)
    if noise_scale is None:
        return np.exp(np.linspace(low, high, NODES[0])), np.zeros(NODES[0])
    # Below a tenth of a sample a noise scale is the absence of noise; its log must stay finite.
    noted = np.maximum(np.multiply(kappa, noise_scale), 0.1)
    level = float(np.log(noted).mean())
    # As wide as the prior is, and as what runs may show against the noise, with the noise in the middle.
    reach = max(3 * log_sds[1], level - low, high - level)
    distance = np.linspace(-reach, reach, NODES[0])
    critical = noted * np.exp(distance)[:, None]
    steps = np.asarray(noise_steps) / (critical + batch.min())
    return (steps * critical).sum(axis=1) / steps.sum(axis=1), np.log(
        sum(np.exp(-0.5 * (distance / sd) ** 2) / sd for sd in log_sds) + SAYS_NOTHING
    )


@dataclass(frozen=True, kw_only=True)
class AveragedCurve:
    """Posterior over curves of steps to the target by batch size: each curve's parameters and weight, [curves].

    Attributes:
        critical: critical batch size, samples.
        power: exponent ``g``.
        log_scale: ``ln A``.
        weight: probability of each curve; they sum to 1.
        run_variance: variance of the log of one more run's steps around the curves.
        freedom: degrees of freedom of that variance.
    """

    critical: Array
    power: Array
    log_scale: Array
    weight: Array
    run_variance: float
    freedom: int

    def steps(self, global_batch_size: ArrayLike) -> Array:
        """Return the steps to the target at each global batch size (samples), the weighted median over the curves."""
        sizes, which = _different(global_batch_size)
        return np.asarray(np.exp(self._median(self._curves(sizes)))[which])

    def relative(self, global_batch_size: ArrayLike, reference: float) -> tuple[Array, Array]:
        """Return steps at each batch size over steps at batch size ``reference``, and the log's standard deviation."""
        sizes, which = _different(global_batch_size)
        ratios = self._curves(sizes) - self._curves(np.array([reference]))
        middle = self._median(ratios)
        apart = np.sqrt((ratios - middle[:, None]) ** 2 @ self.weight)
        return np.asarray(np.exp(middle)[which]), np.asarray(apart[which])

    def least(self, costs: Array, sizes: ArrayLike, reference: float) -> Array:
        """Return the 5 %, 50 % and 95 % quantiles, over the curves, of the cost at each curve's cheapest batch size.

        Args:
            costs: cost of a run at each of ``sizes`` on the median curve; on another curve in proportion to the steps.
            sizes: global batch sizes, samples, all different.
            reference: batch size at which all curves need as many steps, samples.
        """
        ratios = self._curves(np.asarray(sizes, dtype=np.float64)) - self._curves(np.array([reference]))
        by_curve = (costs[:, None] * np.exp(ratios - self._median(ratios)[:, None])).min(axis=0)
        order = np.argsort(by_curve)
        return np.asarray(by_curve[order[np.searchsorted(np.cumsum(self.weight[order]), (0.05, 0.5, 0.95))]])

    def log_sd(self, global_batch_size: ArrayLike) -> Array:
        """Return the standard deviation of the log of `steps` by batch size: of single runs and of the curve."""
        sizes, which = _different(global_batch_size)
        curves = self._curves(sizes)
        apart = (curves - self._median(curves)[:, None]) ** 2 @ self.weight
        return np.asarray((student_half_width(self.freedom) / Z90 * np.sqrt(self.run_variance + apart))[which])

    def _curves(self, sizes: Array) -> Array:
        return np.asarray(self.log_scale + self.power * np.log(1 / sizes[:, None] + 1 / self.critical))

    def _median(self, curves: Array) -> Array:
        """Return the weighted median of each row of ``curves``, shape (rows, nodes)."""
        order = np.argsort(curves, axis=1)
        below = np.cumsum(self.weight[order], axis=1) < 0.5
        middle = np.take_along_axis(order, below.sum(axis=1)[:, None], axis=1)
        return np.asarray(np.take_along_axis(curves, middle, axis=1)[:, 0])


def _different(global_batch_size: ArrayLike) -> tuple[Array, NDArray[np.intp]]:
    """Return the distinct batch sizes, sorted, and the index among them of each one asked for, of the same shape."""
    batch = np.asarray(global_batch_size, dtype=np.float64)
    sizes, which = np.unique(batch, return_inverse=True)
    return sizes, which.reshape(batch.shape)
