"""A profile as it would be now: everything that the processors did follows the yardstick, and nothing else does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from hetopt.backends.emulation.plan import parse_hosts, rehearse
from hetopt.backends.on_this_machine import OWN_LOG_SD, Present, at_present, slowed
from hetopt.backends.prediction import predict_on_local
from hetopt.core.calibration_benchmark import REPEATS, MachineReading, measure_yardstick_s
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend

from .conftest import NOW
from .profiles import make_profile

HERE = 2
THEN_S = 0.002

slowness = st.floats(0.2, 5.0)


def now_at(plan: Plan, slower: float, contention: float = 1.0, log_sd: float = 0.0) -> Present:
    """The plan where the yardstick takes so many times as long as it did, and its wall so many times longer yet."""
    reading = MachineReading(yardstick_s=slower * THEN_S, contention=contention, contention_log_sd=log_sd)
    return at_present(plan, lambda: reading)


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    profile = make_profile().model_copy(update={"yardstick_s": THEN_S})
    options = Options(trials=20, batch_size=128, types=("c7a.large", "c7a.xlarge"))
    return recommend(
        PlanRequest(profile, catalog, Goal(ends="steps", amount=200, budget_usd=5.0), options), seed=0, now=NOW
    )


@given(slower=slowness)
def test_a_run_here_takes_so_many_times_as_long(plan: Plan, slower: float) -> None:
    later = plan.model_copy(update={"profile": slowed(plan.profile, slower)})
    for paces in ((1.0,), (1.0, 1.0), (1.0, 2.0)):
        told, then = predict_on_local(later, paces).prediction, predict_on_local(plan, paces).prediction
        assert told.step_time_s.value == pytest.approx(slower * then.step_time_s.value, rel=0.02)
        assert told.total_s.value == pytest.approx(slower * then.total_s.value, rel=0.02)
        assert told.steps == then.steps


@given(first=slowness, then=slowness)
def test_twice_is_once_by_both(plan: Plan, first: float, then: float) -> None:
    twice, once = slowed(slowed(plan.profile, first), then), slowed(plan.profile, first * then)
    assert _close(twice.model_dump(), once.model_dump())


def _close(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-9)
    return one == other


@given(contention=st.floats(1.0, 80.0), log_sd=st.floats(0.0, 1.0), then=st.floats(1.0, 80.0))
def test_how_busy_others_keep_the_machine_widens_intervals_and_moves_no_centre(
    plan: Plan, contention: float, log_sd: float, then: float
) -> None:
    busy = plan.model_copy(update={"profile": plan.profile.model_copy(update={"contention": then})})
    reach = max(then, contention * math.exp(Z90 * log_sd))
    free = predict_on_local(plan, (1.0, 2.0)).prediction
    contended = predict_on_local(now_at(busy, 1.0, contention, log_sd).plan, (1.0, 2.0)).prediction
    for name in ("step_time_s", "training_s", "total_s"):
        there, here = getattr(contended, name), getattr(free, name)
        assert there.value == here.value
        assert there.low <= here.low
        assert there.high == pytest.approx(reach * here.high, rel=0.3 if name == "total_s" else 1e-9)
    hosts = parse_hosts("speed=1 x4")
    rehearsed, usual = (rehearse(one, HERE, hosts) for one in (now_at(busy, 1.0, contention).plan, plan))
    assert rehearsed.run == usual.run  # it computes no slower for it


@given(slower=slowness, scatter=st.floats(0.0, 0.6))
def test_what_is_within_the_scatter_of_the_profile_is_not_followed(plan: Plan, slower: float, scatter: float) -> None:
    unsteady = plan.model_copy(update={"profile": plan.profile.model_copy(update={"yardstick_log_sd": scatter})})
    later, surely = (now_at(one, slower) for one in (unsteady, plan))
    followed, steadily = (math.log(one.slower) for one in (later, surely))
    assert 0 <= followed / math.log(slower) <= steadily / math.log(slower) <= 1 if slower != 1 else followed == 0
    if abs(math.log(slower)) <= scatter:
        assert later.plan.profile.devices == unsteady.profile.devices
    if abs(math.log(slower)) > 3 * max(scatter, OWN_LOG_SD):
        assert abs(followed) >= 0.88 * abs(math.log(slower))


def test_the_yardstick_is_the_usual_time_of_one_piece_of_work() -> None:
    ticks = iter(
        time_s for piece in range(REPEATS) for time_s in (10.0 * piece, 10.0 * piece + (5 if piece == 3 else 2))
    )
    assert measure_yardstick_s(lambda: next(ticks)) == pytest.approx(2.0)
    assert 0 < measure_yardstick_s() < 1.0
