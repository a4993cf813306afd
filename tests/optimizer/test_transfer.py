"""Laws of prediction for machines that were never profiled.

Planted parameters are found again; what the data cannot tell is frozen and says so.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.profile import Device, GainPoint, Profile
from hetopt.optimizer.fit import SPREAD_FLOOR, SPREAD_ONE_BATCH_SIZE, fit, fit_device, fit_gain, fit_step_time
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.step_time.links import SINGLE_FLOW_BYTES_PER_S, between_machines
from hetopt.optimizer.step_time.transfer import WorkerModel, reference_host, worker_model

from .profiles import SIZES, make_device, make_profile


def _predict(profile: Profile, catalog: Catalog, instance: InstanceType | str) -> WorkerModel:
    model = fit(profile)
    host = reference_host(model, catalog.instance_types.values())
    if isinstance(instance, str):
        instance = catalog.instance_type(instance)
    found = worker_model(model, host, instance)
    assert isinstance(found, WorkerModel), found
    return found


def test_the_reference_predicts_itself(catalog: Catalog) -> None:
    """A machine with the profiled host's CPU and as many vCPUs is as fast as the profiled host."""
    alike = replace(catalog.instance_type("c6a.large"), name="x.y")
    profile = make_profile()
    found = _predict(profile, catalog, alike)
    assert alike.cpu_model == profile.host.cpu_model
    assert found.time.time_s(64) == pytest.approx(fit(profile).reference.step_time.time_s(64), rel=0.1)
    assert found.evidence == "extrapolated"


def test_a_tier_has_its_price_in_certainty(catalog: Catalog) -> None:
    profile = make_profile(devices=[make_device(type="c7i.large")])
    spreads = [_predict(profile, catalog, name) for name in ("c7i.large", "c7i.xlarge", "m7a.xlarge", "g5.xlarge")]
    assert [found.evidence for found in spreads] == ["measured", "interpolated", "extrapolated", "extrapolated"]
    assert spreads[0].log_sd < spreads[1].log_sd < spreads[2].log_sd


def test_more_vcpus_compute_samples_faster_but_do_not_launch_faster(catalog: Catalog) -> None:
    small, large = (_predict(make_profile(), catalog, name).time for name in ("c7a.xlarge", "c7a.8xlarge"))
    assert large.per_sample_s < small.per_sample_s
    assert large.per_sample_s > small.per_sample_s / 8
    assert large.fixed_s == pytest.approx(small.fixed_s, rel=0.1)


def test_faster_hardware_never_slows(catalog: Catalog) -> None:
    profile = make_profile()
    machine = catalog.instance_type("g5.xlarge")
    assert machine.accelerator is not None
    assert machine.accelerator.model is not None
    faster = replace(
        machine,
        accelerator=replace(
            machine.accelerator,
            model=replace(machine.accelerator.model, fp32_tflops=100.0, memory_bandwidth_gb_per_s=3000.0),
        ),
    )
    before, after = _predict(profile, catalog, machine), _predict(profile, catalog, faster)
    assert after.time.time_s(64) < before.time.time_s(64)
    cpu = catalog.instance_type("c7a.xlarge")
    assert cpu.coremark_iterations_per_s is not None
    quicker = replace(cpu, coremark_iterations_per_s=2 * cpu.coremark_iterations_per_s)
    assert _predict(profile, catalog, quicker).time.time_s(64) < _predict(profile, catalog, cpu).time.time_s(64)


def _on_gpus(*devices: Device, name: str = "Tesla T4") -> Profile:
    profile = make_profile(devices=list(devices))
    host = profile.host.model_copy(update={"accelerator": name, "accelerator_count": 1})
    return profile.model_copy(update={"host": host})


def test_a_second_measured_gpu_tells_about_a_third(catalog: Catalog) -> None:
    """A job that finds little in a second GPU finds less in others, and they are known better."""
    one = make_device(kind="cuda", type="g4dn.xlarge")
    first = _predict(_on_gpus(one), catalog, "g6e.xlarge")
    usual = _predict(_on_gpus(one), catalog, "g5.xlarge").time.per_sample_s
    told = [
        _predict(
            _on_gpus(one, make_device(kind="cuda", type="g5.xlarge", fixed_s=0.0, per_sample_s=factor * usual)),
            catalog,
            "g6e.xlarge",
        )
        for factor in (0.7, 1.4)
    ]
    assert told[0].time.time_s(128) < first.time.time_s(128) < told[1].time.time_s(128)
    assert max(one.log_sd for one in told) < first.log_sd


