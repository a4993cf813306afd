"""Where steps hardly grow with their batch the fitted slope says nothing: predictions stay within measured times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.backends.emulation.plan import rehearse
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.core.profile import Profile
from hetopt.optimizer.fit import fit, times_as_long
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.step_time.transfer import (
    THREAD_SCALING,
    WorkerModel,
    reference_host,
    thread_scaling,
    worker_model,
)

from .conftest import NOW
from .profiles import make_device, make_profile

SLOPES = st.sampled_from([0.0, 0.0, 1e-9, 1e-6, 1e-4, 1e-3])
HERE = ThisMachine(processors=2, operating_system="Linux 6.1")
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
    eta, sd = thread_scaling(fit(_profile(slope, divided)))
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
    options = Options(trials=0, max_workers=4, only_types=("c7a.large", "c7a.xlarge"))
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
