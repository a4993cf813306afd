"""Published models of step time behind one interface, for comparison and for choice by error.

None of them knows device types, compression or layouts: a row is its workers, its nodes and its largest local batch.
scipy, which fits them, is imported only when needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from hetopt.core.step_samples import Configuration, StepSample
from hetopt.optimizer.step_time.physics import Array


def columns(configurations: Sequence[Configuration]) -> tuple[Array, Array, Array]:
    """Return the workers, the nodes, and the largest local batch size of each configuration."""
    return (
        np.array([c.workers for c in configurations], dtype=np.float64),
        np.array([len(c.nodes) for c in configurations], dtype=np.float64),
        np.array([max(c.batch_sizes) for c in configurations], dtype=np.float64),
    )


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear model of step time, fitted by ``min |diag(1/t) X c - 1|`` over ``c >= 0``.

    Least squares on the relative error, as for every peer; Scavenger's are on the absolute one.

    Attributes:
        features: ``X`` of workers and largest local batch, a row a configuration.
    """

    features: Callable[[Array, Array], tuple[Array, ...]]
    coefficients: Array

    @classmethod
    def fit(cls, features: Callable[[Array, Array], tuple[Array, ...]], samples: Sequence[StepSample]) -> Linear:
        """Return the model with these features fitted to step-time samples."""
        from scipy.optimize import nnls

        workers, _, batch = columns(samples)
        matrix = (
            np.stack(features(workers, batch), axis=1) / np.array([sample.step_time_s for sample in samples])[:, None]
        )
        return cls(features=features, coefficients=np.asarray(nnls(matrix, np.ones(len(samples)))[0]))

    def step_time_s(self, configurations: Sequence[Configuration]) -> Array:
        """Return the predicted seconds of a step, by configuration."""
        workers, _, batch = columns(configurations)
        return np.asarray(np.stack(self.features(workers, batch), axis=1) @ self.coefficients)


def scavenger(samples: Sequence[StepSample]) -> Linear:
    """Return Scavenger's fitted model, ``tau = c0 + c1 b + c2 K`` (Tyagi and Sharma, CCGrid 2023, eq. 8-10)."""
    return Linear.fit(lambda workers, batch: (np.ones_like(workers), batch, workers), samples)


def ernest(samples: Sequence[StepSample]) -> Linear:
    """Return Ernest's model fitted to samples: ``tau = c0 + c1 b + c2 log k + c3 k``, non-negative.

    Venkataraman et al., NSDI 2016, for a fixed local batch.
    """
    return Linear.fit(lambda workers, batch: (np.ones_like(workers), batch, np.log(workers), workers), samples)


