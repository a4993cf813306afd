"""Whether a spot pool has machines: what was seen of it, and what is believed of how fast it empties and fills.

A pool with capacity runs dry at a rate of ``loss`` an hour and has machines again at ``back`` an hour. Both are unknown
and believed on a grid: weight of a pair ~ prior * loss^losses e^(-loss up_h) * back^returns e^(-back down_h), a
Gamma-Poisson belief whose prior is a mixture of Gamma distributions (as `PreemptionRatePosterior` has it).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

DISPERSION = 3.0
"""Square of the coefficient of variation of stretches with and without capacity, 1 if they were exponential: medians
2.4 and 3.3 over nine recorded pools (skypilot-org/spot-traces 221da1a, 2023). Counts of events vary as much more."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What each run has seen of its pool; arrays of shape (runs,).

    Attributes:
        up_h, down_h: hours with and without capacity.
        losses, returns: how often capacity went and came.
    """

    up_h: Array
    losses: Array
    down_h: Array
    returns: Array

    @classmethod
    def nothing(cls, runs: int) -> Seen:
        """Before the first look."""
        return cls(up_h=np.zeros(runs), losses=np.zeros(runs), down_h=np.zeros(runs), returns=np.zeros(runs))

    def then(self, before: Flags, now: Flags, hours: float) -> Seen:
        """After ``hours`` in the state ``before``, at the end of which the state is ``now``."""
        return Seen(
            up_h=self.up_h + before * hours,
            losses=self.losses + (before & ~now),
            down_h=self.down_h + ~before * hours,
            returns=self.returns + (~before & now),
        )


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Pairs of rates that a pool may have, with their prior weights; arrays of shape (pairs,)."""

    loss_per_hour: Array
    back_per_hour: Array
    weight: Array

    def __post_init__(self) -> None:
        """Refuse what is no belief."""
        shapes = {self.loss_per_hour.shape, self.back_per_hour.shape, self.weight.shape}
        if len(shapes) != 1 or not (self.loss_per_hour > 0).all() or not (self.back_per_hour > 0).all():
            raise ValueError("every pair needs two rates above 0 and a weight")
        if not (self.weight >= 0).all() or not np.isclose(self.weight.sum(), 1.0):
            raise ValueError("weights must be probabilities")

    @classmethod
    def known(cls, loss_per_hour: float, back_per_hour: float) -> Capacity:
        """A pool whose rates are no question."""
        return cls(loss_per_hour=np.array([loss_per_hour]), back_per_hour=np.array([back_per_hour]), weight=np.ones(1))

    @classmethod
    def unknown(cls, nodes: int = 6) -> Capacity:
        """The prior of a pool that matters here: one that runs dry every half hour to every day and a half, for ten
        minutes to a day, each log-uniform. A pool that never runs dry needs no policy, and is soon told apart."""
        loss, back = np.meshgrid(np.geomspace(0.03, 3.0, nodes), np.geomspace(0.05, 6.0, nodes))
        return cls(loss_per_hour=loss.ravel(), back_per_hour=back.ravel(), weight=np.full(loss.size, 1.0 / loss.size))

    def weights(self, seen: Seen, *, dispersion: float = 1.0) -> Array:
        """Probability of each pair for each run, shape (runs, pairs).

        Args:
            seen: of the pool.
            dispersion: divides counts and hours, so that the rates stay and their certainty shrinks.
        """
        with np.errstate(divide="ignore"):
            prior = np.log(self.weight)
        log_likelihood = (
            np.outer(seen.losses, np.log(self.loss_per_hour))
            - np.outer(seen.up_h, self.loss_per_hour)
            + np.outer(seen.returns, np.log(self.back_per_hour))
            - np.outer(seen.down_h, self.back_per_hour)
        )
        log_weight = prior + log_likelihood / dispersion
        weight = np.exp(log_weight - log_weight.max(axis=1, keepdims=True))
        return np.asarray(weight / weight.sum(axis=1, keepdims=True), dtype=np.float64)
