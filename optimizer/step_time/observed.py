"""Measured steps in logs of seconds, with the step model's residuals against them and derivatives by its unknowns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hetopt.core.errors import BadInput
from hetopt.core.step_samples import ModelKind, StepSample
from hetopt.optimizer.step_time.physics import Array, Coordinates, Index, Kinds, Rows, Steps, make_rows, steps
from hetopt.optimizer.step_time.priors import TAIL, Latents, Spread

MOST_LAYOUTS = 200
MOST_ROWS = 4000
"""A fit takes seconds with more, and learns nothing from them."""

LEAST_COMPUTE = 0.02
"""Of a step; what is reported as waiting is never quite all of it."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Measured configurations with the log seconds of their steps, computation and exchange, a row each.

    Attributes:
        log_step: log of the step's seconds; NaN where only a part of it was measured.
        log_compute: log of the computation of the slowest worker; NaN where it is not known.
        log_exchange: log of the exchange by itself; NaN where it was not timed.
        model_kind: kind of the job's model; None: not known.
        flops_per_sample: floating-point operations of a sample; None: not known.
    """

    rows: Rows
    log_step: Array
    log_compute: Array
    log_exchange: Array
    model_kind: ModelKind | None = None
    flops_per_sample: float | None = None

    @property
    def typical_batch(self) -> float:
        """Geometric mean of the local batch sizes."""
        return float(np.exp(np.log(self.rows.group_batch).mean()))


def observe(samples: Sequence[StepSample]) -> Observed:
    """Return step samples of one job as arrays of log seconds, thinned by `representative`.

    Args:
        samples: step samples of one job, at least one; without a synchronization time only the whole step counts.

    Raises:
        BadInput: an unknown compressor, or samples of different jobs.
    """
    kinds = sorted({sample.model_kind for sample in samples if sample.model_kind is not None})
    if len(kinds) > 1:
        raise BadInput(
            f"the samples say that model_kind is {' and '.join(kinds)}, but they must be of one job.",
            hint="import the samples of each job by themselves",
        )
    flops = [sample.flops_per_sample for sample in samples if sample.flops_per_sample is not None]
    samples = representative(samples)
    step = np.array([sample.step_time_s for sample in samples])
    sync = np.array([np.nan if sample.sync_time_s is None else sample.sync_time_s for sample in samples])
    return Observed(
        rows=make_rows(samples),
        log_step=np.log(step),
        log_compute=np.log(np.maximum(step - sync, LEAST_COMPUTE * step)),
        log_exchange=np.full(len(step), np.nan),
        model_kind=kinds[0] if kinds else None,
        flops_per_sample=statistics.median(flops) if flops else None,
    )


def representative(samples: Sequence[StepSample]) -> list[StepSample]:
    """Return at most `MOST_ROWS` samples of `MOST_LAYOUTS` layouts, evenly chosen with both ends; all, if fewer.

    Ordered by workers and nodes of the layout, then by batch size.
    """
    layouts: dict[object, list[StepSample]] = {}
    for sample in samples:
        layouts.setdefault((sample.layout, sample.compression), []).append(sample)
    groups = sorted(layouts.values(), key=lambda group: (group[0].workers, len(group[0].nodes)))
    groups = [groups[index] for index in _evenly(len(groups), MOST_LAYOUTS)]
    rows = [sample for group in groups for sample in sorted(group, key=lambda sample: max(sample.batch_sizes))]
    return [rows[index] for index in _evenly(len(rows), MOST_ROWS)]


def _evenly(count: int, most: int) -> list[int]:
    """Return up to ``most`` indices of ``count`` items, evenly spread with both ends; all where there are no more."""
    if count <= most:
        return list(range(count))
    return [round(place) for place in np.linspace(0, count - 1, most).tolist()]


def median_s(*logs: Array) -> float:
    """Return the median seconds of the first array of log seconds that has any finite entry."""
    known = next(log[np.isfinite(log)] for log in logs if np.isfinite(log).any())
    return math.exp(statistics.median(known.tolist()))


DIFFERENCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Residuals and derivatives of one kind of measurement: of steps, computation or exchange, in logs, a row each.

    Attributes:
        residual: measured less predicted.
        derivatives: derivatives of the prediction by the parameters, a row each, when they are asked for.
        by_compute, by_exchange: derivatives by the residuals at the row's ``point`` and ``layout``.
        point, layout: index of the row's point and layout among those of `Latents`.
        variance: variance of the noise.
    """

    residual: Array
    derivatives: Callable[[], Array]
    by_compute: Array
    by_exchange: Array
    point: Index
    layout: Index
    variance: Array

    @property
    def weight(self) -> Array:
        """Precision of each row; rows in the tail count less (expectation step for Student's t)."""
        return (TAIL + 1) / (TAIL + self.residual**2 / self.variance) / self.variance

    @property
    def loss(self) -> float:
        """Negative log likelihood, up to a constant."""
        return float(
            0.5 * ((TAIL + 1) * np.log1p(self.residual**2 / self.variance / TAIL) + np.log(self.variance)).sum()
        )

    def dense(self, parameters: int, points: int, layouts: int) -> Array:
        """Return all derivatives as one matrix, [rows, parameters + points + layouts]."""
        count = len(self.residual)
        matrix = np.zeros((count, parameters + points + layouts))
        matrix[:, :parameters] = self.derivatives()
        matrix[np.arange(count), parameters + self.point] = self.by_compute
        matrix[np.arange(count), parameters + points + self.layout] = self.by_exchange
        return matrix


