"""Probability that plans keep their limits, by simulated runs, and the least limits that a plan would keep.

Simulated runs differ in prices, losses, step times and steps. The least budget of a cluster is the one that the asked
share of its runs stays within, and never less than its median cost or than it is rented with; the least deadline
likewise. Before the least over all clusters is shown as a hint, the search is made again with it, and with a little
more if that has no plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetopt.core.formatting import duration, round_up_s, round_up_usd, usd
from hetopt.optimizer.cost.cost import DETECTION_S
from hetopt.optimizer.cost.monte_carlo import Finalist, PossibleRuns, RentedPool, possible_runs
from hetopt.optimizer.plan import SURE
from hetopt.optimizer.search.forecast import JobModel
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.open_hours import elapsed_s
from hetopt.optimizer.search.pareto import pareto_front
from hetopt.optimizer.search.search import Effort, SearchResult, search
from hetopt.optimizer.search.search_space import SearchSpace

FINALISTS = 48
"""Number of clusters of which runs are simulated: half of them the best, half those that use less of their limits."""

AS_LIKELY = 0.02
"""Difference of two chances that counts as none: where no plan is sure enough, the best of those so close to the
likeliest is taken."""


def simulate(
    space: SearchSpace, job: JobModel, result: SearchResult, rows: Sequence[int], limits: Limits, *, seed: int
) -> PossibleRuns:
    """Return simulated runs, total seconds and USD, [rows, draws], of the clusters in some rows of a search.

    With a budget and a deadline, runs on AWS move to machines on demand in time, as a supervised launch does.

    Args:
        space: search space that was searched.
        job: inputs of a forecast that do not depend on the cluster.
        result: result of the search.
        rows: indices of rows of ``result``, in the order of the returned rows.
        limits: limits of the plan; its budget and deadline decide when a run moves.
        seed: seed of the draws; the same arguments give the same runs.
    """
    forecast, finalists = result.forecast, []
    for row in rows:
        machines = [(space.options[index], count) for index, count in result.cluster(row).machines]
        startup_s = float(forecast.startup_s[row])
        finalists.append(
            Finalist(
                pools=tuple(
                    RentedPool(
                        machines=count,
                        usd_per_hour=option.usd_per_hour,
                        price_log_sd=option.offer.price.log_sd,
                        belief=option.belief,
                    )
                    for option, count in machines
                ),
                work_s=float(forecast.work_s[row]),
                step_time_log_sd=float(forecast.step_time_log_sd[row]),
                steps_log_sd=float(forecast.steps_log_sd[row]),
                billing=job.billing,
                disk_gb=float(forecast.disk_gb[row]),
                start_up_s=startup_s,
                start_up_log_sd=job.startup_log_sd,
                restart_s=startup_s + DETECTION_S,
                checkpoint_s=job.checkpoint_s,
                written_s=job.written_s,
                checkpoint_bytes=job.checkpoint_bytes,
                before_usd=job.before_usd,
                deadline_s=limits.deadline_s or 0.0,
                budget_usd=(limits.budget_usd or 0.0) * all(option.offer.is_of_aws for option, _ in machines),
                on_demand_usd_per_hour=sum(count * option.offer.worst_usd_per_hour for option, count in machines),
                interval_s=float(forecast.interval_s[row]),
            )
        )
    runs = possible_runs(finalists, seed=seed)
    if len(job.slots_s) > 1:
        runs = replace(runs, total_s=elapsed_s(runs.total_s, forecast.open_parts[rows][:, None], job.slots_s))
    return runs


def confident(
    space: SearchSpace, job: JobModel, result: SearchResult, limits: Limits, confidence: float | None, *, seed: int
) -> tuple[SearchResult, float, bool]:
    """Return ``result`` with the best plan that keeps ``limits`` with ``confidence`` (None: 0.9) in simulated runs.

    Without ``confidence``, a choice that is safe by its interval stays, as long as simulated runs agree.

    Args:
        space: search space that was searched.
        job: inputs of a forecast that do not depend on the cluster.
        result: result of the search; with a choice.
        limits: budget and deadline, at least one of which is set.
        confidence: the probability that is asked for; None: `SURE`, 0.9.
        seed: seed of the simulated runs.

    Returns:
        The search with the best plan that keeps its limits with the asked probability, or else one of the likeliest
        (``safe`` says which); the highest chance of all plans that were simulated; and whether simulated runs made the
        choice, instead of intervals.
    """
    assert result.chosen is not None
    if confidence is None and result.safe:
        chance = float(_chances(space, job, result, limits, [result.chosen], seed=seed)[0])
        if chance >= SURE:
            return result, chance, False
    asked = SURE if confidence is None else confidence
    rows = _finalists(result, limits)
    chances = _chances(space, job, result, limits, rows, seed=seed)
    most = float(chances.max())
    chosen = rows[first_likely(chances, asked)]
    return replace(result, chosen=chosen, safe=most >= asked), most, True


def first_likely(chances: NDArray[np.float64], asked: float) -> int:
    """Return the index of the first chance that reaches ``asked``; if none does, the first near the highest (0.02).

    ``chances`` must not be empty.
    """
    most = float(chances.max())
    return int(np.argmax(chances >= (asked if most >= asked else most - AS_LIKELY)))


def _chances(
    space: SearchSpace, job: JobModel, result: SearchResult, limits: Limits, rows: Sequence[int], *, seed: int
) -> NDArray[np.float64]:
    runs = simulate(space, job, result, rows, limits, seed=seed)
    return runs.chance(budget_usd=limits.budget_usd, deadline_s=limits.deadline_s)


def sparing(result: SearchResult) -> NDArray[np.intp]:
    """Return the row indices of the Pareto front of total time and budget at their 90 % upper ends, quickest first.

    Budget is the cost, or the least budget that the cluster is rented with if that is larger.
    """
    forecast = result.forecast
    return pareto_front(forecast.total_high_s, np.maximum(forecast.cost_high_usd, forecast.least_budget_usd))


def _finalists(result: SearchResult, limits: Limits) -> list[int]:
    """Return up to `FINALISTS` of the rows that fit at their median, and the rows of `sparing`, best first.

    Half of the former are the best; the others are the best of rows that use ever less of their limits.
    """
    overrun = limits.overrun(result.forecast)
    score = limits.expected_score(result.forecast)
    fits = np.flatnonzero(overrun <= 1)
    best = fits[np.argsort(score[fits], kind="stable")]
    chosen = best[: FINALISTS // 2].tolist()
    # The least overrun of each row and all before it: where that first comes below a bound is the best row that is.
    places = np.searchsorted(
        -np.minimum.accumulate(overrun[best]), -np.linspace(1.0, 0.15, FINALISTS - len(chosen)), side="left"
    )
    chosen += best[places[places < len(best)]].tolist()
    surest = sparing(result)
    chosen += surest[overrun[surest] <= 1].tolist()
    return sorted(dict.fromkeys(chosen), key=score.__getitem__)


Limit = Literal["budget_usd", "deadline_s"]

MORE = (1.0, 1.1, 1.3)
"""Factors on the least budget or deadline that are tried one after the other: with more of a limit the search may
prefer a plan that uses more of it."""

NEVER = 1e12
"""Dollars or seconds beyond which a plan is none, but a run that hardly ever ends."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Search of one plan request, which can be made again with other limits: its space, job, confidence and seed.

    Attributes:
        space: clusters to choose from.
        job: inputs of a forecast that do not depend on the cluster.
        confidence: probability with which limits must be kept; None: `SURE`, 0.9.
        seed: seed of simulated runs.
        effort: limits on the work of each further search.
        gpus: texts of the GPUs that were asked for, such as 'L4:4'; empty: none was named.
    """

    space: SearchSpace
    job: JobModel
    confidence: float | None
    seed: int
    effort: Effort
    gpus: tuple[str, ...] = ()

    def search(self, limits: Limits) -> SearchResult:
        """Search the same space and job within other limits, and return the result; takes a whole search."""
        return search(self.space, self.job, limits, effort=self.effort)

    @property
    def asked(self) -> float:
        """The probability with which limits must be kept."""
        return SURE if self.confidence is None else self.confidence

    def least(self, result: SearchResult, limits: Limits, limit: Limit) -> float:
        """Return the least budget, USD, or deadline, s (see ``limit``), that a plan of ``result`` keeps; inf: none.

        Kept means with the asked probability in simulated runs, and at the median, beside the other limit.

        Args:
            result: result of a search in the same space.
            limits: has the other limit; the one that ``limit`` names does not count.
            limit: "budget_usd" or "deadline_s".
        """
        rows = sparing(result)
        other: Limit = "deadline_s" if limit == "budget_usd" else "budget_usd"
        wide = replace(limits, **{limit: None})  # type: ignore[arg-type]  # either limit may be none
        rows = rows[wide.overrun(result.forecast)[rows] <= 1]
        if not rows.size:
            return math.inf
        runs, forecast = simulate(self.space, self.job, result, rows.tolist(), wide, seed=self.seed), result.forecast
        mine, others, fits = runs.total_s, runs.cost_usd, forecast.total_s
        if limit == "budget_usd":
            mine, others, fits = runs.cost_usd, runs.total_s, np.maximum(forecast.cost_usd, forecast.least_budget_usd)
        most = getattr(limits, other)
        within = np.sort(np.where(others <= (math.inf if most is None else most), mine, np.inf), axis=1)
        enough = max(1, math.ceil(self.asked * mine.shape[1] - 1e-9))
        return float(np.maximum(within[:, enough - 1], fits[rows]).min())

    def is_kept(self, limits: Limits) -> bool:
        """Return whether a plan keeps these limits with the asked probability; makes the search again.

        At least one limit must be set.
        """
        result = self.search(limits)
        if result.chosen is None:
            return False
        best, _, _ = confident(self.space, self.job, result, limits, self.confidence, seed=self.seed)
        return best.safe

    def enough(self, limits: Limits, limit: Limit) -> float | None:
        """Return a budget, USD, or deadline, s (by ``limit``), with which a plan keeps all limits; None: none found.

        Three amounts are tried, 1 to 1.3 times `least`, rounded up to a plain figure, and above the present limit. Each
        try makes the search again.
        """
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
    """Return hints on limits that a plan would keep, such as 'raise the budget to $12.40'; makes the search again.

    Each change helps alone; if neither limit alone helps, one hint changes both.

    Args:
        question: the request's search, which is made again.
        limits: budget and deadline that no plan keeps.
        most: highest probability of keeping the limits among plans, which one hint then asks for; None: no plan fits
            even at its median, so there is no such hint.

    Returns:
        Hints, each the beginning of a sentence; empty where no change that was tried helps.
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