LOWEST_S, MOST_S = 1e-8, 1e6
MOST_POWER = 10.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The system throughput model of Pollux (Qiao et al., OSDI 2021), written from the paper.

        T_grad = a_c + b_c m
        T_sync = 0 | a_r + b_r max(k - 2, 0) | a_n + b_n max(k - 2, 0)      one worker | one node | several
        tau    = (T_grad^p + T_sync^p)^(1/p)

    Errors are of logs, of the step and (where synchronization is reported) of computing alone. Both slopes are held
    small against their intercepts, p near 1. What the samples do not identify stays at nothing: optimistic until
    measured.
    """

    compute: tuple[float, float]
    host: tuple[float, float]
    network: tuple[float, float]
    power: float

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> Goodput:
        """Return the model fitted by least squares in logs of the parameters, from the authors' starting point."""
        from scipy.optimize import least_squares

        workers, nodes, batch = columns(samples)
        step = np.log([sample.step_time_s for sample in samples])
        alone = np.array(
            [
                np.nan if s.sync_time_s is None else max(s.step_time_s - s.sync_time_s, 1e-3 * s.step_time_s)
                for s in samples
            ]
        )
        known = np.isfinite(alone)
        seen = np.array(
            [
                True,
                len(np.unique(batch)) > 1,
                bool(((nodes == 1) & (workers > 1)).any()),
                bool(((nodes == 1) & (workers > 2)).any()),
                bool((nodes > 1).any()),
                bool(((nodes > 1) & (workers > 2)).any()),
                True,
            ]
        )
        start: Array = np.log(np.array([0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 0.05]))
        start[~seen] = np.log(LOWEST_S)

        def among_all(free: Array) -> Array:
            """Return the logs of all parameters, with those that the samples can tell set to ``free``."""
            vector = start.copy()
            vector[seen] = free
            return vector

        def residuals(free: Array) -> Array:
            """Return the errors of the steps, of the computing that is known, and of the authors' penalties."""
            model = cls._of(among_all(free))
            computing = np.log(model.compute[0] + model.compute[1] * batch)
            slopes = [0.1 * (b / a) for a, b in (model.host, model.network)]
            return np.concatenate(
                [
                    (np.log(model._steps(workers, nodes, batch)) - step) / np.sqrt(len(step)),
                    (computing[known] - np.log(alone[known])) / np.sqrt(max(1, known.sum())),
                    [*slopes, 0.03 * (model.power - 1)],
                ]
            )

        solution = least_squares(residuals, start[seen], bounds=(np.log(LOWEST_S), np.log(MOST_S)))
        fitted = cls._of(among_all(solution.x))
        if seen[4]:
            return fitted
        # Several nodes are never quicker than one.
        return cls(
            compute=fitted.compute,
            host=fitted.host,
            network=(1.1 * fitted.host[0], 1.1 * fitted.host[1]),
            power=fitted.power,
        )

    @classmethod
    def _of(cls, vector: Array) -> Goodput:
        a, b, c, d, e, f, power = np.exp(vector).tolist()
        return cls(compute=(a, b), host=(c, d), network=(e, f), power=min(1 + power, MOST_POWER))

    def step_time_s(self, configurations: Sequence[Configuration]) -> Array:
        """Return the predicted seconds of a step, by configuration."""
        return self._steps(*columns(configurations))

    def _steps(self, workers: Array, nodes: Array, batch: Array) -> Array:
        """Return the seconds of a step of each layout: computing, and waiting for others where there are any."""
        computing = np.log(self.compute[0] + self.compute[1] * batch)
        growing = np.maximum(workers - 2, 0)
        waiting = np.where(
            nodes > 1, self.network[0] + self.network[1] * growing, self.host[0] + self.host[1] * growing
        )
        both = np.logaddexp(self.power * computing, self.power * np.log(waiting)) / self.power
        return np.asarray(np.exp(np.where(workers > 1, both, computing)))


StepTimePeer: TypeAlias = Linear | Goodput
"""A fitted model of step times."""


PEERS: Mapping[str, Callable[[Sequence[StepSample]], StepTimePeer]] = MappingProxyType(
    {"Scavenger": scavenger, "Ernest": ernest, "Pollux, ours": Goodput.fit}
)

FOLDS = 5

UNTESTED = math.log(4.0)
"""Half-width of a peer's interval where nothing could be left out to see how far off it is: a factor of four."""


def steps_and_reach(name: str, samples: Sequence[StepSample], asked: Sequence[Configuration]) -> tuple[Array, float]:
    """Return a published model's seconds of steps, fitted to samples, and the half-width of a 90 % interval of the log.

    Its own errors on layouts that were left out give the interval (grouped conformal prediction).
    """
    fit_peer = PEERS[name]
    reach = _left_out(fit_peer, samples) if len({sample.layout for sample in samples}) > 2 else UNTESTED
    return fit_peer(samples).step_time_s(asked), reach


def _left_out(fit_peer: Callable[[Sequence[StepSample]], StepTimePeer], samples: Sequence[StepSample]) -> float:
    """Return the 90 % quantile of a peer's absolute log errors on each layout, fitted to four fifths of the others.

    Every layout counts the same, as rows of one layout err together.
    """
    place = {layout: index for index, layout in enumerate(sorted({sample.layout for sample in samples}))}
    layout = np.array([place[sample.layout] for sample in samples], dtype=np.intp)
    residual = np.zeros(len(samples))
    for fold in range(min(FOLDS, len(place))):
        out = layout % FOLDS == fold
        kept, left = ([samples[row] for row in np.flatnonzero(some).tolist()] for some in (~out, out))
        predicted_s = np.maximum(fit_peer(kept).step_time_s(left), 1e-12)
        residual[out] = np.log([sample.step_time_s for sample in left]) - np.log(predicted_s)
    order, weight = np.argsort(np.abs(residual)), 1 / np.bincount(layout)[layout] / len(place)
    return float(np.abs(residual)[order][np.searchsorted(np.cumsum(weight[order]), 0.9 - 1e-12)])
