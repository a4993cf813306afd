"""What a plan becomes on the machine that was profiled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetopt.backends.options import Local
from hetopt.backends.prediction.hosting import division
from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.core.errors import BadInput
from hetopt.core.profile import LOCAL
from hetopt.core.run_spec import RunSpec
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan, Prediction
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from tests.collective_time import collective_time_s

from .conftest import NOW
from .profiles import make_profile


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    options = Options(trials=20, batch_size=128, only_types=("c7a.large", "c7a.xlarge"))
    return recommend(
        PlanRequest(make_profile(), catalog, Goal(ends="epochs", amount=2, budget_usd=5.0), options), seed=0, now=NOW
    )


def test_the_job_is_kept_and_the_machines_are_replaced(plan: Plan) -> None:
    run = predict_on_local(plan, (1, 2)).run
    assert run.global_batch_size == plan.chosen.global_batch_size
    assert (run.task, run.seed, run.stop, run.compression) == (
        plan.run.task,
        plan.run.seed,
        plan.run.stop,
        plan.run.compression,
    )
    assert [(w.type, w.slowdown, w.threads) for w in run.workers] == [(LOCAL, 1, 1), (LOCAL, 2, 1)]
    assert len({worker.host for worker in run.workers}) == 2


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


def test_a_slower_pace_gets_fewer_samples_and_nobody_gains(plan: Plan) -> None:
    shares, times = [], []
    for pace in (1, 2, 4):
        run, told = _told(plan, (1, pace))
        shares.append(run.workers[1].local_batch_size)
        times.append(told.step_time_s.value)
    assert shares == sorted(shares, reverse=True)
    assert times == sorted(times)
    assert shares[1] < shares[0]


def test_more_workers_than_were_measured_share_the_cores(plan: Plan) -> None:
    model = fit(plan.profile)
    assert division(model, 1)[1] == division(model, 2)[1] == 1
    assert division(model, 4)[1] == 2
    four, two = (predict_on_local(plan, (1,) * count).prediction for count in (4, 2))
    # twice the workers on the same cores: the samples take as long as before, the fixed part twice as long
    assert four.compute_s > two.compute_s
    spread = four.step_time_s.high / four.step_time_s.value
    assert spread > two.step_time_s.high / two.step_time_s.value


def test_without_paces_the_machine_is_not_overfilled(plan: Plan) -> None:
    run, _ = _told(plan, None)
    assert 1 <= len(run.workers) <= plan.profile.host.logical_cpus


@pytest.mark.parametrize("paces", [(), (0.5,), (1, float("nan")), (1, float("inf")), (1e300,), ("2",)])
def test_impossible_factors_are_refused(paces: tuple[float, ...]) -> None:
    with pytest.raises(BadInput, match="must be numbers from 1 to 1,000,000, got"):
        Local(slowdowns=paces)


def test_more_workers_than_samples_are_refused(plan: Plan) -> None:
    with pytest.raises(BadInput):
        predict_on_local(plan, (1,) * 129)
