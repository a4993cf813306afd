"""When nothing fits: the plans that come nearest, one on each axis, and what would have to be allowed for them."""

from __future__ import annotations

import math

import numpy as np

from hetopt.optimizer.recommendation.candidates import make_candidate
from hetopt.optimizer.recommendation.explain import describe_machines, usd_at_least
from hetopt.optimizer.search.aims import Limits
from hetopt.optimizer.search.forecast import JobModel
from hetopt.optimizer.search.search import Found
from hetopt.optimizer.search.search_space import SearchSpace
from hetopt.optimizer.words import duration, usd
from hetopt.profiler.errors import NoFeasiblePlan


def nothing_fits(space: SearchSpace, job: JobModel, found: Found, limits: Limits) -> NoFeasiblePlan:
    """The error that names the nearest plans: the cheapest that is in time, and the quickest that can be paid."""
    forecast = found.forecast
    if len(forecast) == 0:
        return NoFeasiblePlan(
            f"No machine can take any of the batch sizes {', '.join(map(str, space.batch_sizes))}.",
            hint="choose another with --batch-size",
        )

    def described(row: int) -> str:
        candidate = make_candidate(space, job, found.cluster(row), forecast, row)
        told = candidate.prediction
        return f"{describe_machines(candidate)}, about {usd(told.cost_usd.value)} and {duration(told.total_s.value)}"

    in_time = np.flatnonzero(forecast.total_s <= (limits.deadline_s or math.inf))
    paid = np.flatnonzero(forecast.cost_usd <= (limits.budget_usd or math.inf))
    nearest: list[str] = []
    remedies: list[str] = []
    if in_time.size:
        row = int(in_time[np.lexsort((forecast.total_s[in_time], forecast.cost_usd[in_time]))[0]])
        that = "" if limits.deadline_s is None else " that meets the deadline"
        nearest.append(f"the cheapest plan{that} is {described(row)}")
        remedies.append(f"raise the budget to {usd_at_least(float(forecast.cost_usd[row]))}")
    elif limits.budget_usd is not None and not paid.size:
        row = int(forecast.cost_usd.argmin())
        nearest.append(f"the cheapest plan of all is {described(row)}")
        remedies.append(f"raise the budget to {usd_at_least(float(forecast.cost_usd[row]))}")
    if limits.deadline_s is not None:
        rows = paid if paid.size and limits.budget_usd is not None else np.arange(len(forecast))
        row = int(rows[np.lexsort((forecast.cost_usd[rows], forecast.total_s[rows]))[0]])
        if forecast.total_s[row] > limits.deadline_s:
            that = " within the budget" if paid.size and limits.budget_usd is not None else ""
            nearest.append(f"the quickest plan{that} is {described(row)}")
            remedies.append(f"allow {duration(float(forecast.total_s[row]) * 1.001)}")
    asked = [
        *([f"a budget of {usd(limits.budget_usd)}"] if limits.budget_usd is not None else []),
        *([f"a deadline of {duration(limits.deadline_s)}"] if limits.deadline_s is not None else []),
    ]
    return NoFeasiblePlan(
        f"Nothing fits {' and '.join(asked)}: {'; '.join(nearest)}.",
        hint=(" and " if not in_time.size and not paid.size else ", or ").join(remedies),
    )
