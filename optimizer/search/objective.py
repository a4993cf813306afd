"""Ranks plans: the budget and deadline to keep, and the score of time and cost by which the better plan wins.

Plans are ranked by expected score, not by its median, so that an uncertain plan has to be better. Time and cost are
log-normal:

    m    median                                                   s, USD
    s    standard deviation of the logarithm                      ln(high / m) / z, with z of the 90 % interval
    E    expectation                                              m exp(s^2 / 2)   (Aitchison and Brown 1957)
    Q    what nine of ten runs stay below: limits are kept there  m exp(z9 s) = m (high / m)^(z9 / z), with z9 of 90 %

A plan fits its limits where its median does, and is safe where Q does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.plan import SURE
from hetopt.optimizer.search.forecast import Forecast
from hetopt.optimizer.search.pareto import Array, pareto_front

BALANCED = math.log(1.2) / (math.log(1.2) + math.log(1 / 0.9))
"""Weight of time in the score of a balanced plan, ``time^w cost^(1-w)``: a tenth less time is worth a fifth more money,
and no more than that, since ``0.9^w 1.2^(1-w) = 1``."""

NEAR = 1.02
"""Factor by which a quicker way has to be quicker before anything is given for it: predictions are not finer."""

FASTEST = math.log(2) / (math.log(2) + math.log(NEAR))
"""Weight of time in the score of the fastest plan: who is in a hurry pays twice as much for `NEAR` less time, and no
more than that. The cheapest plan has the rest, ``1 - FASTEST``: its owner waits twice as long for `NEAR` less money.
To call all plans equals that are so near the best is no order: of two, which is chosen hangs on a third, so that
more budget could buy a slower plan."""

MOST_DOUBT = 300.0
"""Largest logarithm of the factor by which doubt multiplies a figure: an ending that nobody will see stays a number."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Budget, USD, and deadline, seconds, that a plan must keep, and the weight of time against cost in its score.

    Attributes:
        budget_usd: total cost; None: no limit.
        deadline_s: total time from the request on; None: no limit.
        time_weight: the part ``w`` of time, in [0, 1]: ``time^w cost^(1-w)`` is minimised, so that a plan may be dearer
            by w % for each 1 - w % that it is quicker. 1: the fastest plan, 0: the cheapest.
    """

    budget_usd: float | None = None
    deadline_s: float | None = None
    time_weight: float = BALANCED

    def score(self, total_s: Array, cost_usd: Array) -> Array:
        """Return the score to minimise, ``total_s^w cost_usd^(1-w)`` with w = ``time_weight``, elementwise."""
        weight = self.time_weight
        if weight in (0.0, 1.0):
            return total_s if weight else cost_usd
        return np.asarray(total_s**weight * cost_usd ** (1 - weight))

    def expected_score(self, forecast: Forecast) -> Array:
        """Return each cluster's score of expected, not median, time and cost, [clusters]; lower is better."""
        return self.score(*expected_totals(forecast))

    def overrun(self, forecast: Forecast) -> Array:
        """Return the larger of median cost over budget and median time over deadline, [clusters]; up to 1: it fits.

        The least budget that a cluster is rented with counts as a cost. Without limits the result is 0.
        """
        return np.maximum(self.ratio(forecast.cost_usd, forecast.total_s), self._rent(forecast))

    def risk(self, forecast: Forecast) -> Array:
        """Return `overrun` by the quantile `SURE` (0.9) in place of the median, [clusters]; up to 1: kept."""
        cost = sure_quantile(forecast.cost_usd, forecast.cost_high_usd)
        time = sure_quantile(forecast.total_s, forecast.total_high_s)
        return np.maximum(self.ratio(cost, time), self._rent(forecast))

    def _rent(self, forecast: Forecast) -> Array:
        """Return the least budget that each cluster is rented with, over the budget, [clusters]; 0: no budget."""
        return forecast.least_budget_usd / (np.inf if self.budget_usd is None else self.budget_usd)

    def ratio(self, cost: Array, time: Array) -> Array:
        """Return ``cost`` over the budget or ``time`` over the deadline, the larger, elementwise; 0: no limits."""
        ratio = np.zeros_like(cost)
        if self.budget_usd is not None:
            ratio = np.maximum(ratio, cost / self.budget_usd)
        if self.deadline_s is not None:
            ratio = np.maximum(ratio, time / self.deadline_s)
        return ratio


