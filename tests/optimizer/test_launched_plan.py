"""What a plan chose is what a launch starts: every option of the menu, in every precision, and what may be pinned.

What an exchange should take where a plan is launched: of every compressor, under every policy.

What the rules of choosing an exchange bring: who wins by how much, and what is lost without each rule.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetopt.api.backends import backend, options_at
from hetopt.api.launching import Changes, prepare
from hetopt.backends.backend import Prepared
from hetopt.backends.emulation.plan import parse_hosts, rehearse
from hetopt.backends.prediction import LEAST_GAIN, ExchangeGroup, PredictedExchange, predict_exchange, predict_on_local
from hetopt.core.comm.composition import METHODS, Combination, combinations
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import whole_ways
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.errors import BadInput
from hetopt.core.interruption import Reporter
from hetopt.core.memory import Precision
from hetopt.core.profile import Profile
from hetopt.core.run_spec import Compression, RatioPolicyName, RunSpec, StopRule, Synchronization, WorkerSpec
from hetopt.core.training_laws import step_inflation
from hetopt.optimizer.fit import FittedModel, LinkModel, fit
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation import recommend as recommending
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, SearchProblem, recommend, search_problem
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows, uniform_rows
from hetopt.optimizer.search.exchange_menu import ExchangeOption, exchange_menu, exchange_of
from hetopt.optimizer.search.forecast import ClusterTable, Forecast, forecast
from hetopt.optimizer.search.objective import NEAR
from hetopt.optimizer.search.search_space import SearchSpace
from hetopt.trainer.policies.ratio.auto import AutoRatio
from tests.collective_time import collective_time_s

from .conftest import NOW
from .profiles import make_device, make_profile
from .test_convergence import with_trials

MOST = 4
GOAL = Goal(ends="target", budget_usd=50.0)
FEW = Options(
    trials=0,
    types=("g5.xlarge",),
    max_workers=MOST,
    mixed_types=1,
    batch_size=64,
    objective="fastest",
)
TOLD = (
    "compression", "ratio_policy", "ratio_settings", "collective_policy", "sync", "precision", "slowdown_coefficient",
    "learning_rate_scale", "stop", "evaluate_every_epochs", "checkpoint_every_s", "seed", "task",
)  # fmt: skip


@cache
def known() -> Catalog:
    return load_catalog()


@cache
def profile() -> Profile:
    """A job on an A10G that several of them train faster, with every exchange priced, and steps in bf16 too."""
    usual, bf16 = (
        make_device(kind="cuda", type="g5.xlarge", fixed_s=0.001, per_sample_s=per_sample_s)
        for per_sample_s in (0.02, 0.01)
    )
    made = with_trials(make_profile(devices=[usual, bf16.model_copy(update={"precision": "bf16", "compressors": ()})]))
    host = made.host.model_copy(update={"accelerator": "NVIDIA A10G", "accelerator_count": 1})
    return made.model_copy(update={"host": host})


@cache
def options() -> tuple[ExchangeOption, ...]:
    """Everything that the menu may hold: what it holds, and all whole ways that others beat here."""
    model = fit(profile())
    held = exchange_menu(model, minimum_gain=0.05, max_workers=MOST)
    local = replace(exchange_of(model, Compression(), MOST), sync=Synchronization(name="local-sgd", every_steps=8))
    return (*held, *(exchange_of(model, way, MOST) for way in whole_ways()), local)


@cache
def planned(way: str = "", precision: Precision = "fp32") -> Plan:
    """The fastest cluster, with nothing else on the menu than this."""
    with pytest.MonkeyPatch.context() as patch:
        if way:
            option = next(one for one in options() if name(one) == way)
            patch.setattr(recommending, "_menu", lambda *_, **__: (option,))
        return recommending.recommend(
            PlanRequest(profile(), known(), GOAL, replace(FEW, precision=precision)), seed=0, now=NOW
        )


def name(option: ExchangeOption) -> str:
    return f"{spell(option.compression)} {option.sync.name}"


def launched(plan: Plan, on: Place = "local", **changes: str) -> Prepared:
    return prepare(plan, backend(on, Reporter()), options_at(on, {}), Changes(**changes))


def told(run: RunSpec) -> dict[str, object]:
    return {field: getattr(run, field) for field in TOLD}


WAYS = sorted({name(option) for option in options()})


@pytest.mark.parametrize(
    ("way", "precision"), [*((way, "fp32") for way in WAYS), *((way, "bf16") for way in WAYS[::8])]
)
def test_what_was_chosen_is_what_is_started(way: str, precision: Precision) -> None:
    """From the menu's option to what workers are told, on this machine and in a rehearsal."""
    plan = planned(way, precision)
    option = next(one for one in options() if name(one) == way)
    assert plan.chosen.compression == plan.run.compression == option.compression
    assert plan.chosen.sync == plan.run.sync == option.sync
    assert plan.chosen.precision == plan.run.precision == precision
    assert len(plan.run.workers) > 1
    shares = [size for group in plan.chosen.groups for size in group.local_batch_sizes]
    assert [worker.local_batch_size for worker in plan.run.workers] == shares
    selects = METHODS[option.compression.name].by_ratio
    assert plan.run.ratio_policy == ("auto" if selects else "fixed")
    here = launched(plan).launch.spec
    rehearsed = rehearse(plan, 8).run
    assert told(here) == told(rehearsed) == told(plan.run)
    assert here.global_batch_size == plan.chosen.global_batch_size
    assert [worker.local_batch_size for worker in rehearsed.workers] == shares


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compression": "dense(0.01)"}, "ratio of identity must be 1"),
        ({"compression": "none(0.01)"}, "ratio of identity must be 1"),
        ({"compression": "powersgd(rank=2, ratio=0.1)"}, "ratio of powersgd must be 1"),
        ({"compression": "dense", "ratio_policy": "gravac"}, "identity"),
        ({"compression": "topk(0.01, rank=2)"}, "has no option rank"),
        ({"compression": "sign(memory=none)"}, "does not go with the gradient memory none"),
        ({"compression": "auto", "ratio_policy": "gravac"}, "decides the ratio itself"),
    ],
)
def test_pins_that_contradict_are_refused_in_a_sentence(changes: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        launched(planned(), **changes)
    assert refused.value.message.endswith(".")
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("missing", ["gain", "noise", "exchange_trials", "precision_trials"])
def test_profiles_without_a_measurement_are_planned_without_it(missing: str) -> None:
    """What is not known is not chosen, and nothing else changes its way."""
    less = profile().model_copy(update={missing: ()})
    plan = recommending.recommend(PlanRequest(less, known(), GOAL, FEW), seed=0, now=NOW)
    assert plan.chosen.prediction.total_s.value > 0
    if missing == "gain":
        assert not METHODS[plan.chosen.compression.name].by_ratio


MODEL = fit(make_profile())
NUMEL = 500_000
LATENCY_S, BYTES_PER_S = 1e-3, 1e7


def meeting(
    workers: int = 4, bytes_per_s: float = BYTES_PER_S, latency_s: float = LATENCY_S, model: FittedModel = MODEL
) -> ExchangeGroup:
    link = LinkModel(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return ExchangeGroup(model=model, workers=workers, link=lambda _: link, compressors=model.reference.compressors)


def run_of(compression: Compression, policy: RatioPolicyName = "fixed", *, follows_network: bool = False) -> RunSpec:
    return RunSpec(
        task="digits",
        workers=(WorkerSpec(host="a", type="local", local_batch_size=1),),
        compression=compression,
        ratio_policy=policy,
        collective_policy="cheapest" if follows_network else "fixed",
        stop=StopRule(max_steps=1),
    )


def asked(combination: Combination, ratio: float = 0.01) -> Compression:
    return Compression(
        name=combination.name,
        ratio=ratio if METHODS[combination.name].by_ratio else 1.0,
        memory=combination.memory,
        collective=combination.collective,
    )


def seen(run: RunSpec, place: ExchangeGroup, *, compute_s: float = 0.1, to_target: bool = True) -> PredictedExchange:
    return predict_exchange(run, place, compute_s=compute_s, to_target=to_target)


@pytest.mark.parametrize(("name", "ratio"), [("identity", 1.0), ("topk", 0.01)])
def test_what_plans_are_made_with_is_priced_as_plans_price_it(name: str, ratio: float) -> None:
    told = seen(run_of(Compression(name=name, ratio=ratio)), meeting(4))
    collective = "all_reduce" if name == "identity" else "all_gather"
    expected_s = collective_time_s(collective, wire_bytes(name, NUMEL, ratio), 4, LATENCY_S, BYTES_PER_S)
    assert told.exchange_s == pytest.approx(expected_s)
    assert told.gain == MODEL.gain.gain(ratio)
    line = MODEL.reference.compressors.get(name)
    assert told.compress_s == (0 if line is None else line.time_s(ratio, 4))
    assert told.notes == ()


@given(
    st.sampled_from(combinations()),
    st.integers(2, 12),
    st.floats(1e4, 1e9),
    st.floats(0, 0.1),
    st.floats(1, 100),
    st.sampled_from([0.3, 0.01, 0.0001]),
)
def test_a_better_network_never_takes_longer(
    combination: Combination, workers: int, bytes_per_s: float, latency_s: float, better: float, ratio: float
) -> None:
    run = run_of(asked(combination, ratio))
    before_s = seen(run, meeting(workers, bytes_per_s, latency_s)).exchange_s
    assert seen(run, meeting(workers, bytes_per_s * better, latency_s)).exchange_s <= before_s
    assert seen(run, meeting(workers, bytes_per_s, latency_s / better)).exchange_s <= before_s


@given(st.sampled_from(combinations()), st.integers(2, 12), st.floats(1e4, 1e9), st.floats(0, 0.1))
def test_the_cheapest_collective_is_no_dearer_than_the_one_that_was_named(
    combination: Combination, workers: int, bytes_per_s: float, latency_s: float
) -> None:
    place = meeting(workers, bytes_per_s, latency_s)
    named, free = (seen(run_of(asked(combination), follows_network=follows), place) for follows in (False, True))
    assert free.exchange_s + free.compress_s <= named.exchange_s + named.compress_s
    assert free.compression.name == combination.name
    assert not (named.compress_s and "nothing is counted" in " ".join(named.notes)), "what is counted is not denied"


@given(st.sampled_from([0.001, 0.1, 0.9]), st.floats(1e4, 1e9), st.floats(1e-3, 10))
def test_auto_is_never_predicted_to_lose_to_dense_training(ratio: float, bytes_per_s: float, compute_s: float) -> None:
    place = meeting(4, bytes_per_s)

    def per_progress_s(told: PredictedExchange) -> float:
        return (compute_s + told.compress_s + told.exchange_s) * step_inflation(told.gain)

    run = run_of(Compression(name="topk", ratio=ratio), "auto", follows_network=True)
    auto = seen(run, place, compute_s=compute_s)
    assert per_progress_s(auto) <= per_progress_s(seen(run_of(Compression()), place)) * (1 + 1e-12)
    assert auto.gain >= LEAST_GAIN


def test_the_least_gain_is_that_of_the_policy() -> None:
    assert inspect.signature(AutoRatio).parameters["least_gain"].default == LEAST_GAIN


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    options = Options(trials=0, batch_size=128, types=("c7a.large", "c7a.xlarge"))
    return recommend(
        PlanRequest(make_profile(), catalog, Goal(ends="target", budget_usd=5.0), options), seed=0, now=NOW
    )


def exchanging(plan: Plan, **changes: object) -> Plan:
    """The plan with other ways to send gradients."""
    return plan.model_copy(update={"run": plan.run.model_copy(update=changes)})


@pytest.mark.parametrize("combination", combinations(), ids=lambda c: f"{c.name}-{c.memory}-{c.collective}")
def test_any_compression_can_be_predicted_in_both_places(plan: Plan, combination: Combination) -> None:
    wanted = exchanging(plan, compression=asked(combination, 0.0001))
    here = predict_on_local(wanted, (1, 2, 2))
    hosts = parse_hosts("speed=1,rate=20mbit x3")
    there = rehearse(wanted, 2, hosts)
    for run, told in ((here.run, here.prediction), (there.run, there.prediction)):
        assert run.compression == wanted.run.compression
        assert 0 < told.total_s.low < told.total_s.value < told.total_s.high < math.inf
        assert told.communication_s > 0


def test_levels_that_would_overflow_are_refused_before_anything_starts(plan: Plan) -> None:
    levels = Compression(name="qsgd_maxnorm", bits=8, levels=60)
    wanted = exchanging(plan, compression=levels, ratio_policy="fixed", collective_policy="fixed")
    assert predict_on_local(wanted, (1, 1)).run.compression.levels == 60
    with pytest.raises(BadInput, match="overflow"):
        predict_on_local(wanted, (1, 1, 1))


RECORDED = Path(__file__).parents[1] / "recorded"
JOBS = ("resnet20-cifar10", "lstm-small", "5 M", "25 M")
GBIT_PER_S = (1, 25)


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
