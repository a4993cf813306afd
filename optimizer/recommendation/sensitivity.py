"""What the choice depends on: other worlds and who would win in them, and better plans that a limit rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetopt.core.formatting import chance, duration, round_up_s, usd, usd_at_least
from hetopt.core.formatting import cluster as cluster_words
from hetopt.optimizer.plan import Point, Rejected, Scenario, Sensitivity
from hetopt.optimizer.recommendation.confidence import simulate
from hetopt.optimizer.recommendation.remedies import Limit, Question
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.search.objective import Limits, best_rows, choose, sure_quantile
from hetopt.optimizer.search.search import Found
from hetopt.optimizer.search.search_space import Cluster, SearchSpace

WEIGHED = 4000
"""Of the best plans so many are priced again in each other world: the winner there was close here."""

REJECTED = 4


def insight(
    question: Question,
    found: Found,
    limits: Limits,
    *,
    confidence: float | None = None,
    worlds: bool = True,
) -> Sensitivity:
    """All of it, for a search that has chosen something.

    Args:
        question: what was asked, and of which space.
        found: the search, with its choice.
        limits: budget, deadline and what was wanted.
        confidence: by which it was chosen in simulated runs; absent: by its interval.
        worlds: whether other worlds, and better plans that a limit rejects, are looked at.
    """
    assert found.chosen is not None
    space, job = question.space, question.job
    runs = simulate(space, job, found, [found.chosen], seed=question.seed)
    limited = limits.budget_usd is not None or limits.deadline_s is not None
    kept = float(runs.chance(budget_usd=limits.budget_usd, deadline_s=limits.deadline_s)[0])
    gap = None
    if found.safe and found.proof is not None and found.proof.complete:
        # Of the choice, which may be dearer to the score than the best by what counts as equal.
        score = float(limits.expected_score(found.forecast)[found.chosen])
        gap = max(0.0, 1 - found.proof.bound / score)
    return Sensitivity(
        gap=gap,
        chance=kept if limited else None,
        confidence=confidence,
        asked=question.asked,
        cost_90_usd=float(runs.quantile_usd(0.9)[0]),
        total_90_s=float(runs.quantile_s(0.9)[0]),
        scenarios=(*_scenarios(space, job, found, limits), *_less(question, found, limits)) if worlds else (),
        rejected=tuple(_rejected(space, found, limits)) if worlds else (),
    )


def point(space: SearchSpace, cluster: Cluster, figures: Forecast, row: int) -> Point:
    """A plan in a few words."""
    names = ((count, space.options[option].offer.in_words) for option, count in cluster.machines)
    return Point(
        machines=cluster_words(names), total_s=float(figures.total_s[row]), cost_usd=float(figures.cost_usd[row])
    )


def _scenarios(space: SearchSpace, job: JobModel, found: Found, limits: Limits) -> Iterator[Scenario]:
    assert found.chosen is not None
    # What it costs an hour changes with prices: that limit was for choosing.
    columns = Columns(replace(space, max_hourly_usd=None))
    near = np.union1d(best_rows(found.forecast, limits, WEIGHED), [*found.front, found.chosen])
    rows = found.rows.take(near)
    here = int(np.searchsorted(near, found.chosen))
    spot = np.array([option.offer.price.market == "spot" for option in space.options])
    usd, bytes_s = columns.usd_per_hour, columns.link_s_per_byte
    worlds: tuple[tuple[str, dict[str, NDArray[np.float64]]], ...] = (
        ("spot prices 20 % higher", {"usd_per_hour": usd * np.where(spot, 1.2, 1.0)}),
        ("spot prices 20 % lower", {"usd_per_hour": usd * np.where(spot, 0.8, 1.0)}),
        ("half the bandwidth between machines", {"link_s_per_byte": 2 * bytes_s}),
        ("twice the bandwidth between machines", {"link_s_per_byte": bytes_s / 2}),
        ("a high preemption rate everywhere", {"scarce_chance": np.where(spot, 1.0, 0.0)}),
        ("provisioning twice as long", {"startup_s": 2 * columns.startup_s}),
    )
    for change, other in worlds:
        yield _scenario(change, space, columns.changed(**other), job, rows, here, limits)


def _less(question: Question, found: Found, limits: Limits) -> Iterator[Scenario]:
    """The least of each limit that a plan keeps, of those that were found."""
    ways: tuple[tuple[Limit, float | None, Callable[[float], str]], ...] = (
        ("budget_usd", limits.budget_usd, lambda least: f"a budget below {usd_at_least(least)}"),
        ("deadline_s", limits.deadline_s, lambda least: f"a deadline below {duration(round_up_s(least))}"),
    )
    for limit, given, say in ways:
        told = None if given is None else question.least(found, limits, limit)
        if told is not None:
            least, row = told
            yield Scenario(
                change=say(least),
                verdict=f"no plan that was found keeps it with a probability of {chance(question.asked)}",
                best=point(question.space, found.cluster(row), found.forecast, row),
                same=row == found.chosen,
            )


def _scenario(
    change: str, space: SearchSpace, columns: Columns, job: JobModel, rows: ClusterRows, here: int, limits: Limits
) -> Scenario:
    possible, table = tabulate_rows(columns, rows, job)
    assert len(possible) == len(rows)  # another price or link makes nothing impossible
    found = forecast(table, job)
    row, _ = choose(found, limits)
    if row is None:
        return Scenario(change=change, verdict="nothing fits any more", best=None, same=False)
    best, chosen = rows.cluster(row), rows.cluster(here)
    told = point(space, best, found, row)
    same = best.machines == chosen.machines
    now = f"{usd(told.cost_usd)} and {duration(told.total_s)}"
    if same:
        doubt = "" if limits.risk(found)[row] <= 1 else ", and might exceed the limits"
        return Scenario(change=change, verdict=f"the same machines win, at {now}{doubt}", best=told, same=True)
    before = point(space, chosen, found, here)
    doubt = "" if limits.risk(found)[here] <= 1 else ", and might exceed the limits"
    return Scenario(
        change=change,
        verdict=f"{told.machines} wins, at {now}; this plan would come to {usd(before.cost_usd)} and "
        f"{duration(before.total_s)}{doubt}",
        best=told,
        same=False,
    )


def _rejected(space: SearchSpace, found: Found, limits: Limits) -> Iterator[Rejected]:
    """Plans with a better score that are not sure to keep a limit, those first that break it least."""
    assert found.chosen is not None
    told = found.forecast
    score = limits.expected_score(told)
    risk = limits.risk(told)
    better = np.flatnonzero((risk > max(1.0, risk[found.chosen])) & (score < 0.98 * score[found.chosen]))
    seen: set[tuple[int, ...]] = set()
    for row in better[np.argsort(risk[better], kind="stable")].tolist():
        cluster = found.cluster(row)
        kinds = tuple(option for option, _ in cluster.machines)
        if kinds in seen:
            continue
        seen.add(kinds)
        yield Rejected(plan=point(space, cluster, told, row), reason=_reason(told, row, limits))
        if len(seen) == REJECTED:
            return


def _reason(told: Forecast, row: int, limits: Limits) -> str:
    """The limit that is exceeded, in more than every second or than one of ten runs."""
    reasons = []
    for name, limit, value, high, say in (
        ("budget", limits.budget_usd, told.cost_usd[row], sure_quantile(told.cost_usd, told.cost_high_usd)[row], usd),
        (
            "deadline",
            limits.deadline_s,
            told.total_s[row],
            sure_quantile(told.total_s, told.total_high_s)[row],
            duration,
        ),
    ):
        if limit is None or high <= limit:
            continue
        figure, how = (value, "or more in every other run") if value > limit else (high, "or more in one of ten runs")
        reasons.append(f"{name} of {say(limit)}: {say(float(figure))} {how}")
    if limits.budget_usd is not None and told.least_budget_usd[row] > limits.budget_usd:
        least = usd_at_least(float(told.least_budget_usd[row]))
        reasons.append(f"budget of {usd(limits.budget_usd)}: {least} is ten minutes of it at its on-demand price")
    return "; ".join(reasons)
