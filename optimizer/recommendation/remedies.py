"""What would have to be allowed for a plan that keeps its limits: hints by the very rule that plans are held against.

The least budget of a cluster is the one that so many of its simulated runs stay within, and never less than its
median cost or than it is rented with; the least deadline likewise. The least of all clusters is then followed: the
search is made again with it, as whoever takes the hint would, and moved until the answer is a plan that keeps its
limits, while one a little stricter has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetopt.core.formatting import chance, duration, round_up_s, round_up_usd, usd
from hetopt.optimizer.cost.monte_carlo import PossibleRuns
from hetopt.optimizer.plan import SURE
from hetopt.optimizer.recommendation.confidence import confident, simulate, sparing
from hetopt.optimizer.search.forecast import JobModel
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search import Effort, Found, search
from hetopt.optimizer.search.search_space import SearchSpace

Array = NDArray[np.float64]
Limit = Literal["budget_usd", "deadline_s"]

STRICTER = 0.97
"""A hint is the least that is kept: with this part of it nothing is."""

MOST_SEARCHES = 10
"""Searches for what would have to be allowed, each of which bounds no more boxes than the question's own did: together
they take at most about so many times as long, and what was found by then is the answer."""

NEVER = 1e12
"""Dollars or seconds: what needs more is no plan, but a run that hardly ever ends."""


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Changes of which each alone lets a plan keep the limits; absent where that is not to be had.

    Attributes:
        budget_usd, deadline_s: the least that is kept, with the other limit as it is.
        both: the least budget, and the least deadline with it, where neither limit alone can be kept by more.
        confidence: that some plan reaches with the limits as they are.
    """

    budget_usd: float | None = None
    deadline_s: float | None = None
    both: tuple[float, float] | None = None
    confidence: float | None = None

    def in_words(self, kept: float | None = None) -> Iterator[str]:
        """One phrase for each remedy, such as 'raise the budget to $12.40'.

        Args:
            kept: the probability with which it is kept, where that has to be said.
        """
        sure = "" if kept is None else f", which {chance(kept)} of simulated runs keep"
        if self.budget_usd is not None:
            yield f"raise the budget to {usd(self.budget_usd)}{sure}"
        if self.deadline_s is not None:
            yield f"allow {duration(self.deadline_s)}{sure}"
        if self.both is not None:
            yield f"raise the budget to {usd(self.both[0])} and allow {duration(self.both[1])}{sure}"
        if self.confidence is not None:
            yield f"ask for no more than `confidence={self.confidence:g}`"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What was asked, to be asked again with other limits.

    Attributes:
        confidence: that was asked for; absent: as usual.
        effort: of another search.
        searched: by their limits, the searches that were made.
    """

    space: SearchSpace
    job: JobModel
    confidence: float | None
    seed: int
    effort: Effort
    searched: dict[Limits, Found] = field(default_factory=dict)

    def search(self, limits: Limits) -> Found | None:
        """Return what is found within other limits; None where `MOST_SEARCHES` were made."""
        if limits not in self.searched:
            if len(self.searched) == MOST_SEARCHES:
                return None
            self.searched[limits] = search(self.space, self.job, limits, seed=self.seed, effort=self.effort)
        return self.searched[limits]

    @property
    def asked(self) -> float:
        """The probability with which limits must be kept."""
        return SURE if self.confidence is None else self.confidence

    def least(self, found: Found, limits: Limits, limit: Limit) -> tuple[float, int] | None:
        """The least of a limit that a plan of these keeps beside the other one, and its row; absent: none does."""
        rows = sparing(found)
        other: Limit = "deadline_s" if limit == "budget_usd" else "budget_usd"
        rows = rows[_with(limits, limit, None).overrun(found.forecast)[rows] <= 1]
        if not rows.size:
            return None
        runs = simulate(self.space, self.job, found, rows.tolist(), seed=self.seed)
        needed = _least(found, rows, runs, limit, getattr(limits, other), self.asked)
        best = int(needed.argmin())
        return (float(needed[best]), int(rows[best])) if np.isfinite(needed[best]) else None

    def is_kept(self, found: Found, limits: Limits) -> bool:
        """Whether the search within these limits has found a plan that keeps them."""
        if found.chosen is None:
            return False
        return confident(self.space, self.job, found, limits, self.confidence, seed=self.seed).found.safe

    def followed(self, limits: Limits, limit: Limit) -> float | None:
        """The least of a limit with which this question is answered, found by asking it."""
        # Where only this limit is in the way, what uses least of it is wanted.
        wide = replace(_with(limits, limit, None), time_weight=0.0 if limit == "budget_usd" else 1.0)
        found = self.search(wide)
        told = None if found is None else self.least(found, limits, limit)
        if told is None or told[0] >= NEVER:
            return None
        round_up = round_up_usd if limit == "budget_usd" else round_up_s
        too_little, kept = float(getattr(limits, limit) or 0.0), math.inf
        value = round_up(max(told[0], 1.005 * too_little))
        while too_little < value < kept and (found := self.search(_with(limits, limit, value))) is not None:
            again = self.least(found, limits, limit)
            if self.is_kept(found, _with(limits, limit, value)):
                kept = value
                value = round_up(min(STRICTER * kept, math.inf if again is None else again[0]))
            else:
                too_little = max(too_little, value)
                value = round_up(max(1.02 * value, 0.0 if again is None else again[0]))
        return kept if math.isfinite(kept) else None


def remedies(question: Question, limits: Limits, *, most: float | None = None) -> Remedies:
    """What would let a plan keep the limits.

    Args:
        question: that no plan answers.
        limits: that none keeps.
        most: the highest chance of a plan to keep them; absent: none fits even at its median.
    """
    budget = None if limits.budget_usd is None else question.followed(limits, "budget_usd")
    deadline = None if limits.deadline_s is None else question.followed(limits, "deadline_s")
    both = None
    if budget is None and deadline is None and limits.budget_usd is not None and limits.deadline_s is not None:
        least = question.followed(replace(limits, deadline_s=None), "budget_usd")
        # What just keeps the least budget keeps it for no deadline at all, if the search then prefers another plan.
        enough = [] if least is None else [round_up_usd(more * least) for more in (1.0, 1.1, 1.3)]
        for usd_enough in enough:
            later = question.followed(replace(limits, budget_usd=usd_enough), "deadline_s")
            if later is not None:
                both = (usd_enough, later)
                break
    reached = None if most is None else math.floor(most * 1000) / 1000
    return Remedies(budget_usd=budget, deadline_s=deadline, both=both, confidence=reached or None)


def _with(limits: Limits, limit: Limit, value: float | None) -> Limits:
    return replace(limits, budget_usd=value) if limit == "budget_usd" else replace(limits, deadline_s=value)


def _least(
    found: Found,
    rows: Sequence[int] | NDArray[np.intp],
    runs: PossibleRuns,
    limit: Limit,
    other: float | None,
    asked: float,
) -> Array:
    """Of each row the least of a limit that so many of its runs keep beside the other; infinite where they never do."""
    told, draws = found.forecast, runs.total_s.shape[1]
    mine, others = (runs.cost_usd, runs.total_s) if limit == "budget_usd" else (runs.total_s, runs.cost_usd)
    within = np.sort(np.where(others <= (math.inf if other is None else other), mine, np.inf), axis=1)
    enough = max(1, math.ceil(asked * draws - 1e-9))
    fits = np.maximum(told.cost_usd, told.least_budget_usd) if limit == "budget_usd" else told.total_s
    return np.asarray(np.maximum(within[:, enough - 1], fits[rows]), dtype=np.float64)
