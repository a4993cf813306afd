"""Whether intervals hold where it can be checked: each layout predicted from all others, and the factor that follows.

Grouped conformal prediction (Vovk et al. 2005; folds by layout, because rows of one layout err together), from which we
depart in three ways. A score is the error in units of the predicted standard deviation, and not the error, so that an
interval stays wide where the samples are silent. Leaving a layout out takes Laplace's approximation instead of another
fit: one downdate of the posterior (Woodbury), at the same weights. And the quantile is the scores' own, not that of
(1 - alpha)(1 + 1/L): with a dozen layouts that bound is their largest score, which is noise; what few layouts leave
open is said by how little they weigh against the normal quantile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.step_time.design_matrix import Array, Index
from hetopt.optimizer.step_time.posterior import Posterior

TRUST = 60.0
"""Layouts that the assumed quantile is worth against the measured one."""

LEAST_SCORE = 0.25
"""Of the normal quantile: priors are centred on what was measured, so a lone layout foretells itself without error."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Errors of predicting each row from all other layouts.

    Attributes:
        residual: log of (true / predicted).
        log_sd: what the model expected it to be.
        layout: of each row.
    """

    residual: Array
    log_sd: Array
    layout: Index


def held_out(model: Posterior) -> HeldOut:
    """Predict every row whose step was measured without its layout."""
    sizes = len(model.where), len(model.latents.points), len(model.latents.layouts)
    derivatives = np.concatenate([channel.dense(*sizes) for channel in model.channels])
    weight = np.concatenate([channel.weight for channel in model.channels])
    residual = np.concatenate([channel.residual for channel in model.channels])
    layout = np.concatenate([channel.layout for channel in model.channels])
    steps = np.isfinite(model.observed.log_step).any()
    measured = np.arange(len(layout)) < (len(model.channels[0].residual) if steps else 0)
    errors, sds = np.zeros(len(layout)), np.ones(len(layout))
    for index in range(sizes[2]):
        rows = np.flatnonzero(layout == index)
        if not measured[rows].any():
            continue
        here = derivatives[rows]
        spread = here @ model.covariance @ here.T
        # Without these rows: H' = H - J' W J, so covariance and mode move by the gain of their removal.
        removal = np.linalg.inv(np.diag(1 / weight[rows]) - spread)
        errors[rows] = residual[rows] + spread @ (removal @ residual[rows])
        without = spread + spread @ removal @ spread
        noise = np.concatenate([channel.variance for channel in model.channels])[rows]
        sds[rows] = np.sqrt(np.maximum(np.diag(without), 0.0) + noise)
    return HeldOut(residual=errors[measured], log_sd=sds[measured], layout=layout[measured])


def quantile(found: HeldOut, level: float) -> float | None:
    """Quantile of the scores, every layout counting the same; absent where no step was measured."""
    layouts, which, counts = np.unique(found.layout, return_inverse=True, return_counts=True)
    if not len(layouts):
        return None
    scores = np.abs(found.residual) / found.log_sd
    order = np.argsort(scores)
    reached = np.cumsum((1 / counts[which])[order]) / len(layouts)
    return float(scores[order][np.searchsorted(reached, level - 1e-12)])


def half_width(model: Posterior) -> float:
    """Half-width of the 90 % interval in predicted standard deviations.

    The normal quantile and the conformal one are weighed by the layouts that stand behind each: leaving one layout out
    says little about layouts far beyond all that were measured, and less the fewer there are.
    """
    found = held_out(model)
    measured = quantile(found, 0.9)
    if measured is None:
        return Z90
    layouts = len(np.unique(found.layout))
    measured = max(measured, LEAST_SCORE * Z90)
    return float(np.exp((TRUST * np.log(Z90) + layouts * np.log(measured)) / (TRUST + layouts)))