def test_thread_scaling_comes_from_two_divisions_of_the_host() -> None:
    perfect = [make_device(per_sample_s=0.0004), make_device(per_sample_s=0.0008, workers_per_host=2, threads=1)]
    useless = [make_device(per_sample_s=0.0004), make_device(per_sample_s=0.0004, workers_per_host=2, threads=1)]
    noisy = [make_device(per_sample_s=0.0004, noise=1.0), make_device(workers_per_host=2, threads=1, noise=1.0, seed=1)]
    assert fit(make_profile(devices=perfect)).thread_scaling[0] == pytest.approx(1, abs=0.03)
    assert fit(make_profile(devices=useless)).thread_scaling[0] == pytest.approx(0.3)
    assert fit(make_profile(devices=noisy)).thread_scaling[0] == pytest.approx(0.85, abs=0.2)
    spreads = [fit(make_profile(devices=some)).thread_scaling[1] for some in (perfect, noisy, perfect[:1])]
    assert spreads == sorted(spreads)


def test_the_network_is_never_faster_than_its_sustained_rate(catalog: Catalog) -> None:
    model = fit(make_profile())
    for instance in catalog.instance_types.values():
        for collective in ("all_reduce", "all_gather"):
            hop = between_machines(model, instance, collective)
            assert hop.bytes_per_s <= instance.network_bytes_per_s
            if not instance.cuda_devices:
                assert hop.bytes_per_s <= SINGLE_FLOW_BYTES_PER_S


seconds = st.floats(1e-5, 1.0)


@given(fixed=seconds, per_sample=st.floats(1e-6, 0.1))
def test_a_line_is_recovered(fixed: float, per_sample: float) -> None:
    a, c, floor, log_sd = fit_step_time(SIZES, [fixed + per_sample * b for b in SIZES])
    assert floor == 0
    assert [a + c * b for b in SIZES] == pytest.approx([fixed + per_sample * b for b in SIZES], rel=1e-6)
    assert log_sd == pytest.approx(SPREAD_FLOOR)


def test_a_floor_is_recovered_and_only_taken_where_it_explains_more() -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    times = [max(0.010, 0.002 + 0.0005 * b) for b in sizes]
    a, c, floor, _ = fit_step_time(sizes, times)
    assert (a, c, floor) == pytest.approx((0.002, 0.0005, 0.010), rel=1e-6)


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=8))
def test_any_times_give_a_usable_line(times: list[float]) -> None:
    a, c, floor, log_sd = fit_step_time(range(1, len(times) + 1), times)
    assert a >= 0
    assert c > 0
    assert floor >= 0
    assert all(math.isfinite(x) for x in (a, c, floor, log_sd))


def test_one_batch_size_splits_evenly_and_is_uncertain() -> None:
    a, c, floor, log_sd = fit_step_time([32], [0.1])
    assert (a, c, floor, log_sd) == pytest.approx((0.05, 0.05 / 32, 0.0, SPREAD_ONE_BATCH_SIZE))


def test_the_mean_of_the_steps_is_what_a_run_pays() -> None:
    quiet, noisy = fit_device(make_device()), fit_device(make_device(noise=0.2))
    assert quiet.step_time.jitter == 0
    assert noisy.step_time.jitter == pytest.approx(0.2, rel=0.35)
    # exp of a normal has its mean above its median
    assert noisy.step_time.time_s(64) > 0.99 * quiet.step_time.time_s(64)


@given(st.lists(st.tuples(st.floats(1e-4, 1), st.floats(0, 1)), min_size=1, max_size=12, unique_by=lambda p: p[0]))
def test_gain_never_falls_when_more_is_sent(points: list[tuple[float, float]]) -> None:
    curve = fit_gain([GainPoint(ratio=r, gain=g, gain_low=g) for r, g in points])
    smallest = min(r for r, _ in points)
    gains = [curve.gain(r) for r in np.geomspace(smallest, 1, 30)]
    assert all(0 < gain <= 1 for gain in gains)
    assert gains == sorted(gains)
    assert curve.gain(1) == 1


def test_gain_is_not_guessed_below_what_was_measured() -> None:
    with pytest.raises(BadInput, match="has no retained energy"):
        fit(make_profile()).gain.gain(1e-5)
