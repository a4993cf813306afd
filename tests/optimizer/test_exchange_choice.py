"""What the rules of choosing an exchange bring: who wins by how much, and what is lost without each rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.options import Options, PlanRequest
from hetopt.optimizer.recommendation.recommend import SearchProblem, search_problem
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows, uniform_rows
from hetopt.optimizer.search.forecast import ClusterTable, Forecast, forecast
from hetopt.optimizer.search.objective import NEAR
from hetopt.optimizer.search.search_space import SearchSpace

from .profiles import make_profile

RECORDED = Path(__file__).parents[1] / "recorded"
JOBS = ("resnet20-cifar10", "lstm-small", "5 M", "25 M")
GBIT_PER_S = (1, 25)
WORLDS = 30


def at(space: SearchSpace, gbit_per_s: float) -> SearchSpace:
    """With no more bandwidth between machines than this."""
    most = gbit_per_s * 1e9 / 8
    capped = (
        replace(
            option,
            network=replace(
                option.network,
                links={
                    name: replace(link, bytes_per_s=min(link.bytes_per_s, most))
                    for name, link in option.network.links.items()
                },
            ),
        )
        for option in space.options
    )
    return replace(space, options=tuple(capped))


@pytest.fixture(scope="module", params=JOBS)
def problem(request: pytest.FixtureRequest, catalog: Catalog) -> SearchProblem:
    """Two recorded jobs and two larger ones, for fifty epochs on clusters of up to 16 workers."""
    job = request.param
    path = RECORDED / f"{job}.json"
    profile = (
        Profile.load(path)
        if path.is_file()
        else make_profile(parameters=int(job.split()[0]) * 1_000_000, per_sample_s=0.01)
    )
    return search_problem(
        PlanRequest(profile, catalog, Goal(ends="epochs", amount=50.0), Options(max_workers=16, batch_size=64))
    )


def priced(problem: SearchProblem, space: SearchSpace | None = None) -> tuple[ClusterRows, ClusterTable, Forecast]:
    """Every cluster of one type."""
    columns = Columns(space or problem.space)
    rows, table = tabulate_rows(columns, uniform_rows(columns), problem.job)
    return rows, table, forecast(table, problem.job)


def whole_sums(problem: SearchProblem) -> Forecast:
    """The same clusters without the menu."""
    return priced(problem, replace(problem.space, exchanges=problem.space.exchanges[:1]))[2]


def test_what_is_sent_instead_of_whole_gradients_pays(problem: SearchProblem) -> None:
    """By 2 % of the whole run at least, and never inside one machine: the saving of microseconds is none."""
    rows, table, found = priced(problem)
    plain = whole_sums(problem)
    compressed = rows.exchange > 0
    assert not compressed[table.machines == 1].any()
    assert (found.total_s[compressed] * NEAR <= plain.total_s[compressed]).all()
    np.testing.assert_array_equal(found.total_s[~compressed], plain.total_s[~compressed])


def test_the_slower_the_links_the_more_it_saves(problem: SearchProblem) -> None:
    """At a gigabit some cluster of each job ends in less than two thirds of the time that whole sums take it."""
    slow, quick = (
        1 - priced(other)[2].total_s / whole_sums(other).total_s
        for other in (replace(problem, space=at(problem.space, gbit)) for gbit in GBIT_PER_S)
    )
    assert (slow >= quick - (NEAR - 1)).all()
    assert slow.max() > 1 / 3
