"""What would have to be allowed for a plan that keeps its limits: hints by the very rule that plans are held against.

The least budget of a cluster is the one that so many of its simulated runs stay within, and never less than its
median cost or than it is rented with; the least deadline likewise. The least of all clusters is then followed: the
search is made again with it, as whoever takes the hint would, and moved until the answer is a plan that keeps its
limits, while one a little stricter has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hetopt.core.formatting import duration, round_up_s, round_up_usd, usd
from hetopt.optimizer.plan import SURE
from hetopt.optimizer.recommendation.confidence import confident, simulate, sparing
from hetopt.optimizer.search.forecast import JobModel
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search import Effort, Found, search
from hetopt.optimizer.search.search_space import SearchSpace

Limit = Literal["budget_usd", "deadline_s"]

MORE = (1.0, 1.1, 1.3)
"""Times the least that a plan needs: with more of a limit the search may prefer a plan that uses more of it."""

NEVER = 1e12
"""Dollars or seconds: what needs more is no plan, but a run that hardly ever ends."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A plan request's search and confidence, to be asked again with other limits.

    Attributes:
        space, job: what was searched.
        confidence: with which limits must be kept; absent: the usual one.
        seed: of possible runs.
        effort: of each further search.
        gpus: that were named.
    """

    space: SearchSpace
    job: JobModel
    confidence: float | None
    seed: int
    effort: Effort
    gpus: tuple[str, ...] = ()

    def search(self, limits: Limits) -> Found:
        """Return the search result within other limits."""
        return search(self.space, self.job, limits, effort=self.effort)

    @property
    def asked(self) -> float:
        """The probability with which limits must be kept."""
        return SURE if self.confidence is None else self.confidence

    def least(self, found: Found, limits: Limits, limit: Limit) -> float:
        """Return the least of a limit that a plan of these keeps beside the other one; infinite: none does."""
        rows = sparing(found)
        other: Limit = "deadline_s" if limit == "budget_usd" else "budget_usd"
        wide = replace(limits, **{limit: None})  # type: ignore[arg-type]  # either limit may be none
        rows = rows[wide.overrun(found.forecast)[rows] <= 1]
        if not rows.size:
            return math.inf
        runs, forecast = simulate(self.space, self.job, found, rows.tolist(), seed=self.seed), found.forecast
        mine, others, fits = runs.total_s, runs.cost_usd, forecast.total_s
        if limit == "budget_usd":
            mine, others, fits = runs.cost_usd, runs.total_s, np.maximum(forecast.cost_usd, forecast.least_budget_usd)
        most = getattr(limits, other)
        within = np.sort(np.where(others <= (math.inf if most is None else most), mine, np.inf), axis=1)
        enough = max(1, math.ceil(self.asked * mine.shape[1] - 1e-9))
        return float(np.maximum(within[:, enough - 1], fits[rows]).min())

    def is_kept(self, limits: Limits) -> bool:
        """Return whether a plan within these limits keeps them."""
        result = self.search(limits)
        if result.chosen is None:
            return False
        best, _, _ = confident(self.space, self.job, result, limits, self.confidence, seed=self.seed)
        return best.safe

    def enough(self, limits: Limits, limit: Limit) -> float | None:
        """Return the amount of a limit with which a plan keeps all limits; None: no amount was found."""
        # Where only this limit is in the way, what uses least of it is wanted.
        wide = replace(limits, **{limit: None}, time_weight=0.0 if limit == "budget_usd" else 1.0)
        least = self.least(self.search(wide), limits, limit)
        if least >= NEVER:
            return None
        round_up = round_up_usd if limit == "budget_usd" else round_up_s
        too_little = float(getattr(limits, limit))
        amounts = (round_up(max(more * least, 1.005 * too_little)) for more in MORE)
        return next((amount for amount in amounts if self.is_kept(replace(limits, **{limit: amount}))), None)


def remedies(question: Question, limits: Limits, *, most: float | None = None) -> list[str]:
    """Return changes that would let a plan keep the limits, each alone or else both: 'raise the budget to $12.40'.

    Args:
        question: to be asked again.
        limits: that nothing keeps.
        most: the probability that the choice has; absent where there is none.
    """
    changes = []
    budget = None if limits.budget_usd is None else question.enough(limits, "budget_usd")
    later_s = None if limits.deadline_s is None else question.enough(limits, "deadline_s")
    if budget is not None:
        changes.append(f"raise the budget to {usd(budget)}")
    if later_s is not None:
        changes.append(f"allow {duration(later_s)}")
    if not changes and limits.budget_usd is not None and limits.deadline_s is not None:
        budget = question.enough(replace(limits, deadline_s=None), "budget_usd")
        later_s = None if budget is None else question.enough(replace(limits, budget_usd=budget), "deadline_s")
        if budget is not None and later_s is not None:
            changes.append(f"raise the budget to {usd(budget)} and allow {duration(later_s)}")
    if most is not None and (reached := math.floor(most * 1000) / 1000):
        changes.append(f"ask for no more than `confidence={reached:g}`")
    return changes
