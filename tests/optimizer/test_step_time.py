"""Laws of one step: between maximum and sum, monotone in everything that is a burden.

Laws of the forecast: what can only help, what can only hurt, and what step samples beside a profile change.
Where steps hardly grow with their batch the fitted slope says nothing: predictions stay within measured times.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetopt.backends.emulation.plan import rehearse
from hetopt.backends.prediction import predict_on_local
from hetopt.core.batch_partition import WorkerTime
from hetopt.core.comm.payload_bytes import Collective
from hetopt.core.profile import Profile
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.convergence.convergence import GivenSteps
from hetopt.optimizer.cost.bill import load_billing
from hetopt.optimizer.fit import THREAD_SCALING, fit, times_as_long
from hetopt.optimizer.market.catalog import Catalog, offers
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.search.forecast import ClusterTable, JobModel, forecast
from hetopt.optimizer.search.search_space import machine_options
from hetopt.optimizer.step_time.model import StepTimeModel, learned_shape, sampled_machines
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.posterior import Known
from hetopt.optimizer.step_time.step_time import Breakdown, expected_latest_s, expected_maximum, overlapped, step_time
from hetopt.optimizer.step_time.transfer import (
    WorkerModel,
    reference_host,
    worker_model,
)
from tests.collective_time import collective_time_s

from .conftest import NOW
from .profiles import make_device, make_profile

workers = st.lists(
    st.tuples(st.floats(0, 1), st.floats(1e-6, 0.1), st.integers(1, 500)).map(
        lambda t: (WorkerTime(fixed_s=t[0], per_sample_s=t[1]), t[2])
    ),
    min_size=1,
    max_size=6,
)
collectives: st.SearchStrategy[Collective] = st.sampled_from(["all_reduce", "all_gather"])
payloads = st.floats(0, 1e9)
latencies = st.floats(0, 0.1)
bandwidths = st.floats(1e6, 1e11)


def _step(
    team: list[tuple[WorkerTime, int]], collective: Collective, payload: float, latency: float, bandwidth: float
) -> Breakdown:
    return step_time(
        [worker.time_s(samples) for worker, samples in team],
        exchange_s=collective_time_s(collective, payload, len(team), latency, bandwidth),
    )


@given(workers, collectives, payloads, latencies, bandwidths)
def test_a_step_is_the_slowest_worker_plus_the_exchange(
    team: list[tuple[WorkerTime, int]], collective: Collective, payload: float, latency: float, bandwidth: float
) -> None:
    step = _step(team, collective, payload, latency, bandwidth)
    slowest = max(worker.time_s(samples) for worker, samples in team)
    assert step.compute_s == slowest
    assert 0 <= step.waiting_s <= slowest
    assert step.step_time_s == pytest.approx(step.compute_s + step.communication_s)
    if len(team) == 1:
        assert step.communication_s == 0


@given(workers, collectives, payloads, latencies, bandwidths, st.floats(1, 10))
def test_no_burden_makes_a_whole_step_quicker(
    team: list[tuple[WorkerTime, int]],
    collective: Collective,
    payload: float,
    latency: float,
    bandwidth: float,
    more: float,
) -> None:
    before = _step(team, collective, payload, latency, bandwidth).step_time_s
    bigger = [(worker, math.ceil(samples * more)) for worker, samples in team]
    for after in (
        _step(team, collective, payload * more, latency, bandwidth),
        _step(team, collective, payload, latency * more, bandwidth),
        _step(team, collective, payload, latency, bandwidth / more),
        _step(bigger, collective, payload, latency, bandwidth),
    ):
        assert after.step_time_s >= before * (1 - 1e-12)
    # Adding up in another order may differ in the last bit.
    assert _step(team[::-1], collective, payload, latency, bandwidth).step_time_s == pytest.approx(before)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (4, 1.03), (8, 1.42), (16, 1.77), (64, 2.34), (256, 2.83)],
)
def test_expected_maximum_of_normals(count: int, expected: float) -> None:
    assert expected_maximum(count) == pytest.approx(expected, abs=0.005)


LARGE = make_profile(parameters=25_000_000, per_sample_s=0.02)
SHAPE = learned_shape(fit(LARGE))
JOB = JobModel(
    steps=GivenSteps(amount=100),
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
        "missing": 0.0,
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
    both = overlapped(compute, exchange, forward=forward, power=power, last=last)
    assert max(compute, exchange) * (1 - 1e-9) <= both.time_s <= (compute + exchange) * (1 + 1e-9)
    assert float(both.by_compute + both.by_exchange) == pytest.approx(float(both.time_s))


@given(seconds, seconds, st.floats(0.05, 0.95), st.floats(1.1, 9), st.floats(0, 0.9))
def test_derivatives_are_those_of_the_time(
    compute: float, exchange: float, forward: float, power: float, last: float
) -> None:
    by = 1e-5

    def time_s(f: float = forward, p: float = power, c: float = compute, t: float = exchange) -> float:
        return float(overlapped(c, t, forward=f, power=p, last=last).time_s)

    here = overlapped(compute, exchange, forward=forward, power=power, last=last)
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


SLOPES = st.sampled_from([0.0, 0.0, 1e-9, 1e-6, 1e-4, 1e-3])
HERE = 2
EVALUATION_S = 1.0


def _profile(slope: float, divided_slope: float, fixed_s: float = 0.01) -> Profile:
    """A host that was measured whole and divided among two, each with steps that grow as they like, or not at all."""
    whole = make_device(fixed_s=fixed_s, per_sample_s=slope, threads=2)
    half = make_device(fixed_s=fixed_s, per_sample_s=divided_slope, threads=1, workers_per_host=2)
    return make_profile().model_copy(update={"devices": (whole, half), "evaluation_s": EVALUATION_S})


def _most(profile: Profile) -> float:
    """The longest of all measured steps over the shortest: no ratio of measured times is larger."""
    times = [point.step_time_s for device in profile.devices for point in device.step_times]
    return max(times) / min(times)


@settings(max_examples=25, deadline=None)
@given(slope=SLOPES, divided=SLOPES, fixed_s=st.floats(1e-3, 0.1))
def test_one_division_is_so_much_slower_than_another_as_was_measured(
    slope: float, divided: float, fixed_s: float
) -> None:
    profile = _profile(slope, divided, fixed_s)
    whole, half = fit(profile).devices
    for one, other in ((half, whole), (whole, half)):
        assert 0.99 / _most(profile) <= times_as_long(one.time_s, other.time_s, 64) <= 1.01 * _most(profile)


@settings(max_examples=25, deadline=None)
@given(slope=SLOPES, divided=SLOPES)
def test_a_flat_profile_tells_nothing_of_threads(slope: float, divided: float) -> None:
    eta, sd = fit(_profile(slope, divided)).thread_scaling
    if min(slope, divided) < 1e-6:
        assert eta == THREAD_SCALING
    assert 0.3 <= eta <= 1
    assert sd > 0


@settings(max_examples=25, deadline=None)
@given(slope=SLOPES, divided=SLOPES)
def test_evaluations_elsewhere_take_as_much_longer_as_steps_do(catalog: Catalog, slope: float, divided: float) -> None:
    model = fit(_profile(slope, divided))
    host = reference_host(model, catalog.instance_types.values())
    reference = model.reference
    for name in ("c7a.large", "c7a.4xlarge", "m7i.xlarge", "g4dn.xlarge", "g5.xlarge"):
        told = worker_model(model, host, catalog.instance_type(name))
        assert isinstance(told, WorkerModel)
        for samples in (reference.largest_measured,):
            steps = told.time.time_s(samples) / reference.step_time.time_s(samples)
            assert steps / 2.5 <= told.evaluation_factor <= 2.5 * steps, name


@pytest.mark.parametrize("slope", [0.0, 1e-4])
@pytest.mark.parametrize("divided", [0.0, 1e-4])
def test_a_run_here_takes_what_its_steps_and_evaluations_take(catalog: Catalog, slope: float, divided: float) -> None:
    """It was foretold in hours where it took a minute: an evaluation times the ratio of a slope to next to nothing."""
    profile = _profile(slope, divided)
    options = Options(trials=0, max_workers=4, types=("c7a.large", "c7a.xlarge"))
    plan = recommend(
        PlanRequest(profile, catalog, Goal(ends="epochs", amount=2, budget_usd=5.0), options), seed=0, now=NOW
    )
    run = predict_on_local(plan, (1.0, 1.0)).prediction
    longest_s = max(point.step_time_s for device in profile.devices for point in device.step_times)
    evaluations = math.ceil(2 / plan.run.evaluate_every_epochs) + 1
    steps_s = run.steps.value * max(run.step_time_s.value, longest_s)
    bound = (profile.startup_s or 0.0) + steps_s + evaluations * EVALUATION_S * 2 * _most(profile)
    assert run.total_s.value <= bound
    rehearsed = rehearse(plan, HERE)
    steps_s = rehearsed.prediction.steps.value * rehearsed.prediction.step_time_s.value
    assert rehearsed.prediction.training_s.value - steps_s <= evaluations * EVALUATION_S * 4 * _most(profile)