def expected(median: Array, high: Array) -> Array:
    """Return the expectation of a log-normal figure from its median and the upper end of its 90 % interval.

    Elementwise, in the unit of the arguments; a median of 0 is returned as it is.
    """
    log_sd = np.log(np.divide(high, median, out=np.ones_like(median), where=median > 0)) / Z90
    return np.asarray(median * np.exp(np.minimum(np.square(log_sd) / 2, MOST_DOUBT)))


def sure_quantile(median: Array, high: Array) -> Array:
    """Return the quantile `SURE` (0.9) of a log-normal figure from its median and the upper end of its 90 % interval.

    Lower bounds on both arguments give a lower bound.
    """
    power = NormalDist().inv_cdf(SURE) / Z90
    return np.asarray(median ** (1 - power) * high**power)


def least_expected(median: Array, high: Array) -> Array:
    """Return a lower bound on a log-normal's expectation from lower bounds on its median and 90 % upper end.

    For an upper end ``h`` the expectation falls with the median up to ``h exp(-z^2)``, and grows from there.
    """
    return expected(np.maximum(median, high * np.exp(-(Z90**2))), high)


def expected_totals(forecast: Forecast) -> tuple[Array, Array]:
    """Return each cluster's expected, not median, total time, seconds, and cost, USD, [clusters]."""
    return expected(forecast.total_s, forecast.total_high_s), expected(forecast.cost_usd, forecast.cost_high_usd)


def plan_front(forecast: Forecast) -> NDArray[np.intp]:
    """Return the rows of a forecast that are best for some weight of time against cost, quickest first.

    A row is left out where another scores better at the fastest plan's weight (`FASTEST`) and at the cheapest plan's,
    and so at every weight between. Limits do not count.
    """
    return best_for_some(lambda wish: wish.expected_score(forecast))


def best_for_some(score: Callable[[Limits], Array]) -> NDArray[np.intp]:
    """Return the indices of plans that are best for some weight of time, quickest first.

    ``score`` returns the scores of all plans, [plans], by the weight of time in the `Limits` it is given.
    """
    return pareto_front(*(score(Limits(time_weight=weight)) for weight in (FASTEST, 1 - FASTEST)))


def choose(forecast: Forecast, limits: Limits) -> tuple[int | None, bool]:
    """Return the row of the best plan (None: none fits at its median), and whether it keeps ``limits`` with `SURE`.

    Among plans that keep the limits with the probability `SURE`, the least expected score wins; if there are none, the
    plan least likely to exceed the limits, whatever its score: see docs/decisions. An empty forecast gives
    (None, False).
    """
    keys = Keys.of(forecast, limits)
    if not len(keys.main) or keys.level.min() > 1:
        return None, False
    best = int(keys.best(1)[0])
    return best, bool(keys.level[best] == 0)


class Keys(NamedTuple):
    """Sort keys of the clusters of a forecast, each [clusters], most important first; lower is better.

    Attributes:
        level: 0 where a row is safe, 1 where it fits, 2 otherwise.
        main: score of rows that are safe, risk of those that fit, overrun of the others.
        second: expected cost, or expected time at the cheapest plan's weight of time.
    """

    level: NDArray[np.int_]
    main: Array
    second: Array

    @classmethod
    def of(cls, forecast: Forecast, limits: Limits) -> Keys:
        """Return the sort keys of a forecast's clusters under ``limits``: safe ones, then fitting ones, then others.

        Ties in ``main`` go by ``second``.
        """
        time, cost = expected_totals(forecast)
        risk, overrun = limits.risk(forecast), limits.overrun(forecast)
        level = np.where(risk <= 1, 0, np.where(overrun <= 1, 1, 2))
        main = np.select([level == 0, level == 1], [limits.score(time, cost), risk], overrun)
        return cls(level, main, time if limits.time_weight <= 1 - FASTEST else cost)

    def best(self, count: int) -> NDArray[np.intp]:
        """Return the row indices of the ``count`` best clusters, best first; all where there are fewer."""
        return np.lexsort(self[::-1]).astype(np.intp)[:count]

    def rank(self, row: int) -> tuple[float, ...]:
        """Return the sort key (level, main, second) of one row; the lower tuple is the better plan."""
        return tuple(float(key[row]) for key in self)


def best_rows(forecast: Forecast, limits: Limits, count: int) -> NDArray[np.intp]:
    """Return the row indices of the ``count`` best plans, best first: safe, then fitting the limits, then the rest.

    All rows where there are fewer.
    """
    return Keys.of(forecast, limits).best(count)
