"""What a plan becomes on the machine that was profiled.

Workers that share processors end when an event-by-event account says so, and the factor leaves its headroom.

Steps of workers under CPU quotas: as fast as processors and network are, or as slow as the quotas make them.

A profile as it would be now: everything that the processors did follows the yardstick, and nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from hetopt.backends.emulation.plan import parse_hosts, rehearse
from hetopt.backends.on_this_machine import with_contention
from hetopt.backends.options import Local
from hetopt.backends.prediction import finish_times_s, least_factor, predict_on_local, rounded_up
from hetopt.core.calibration_benchmark import REPEATS, MachineReading, measure_yardstick_s
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan, Prediction
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from tests.collective_time import collective_time_s

from .conftest import NOW
from .profiles import make_profile


def test_no_worker_takes_less_than_the_model_needs(plan: Plan) -> None:
    """BatchNorm cannot normalise a single sample: the slowest worker takes two, the others what is left."""
    assert min(worker.local_batch_size for worker in predict_on_local(plan, (1, 200)).run.workers) == 1
    job = plan.profile.job.model_copy(update={"least_local_batch_size": 2})
    normalised = plan.model_copy(update={"profile": plan.profile.model_copy(update={"job": job})})
    run = predict_on_local(normalised, (1, 200)).run
    assert [worker.local_batch_size for worker in run.workers] == [126, 2]
    assert run.global_batch_size == 128


def _told(plan: Plan, paces: Sequence[float] | None) -> tuple[RunSpec, Prediction]:
    here = predict_on_local(plan, paces)
    return here.run, here.prediction


def test_a_worker_alone_is_the_whole_host(plan: Plan) -> None:
    run, told = _told(plan, (1,))
    assert run.workers[0].threads == 2
    assert told.step_time_s.value == pytest.approx(0.004 + 0.0004 * 128)
    assert told.communication_s == 0
    # two epochs, an evaluation after each, and the start
    steps = -(-2 * 50_000 // 128)
    assert told.steps.value == steps
    assert told.total_s.value == pytest.approx(7.0 + steps * told.step_time_s.value + 2 * 1.0)


def test_two_workers_are_the_divided_host(plan: Plan) -> None:
    _, told = _told(plan, (1, 1))
    link = fit(plan.profile).host_links["all_reduce"]
    exchange = collective_time_s("all_reduce", 2_000_000, 2, link.latency_s, link.bytes_per_s)
    if plan.chosen.compression.name == "identity":
        assert told.communication_s == pytest.approx(exchange)
    assert told.compute_s == pytest.approx(1.1 * 0.004 + 1.8 * 0.0004 * 64)
    assert told.waiting_s == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("paces", [(), (0.5,), (1, float("nan")), (1, float("inf")), (1e300,), ("2",)])
def test_impossible_factors_are_refused(paces: tuple[float, ...]) -> None:
    with pytest.raises(BadInput, match="must be numbers from 1 to 1,000,000, got"):
        Local(slowdowns=paces)


WORK = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12)
PROCESSORS = st.integers(1, 8)


def account(work_s: list[float], processors: int) -> list[float]:
    """Processor sharing, one end at a time."""
    left = dict(enumerate(work_s))
    finish = [0.0] * len(work_s)
    now_s = 0.0
    while left:
        speed = min(1.0, processors / len(left))
        span_s = min(left.values()) / speed
        now_s += span_s
        for worker in list(left):
            left[worker] -= span_s * speed
            if left[worker] <= 1e-12:
                finish[worker] = now_s
                del left[worker]
    return finish


@given(WORK, PROCESSORS)
def test_ends_are_those_of_the_account(work_s: list[float], processors: int) -> None:
    assert finish_times_s(work_s, processors) == pytest.approx(account(work_s, processors), rel=1e-6)


@given(WORK, PROCESSORS)
def test_nobody_ends_before_its_work_and_no_work_is_lost(work_s: list[float], processors: int) -> None:
    finish = finish_times_s(work_s, processors)
    assert all(end >= work * (1 - 1e-12) for end, work in zip(finish, work_s, strict=True))
    assert sum(work_s) <= processors * max(finish) * (1 + 1e-9)


@given(WORK, PROCESSORS)
def test_a_processor_for_everybody_is_no_wait(work_s: list[float], processors: int) -> None:
    assert finish_times_s(work_s, len(work_s) + processors) == pytest.approx(work_s)


@given(st.data(), WORK, PROCESSORS)
def test_the_factor_leaves_its_headroom_and_no_more(data: st.DataObject, work_s: list[float], processors: int) -> None:
    wanted_s = [data.draw(st.floats(0.001, 10.0)) for _ in work_s]
    factor = least_factor(wanted_s, work_s, processors, 1.25)
    finish = finish_times_s(work_s, processors)
    used = max(end / (factor * wanted) for end, wanted in zip(finish, wanted_s, strict=True))
    assert used <= 0.8 * (1 + 1e-9)
    assert factor == 1 or used == pytest.approx(0.8)
    assert sum(work_s) <= 0.8 * processors * factor * max(wanted_s) * (1 + 1e-9)


@given(st.floats(1.0, 1e5))
def test_a_factor_is_rounded_up_to_two_digits(factor: float) -> None:
    up = rounded_up(factor)
    assert factor <= up * (1 + 1e-9)
    assert up <= factor * 1.1 + 1e-9
    assert float(f"{up:.2g}") == up


HERE = 2


def now_at(plan: Plan, contention: float = 1.0, log_sd: float = 0.0) -> Plan:
    """The plan on a machine whose processors others use."""
    return with_contention(plan, MachineReading(contention=contention, contention_log_sd=log_sd))


@pytest.fixture(scope="module")
def unloaded(catalog: Catalog) -> Plan:
    profile = make_profile()
    options = Options(trials=0, batch_size=128, types=("c7a.large", "c7a.xlarge"))
    return recommend(
        PlanRequest(profile, catalog, Goal(ends="steps", amount=200, budget_usd=5.0), options), seed=0, now=NOW
    )


@given(contention=st.floats(1.0, 80.0), log_sd=st.floats(0.0, 1.0), then=st.floats(1.0, 80.0))
def test_how_busy_others_keep_the_machine_widens_intervals_and_moves_no_centre(
    unloaded: Plan, contention: float, log_sd: float, then: float
) -> None:
    busy = unloaded.model_copy(update={"profile": unloaded.profile.model_copy(update={"contention": then})})
    reach = max(then, contention * math.exp(Z90 * log_sd))
    free = predict_on_local(unloaded, (1.0, 2.0)).prediction
    contended = predict_on_local(now_at(busy, contention, log_sd), (1.0, 2.0)).prediction
    for name in ("step_time_s", "training_s", "total_s"):
        there, here = getattr(contended, name), getattr(free, name)
        assert there.value == here.value
        assert there.low <= here.low
        assert there.high == pytest.approx(reach * here.high, rel=0.3 if name == "total_s" else 1e-9)
    hosts = parse_hosts("speed=1 x4")
    rehearsed, usual = (rehearse(one, HERE, hosts) for one in (now_at(busy, contention), unloaded))
    assert rehearsed.run == usual.run  # it computes no slower for it


def test_the_yardstick_is_the_usual_time_of_one_piece_of_work() -> None:
    ticks = iter(
        time_s for piece in range(REPEATS) for time_s in (10.0 * piece, 10.0 * piece + (5 if piece == 3 else 2))
    )
    assert measure_yardstick_s(lambda: next(ticks)) == pytest.approx(2.0)
    assert 0 < measure_yardstick_s() < 1.0
