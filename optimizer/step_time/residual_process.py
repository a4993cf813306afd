"""What the equations leave over, as smooth random functions: computing by batch size, exchanging by layout.

Gaussian processes (Rasmussen and Williams 2006) inside the physics instead of around it: an excess over the line at one
batch size is an excess of computing wherever that batch size is used, and shows in a step only as far as it computes.
So scikit-learn's, which are fitted to their own observations, do not serve, and importing them takes a bare python's
start 40 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.optimizer.step_time.design_matrix import PITCH, Array, Layout
from hetopt.optimizer.step_time.priors import Spread

JITTER = 1e-6
"""Relative, so that the matrices of near points can be inverted."""

Point = tuple[int, int]
"""A machine type, by its number among the model's, and the log of a local batch size, see `Rows.points`."""


def compute_covariance(left: Sequence[Point], right: Sequence[Point], spread: Spread) -> Array:
    """Return the covariance of the log computation at two sequences of points; types are independent."""
    a, b = np.array(left, dtype=np.float64).reshape(-1, 2), np.array(right, dtype=np.float64).reshape(-1, 2)
    distance = (a[:, 1][:, None] - b[:, 1][None]) * math.log(2) / PITCH / spread.compute_length
    same_type = a[:, 0][:, None] == b[:, 0][None]
    return np.asarray(spread.compute**2 * np.exp(-0.5 * distance**2) * same_type, dtype=np.float64)


def exchange_covariance(left: Sequence[Layout], right: Sequence[Layout], spread: Spread) -> Array:
    """Return the covariance of the log exchange of two sequences of layouts, each layout's own part included."""
    a, b = (np.array([layout.coordinates for layout in side]).reshape(-1, 3) for side in (left, right))
    square = (((a[:, None, :] - b[None, :, :]) / spread.exchange_length) ** 2).sum(axis=2)
    regimes = [np.array([min(len(layout.machines), 3) for layout in side]) for side in (left, right)]
    regime = np.where(regimes[0][:, None] == regimes[1][None], 1.0, spread.other_regime)
    numbers: dict[object, int] = {}
    kinds = [
        np.array([numbers.setdefault(layout.exchange, len(numbers)) for layout in side], dtype=np.intp)
        for side in (left, right)
    ]
    kind = np.where(kinds[0][:, None] == kinds[1][None], 1.0, spread.other_exchange)
    covariance = spread.exchange**2 * np.exp(-0.5 * square) * regime * kind
    place = {layout: index for index, layout in enumerate(right)}
    for index, layout in enumerate(left):
        if layout in place:
            covariance[index, place[layout]] += spread.layout**2
    return np.asarray(covariance, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Latents:
    """The points and layouts that were measured, with the prior covariance of the residuals there."""

    points: tuple[Point, ...]
    layouts: tuple[Layout, ...]
    spread: Spread
    compute_inverse: Array
    exchange_inverse: Array

    @classmethod
    def at(cls, points: Sequence[Point], layouts: Sequence[Layout], spread: Spread) -> Latents:
        """Return the residual process at batch sizes and layouts, before any sample."""
        compute = compute_covariance(points, points, spread)
        exchange = exchange_covariance(layouts, layouts, spread)
        return cls(
            points=tuple(points),
            layouts=tuple(layouts),
            spread=spread,
            compute_inverse=_inverse(compute),
            exchange_inverse=_inverse(exchange),
        )

    def __len__(self) -> int:
        return len(self.points) + len(self.layouts)

    def compute_at(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Return the weights of the known points that predict other points, and the variance that remains."""
        cross = compute_covariance(points, self.points, self.spread)
        weights = cross @ self.compute_inverse
        return weights, np.maximum(self.spread.compute**2 - (weights * cross).sum(axis=1), 0.0)

    def exchange_at(self, layouts: Sequence[Layout]) -> tuple[Array, Array]:
        """Return the weights of the known layouts that predict other layouts, and the variance that remains."""
        cross = exchange_covariance(layouts, self.layouts, self.spread)
        weights = cross @ self.exchange_inverse
        prior = self.spread.exchange**2 + self.spread.layout**2
        return weights, np.maximum(prior - (weights * cross).sum(axis=1), 0.0)


def _inverse(covariance: Array) -> Array:
    size = len(covariance)
    scale = float(covariance[0, 0]) if size else 0.0
    return np.asarray(np.linalg.inv(covariance + JITTER * scale * np.eye(size)), dtype=np.float64)