def evaluate(
    vector: Array, where: Coordinates, rows: Rows, kinds: Kinds, *, compute_rest: Array, exchange_rest: Array
) -> tuple[Steps, Callable[[str], Array]]:
    """Return the steps predicted at ``vector``, and a function from a field's name to that field's derivatives.

    The derivatives, [rows, parameters], are forward differences, computed at the first call. Arguments are those of
    `steps`.
    """

    def at(parameters: Array) -> Steps:
        return steps(parameters, where, rows, kinds, compute_rest=compute_rest, exchange_rest=exchange_rest)

    here = at(vector)
    moved: list[Steps] = []

    def by_parameter(field: str) -> Array:
        """Return a field's derivatives by each parameter, [rows, parameters]."""
        if not moved:
            moved.extend(at(vector + DIFFERENCE * unit) for unit in np.eye(len(vector)))
        base: Array = getattr(here, field)
        return np.stack([getattr(there, field) - base for there in moved], axis=1) / DIFFERENCE

    return here, by_parameter


def noise_variance(here: Steps, spread: Spread) -> Array:
    """Return the variance of noise in measured log step times, [rows], from noise of computing and exchanging."""
    return np.asarray(
        (spread.noise_compute * (1 - here.exchange_share)) ** 2 + (spread.noise_exchange * here.exchange_share) ** 2,
        dtype=np.float64,
    )


def channels(observed: Observed, where: Coordinates, latents: Latents, mode: Array) -> tuple[Channel, ...]:
    """Return the channels of steps, of computing and of exchanges, linearised at ``mode``; without unmeasured ones.

    ``mode`` holds the parameters, then the residuals at points and at layouts.
    """
    rows, spread = observed.rows, latents.spread
    parameters, points = len(where), len(latents.points)
    here, by_parameter = evaluate(
        mode[:parameters],
        where,
        rows,
        Kinds.unshared(rows),
        compute_rest=mode[parameters : parameters + points][rows.group_point],
        exchange_rest=mode[parameters + points :][rows.layout],
    )
    point = rows.group_point[here.slowest]
    ones, none = np.ones(len(rows)), np.zeros(len(rows))
    linearised = []
    for measured, field, by_compute, by_exchange, variance in (
        (observed.log_step, "log_step", here.compute_share, here.exchange_share, noise_variance(here, spread)),
        (observed.log_compute, "log_compute", ones, none, spread.of_compute**2 * ones),
        (observed.log_exchange, "log_exchange", none, ones, spread.of_exchange**2 * ones),
    ):
        some = np.isfinite(measured)
        if some.any():
            linearised.append(
                Channel(
                    residual=(measured - getattr(here, field))[some],
                    derivatives=partial(_some, by_parameter, field, some),
                    by_compute=by_compute[some],
                    by_exchange=by_exchange[some],
                    point=point[some],
                    layout=rows.layout[some],
                    variance=variance[some],
                )
            )
    return tuple(linearised)


def _some(by_parameter: Callable[[str], Array], field: str, some: NDArray[np.bool_]) -> Array:
    return by_parameter(field)[some]
