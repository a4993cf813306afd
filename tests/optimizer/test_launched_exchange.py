"""What an exchange should take where a plan is launched: of every compressor, under every policy."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.emulation.description import parse_hosts
from hetopt.backends.emulation.plan import rehearse
from hetopt.backends.prediction.hosting import LEAST_GAIN, Foreseen, Meeting, ThisMachine, foresee
from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.core.comm.composition import METHODS, Combination, combinations
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression, RatioPolicyName, RunSpec, StopRule, WorkerSpec
from hetopt.core.training_laws import step_inflation
from hetopt.optimizer.fit import CompressorLine, FittedModel, LinkModel, fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.trainer.policies.ratio.auto import AutoRatio
from tests.collective_time import collective_time_s

from .conftest import NOW
from .profiles import make_profile

MODEL = fit(make_profile())
NUMEL = 500_000
LATENCY_S, BYTES_PER_S = 1e-3, 1e7
POLICIES: tuple[RatioPolicyName, ...] = get_args(RatioPolicyName)


def meeting(
    workers: int = 4, bytes_per_s: float = BYTES_PER_S, latency_s: float = LATENCY_S, model: FittedModel = MODEL
) -> Meeting:
    link = LinkModel(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Meeting(model=model, workers=workers, link=lambda _: link, compressors=model.reference.compressors)


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


def seen(run: RunSpec, place: Meeting, *, compute_s: float = 0.1, to_target: bool = True) -> Foreseen:
    return foresee(run, place, compute_s=compute_s, to_target=to_target)


@pytest.mark.parametrize("combination", combinations(), ids=lambda c: f"{c.name}-{c.memory}-{c.collective}")
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_every_combination_has_a_time_and_a_gain(combination: Combination, workers: int) -> None:
    told = seen(run_of(asked(combination)), meeting(workers))
    assert 0 < told.gain <= 1
    assert 0 <= told.compress_s < 1
    assert (told.exchange_s == 0) == (workers == 1)
    assert all(note.endswith(".") for note in told.notes)
    if workers > 1 and combination.name not in ("identity", "topk"):
        assert any("not profiled" in note for note in told.notes)


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


@given(st.sampled_from([0.001, 0.1, 0.9]), st.floats(1e4, 1e9), st.floats(1e-3, 10))
def test_auto_is_never_predicted_to_lose_to_dense_training(ratio: float, bytes_per_s: float, compute_s: float) -> None:
    place = meeting(4, bytes_per_s)

    def per_progress_s(told: Foreseen) -> float:
        return (compute_s + told.compress_s + told.exchange_s) * step_inflation(told.gain)

    run = run_of(Compression(name="topk", ratio=ratio), "auto", follows_network=True)
    auto = seen(run, place, compute_s=compute_s)
    assert per_progress_s(auto) <= per_progress_s(seen(run_of(Compression()), place)) * (1 + 1e-12)
    assert auto.gain >= LEAST_GAIN


def test_auto_is_predicted_dense_where_the_network_is_fast_and_rounded_where_it_is_slow() -> None:
    """It sends a few elements only where a trial has shown that to be harmless, or where the plan knows."""
    run = run_of(Compression(), "auto", follows_network=True)
    assert seen(run, meeting(bytes_per_s=1e10, latency_s=0)).compression.name == "identity"
    slow = seen(run, meeting(bytes_per_s=1e5))
    assert slow.compression.name == "int4"
    assert any("decided while training goes on" in note and "int4" in note for note in slow.notes)
    assert any("steps become shorter" in note for note in slow.notes)
    harmless = seen(run.model_copy(update={"slowdown_coefficient": 0.0}), meeting(bytes_per_s=1e5))
    assert harmless.compression.name == "topk"
    assert harmless.compression.ratio < 1


def test_what_rounding_costs_is_what_was_profiled_and_grows_with_the_workers() -> None:
    """Each worker sums a slice of everyone's gradient: further workers are further slices."""
    few, many = meeting(2), meeting(8)
    line = CompressorLine(log_ratios=(0.0,), compress_s=(0.004,), decompress_s=(0.0005,))
    for place, expected_s in ((few, 0.005), (many, 0.008)):
        timed = replace(place, compressors={**place.compressors, "int4": line})
        assert timed.compress_s(Compression(name="int4")) == pytest.approx(timed.crowding * expected_s)
        assert not any("costs a worker" in note for note in seen(run_of(Compression(name="int4")), timed).notes)


def test_the_least_gain_is_that_of_the_policy() -> None:
    assert inspect.signature(AutoRatio).parameters["least_gain"].default == LEAST_GAIN


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    options = Options(trials=20, batch_size=128, only_types=("c7a.large", "c7a.xlarge"))
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
    there = rehearse(wanted, ThisMachine(processors=2, operating_system="Linux"), hosts)
    for run, told in ((here.run, here.prediction), (there.run, there.prediction)):
        assert run.compression == wanted.run.compression
        assert 0 < told.total_s.low < told.total_s.value < told.total_s.high < math.inf
        assert told.communication_s > 0


def test_less_to_send_over_slow_links_is_predicted_to_be_quicker(plan: Plan) -> None:
    hosts, machine = parse_hosts("speed=1,rate=10mbit x3"), ThisMachine(processors=2, operating_system="Linux")
    settled = exchanging(plan, ratio_policy="fixed", collective_policy="fixed")
    dense, half, thin = (
        rehearse(exchanging(settled, compression=compression), machine, hosts).prediction
        for compression in (Compression(), Compression(name="bf16"), Compression(name="topk", ratio=0.01))
    )
    assert dense.communication_s > half.communication_s > thin.communication_s
    assert dense.compute_s == half.compute_s == thin.compute_s
    assert thin.steps.value > dense.steps.value == half.steps.value


def test_levels_that_would_overflow_are_refused_before_anything_starts(plan: Plan) -> None:
    levels = Compression(name="qsgd_maxnorm", bits=8, levels=60)
    wanted = exchanging(plan, compression=levels, ratio_policy="fixed", collective_policy="fixed")
    assert predict_on_local(wanted, (1, 1)).run.compression.levels == 60
    with pytest.raises(BadInput, match="overflow"):
        predict_on_local(wanted, (1, 1, 1))
