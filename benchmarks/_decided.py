"""Choices among configurations whose true times are known, and what they cost beside the best choice.

Totals are of one sample: its seconds and their price. A throughput or a deadline is the most seconds, a budget the most
dollars (`hetopt.optimizer.search.objective`); the rule that chooses is `recommend`'s own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.plan import SURE
from hetopt.optimizer.recommendation.confidence import first_likely
from hetopt.optimizer.search.forecast import Forecast
from hetopt.optimizer.search.objective import Limits

Array = NDArray[np.float64]

TARGETS = 22
"""Limits a table, in equal ratios strictly between its least and its greatest measured value."""

ROUNDING = 1e-9
"""By which a limit may be exceeded and is kept, relative: values that are computed in two ways differ by less."""

ASKED = (0.5, 0.8, 0.9, 0.95)
"""Confidences that are asked for."""


@dataclass(frozen=True, kw_only=True)
class Menu:
    """The configurations to choose from, by measured seconds and price.

    Attributes:
        seconds: measured seconds of a sample, by configuration.
        usd_per_s: price of a second, by configuration, in any currency.
    """

    seconds: Array
    usd_per_s: Array

    @property
    def usd(self) -> Array:
        """The price of a sample, as measured."""
        return np.asarray(self.seconds * self.usd_per_s)


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Predicted seconds of a sample: medians, and the standard deviations of their logs."""

    seconds: Array
    log_sd: Array

    def forecast(self, menu: Menu) -> Forecast:
        """Return the belief as the planner's forecast; fields that only whole runs have are zero."""
        nothing = np.zeros(len(self.seconds))
        reach = np.exp(Z90 * self.log_sd)
        of_time = {"total_s": self.seconds, "total_low_s": self.seconds / reach, "total_high_s": self.seconds * reach}
        of_cost = {
            name.replace("total", "cost").replace("_s", "_usd"): t * menu.usd_per_s for name, t in of_time.items()
        }
        return Forecast(**{field.name: nothing for field in fields(Forecast)} | of_time | of_cost)

    def chances(self, menu: Menu, limits: Limits) -> Array:
        """Return the probability that each configuration keeps the limits."""
        most_s = np.minimum(
            math.inf if limits.deadline_s is None else limits.deadline_s,
            math.inf if limits.budget_usd is None else limits.budget_usd / menu.usd_per_s,
        )
        away = np.log(most_s / self.seconds)
        sure = np.where(away >= 0, math.inf, -math.inf)
        with np.errstate(over="ignore"):  # as sure as can be
            z = np.divide(away, self.log_sd, out=sure, where=self.log_sd > 0)
        return np.array([NormalDist().cdf(score) for score in z.tolist()])


Chooser = Callable[[Limits], int]
"""Row of the configuration that is taken for these limits."""


def as_recommended(menu: Menu, belief: Belief) -> Chooser:
    """Return the chooser of `recommend` where no confidence is asked for."""
    return by_chance(menu, belief, SURE)


def by_chance(menu: Menu, belief: Belief, confidence: float) -> Chooser:
    """Return a function from limits to a row of ``menu``: the best that keeps them with probability ``confidence``.

    Where none is expected to keep the limits, the row that exceeds them least. The rule is that of `recommend`.
    """
    forecast = belief.forecast(menu)

    def chosen(limits: Limits) -> int:
        """Return the row of the best configuration that is likely to keep the limits, else of the least overrun."""
        overrun = limits.overrun(forecast)
        fits = np.flatnonzero(overrun <= 1)
        if not len(fits):
            return int(overrun.argmin())
        best_first = fits[np.argsort(limits.expected_score(forecast)[fits], kind="stable")]
        return int(best_first[first_likely(belief.chances(menu, limits)[best_first], confidence)])

    return chosen


def as_believed(menu: Menu, belief: Belief) -> Chooser:
    """Return a chooser of the best configuration by point predictions, however uncertain these are."""
    return by_chance(menu, replace(belief, log_sd=np.zeros_like(belief.log_sd)), 0.5)


def throughputs(menu: Menu) -> list[Limits]:
    """Return limits of time within which the cheapest configuration is wanted."""
    return [Limits(deadline_s=most, time_weight=0.0) for most in _between(menu.seconds)]


def _between(values: Array) -> list[float]:
    """Return `TARGETS` limits between the least and the largest value, in equal ratios, none below what can be kept."""
    between = np.geomspace(values.min(), values.max(), TARGETS + 2)[1:-1]
    limits: list[float] = np.maximum(between, values.min() * (1 + ROUNDING)).tolist()
    return limits


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A choice of a configuration, judged by measured times.

    Attributes:
        extra: cost of the choice (time, under a budget) over that of the best that keeps the limits, less 1; 0 where a
            choice costs less because it does not keep the limits.
        kept: whether the choice keeps the limits.
    """

    extra: float
    kept: bool


def judged(menu: Menu, limits: Limits, row: int) -> Decision:
    """Return the decision for a configuration, compared with the best by measured times."""
    total = menu.seconds if limits.time_weight else menu.usd
    keeps = limits.ratio(menu.usd, menu.seconds) <= 1 + ROUNDING
    return Decision(extra=max(0.0, float(total[row] / total[keeps].min()) - 1), kept=bool(keeps[row]))


def decide(menu: Menu, wanted: Sequence[Limits], chooser: Chooser) -> list[Decision]:
    """Return a chooser's decision for each of the limits."""
    return [judged(menu, limits, chooser(limits)) for limits in wanted]


def mean_extra(decisions: Sequence[Decision]) -> float:
    """Return the mean extra cost of decisions, relative."""
    return float(np.mean([decision.extra for decision in decisions]))


def missed(decisions: Sequence[Decision]) -> float:
    """Return the fraction of decisions whose limits are not kept."""
    return float(np.mean([not decision.kept for decision in decisions]))
