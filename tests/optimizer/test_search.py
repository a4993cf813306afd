"""The search against brute force: nothing better is missed, and the rules of the limits hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.optimizer.billing import load_billing
from hetopt.optimizer.catalog import Catalog, offers
from hetopt.optimizer.cost import Rates
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.forecast import ClusterTable, Forecast, JobModel, forecast, tabulate, tabulate_uniform
from hetopt.optimizer.pareto import pareto_front, thin
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommend import steps_model
from hetopt.optimizer.search import NEAR, Limits, choose, search, study_mixes
from hetopt.optimizer.search_space import (
    Cluster,
    MachineOption,
    SearchSpace,
    batch_ladder,
    drop_dominated,
    exchange_options,
    machine_options,
)
from hetopt.optimizer.transfer import reference_host

from .profiles import make_profile

TYPES = ("c7a.xlarge", "c7a.4xlarge", "g5.xlarge")
MACHINES = 4


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return fit(make_profile(parameters=5_000_000, per_sample_s=0.02, minimum_steps=2000, minimum_samples=3e6))


@pytest.fixture(scope="module")
def options(model: FittedModel, catalog: Catalog) -> tuple[MachineOption, ...]:
    return machine_options(model, offers(catalog, "spot"), reference_host(model, catalog.instance_types.values()))[0]


@pytest.fixture(scope="module")
def job(model: FittedModel) -> JobModel:
    return JobModel(
        steps=steps_model(model, Goal(ends="target"), 1.0),
        evaluate_every_samples=50_000,
        jitter=0.05,
        network_log_sd=0.35,
        startup_s=180.0,
        startup_log_sd=0.5,
        checkpoint_s=1.0,
        restart_s=210.0,
        rates=Rates.of(load_billing()),
    )


def _space(model: FittedModel, options: tuple[MachineOption, ...], machines: int = MACHINES) -> SearchSpace:
    return SearchSpace(
        options=options,
        batch_sizes=batch_ladder(64, 512, 64),
        exchanges=exchange_options(model, minimum_gain=0.5, max_workers=8 * machines),
        max_machines=machines,
        offered=len(options),
        usable=len(options),
    )


@pytest.fixture(scope="module")
def space(model: FittedModel, options: tuple[MachineOption, ...]) -> SearchSpace:
    return _space(model, tuple(option for option in options if option.name in TYPES))


@pytest.fixture(scope="module")
def everything(space: SearchSpace, job: JobModel) -> Forecast:
    """Every cluster of the small space."""
    counts = itertools.product(range(MACHINES + 1), repeat=len(TYPES))
    clusters = [
        Cluster.of(enumerate(count), batch, exchange)
        for count in counts
        if 0 < sum(count) <= MACHINES
        for batch in range(len(space.batch_sizes))
        for exchange in range(len(space.exchanges))
    ]
    possible, table = tabulate(space, clusters)
    assert len(possible) > 500
    return forecast(table, job)


def test_enumeration_equals_the_exact_solver(space: SearchSpace, job: JobModel) -> None:
    """The vectorised short cut for equal workers and the general path price alike, column for column."""
    rows, quick = tabulate_uniform(space)
    clusters = [Cluster(machines=((o, n),), batch=b, exchange=e) for o, n, b, e in rows.tolist()]
    possible, exact = tabulate(space, clusters)
    assert list(possible) == clusters
    for name in ClusterTable.__dataclass_fields__:
        np.testing.assert_allclose(getattr(quick, name), getattr(exact, name), rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("budget", [0.35, 0.6, 1.5, 10.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_regret_against_brute_force(
    space: SearchSpace, job: JobModel, everything: Forecast, budget: float, seed: int
) -> None:
    limits = Limits(budget_usd=budget)
    found = search(space, job, limits, seed=seed)
    best, safe = choose(everything, limits)
    assert found.safe == safe
    if best is None:
        assert found.chosen is None
        return
    assert found.chosen is not None
    if safe:
        fastest = everything.total_s[limits.risk(everything) <= 1].min()
        assert found.forecast.total_s[found.chosen] <= fastest * NEAR * 1.01
    else:
        least = limits.risk(everything)[limits.overrun(everything) <= 1].min()
        assert limits.risk(found.forecast)[found.chosen] <= least * 1.01


def test_the_study_alone_finds_nearly_the_best(space: SearchSpace, job: JobModel, everything: Forecast) -> None:
    limits = Limits(budget_usd=1.0)
    start = Cluster(machines=((0, 1),), batch=0, exchange=0)
    asked = study_mixes(space, job, limits, [start], range(len(space.options)), seed=0, trials=600)
    _, table = tabulate(space, asked)
    found = forecast(table, job)
    best = everything.total_s[limits.risk(everything) <= 1].min()
    assert found.total_s[limits.risk(found) <= 1].min() <= 1.01 * best


def test_the_same_seed_finds_the_same(space: SearchSpace, job: JobModel) -> None:
    first, second = (search(space, job, Limits(budget_usd=1.0), seed=3, trials=100) for _ in range(2))
    assert first.others == second.others
    assert first.chosen == second.chosen
    np.testing.assert_array_equal(first.front, second.front)


def test_the_front_is_not_dominated_and_holds_both_optima(space: SearchSpace, job: JobModel) -> None:
    found = search(space, job, Limits(budget_usd=1.0), seed=0, trials=100)
    time, cost = found.forecast.total_s, found.forecast.cost_usd
    for row in found.front:
        assert not ((time < time[row]) & (cost < cost[row])).any()
    assert time[found.front[0]] == time.min()
    assert cost[found.front[-1]] == cost.min()


def test_pruning_loses_no_point_of_the_front(
    model: FittedModel, options: tuple[MachineOption, ...], job: JobModel
) -> None:
    kept = drop_dominated(options)
    assert 0 < len(kept) < len(options)
    fronts = []
    for some in (options, kept):
        found = forecast(tabulate_uniform(_space(model, some, machines=3))[1], job)
        rows = pareto_front(found.total_s, found.cost_usd)
        fronts.append(np.stack([found.total_s[rows], found.cost_usd[rows]]))
    np.testing.assert_allclose(fronts[0], fronts[1], rtol=1e-12)


def test_double_prices_double_the_machines(space: SearchSpace, job: JobModel) -> None:
    _, table = tabulate_uniform(space)
    columns = {name: getattr(table, name) for name in ClusterTable.__dataclass_fields__}
    dearer = forecast(ClusterTable(**{**columns, "usd_per_hour": 2 * table.usd_per_hour}), job)
    plain = forecast(table, job)
    hours = job.rates.billed_hours(plain.total_s)
    np.testing.assert_allclose(dearer.cost_usd - plain.cost_usd, table.usd_per_hour * hours)
    np.testing.assert_array_equal(dearer.total_s, plain.total_s)


def test_intervals_hold_their_figure(everything: Forecast) -> None:
    for name in ("total", "cost"):
        unit = "s" if name == "total" else "usd"
        value, low, high = (getattr(everything, f"{name}{end}_{unit}") for end in ("", "_low", "_high"))
        assert (low >= 0).all()
        assert (low < value).all()
        assert (value < high).all()


@given(st.lists(st.floats(0.2, 20), min_size=2, max_size=5))
def test_a_looser_budget_is_never_riskier_nor_slower(everything: Forecast, budgets: list[float]) -> None:
    before: tuple[int, float] | None = None
    for budget in sorted(budgets):
        limits = Limits(budget_usd=budget)
        row, safe = choose(everything, limits)
        if row is None:
            assert before is None
            continue
        # worst first: no plan, an unsafe plan (by its dollars at risk), a safe plan (by its time)
        now = (1, float(everything.total_s[row])) if safe else (0, float(everything.cost_high_usd[row]))
        if before is not None:
            assert now[0] >= before[0]
            if now[0] == before[0]:
                assert now[1] <= before[1] * NEAR + 1e-12
        before = now


def test_deadline_takes_the_cheapest_in_time(everything: Forecast) -> None:
    deadline = float(np.median(everything.total_high_s))
    row, safe = choose(everything, Limits(deadline_s=deadline))
    assert safe
    assert row is not None
    in_time = everything.total_high_s <= deadline
    assert in_time[row]
    assert everything.cost_usd[row] <= NEAR * everything.cost_usd[in_time].min()


def test_large_clusters_are_enumerated_in_steps_and_refined(
    model: FittedModel, options: tuple[MachineOption, ...], job: JobModel
) -> None:
    space = _space(model, tuple(option for option in options if option.name == "c7a.xlarge"), machines=100)
    assert space.machine_counts[:32] == tuple(range(1, 33))
    assert space.machine_counts[-1] == 100
    assert len(space.machine_counts) < 50
    found = search(space, job, Limits(budget_usd=1.0), seed=0, trials=20)
    every = [Cluster(machines=((0, n),), batch=b, exchange=e) for n in range(1, 65) for b in range(7) for e in range(3)]
    _, table = tabulate(space, every)
    best, _ = choose(forecast(table, job), Limits(budget_usd=1.0))
    assert best is not None
    assert found.chosen is not None
    assert found.forecast.total_s[found.chosen] <= 1.001 * forecast(table, job).total_s[best]


def test_impossible_clusters_are_left_out(space: SearchSpace) -> None:
    possible, table = tabulate(
        space,
        [
            Cluster.of([], 0, 0),
            Cluster.of([(0, MACHINES + 1)], 0, 0),
            Cluster.of([(0, 1), (1, 0)], 0, 0),
        ],
    )
    assert [cluster.machines for cluster in possible] == [((0, 1),)]
    assert len(table) == 1


points = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30)


@given(points)
def test_pareto_front_against_its_definition(figures: list[tuple[int, int]]) -> None:
    time, cost = (np.array(column, dtype=float) for column in zip(*figures, strict=True))
    front = {(time[row], cost[row]) for row in pareto_front(time, cost)}
    expected = {(t, c) for t, c in figures if not any((u <= t and d <= c) and (u < t or d < c) for u, d in figures)}
    assert front == expected


@given(st.integers(2, 60), st.integers(2, 12))
def test_thinning_keeps_both_ends(size: int, count: int) -> None:
    time = np.geomspace(1, 1000, size)
    kept = thin(np.arange(size), time, count)
    assert len(kept) <= count
    assert kept[0] == 0
    assert kept[-1] == size - 1


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 512))
def test_batch_ladder_stays_between_its_limits(a: int, b: int, task: int) -> None:
    low, high = sorted((a, b))
    ladder = batch_ladder(low, high, task)
    assert ladder
    assert all(low <= size <= high for size in ladder)
    assert list(ladder) == sorted(set(ladder))
    if low <= task <= high:
        assert task in ladder
