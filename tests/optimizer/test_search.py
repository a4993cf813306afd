"""The search against brute force: nothing better is missed, and the rules of the limits hold.

Shares in columns against the solver of the trainer, and the level against everything in its box.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from hypothesis import given, strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from hetopt.core.batch_partition import Shares, WorkerTime, solve_shares
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Synchronization
from hetopt.optimizer.convergence.compression_penalty import Penalty
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.cost.bill import load_billing
from hetopt.optimizer.fit import FittedModel, LinkModel, fit
from hetopt.optimizer.market.catalog import Catalog, offers
from hetopt.optimizer.market.quota import read_quotas
from hetopt.optimizer.plan import SURE, Goal
from hetopt.optimizer.recommendation.recommend import steps_model
from hetopt.optimizer.search.bounds import Bar, could_beat
from hetopt.optimizer.search.cluster_rows import Boxes, ClusterRows, Columns, tabulate_rows, uniform_rows
from hetopt.optimizer.search.exchange_menu import ExchangeOption, exchange_menu, local_exchange
from hetopt.optimizer.search.forecast import ClusterTable, Forecast, JobModel, forecast
from hetopt.optimizer.search.group_shares import Lines, earliest_finish, feasible, share
from hetopt.optimizer.search.mixes import GAP, Pool, search_mixes
from hetopt.optimizer.search.objective import (
    FASTEST,
    NEAR,
    Keys,
    best_rows,
    expected,
    expected_totals,
    least_expected,
    plan_front,
    sure_quantile,
)
from hetopt.optimizer.search.pareto import pareto_front, thin
from hetopt.optimizer.search.search import Limits, choose, search
from hetopt.optimizer.search.search_space import (
    Cluster,
    MachineOption,
    SearchSpace,
    batch_ladder,
    drop_dominated,
    machine_options,
)
from hetopt.optimizer.search.study import Study
from hetopt.optimizer.step_time.links import COLLECTIVES
from hetopt.optimizer.step_time.local_options import Communication, LocalOption
from hetopt.optimizer.step_time.model import learned_shape
from hetopt.optimizer.step_time.transfer import reference_host

from .profiles import make_profile
from .scalar_table import suited, tabulate

TYPES = ("c7a.xlarge", "c7a.4xlarge", "g5.xlarge")
MACHINES = 4


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return fit(make_profile(parameters=5_000_000, per_sample_s=0.02, minimum_steps=2000, minimum_samples=3e6))


@pytest.fixture(scope="module")
def options(model: FittedModel, catalog: Catalog) -> tuple[MachineOption, ...]:
    host = reference_host(model, catalog.instance_types.values())
    return machine_options(model, offers(catalog, "spot"), host, learned_shape(model))[0]


@pytest.fixture(scope="module")
def job(model: FittedModel) -> JobModel:
    return JobModel(
        steps=steps_model(model, Goal(ends="target"), 1.0),
        evaluate_every_samples=50_000,
        shape=learned_shape(model),
        startup_log_sd=0.5,
        checkpoint_s=1.0,
        billing=load_billing(),
    )


def _space(model: FittedModel, options: tuple[MachineOption, ...], machines: int = MACHINES) -> SearchSpace:
    return SearchSpace(
        options=options,
        batch_sizes=batch_ladder(64, 512, 64),
        exchanges=_some(model, 8 * machines),
        max_machines=machines,
        offered=len(options),
        usable=len(options),
    )


def _some(model: FittedModel, max_workers: int) -> tuple[ExchangeOption, ...]:
    """Whole sums, sums in bf16 beside the backward pass, and a part of the gradient gathered."""
    options = exchange_menu(model, minimum_gain=0.5, max_workers=max_workers)
    bf16 = next(option for option in options if option.compression.name == "bf16")
    return options[0], bf16, next(option for option in options if option.collective == "all_gather")


def _with_local(model: FittedModel, space: SearchSpace) -> tuple[ExchangeOption, ...]:
    """Whole sums, a part gathered, and averages of parameters in an eighth of the steps, for at most 24 workers."""
    local = LocalOption(
        sync=Synchronization(name="selsync", delta=0.3),
        communication=Communication(share=1 / 8, log_sd=0.3, note=""),
        penalty=Penalty(coefficient=0.3, coefficient_sd=0.2),
        most_workers=24,
        counts_steps=True,
    )
    return space.exchanges[0], space.exchanges[2], local_exchange(model, space.exchanges[0], local)


@pytest.fixture(scope="module")
def space(model: FittedModel, options: tuple[MachineOption, ...]) -> SearchSpace:
    return _space(model, tuple(option for option in options if option.name in TYPES))


@pytest.fixture(scope="module")
def wide(model: FittedModel, options: tuple[MachineOption, ...]) -> SearchSpace:
    """Options of every kind: fast and slow, cheap and dear, of one worker and of eight; the whole menu, and averages.

    Between three machines and more, links of every second option are better than between two.
    """
    few = _space(model, options[::23], machines=16)
    relieved = tuple(
        replace(option, network=replace(option.network, relief=1.0 + 0.4 * (place % 2)))
        for place, option in enumerate(few.options)
    )
    whole = exchange_menu(model, minimum_gain=0.5, max_workers=8 * 16)
    assert {option.compression.name for option in whole} >= {"identity", "bf16", "int8"}
    return replace(few, options=relieved, max_workers=128, exchanges=(*whole, _with_local(model, few)[2]))


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
    possible, table = tabulate(space, suited(space, job, clusters))
    assert len(possible) > 200
    return forecast(table, job)


def test_columns_equal_one_cluster_at_a_time(model: FittedModel, space: SearchSpace) -> None:
    """The vectorised table and the one that is written out price alike, column for column."""
    space = replace(space, exchanges=_with_local(model, space))
    columns = Columns(space)
    counts = itertools.product(range(3), repeat=len(TYPES))
    clusters = [Cluster.of(enumerate(count), b, e) for count in counts if sum(count) for b in (0, 3) for e in range(3)]
    rows, quick = tabulate_rows(columns, ClusterRows.of(clusters))
    possible, exact = tabulate(space, clusters)
    assert [rows.cluster(row) for row in range(len(rows))] == list(possible)
    for name in ClusterTable.__dataclass_fields__:
        np.testing.assert_allclose(getattr(quick, name), getattr(exact, name), rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("bandwidth", [None, 2e8, 2e7])
def test_each_cluster_gets_the_exchange_that_suits_it(
    model: FittedModel, wide: SearchSpace, options: tuple[MachineOption, ...], job: JobModel, bandwidth: float | None
) -> None:
    """As weighed one by one, over links of every speed; on slow ones something is rounded, and something averaged."""
    few = tuple(option for option in options if option.name in (*TYPES, "g5.12xlarge"))
    if bandwidth is not None:
        slow = LinkModel(latency_s=1e-4, bytes_per_s=bandwidth)
        few = tuple(
            replace(option, network=replace(option.network, links=dict.fromkeys(COLLECTIVES, slow))) for option in few
        )
    space = replace(_space(model, few), max_workers=64)
    space = replace(space, exchanges=(*space.exchanges, _with_local(model, space)[2]))
    counts = [count for count in itertools.product(range(3), repeat=len(few)) if 0 < sum(count) <= MACHINES]
    clusters = [Cluster.of(enumerate(count), b, 0) for count in counts if count.count(0) for b in (0, 3)]
    rows, _ = tabulate_rows(Columns(space), ClusterRows.of(clusters), job)
    found = [rows.cluster(row) for row in range(len(rows))]
    assert found == list(suited(space, job, clusters))
    used = {cluster.exchange for cluster in found}
    assert {cluster.exchange for cluster in found if cluster.machine_count == 1} <= {0, 3}
    if bandwidth == 2e7:
        assert len(used) > 2


@given(
    low=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    more=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    options=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    batch=st.integers(0, 6),
    exchange=st.integers(0, 1000),
    budget=st.floats(0.2, 20),
    quickest=st.booleans(),
    looser=st.floats(0.8, 3),
)
def test_no_box_is_dropped_that_holds_something_better(
    wide: SearchSpace,
    job: JobModel,
    low: tuple[int, int],
    more: tuple[int, int],
    options: tuple[int, int],
    batch: int,
    exchange: int,
    budget: float,
    quickest: bool,
    looser: float,
) -> None:
    """Branch and bound is exact if this holds: whatever is in a dropped box is worse, or breaks a limit."""
    first, second = (index % len(wide.options) for index in options)
    if first == second:
        return
    counts = [(n, m) for n in range(low[0], low[0] + more[0] + 1) for m in range(low[1], low[1] + more[1] + 1)]
    exchange %= len(wide.exchanges)
    columns = Columns(wide)
    clusters = [Cluster.of([(first, n), (second, m)], batch, exchange) for n, m in counts]
    rows, table = tabulate_rows(columns, ClusterRows.of(clusters))
    if not len(rows):
        return
    found = forecast(table, job)
    limits = (
        Limits(budget_usd=budget, time_weight=1.0)
        if quickest
        else Limits(deadline_s=float(np.median(found.total_high_s)) * looser, time_weight=0.0)
    )
    score = limits.expected_score(found)
    aim = float(np.median(score)) * looser
    pair = np.array([[first, second]], dtype=np.intp)
    box = Boxes(
        option=pair,
        count=np.array([low]),
        batch=np.array([batch]),
        exchange=np.array([exchange]),
        most=np.array([[low[0] + more[0], low[1] + more[1]]]),
    )
    kept, bound = could_beat(box, Bar.of(columns, job, limits, aim))
    better = (score < aim) & (limits.risk(found) <= 1)
    assert kept[0] or not better.any()
    if kept[0]:
        assert bound[0] <= score.min() * (1 + 1e-9) or not better.any()


LIMITS = [
    Limits(budget_usd=1.2, time_weight=1.0),
    Limits(budget_usd=3.0, time_weight=1.0),
    Limits(deadline_s=4000.0, time_weight=0.0),
    Limits(budget_usd=3.0, time_weight=0.0),
    Limits(budget_usd=3.0, time_weight=0.4),
]


@pytest.mark.parametrize("types", [2, 3])
@pytest.mark.parametrize("limits", LIMITS)
def test_mixes_are_searched_exactly(space: SearchSpace, job: JobModel, limits: Limits, types: int) -> None:
    columns = Columns(space)
    pool = Pool(columns, job, limits)
    pool.add(uniform_rows(columns), keep=None)
    pool.uniform = len(pool.rows)
    proofs = [search_mixes(pool, types=kinds) for kinds in range(2, types + 1)]
    clusters = [
        Cluster.of(zip(chosen, counts, strict=True), batch, exchange)
        for chosen in itertools.combinations(range(len(space.options)), types)
        for counts in itertools.product(range(MACHINES + 1), repeat=types)
        if 0 < sum(counts) <= MACHINES
        for batch in range(len(space.batch_sizes))
        for exchange in range(len(space.exchanges))
    ]
    every = forecast(tabulate(space, suited(space, job, clusters))[1], job)
    safe = limits.risk(every) <= 1
    best = limits.expected_score(every)[safe].min()
    assert best * (1 - 1e-9) <= pool.safe_score <= best / (1 - GAP)
    for proof in proofs:
        assert proof is not None
        assert proof.complete
        assert proof.gap == pytest.approx(GAP)
        assert proof.bound <= best


@pytest.mark.parametrize("most", [4, 20])
def test_full_memory_does_not_hide_what_is_better(space: SearchSpace, job: JobModel, most: int) -> None:
    """With little memory a worker takes no more samples however long the run, which a bound on the rent has to know."""
    little = tuple(
        replace(option, worker=replace(option.worker, time=replace(option.worker.time, max_samples=most)))
        for option in space.options
    )
    space = replace(space, options=little, max_machines=32, max_workers=64, batch_sizes=(64,))
    columns, limits = Columns(space), Limits(deadline_s=40 * 3600.0, time_weight=0.0)
    pool = Pool(columns, job, limits)
    pool.add(uniform_rows(columns), keep=None)
    pool.uniform = len(pool.rows)
    # Not the best is to be beaten but what is twice as dear, so that much is.
    bar = Bar.of(columns, job, limits, 2 * pool.safe_score)
    pair = itertools.product(range(1, 17), repeat=2)
    for one, other in itertools.combinations(range(len(space.options)), 2):
        rows = ClusterRows.of([Cluster.of([(one, n), (other, m)], 0, 0) for n, m in pair])
        rows, table = tabulate_rows(columns, rows)
        if not len(rows):
            continue
        found = forecast(table, job)
        score = limits.expected_score(found)
        better = (score < bar.score) & (limits.risk(found) <= 1)
        each = ClusterRows(option=rows.option[:, :2], count=rows.count[:, :2], batch=rows.batch, exchange=rows.exchange)
        kept, bound = could_beat(Boxes(**vars(each), most=each.count), bar)
        assert kept[better].all()
        assert (bound[better] <= score[better] * (1 + 1e-9)).all()
        more, _ = bar.more_usd(Boxes(**vars(each) | {"count": np.ones_like(each.count)}, most=each.count))
        alone = bar.alone_usd()[0][:, 0, 0]
        assert (np.minimum(alone[one], alone[other]) <= found.cost_usd[better].min(initial=np.inf)).all()
        assert (more[better] <= found.cost_usd[better]).all()


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=40), st.integers(1, 45))
def test_the_best_rows_are_the_first_of_the_order(figures: list[tuple[int, int]], count: int) -> None:
    time, cost = (np.array(column, dtype=float) for column in zip(*figures, strict=True))
    found = _forecast_of(time, cost)
    for limits in (
        Limits(budget_usd=3.0, time_weight=1.0),
        Limits(deadline_s=2.5, time_weight=0.0),
        Limits(budget_usd=2.0, time_weight=0.5),
    ):
        np.testing.assert_array_equal(best_rows(found, limits, count), np.lexsort(Keys.of(found, limits)[::-1])[:count])


positive = st.floats(0.01, 1e6)


@given(positive, st.floats(0, 4), st.integers(0, 2**32 - 1))
def test_the_expectation_is_that_of_draws(median: float, log_sd: float, seed: int) -> None:
    spread = min(log_sd, 1.2)  # beyond, a mean of draws says little
    draws = median * np.exp(spread * np.random.default_rng(seed).standard_normal(200_000))
    high = np.array([median * math.exp(Z90 * spread)])
    assert expected(np.array([median]), high)[0] == pytest.approx(draws.mean(), rel=0.05)


@given(positive, st.floats(0.01, 4), st.integers(0, 2**32 - 1))
def test_nine_of_ten_draws_stay_below_what_limits_are_kept_at(median: float, log_sd: float, seed: int) -> None:
    draws = median * np.exp(log_sd * np.random.default_rng(seed).standard_normal(20_000))
    high = np.array([median * math.exp(Z90 * log_sd)])
    most = sure_quantile(np.array([median]), high)[0]
    assert (draws <= most).mean() == pytest.approx(SURE, abs=0.015)


@given(positive, st.floats(1, 1e4), st.floats(1, 100), st.floats(1, 100))
def test_nothing_above_a_median_and_an_upper_end_is_expected_to_be_less(
    median: float, reach: float, larger: float, higher: float
) -> None:
    least = least_expected(np.array([median]), np.array([median * reach]))
    own = median * larger
    assert least[0] <= expected(np.array([own]), np.array([max(own, median * reach * higher)]))[0] * (1 + 1e-9)


def _forecast_of(time: np.ndarray, cost: np.ndarray) -> Forecast:
    """A forecast that knows time and cost alone, with upper ends a tenth above them."""
    known = {"total_s": time, "total_high_s": 1.1 * time, "cost_usd": cost, "cost_high_usd": 1.1 * cost}
    return Forecast(**{name: known.get(name, np.zeros_like(time)) for name in Forecast.__dataclass_fields__})


def test_what_a_cluster_may_have_is_kept(model: FittedModel, options: tuple[MachineOption, ...], job: JobModel) -> None:
    few = tuple(option for option in options if option.name in TYPES)
    limited = replace(
        _space(model, few, machines=8),
        max_workers=5,
        max_hourly_usd=0.9,
        quotas=read_quotas(["g=4", "standard=20"]),
    )
    found = search(limited, job, Limits(budget_usd=5.0, time_weight=1.0))
    assert found.chosen is not None
    for row in range(len(found.rows)):
        machines = [(limited.options[option], count) for option, count in found.cluster(row).machines]
        assert sum(count * option.worker.workers for option, count in machines) <= 5
        assert sum(count * option.usd_per_hour for option, count in machines) <= 0.9 + 1e-9
        gpus = sum(count * option.offer.instance_type.vcpus for option, count in machines if option.name[0] == "g")
        others = sum(count * option.offer.instance_type.vcpus for option, count in machines if option.name[0] != "g")
        assert gpus <= 4
        assert others <= 20


@pytest.mark.parametrize("budget", [0.35, 0.6, 1.5, 10.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_regret_against_brute_force(
    space: SearchSpace, job: JobModel, everything: Forecast, budget: float, seed: int
) -> None:
    limits = Limits(budget_usd=budget, time_weight=1.0)
    found = search(space, job, limits)
    best, safe = choose(everything, limits)
    assert found.safe == safe
    if best is None:
        assert found.chosen is None
        return
    assert found.chosen is not None
    if safe:
        fastest = limits.expected_score(everything)[limits.risk(everything) <= 1].min()
        assert limits.expected_score(found.forecast)[found.chosen] <= fastest * 1.01
    else:
        least = limits.risk(everything)[limits.overrun(everything) <= 1].min()
        assert limits.risk(found.forecast)[found.chosen] <= least * 1.01


def test_a_study_goes_on_from_its_file(space: SearchSpace, job: JobModel, tmp_path: Path) -> None:
    kept = tmp_path / "search.journal"

    def study(trials: int, budget: float = 1.0) -> list[Cluster]:
        limits = Limits(budget_usd=budget, time_weight=1.0)
        asked = Study(Columns(space), job, limits, types=3, seed=0)
        first = [Cluster(machines=((0, 1),), batch=0, exchange=0)]
        return [asked.cluster(trial.params) for trial in asked.run(first, trials, kept).trials]

    begun = study(8)
    assert study(8) == begun
    assert begun[0].machines == ((0, 1),)
    more = study(14)
    assert more[:9] == begun
    assert len(more) == 15
    # Another question has trials of its own.
    assert len(study(4, budget=2.0)) == 5
    storage = JournalStorage(JournalFileBackend(str(kept)))
    one, other = optuna.get_all_study_names(storage)
    assert (one.partition(",")[0], other.partition(",")[0]) == ("$1.00", "$2.00")
    assert optuna.load_study(storage=storage, study_name=one).metric_names == ["expected time, s", "expected cost, USD"]


def test_the_front_has_the_best_for_every_wish_and_nothing_hardly_quicker_for_much_more(
    space: SearchSpace, job: JobModel
) -> None:
    every = _uniform(space, job)
    front = plan_front(every)
    for weight in np.linspace(1 - FASTEST, FASTEST, 9).tolist():
        assert Limits(time_weight=weight).expected_score(every).argmin() in front
    time, cost = (column[front] for column in expected_totals(every))
    assert (np.diff(time) > 0).all()
    assert (np.diff(cost) < 0).all()
    for quicker, slower in itertools.combinations(range(len(front)), 2):
        doublings = math.log(cost[quicker] / cost[slower]) / math.log(2)
        assert time[slower] / time[quicker] >= NEAR**doublings * (1 - 1e-9)


def _uniform(space: SearchSpace, job: JobModel) -> Forecast:
    return forecast(tabulate_rows(Columns(space), uniform_rows(Columns(space)), job)[1], job)


def test_pruning_loses_no_point_of_the_front(
    model: FittedModel, options: tuple[MachineOption, ...], job: JobModel
) -> None:
    kept = drop_dominated(options, {})
    assert 0 < len(kept) < len(options)
    fronts = []
    for some in (options, kept):
        found = _uniform(_space(model, some, machines=3), job)
        rows = pareto_front(found.total_s, found.cost_usd)
        fronts.append(np.stack([found.total_s[rows], found.cost_usd[rows]]))
    np.testing.assert_allclose(fronts[0], fronts[1], rtol=1e-12)


@given(st.lists(st.floats(0.2, 20), min_size=2, max_size=5))
def test_a_looser_budget_is_never_riskier_nor_slower(everything: Forecast, budgets: list[float]) -> None:
    before: tuple[int, float] | None = None
    time_s, _ = expected_totals(everything)
    for budget in sorted(budgets):
        limits = Limits(budget_usd=budget, time_weight=1.0)
        row, safe = choose(everything, limits)
        if row is None:
            assert before is None
            continue
        # worst first: no plan, an unsafe plan (by its dollars at risk), a safe plan (by its expected time)
        now = (1, float(time_s[row])) if safe else (0, float(everything.cost_high_usd[row]))
        if before is not None:
            assert now[0] >= before[0]
            if now[0] == before[0]:
                assert now[1] <= before[1]
        before = now


def test_large_clusters_are_enumerated_in_steps_and_refined(
    model: FittedModel, options: tuple[MachineOption, ...], job: JobModel
) -> None:
    space = _space(model, tuple(option for option in options if option.name == "c7a.xlarge"), machines=100)
    assert space.machine_counts[:32] == tuple(range(1, 33))
    assert space.machine_counts[-1] == 100
    assert len(space.machine_counts) < 50
    found = search(space, job, Limits(budget_usd=1.0, time_weight=1.0))
    every = [Cluster(machines=((0, n),), batch=b, exchange=e) for n in range(1, 65) for b in range(7) for e in range(3)]
    _, table = tabulate(space, suited(space, job, every))
    best, _ = choose(forecast(table, job), Limits(budget_usd=1.0, time_weight=1.0))
    assert best is not None
    assert found.chosen is not None
    limits = Limits(budget_usd=1.0, time_weight=1.0)
    every_s, found_s = (limits.expected_score(one) for one in (forecast(table, job), found.forecast))
    assert found_s[found.chosen] <= 1.001 * every_s[best]


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
    assert set(batch_ladder(task, 16 * task, task)) == {round(task * x) for x in (1, 1.5, 2, 3, 4, 6, 8, 12, 16)}


WORKERS = st.builds(
    WorkerTime,
    fixed_s=st.floats(0, 2),
    per_sample_s=st.floats(1e-4, 1),
    floor_s=st.sampled_from([0.0, 0.5]),
    max_samples=st.one_of(st.none(), st.integers(1, 40)),
)
GROUPS = st.lists(st.tuples(WORKERS, st.integers(1, 7)), min_size=1, max_size=3)

IN_PARTS = st.builds(
    lambda fixed_s, per_sample_s, floor_s, part, once: WorkerTime(
        fixed_s=fixed_s, per_sample_s=per_sample_s, floor_s=floor_s, micro_batch=part, once_s=once * fixed_s
    ),
    st.floats(0, 2),
    st.floats(1e-4, 1),
    st.sampled_from([0.0, 0.5]),
    st.integers(1, 20) | st.none(),
    st.floats(0, 1),
)


def columns(groups: list[tuple[WorkerTime, int]], width: int = 3) -> tuple[Lines, np.ndarray]:
    """One row, padded to ``width`` groups."""
    padded = [*groups, *[(groups[0][0], 0)] * (width - len(groups))]
    most = [np.inf if w.max_samples is None else w.max_samples for w, _ in padded]
    lines = Lines(
        fixed_s=np.array([[w.fixed_s for w, _ in padded]]),
        per_sample_s=np.array([[w.per_sample_s for w, _ in padded]]),
        floor_s=np.array([[w.floor_s for w, _ in padded]]),
        most=np.array([most], dtype=np.float64),
        together=np.array([[np.inf if w.micro_batch is None else w.micro_batch for w, _ in padded]]),
        once_s=np.array([[w.once_s for w, _ in padded]]),
    )
    return lines, np.array([[count for _, count in padded]])


def solved(groups: list[tuple[WorkerTime, int]], batch: int) -> Shares | None:
    try:
        return solve_shares([worker for worker, count in groups for _ in range(count)], batch)
    except BadInput:
        return None


@given(GROUPS, st.integers(1, 200))
def test_columns_solve_what_the_trainer_solves(groups: list[tuple[WorkerTime, int]], batch: int) -> None:
    lines, workers = columns(groups)
    exact = solved(groups, batch)
    assert bool(feasible(lines, workers, np.array([batch]))[0]) == (exact is not None)
    if exact is None:
        return
    found = share(lines, workers, np.array([batch]))
    np.testing.assert_allclose(found.compute_s[0], exact.compute_s, rtol=1e-9)
    assert int((workers * found.base + found.raised).sum()) == batch
    assert (found.raised < np.maximum(workers, 1)).all()


@given(st.lists(st.tuples(GROUPS, st.integers(1, 200)), min_size=1, max_size=8))
def test_rows_do_not_disturb_each_other(rows: list[tuple[list[tuple[WorkerTime, int]], int]]) -> None:
    possible = [(groups, batch) for groups, batch in rows if solved(groups, batch) is not None]
    if not possible:
        return
    parts = [columns(groups) for groups, _ in possible]
    lines = Lines(**{f: np.concatenate([getattr(p, f) for p, _ in parts]) for f in Lines.__dataclass_fields__})
    workers = np.concatenate([w for _, w in parts])
    together = share(lines, workers, np.array([batch for _, batch in possible]))
    for row, ((line, count), (_, batch)) in enumerate(zip(parts, possible, strict=True)):
        alone = share(line, count, np.array([batch]))
        np.testing.assert_array_equal(together.base[row], alone.base[0])
        assert together.compute_s[row] == alone.compute_s[0]


@given(GROUPS, st.integers(1, 120))
def test_nothing_in_a_box_finishes_before_its_level(groups: list[tuple[WorkerTime, int]], batch: int) -> None:
    lines, workers = columns(groups)
    bound = earliest_finish(lines, workers, np.array([batch]))[0]
    for counts in itertools.product(*(range(1, count + 1) for _, count in groups)):
        exact = solved([(worker, count) for (worker, _), count in zip(groups, counts, strict=True)], batch)
        if exact is not None:
            assert bound <= exact.compute_s * (1 + 1e-9)


@given(IN_PARTS, st.integers(1, 200))
def test_a_local_batch_in_micro_batches_takes_what_its_parts_take(worker: WorkerTime, samples: int) -> None:
    """Each part takes a step of its own, but for the update, which is done once; more samples take no less."""
    lines, _ = columns([(worker, 1)], width=1)
    took = float(lines.time_s(np.array([[float(samples)]]))[0, 0])
    parts = 1 if worker.micro_batch is None else -(-samples // worker.micro_batch)
    part_s = max(worker.floor_s, worker.fixed_s + worker.per_sample_s * samples / parts)
    assert took == pytest.approx(worker.time_s(samples))
    assert took == pytest.approx(parts * part_s - (parts - 1) * worker.once_s)
    assert worker.time_s(samples + 1) >= worker.time_s(samples) - 1e-12
    line_s = max(worker.floor_s, worker.fixed_s + worker.per_sample_s * samples)
    over = float(lines.most_over_line_s(np.array([[float(samples)]]))[0, 0])
    assert line_s - 1e-12 <= took <= line_s + over + 1e-9


@given(st.lists(st.tuples(IN_PARTS, st.integers(1, 7)), min_size=1, max_size=3), st.integers(1, 200))
def test_shares_in_columns_take_what_their_workers_take(groups: list[tuple[WorkerTime, int]], batch: int) -> None:
    lines, workers = columns(groups)
    if not feasible(lines, workers, np.array([batch]))[0]:
        return
    found = share(lines, workers, np.array([batch]))
    largest = found.base[0] + (found.raised[0] > 0)
    slowest = max(worker.time_s(int(samples)) for (worker, _), samples in zip(groups, largest, strict=False))
    assert float(found.compute_s[0]) == pytest.approx(slowest)
