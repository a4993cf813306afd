"""Fits the standard deviations of `hetopt.optimizer.step_time.gpu_transfer` to public throughputs.

The most probable ones (type II maximum likelihood with weak priors; Rasmussen and Williams 2006, section 5.4) by
scipy's L-BFGS-B with gradients. The same input gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import get_args

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from benchmarks._gpu_throughput import Column
from hetopt.optimizer.step_time.gpu_transfer import (
    BATCH_GAIN,
    FEATURES,
    KINDS,
    LEVEL_SD,
    PARTS,
    SLOPES,
    Array,
    Cells,
    GpuModel,
    JobFacts,
    Spread,
    alikeness,
)

ROUNDS = 25
STARTS = np.log(
    [*[0.3] * FEATURES, *[0.15] * 3 * FEATURES, *[0.06] * FEATURES, 0.1, 0.06, 0.06, 0.06, 0.05, 0.06, 0.04, 0.06]
)
"""Where standard deviations are looked for, each within a factor of e or so: of `SLOPES` by feature, of `PARTS`, and of
noise."""


def fit(columns: Sequence[Column], calibration: float = 1.0) -> dict[JobFacts, GpuModel]:
    """Return the GPU model fitted to columns, by what is known of a job. Takes a minute for a thousand cells."""
    each = [
        Cells.of(
            [cell.place for cell in column.cells],
            column.job,
            index,
            KINDS.index(column.model_kind),
            np.mean([cell.likeness for cell in column.cells], axis=0).tolist(),
        )
        for index, column in enumerate(columns)
    ]
    cells = Cells(
        **{field.name: np.concatenate([getattr(cells_, field.name) for cells_ in each]) for field in fields(Cells)}
    )
    throughput = np.concatenate([_about_the_middle(column) for column in columns])
    return {known: _fit(cells.when(known), throughput, calibration) for known in get_args(JobFacts)}


def _fit(cells: Cells, throughput: Array, calibration: float) -> GpuModel:
    """Return the GPU model with the likeliest standard deviations, by the throughputs and a prior around `STARTS`."""
    features, count = cells.features, len(SLOPES) * FEATURES
    alike, in_rate = alikeness(cells, cells)
    job, column, gpu, architecture = (
        (names[:, None] == names[None]).astype(np.float64)
        for names in (cells.job, cells.column, cells.gpu, cells.capability)
    )
    # In the order of `SLOPES`, then of `PARTS` and noise.
    of_slopes = (np.ones_like(alike), alike, in_rate, job, column)
    of_parts = (
        gpu,
        architecture,
        architecture * alike,
        architecture * in_rate,
        architecture * np.outer(cells.half, cells.half),
        architecture * job,
        gpu * job,
        np.eye(len(cells)),
    )

    def loss(logs: Array) -> tuple[float, Array]:
        """Return the negative log posterior of the standard deviations, and its gradient with respect to their logs."""
        variances = np.exp(2 * logs)
        among = LEVEL_SD**2 * column
        for by_feature, mask in zip(variances[:count].reshape(-1, FEATURES), of_slopes, strict=True):
            among = among + ((features * by_feature) @ features.T) * mask
        for variance, mask in zip(variances[count:], of_parts, strict=True):
            among += variance * mask
        factor = cho_factor(among, lower=True, check_finite=False)
        weights = cho_solve(factor, throughput)
        pull = cho_solve(factor, np.eye(len(cells)), check_finite=False) - np.outer(weights, weights)
        gradient = [(((pull * mask) @ features) * features).sum(axis=0) for mask in of_slopes]
        gradient.append(np.array([(pull * mask).sum() for mask in of_parts]))
        away = logs - STARTS
        value = 0.5 * float(throughput @ weights) + float(np.log(np.diag(factor[0])).sum()) + 0.5 * float(away @ away)
        return value, variances * np.concatenate(gradient) + away

    deviations = np.exp(minimize(loss, STARTS, jac=True, method="L-BFGS-B", options={"maxiter": ROUNDS}).x)
    return GpuModel.of(
        cells,
        throughput,
        Spread(
            slopes=deviations[:count].reshape(-1, FEATURES),
            parts=deviations[count : count + len(PARTS)],
            noise=float(deviations[-1]),
            calibration=calibration,
        ),
    )


def _about_the_middle(column: Column) -> Array:
    """Return the log throughput of a column's cells at one batch size, less its mean."""
    batches = np.log([cell.place.batch_size for cell in column.cells])
    logs = (1 - BATCH_GAIN) * batches - np.log([cell.step_time_s for cell in column.cells])
    return np.asarray(logs - logs.mean(), dtype=np.float64)
