"""What the choice depends on: other worlds and who would win in them, and better plans that a limit rejects."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hetopt.optimizer.plan import Insight, Point, Rejected, Scenario
from hetopt.optimizer.recommendation.confidence import simulate
from hetopt.optimizer.recommendation.explain import usd_at_least
from hetopt.optimizer.search.aims import Limits, best_rows, choose
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.search.search import Found
from hetopt.optimizer.search.search_space import Cluster, SearchSpace
from hetopt.optimizer.words import cluster as cluster_words
from hetopt.optimizer.words import duration, usd

WEIGHED = 4000
"""Of the best plans so many are priced again in each other world: the winner there was close here."""

REJECTED = 4


def insight(
    space: SearchSpace,
    job: JobModel,
    found: Found,
    limits: Limits,
    *,
    seed: int,
    confidence: float | None = None,
) -> Insight:
    """All of it, for a search that has chosen something.

    Args:
        space: what was searched.
        job: what does not depend on the cluster.
        found: the search, with its choice.
        limits: budget, deadline and what was wanted.
        seed: of the simulated runs.
        confidence: that was asked for.
    """
    assert found.chosen is not None
    runs = simulate(space, job, found, [found.chosen], seed=seed)
    limited = limits.budget_usd is not None or limits.deadline_s is not None
    chance = float(runs.chance(budget_usd=limits.budget_usd, deadline_s=limits.deadline_s)[0])
    gap = None
    if found.safe and found.proof is not None and found.proof.complete and not limits.knee:
        # Of the choice, which may be dearer to the score than the best by what counts as equal.
        score = float(limits.score(found.forecast.total_s, found.forecast.cost_usd)[found.chosen])
        gap = max(0.0, 1 - found.proof.bound / score)
    return Insight(
        gap=gap,
        chance=chance if limited else None,
        confidence=confidence,
        cost_90_usd=float(runs.quantile_usd(0.9)[0]),
        total_90_s=float(runs.quantile_s(0.9)[0]),
        scenarios=tuple(_scenarios(space, job, found, limits)),
        rejected=tuple(_rejected(space, found, limits)),
    )


def point(space: SearchSpace, cluster: Cluster, figures: Forecast, row: int) -> Point:
    """A plan in a few words."""
    names = (
        (count, f"{space.options[option].name} {space.options[option].offer.price.market}")
        for option, count in cluster.machines
    )
    return Point(
        machines=cluster_words(names),
        total_s=float(figures.total_s[row]),
        cost_usd=float(figures.cost_usd[row]),
    )


def _scenarios(space: SearchSpace, job: JobModel, found: Found, limits: Limits) -> Iterator[Scenario]:
    assert found.chosen is not None
    # What it costs an hour changes with prices: that limit was for choosing.
    columns = Columns.of(replace(space, max_hourly_usd=None))
    near = np.union1d(best_rows(found.forecast, limits, WEIGHED), [*found.front, found.chosen])
    rows = found.rows.take(near)
    here = int(np.searchsorted(near, found.chosen))
    spot = np.array([option.offer.price.market == "spot" for option in space.options])
    worlds = (
        (
            "spot prices 20 % higher",
            replace(columns, usd_per_hour=columns.usd_per_hour * np.where(spot, 1.2, 1.0)),
            job,
        ),
        ("spot prices 20 % lower", replace(columns, usd_per_hour=columns.usd_per_hour * np.where(spot, 0.8, 1.0)), job),
        ("half the bandwidth between machines", replace(columns, link_s_per_byte=2 * columns.link_s_per_byte), job),
        ("twice the bandwidth between machines", replace(columns, link_s_per_byte=columns.link_s_per_byte / 2), job),
        ("every spot pool scarce", replace(columns, scarce_chance=np.where(spot, 1.0, 0.0)), job),
        ("start-up twice as long", columns, replace(job, startup_s=2 * job.startup_s)),
    )
    for change, other, other_job in worlds:
        yield _scenario(change, space, other, other_job, rows, here, limits)
    if limits.budget_usd is not None:
        in_time = found.forecast.total_s <= (limits.deadline_s or math.inf)
        least = float(np.min(found.forecast.cost_usd[in_time], initial=math.inf))
        row = int(np.flatnonzero(in_time)[found.forecast.cost_usd[in_time].argmin()])
        yield Scenario(
            change=f"a budget below {usd_at_least(least)}",
            verdict="nothing fits",
            best=point(space, found.cluster(row), found.forecast, row),
            same=row == found.chosen,
        )


def _scenario(
    change: str, space: SearchSpace, columns: Columns, job: JobModel, rows: ClusterRows, here: int, limits: Limits
) -> Scenario:
    possible, table = tabulate_rows(columns, rows)
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
        return Scenario(change=change, verdict=f"the same machines win, at {now}", best=told, same=True)
    before = point(space, chosen, found, here)
    kept = "" if limits.risk(found)[here] <= 1 else ", and might exceed the limits"
    return Scenario(
        change=change,
        verdict=f"{told.machines} wins, at {now}; this plan would come to {usd(before.cost_usd)} and "
        f"{duration(before.total_s)}{kept}",
        best=told,
        same=False,
    )


def _rejected(space: SearchSpace, found: Found, limits: Limits) -> Iterator[Rejected]:
    """Plans with a better score that break a limit at the upper end, those first that break it least."""
    assert found.chosen is not None
    told = found.forecast
    score = limits.score(told.total_s, told.cost_usd)
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
    """The limit that is exceeded, on expectation or only at the upper end."""
    reasons = []
    for name, limit, value, high, say in (
        ("budget", limits.budget_usd, told.cost_usd[row], told.cost_high_usd[row], usd),
        ("deadline", limits.deadline_s, told.total_s[row], told.total_high_s[row], duration),
    ):
        if limit is None or high <= limit:
            continue
        figure, how = (value, "expected") if value > limit else (high, "possible (upper end of 90 %)")
        reasons.append(f"{name} of {say(limit)}: {say(float(figure))} {how}")
    return "; ".join(reasons)
