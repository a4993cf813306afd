"""Fits what jobs share in `hetopt.optimizer.step_time.gpu_transfer` to public throughputs, with or without some jobs.

Standard deviations by the most probable ones (type II maximum likelihood with weak priors; Rasmussen and Williams 2006,
section 5.4) by scipy's L-BFGS-B with gradients; the centres of the radial basis by scikit-learn's k-means. Jobs are
independent given what they share, so each contributes a precision and a vector that are added up, or left out. The same
input gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from sklearn.cluster import KMeans

from benchmarks._gpu_throughput import Column
from hetopt.optimizer.step_time.gpu_transfer import (
    FEATURES,
    LEVEL_SD,
    Array,
    GpuModel,
    Measured,
    Spread,
    basis,
    features_of,
    shared_rows,
    whitening,
)

Names = NDArray[np.str_]

CENTRES = 16
ROUNDS = 25
SLOPES = ("all jobs", "alike", "one job", "one column")
LEFT = ("gpu", "architecture", "architecture, alike", "architecture, half", "architecture, job", "gpu, job", "noise")
STARTS = np.log(
    np.array([0.3] * FEATURES + [0.15] * 2 * FEATURES + [0.06] * FEATURES + [0.1, 0.08, 0.05, 0.05, 0.06, 0.04, 0.06])
)
"""Where standard deviations are looked for, each within a factor of e or so: of `SLOPES` by feature, then of `LEFT`."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Measurements, and what they are made of.

    Attributes:
        blank: the model without mean and covariance.
        prior: variances of what jobs share.
        rows, throughput: of every cell.
        own: covariance of what is a job's alone, between cells.
        job, gpu: of every cell.
    """

    blank: GpuModel
    prior: Array
    rows: Array
    throughput: Array
    own: Array
    job: Names
    gpu: Names

    def parts(self, *, without_gpu: str | None = None) -> dict[str, tuple[Array, Array]]:
        """The precision and the vector that each job adds, with or without what one GPU tells."""
        found = {}
        for job in dict.fromkeys(self.job.tolist()):
            here = np.flatnonzero((self.job == job) & (self.gpu != without_gpu))
            solved = np.linalg.solve(self.own[np.ix_(here, here)], self.rows[here])
            found[job] = self.rows[here].T @ solved, solved.T @ self.throughput[here]
        return found

    def posterior(
        self, parts: dict[str, tuple[Array, Array]], *, without: Sequence[str] = (), calibration: float = 1.0
    ) -> GpuModel:
        """From the parts of all jobs but some."""
        kept = [part for job, part in parts.items() if job not in without]
        covariance = np.linalg.inv(np.diag(1 / self.prior) + sum(precision for precision, _ in kept))
        mean = covariance @ sum(vector for _, vector in kept)
        spread = replace(self.blank.spread, calibration=calibration)
        return replace(self.blank, mean=mean, covariance=(covariance + covariance.T) / 2, spread=spread)


def fit(columns: Sequence[Column]) -> Fit:
    """Fit to columns. A quarter of a minute for a thousand cells."""
    cells = [cell for column in columns for cell in column.cells]
    column_of = np.repeat(np.arange(len(columns)), [len(column.cells) for column in columns])
    job_of = np.array([column.job for column in columns for _ in column.cells])
    likeness = np.array([np.mean([cell.likeness for cell in column.cells], axis=0) for column in columns])
    centres = KMeans(CENTRES, n_init=10, random_state=0).fit(likeness).cluster_centers_
    throughput = np.array([_throughput(cell) for cell in cells])
    for index in range(len(columns)):
        throughput[column_of == index] -= throughput[column_of == index].mean()

    places = [cell.place for cell in cells]
    features = features_of(places)
    phi = basis(centres, whitening(centres), likeness)[column_of]
    capability = np.array([place.gpu.capability for place in places])
    gpu = np.array([place.gpu.key for place in places])
    half = np.array([place.half for place in places])
    one_job, one_column, alike = _same(job_of), _same(column_of), phi @ phi.T
    one_gpu, architecture = _same(gpu), _same(capability)
    masks = (np.ones_like(alike), alike, one_job, one_column)
    left = (
        one_gpu,
        architecture,
        architecture * alike,
        architecture * np.outer(half, half),
        architecture * one_job,
        one_gpu * one_job,
        np.eye(len(cells)),
    )

    def loss(logs: Array) -> tuple[float, Array]:
        """Negative log of the posterior of the standard deviations, and its gradient by their logs."""
        variances = np.exp(2 * logs)
        slopes, others = variances[: 4 * FEATURES].reshape(4, FEATURES), variances[4 * FEATURES :]
        covariance = LEVEL_SD**2 * one_column
        covariance = covariance + sum(
            ((features * v) @ features.T) * mask for v, mask in zip(slopes, masks, strict=True)
        )
        covariance += sum(v * mask for v, mask in zip(others, left, strict=True))
        factor = cho_factor(covariance, lower=True, check_finite=False)
        weights = cho_solve(factor, throughput)
        pull = cho_solve(factor, np.eye(len(cells)), check_finite=False) - np.outer(weights, weights)
        gradient = [*(((pull * mask) @ features * features).sum(axis=0) for mask in masks)]
        gradient.append(np.array([(pull * mask).sum() for mask in left]))
        away = logs - STARTS
        value = 0.5 * float(throughput @ weights) + float(np.log(np.diag(factor[0])).sum()) + 0.5 * float(away @ away)
        return value, variances * np.concatenate(gradient) + away

    found = np.exp(minimize(loss, STARTS, jac=True, method="L-BFGS-B", options={"maxiter": ROUNDS}).x)
    slopes, others = (
        found[: 4 * FEATURES].reshape(4, FEATURES),
        dict(zip(LEFT, found[4 * FEATURES :].tolist(), strict=True)),
    )

    blank = GpuModel(
        gpus=tuple(sorted(set(gpu.tolist()))),
        capabilities=tuple(sorted(set(capability.tolist()))),
        centres=centres,
        mean=np.zeros(0),
        covariance=np.zeros((0, 0)),
        spread=Spread(
            slopes=np.hypot(slopes[2], slopes[3]),
            architecture=others["architecture, job"],
            gpu=others["gpu, job"],
            noise=others["noise"],
        ),
    )
    rows = shared_rows(places, features, phi, blank)
    own = LEVEL_SD**2 * one_column
    own = (
        own
        + ((features * slopes[2] ** 2) @ features.T) * one_job
        + ((features * slopes[3] ** 2) @ features.T) * one_column
    )
    own += others["architecture, job"] ** 2 * architecture * one_job + others["gpu, job"] ** 2 * one_gpu * one_job
    own += others["noise"] ** 2 * np.eye(len(cells))
    architectures = len(blank.capabilities)
    prior = np.concatenate(
        [
            slopes[0],
            np.tile(slopes[1], CENTRES),
            np.full(len(blank.gpus), others["gpu"]),
            np.full(architectures, others["architecture"]),
            np.full(architectures * CENTRES, others["architecture, alike"]),
            np.full(architectures, others["architecture, half"]),
        ]
    )
    return Fit(blank=blank, prior=prior**2, rows=rows, throughput=throughput, own=own, job=job_of, gpu=gpu)


def _throughput(cell: Measured) -> float:
    return float(np.log(cell.place.batch_size / cell.step_time_s))


def _same(names: NDArray[Any]) -> Array:
    return np.asarray(names[:, None] == names[None], dtype=np.float64)
