"""Laws of prediction for machines that were never profiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetopt.core.profile import Device, Profile
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.step_time import gpu_transfer
from hetopt.optimizer.step_time.links import SINGLE_FLOW_BYTES_PER_S, between_machines
from hetopt.optimizer.step_time.transfer import WorkerModel, reference_host, thread_scaling, worker_model
from tests.work import calls_of

from .profiles import make_device, make_profile


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


def test_a_measured_type_is_measured(catalog: Catalog) -> None:
    profile = make_profile(devices=[make_device(type="c7i.large")])
    found = _predict(profile, catalog, "c7i.large")
    assert (found.evidence, found.workers) == ("measured", 1)
    assert found.time.time_s(64) == pytest.approx(0.004 + 0.0004 * 64)
    assert found.log_sd < 0.05


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


def test_one_worker_for_each_gpu(catalog: Catalog) -> None:
    assert _predict(make_profile(), catalog, "g5.12xlarge").workers == 4


def test_the_same_gpu_is_interpolated(catalog: Catalog) -> None:
    profile = make_profile(devices=[make_device(kind="cuda")])
    profile = profile.model_copy(
        update={"host": profile.host.model_copy(update={"accelerator": "NVIDIA A10G", "accelerator_count": 1})}
    )
    assert _predict(profile, catalog, "g5.xlarge").evidence == "interpolated"
    assert _predict(profile, catalog, "g5.xlarge").time.per_sample_s == pytest.approx(0.0004)
    assert _predict(profile, catalog, "g6.xlarge").evidence == "extrapolated"


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


def test_precision_counts(catalog: Catalog) -> None:
    def speedup(precision: str) -> float:
        device = make_device(kind="cuda", type="g4dn.xlarge").model_copy(update={"precision": precision})
        profile = _on_gpus(device)
        return fit(profile).reference.step_time.time_s(128) / _predict(profile, catalog, "p4d.24xlarge").time.time_s(
            128
        )

    assert speedup("fp32") != pytest.approx(speedup("fp16"), rel=0.02)
    assert min(speedup("fp32"), speedup("fp16")) > 1.5


def test_a_gpu_that_nobody_measured_needs_no_special_case(catalog: Catalog) -> None:
    """Its facts alone speak: between those of others, and less surely than of a GPU that the data have."""
    profile = _on_gpus(make_device(kind="cuda", type="g4dn.xlarge"))
    machine = catalog.instance_type("g5.xlarge")
    assert machine.accelerator is not None
    assert machine.accelerator.model is not None
    stranger = replace(machine.accelerator, model=replace(machine.accelerator.model, name="X7"))
    found = _predict(profile, catalog, replace(machine, accelerator=stranger))
    known = _predict(profile, catalog, machine)
    assert found.log_sd > known.log_sd
    assert found.time.time_s(64) == pytest.approx(known.time.time_s(64), rel=0.35)


def test_a_slice_of_a_gpu_is_slower_and_less_sure(catalog: Catalog) -> None:
    profile = _on_gpus(make_device(kind="cuda", type="g4dn.xlarge"))
    machine = catalog.instance_type("g6.xlarge")
    assert machine.accelerator is not None
    part = replace(machine, accelerator=replace(machine.accelerator, fraction=0.25))
    whole, quarter = _predict(profile, catalog, machine), _predict(profile, catalog, part)
    assert quarter.time.time_s(64) > 1.3 * whole.time.time_s(64)
    assert quarter.log_sd > whole.log_sd


def test_a_gpu_of_no_catalogue_is_known_by_what_it_was_measured_to_do(catalog: Catalog) -> None:
    device = make_device(kind="cuda").model_copy(update={"matmul_flops_per_s": 2e13, "copy_bytes_per_s": 6e11})
    found = _predict(_on_gpus(device, name="Unheard Of 9000"), catalog, "g5.xlarge")
    assert found.evidence == "extrapolated"
    assert found.log_sd > _predict(_on_gpus(device, name="NVIDIA L4"), catalog, "g5.xlarge").log_sd


def test_every_gpu_of_the_catalogue_is_predicted_fast(catalog: Catalog) -> None:
    model = fit(_on_gpus(make_device(kind="cuda", type="g4dn.xlarge")))
    host = reference_host(model, catalog.instance_types.values())
    gpu_transfer.transferred.cache_clear()
    worker_model(model, host, catalog.instance_type("g5.xlarge"))
    told: list[object] = []
    types = list(catalog.instance_types.values())
    calls = calls_of(lambda: told.extend(worker_model(model, host, instance) for instance in types))
    assert calls < 1_000 * len(types)
    assert sum(isinstance(one, WorkerModel) and one.kind == "cuda" for one in told) > 20


def test_an_unknown_cpu_is_compared_with_the_median_and_less_certain(catalog: Catalog) -> None:
    types = list(catalog.instance_types.values())
    known, vague, unknown = (
        reference_host(fit(make_profile(cpu_model=name)), types)
        for name in ("AMD EPYC 7R13 Processor", "AMD EPYC", "Quantum 9000")
    )
    assert known.log_sd < vague.log_sd < unknown.log_sd
    assert "median" in unknown.basis


def test_thread_scaling_comes_from_two_divisions_of_the_host() -> None:
    perfect = [make_device(per_sample_s=0.0004), make_device(per_sample_s=0.0008, workers_per_host=2, threads=1)]
    useless = [make_device(per_sample_s=0.0004), make_device(per_sample_s=0.0004, workers_per_host=2, threads=1)]
    noisy = [make_device(per_sample_s=0.0004, noise=1.0), make_device(workers_per_host=2, threads=1, noise=1.0, seed=1)]
    assert thread_scaling(fit(make_profile(devices=perfect)))[0] == pytest.approx(1, abs=0.03)
    assert thread_scaling(fit(make_profile(devices=useless)))[0] == pytest.approx(0.3)
    assert thread_scaling(fit(make_profile(devices=noisy)))[0] == pytest.approx(0.85, abs=0.2)
    spreads = [thread_scaling(fit(make_profile(devices=some)))[1] for some in (perfect, noisy, perfect[:1])]
    assert spreads == sorted(spreads)


def test_the_network_is_never_faster_than_its_sustained_rate(catalog: Catalog) -> None:
    model = fit(make_profile())
    for instance in catalog.instance_types.values():
        for collective in ("all_reduce", "all_gather"):
            hop = between_machines(model, instance, collective)
            assert hop.bytes_per_s <= instance.network_bytes_per_s
            if not instance.cuda_devices:
                assert hop.bytes_per_s <= SINGLE_FLOW_BYTES_PER_S


def test_a_profiled_slice_of_a_gpu_is_not_taken_for_all_of_it(catalog: Catalog) -> None:
    """The same steps on three sevenths of an A100 foretell shorter ones on a whole, and less surely."""
    device = make_device(kind="cuda")
    whole, part = (
        _predict(_on_gpus(device, name=f"NVIDIA A100-SXM4-40GB{slices}"), catalog, "p4d.24xlarge")
        for slices in ("", " MIG 3g.20gb")
    )
    assert whole.evidence == "interpolated"
    assert part.evidence == "extrapolated"
    assert part.time.time_s(64) < 0.9 * whole.time.time_s(64)
    assert part.log_sd > whole.log_sd
