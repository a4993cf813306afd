"""How likely plans are to keep their limits: possible runs of finalists, over prices, losses, step times and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.cost.cost import DETECTION_S
from hetopt.optimizer.cost.monte_carlo import Finalist, PossibleRuns, RentedPool, possible_runs
from hetopt.optimizer.plan import SURE
from hetopt.optimizer.search.forecast import JobModel
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.open_hours import elapsed_s
from hetopt.optimizer.search.pareto import pareto_front
from hetopt.optimizer.search.search import Found
from hetopt.optimizer.search.search_space import SearchSpace

FINALISTS = 48
"""Of the best plans, and of those that use less of their limits, possible runs of so many are drawn."""

AS_LIKELY = 0.02
"""Where no plan is sure enough, those so close to the likeliest are equals, and the best of them is taken."""


def simulate(space: SearchSpace, job: JobModel, found: Found, rows: Sequence[int], *, seed: int) -> PossibleRuns:
    """Return simulated runs of the plans of some rows."""
    forecast, finalists = found.forecast, []
    for row in rows:
        machines = [(space.options[index], count) for index, count in found.cluster(row).machines]
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
                checkpoint_bytes=job.checkpoint_bytes,
                before_usd=job.before_usd,
                resumes=job.resumes,
            )
        )
    runs = possible_runs(finalists, seed=seed)
    if len(job.slots_s) > 1:
        runs = replace(runs, total_s=elapsed_s(runs.total_s, forecast.open_parts[rows][:, None], job.slots_s))
    return runs


def confident(
    space: SearchSpace, job: JobModel, found: Found, limits: Limits, confidence: float | None, *, seed: int
) -> tuple[Found, float, bool]:
    """Choose by the probability of keeping the limits, for a search that has found plans that fit.

    Where no confidence is asked for, the plan that is `SURE` to keep the limits by its interval stays the choice, as
    long as simulated runs agree.

    Returns:
        The search with the best plan that keeps its limits with the asked probability, or else one of the likeliest;
        the highest chance of all plans that were simulated; and whether these made the choice, instead of intervals.
    """
    assert found.chosen is not None
    if confidence is None and found.safe:
        chance = float(_chances(space, job, found, limits, [found.chosen], seed=seed)[0])
        if chance >= SURE:
            return found, chance, False
    asked = SURE if confidence is None else confidence
    rows = _finalists(found, limits)
    chances = _chances(space, job, found, limits, rows, seed=seed)
    most = float(chances.max())
    chosen = rows[first_likely(chances, asked)]
    return replace(found, chosen=chosen, safe=most >= asked), most, True


def first_likely(chances: NDArray[np.float64], asked: float) -> int:
    """Return the place of the first chance, of plans from best to worst, that is as high as asked or near the top."""
    most = float(chances.max())
    return int(np.argmax(chances >= (asked if most >= asked else most - AS_LIKELY)))


def _chances(
    space: SearchSpace, job: JobModel, result: Found, limits: Limits, rows: Sequence[int], *, seed: int
) -> NDArray[np.float64]:
    runs = simulate(space, job, result, rows, seed=seed)
    return runs.chance(budget_usd=limits.budget_usd, deadline_s=limits.deadline_s)


def sparing(found: Found) -> NDArray[np.intp]:
    """Return the rows that none beats in both budget and time at the upper ends of their intervals: the surest ones."""
    forecast = found.forecast
    return pareto_front(forecast.total_high_s, np.maximum(forecast.cost_high_usd, forecast.least_budget_usd))


def _finalists(result: Found, limits: Limits) -> list[int]:
    """Return the best rows that fit, thinned towards those with more to spare, best first.

    Half are the best; others are the best of those that use less and less of their limits, so that one with enough to
    spare is among them; and so are the surest of all, whatever the limits.
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
