"""Laws of the forecast: what can only help, what can only hurt, and what step samples beside a profile change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.comm.cost import last_bucket_share
from hetopt.core.profile import Profile
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.convergence.convergence import FixedSteps
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog, offers
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.search.forecast import ClusterTable, JobModel, forecast
from hetopt.optimizer.search.search_space import machine_options
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.profiled import learned_shape, sampled_machines
from hetopt.optimizer.step_time.shape import Known
from hetopt.optimizer.step_time.step_time import expected_latest_s, expected_maximum, together
from hetopt.optimizer.step_time.transfer import reference_host

from .conftest import NOW
from .profiles import make_device, make_profile

LARGE = make_profile(parameters=25_000_000, per_sample_s=0.02)
SHAPE = learned_shape(fit(LARGE))
JOB = JobModel(
    steps=FixedSteps(count=100),
    evaluate_every_samples=1e9,
    shape=SHAPE,
    startup_log_sd=0.5,
    checkpoint_s=1.0,
    billing=load_billing(),
)
seconds = st.floats(1e-6, 1e3)


def _table(**columns: float) -> ClusterTable:
    one = {
        "machines": 2.0,
        "workers": 2.0,
        "batch": 64.0,
        "gain": 1.0,
        "stretch": 1.0,
        "stretch_log_sd": 0.0,
        "share_log_sd": 0.0,
        "network_log_sd": 0.35,
        "compute_s": 0.5,
        "mean_compute_s": 0.5,
        "compress_s": 0.0,
        "compress_log_sd": 0.0,
        "latency_s": 0.001,
        "traffic_s": 0.2,
        "traffic_bytes": 0.0,
        "under_backward": 1.0,
        "evaluation_s": 0.0,
        "compute_log_sd": 0.1,
        "usd_per_hour": 1.0,
        "worst_usd_per_hour": 1.0,
        "price_log_sd": 0.0,
        "calm_per_hour": 0.0,
        "scarce_per_hour": 0.0,
        "scarce_chance": 0.0,
        "startup_s": 180.0,
        "disk_gb": 100.0,
        **columns,
    }
    return ClusterTable(**{name: np.array([value]) for name, value in one.items()}, open_parts=np.ones((1, 1)))


def _step_s(**columns: float) -> float:
    return float(forecast(_table(**columns), JOB).step_time_s[0])


@given(seconds, seconds, st.floats(1, 10), st.sampled_from(["compute_s", "traffic_s", "latency_s", "compress_s"]))
def test_no_burden_makes_a_step_quicker(compute: float, traffic: float, more: float, name: str) -> None:
    before = {"compute_s": compute, "traffic_s": traffic, "latency_s": 0.01, "compress_s": 0.01}
    for beside in (0.0, 1.0):
        slow = _step_s(**{**before, name: before[name] * more}, under_backward=beside)
        assert slow >= _step_s(**before, under_backward=beside) * (1 - 1e-12)


@given(seconds, seconds)
def test_an_exchange_beside_backward_is_never_slower_than_after_it(compute: float, traffic: float) -> None:
    beside, after = (_step_s(compute_s=compute, traffic_s=traffic, under_backward=way) for way in (1.0, 0.0))
    assert beside <= after * (1 + 1e-12)
    assert beside >= max(compute, traffic) * (1 - 1e-12)


@given(st.integers(2, 64))
def test_more_machines_straggle_more(machines: int) -> None:
    few, many = (_step_s(machines=float(n), workers=float(n)) for n in (machines, 2 * machines))
    assert few < many


def test_what_is_unknown_of_the_shape_widens_the_interval() -> None:
    certain = replace(
        SHAPE,
        **{
            name: replace(getattr(SHAPE, name), sd=0.0)
            for name in ("straggling", "forward", "power", "network_growth", "host_sharing")
        },
    )
    table = _table(workers=16.0, machines=16.0)
    unsure = forecast(table, JOB).step_time_log_sd[0]
    assert unsure > forecast(table, replace(JOB, shape=certain)).step_time_log_sd[0]


def test_a_hidden_network_that_may_be_slow_still_widens_the_interval() -> None:
    """Its derivative is next to nothing, but a network five times slower would show."""
    shape = replace(SHAPE, power=Known(value=10.0, sd=0.0), gradient_bytes=1e12)
    hidden = _table(traffic_s=0.2, compute_s=0.5, compute_log_sd=0.0)
    narrow, wide = (
        forecast(replace(hidden, network_log_sd=np.array([sd])), replace(JOB, shape=shape)).step_time_log_sd[0]
        for sd in (0.01, 1.0)
    )
    assert wide > narrow + 0.05


@given(seconds, seconds, st.floats(0, 1), st.floats(1, 10), st.floats(0, 1))
def test_computing_and_exchanging_lie_between_the_longer_and_the_sum(
    compute: float, exchange: float, forward: float, power: float, last: float
) -> None:
    both = together(compute, exchange, forward=forward, power=power, last=last)
    assert max(compute, exchange) * (1 - 1e-9) <= both.time_s <= (compute + exchange) * (1 + 1e-9)
    assert float(both.by_compute + both.by_exchange) == pytest.approx(float(both.time_s))


@given(seconds, seconds, st.floats(0.05, 0.95), st.floats(1.1, 9), st.floats(0, 0.9))
def test_derivatives_are_those_of_the_time(
    compute: float, exchange: float, forward: float, power: float, last: float
) -> None:
    by = 1e-5

    def time_s(f: float = forward, p: float = power, c: float = compute, t: float = exchange) -> float:
        return float(together(c, t, forward=f, power=p, last=last).time_s)

    here = together(compute, exchange, forward=forward, power=power, last=last)
    logit = np.log(forward / (1 - forward)) + by
    moved = (
        (here.by_compute, time_s(c=compute * np.exp(by))),
        (here.by_exchange, time_s(t=exchange * np.exp(by))),
        (here.by_forward, time_s(f=1 / (1 + np.exp(-logit)))),
        (here.by_power, time_s(p=1 + (power - 1) * np.exp(by))),
    )
    for derivative, there in moved:
        assert (there - time_s()) / by == pytest.approx(float(derivative), abs=2e-4 * time_s())


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.floats(0, 0.3))
def test_the_last_worker_is_no_earlier_than_the_slowest_and_no_later_than_if_all_were(
    times_s: list[float], jitter: float
) -> None:
    latest = expected_latest_s(times_s, jitter)
    bound = max(times_s) * (1 + jitter * expected_maximum(len(times_s)))
    assert max(times_s) <= latest <= bound * (1 + 1e-4)
    assert expected_latest_s([2.0] * len(times_s), jitter) == pytest.approx(
        2 * (1 + jitter * expected_maximum(len(times_s)))
    )


def test_a_gradient_of_one_bucket_hides_nothing() -> None:
    assert last_bucket_share(1e6) == 1
    assert last_bucket_share(20e6) > 0.9
    assert last_bucket_share(400e6) < 0.1


def _sampled(profile: Profile) -> Profile:
    """Two GPU types, one and two nodes: a step is 0.01 s and 0.001 s a sample, twice that on the other."""
    samples = tuple(
        StepSample(
            nodes=(Node(type=name, workers=1),) * nodes,
            local_batch_size=size,
            step_time_s=factor * (0.01 + 0.001 * size) + (0.3 if nodes > 1 else 0.0),
            sync_time_s=0.3 if nodes > 1 else 0.0,
        )
        for name, factor in (("g5.xlarge", 1.0), ("g4dn.xlarge", 2.0))
        for nodes in (1, 2)
        for size in (8, 16, 32, 64, 128)
    )
    return profile.model_copy(update={"samples": samples})


def test_step_samples_beside_a_profile_are_planned_with(catalog: Catalog) -> None:
    profile = _sampled(LARGE)
    model, types = fit(profile), catalog.instance_types
    host = reference_host(model, types.values())
    found = offers(catalog, "spot")
    plain, _ = machine_options(model, found, host, learned_shape(model))
    sampled, _ = machine_options(model, found, host, learned_shape(model), sampled_machines(profile, types))
    by_name = [{option.name: option for option in options} for options in (plain, sampled)]
    before, after = by_name[0]["g5.xlarge"], by_name[1]["g5.xlarge"]
    assert (before.worker.evidence, after.worker.evidence) == ("extrapolated", "measured")
    assert after.worker.log_sd < 0.15 < before.worker.log_sd
    assert after.worker.time.time_s(64) == pytest.approx(0.074, rel=0.05)
    assert by_name[1]["g5.2xlarge"].worker.evidence == "interpolated"
    # A ring of two moves the gradient once: 100 MB in 0.3 s.
    assert after.network.links["all_reduce"].bytes_per_s == pytest.approx(1e8 / 0.3, rel=0.3)
    assert after.worker.time.max_samples == before.worker.time.max_samples, "memory is the profile's"


def test_a_plan_from_samples_says_measured(catalog: Catalog) -> None:
    options = Options(trials=20, only_types=("g5.xlarge", "g4dn.xlarge"))
    plan = recommend(
        PlanRequest(_sampled(LARGE), catalog, Goal(ends="epochs", amount=1, budget_usd=50), options), seed=0, now=NOW
    )
    assert {group.evidence for group in plan.chosen.groups} == {"measured"}
    assert not any("The network between machines" in said for said in plan.explanation)


@pytest.mark.parametrize("machines", [1, 2, 3, 8, 16])
def test_planning_and_predicting_are_one_model(catalog: Catalog, machines: int) -> None:
    """The same samples, the same cluster, the same step. Only planning knows the last bucket, which is small here."""
    profile = _sampled(make_profile(parameters=1_000_000_000, per_sample_s=0.02))
    types, model = catalog.instance_types, fit(profile)
    sampled = sampled_machines(profile, types)
    assert sampled is not None
    shape = learned_shape(model)
    found, _ = machine_options(model, offers(catalog, "spot"), reference_host(model, types.values()), shape, sampled)
    option = next(one for one in found if one.name == "g5.xlarge")
    link = option.network.links["all_reduce"]
    relief = option.network.relief if machines > 2 else 1.0
    several = machines > 1
    table = _table(
        machines=float(machines),
        workers=float(machines),
        compute_s=option.worker.time.time_s(64),
        latency_s=2 * (machines - 1) * link.latency_s,
        traffic_s=several * 2 * (machines - 1) / machines * 4e9 / link.bytes_per_s / relief,
    )
    planned = float(forecast(table, replace(JOB, shape=shape)).step_time_s[0])
    asked = Configuration(nodes=(Node(type="g5.xlarge", workers=1),) * machines, local_batch_size=64)
    predicted = StepTimeModel.fit(observe(profile.samples), types).predict([asked])[0].step_time_s
    assert planned == pytest.approx(predicted, rel=0.06)


def test_workers_of_a_full_machine_slow_each_other(catalog: Catalog) -> None:
    profile = make_profile(devices=[make_device(type="g5.xlarge", kind="cuda")])
    profile = profile.model_copy(update={"host": profile.host.model_copy(update={"accelerator": "NVIDIA A10G"})})
    model = fit(profile)
    found, _ = machine_options(
        model,
        offers(catalog, "spot"),
        reference_host(model, catalog.instance_types.values()),
        learned_shape(model),
    )
    by_name = {option.name: option.worker for option in found}
    alone, four = by_name["g5.2xlarge"], by_name["g5.12xlarge"]
    assert four.time.per_sample_s > alone.time.per_sample_s
    assert four.log_sd > alone.log_sd
