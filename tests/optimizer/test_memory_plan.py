"""Plans never ask more of a device than it holds, say at which micro-batch it holds it, and refuse what none holds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.core.errors import NoFeasiblePlan
from hetopt.core.memory import StepMemory, TrainingMemory
from hetopt.core.profile import Profile
from hetopt.core.step_samples import Configuration, Node
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.memory import NOT_COUNTED
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.search.asked_steps import AskedSteps
from hetopt.optimizer.step_time.device_memory import exchange_memory
from tests.optimizer.profiles import make_profile

NOW = datetime(2026, 7, 28, tzinfo=UTC)
GIB = 2**30
TYPES = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge")
STEPS = Goal(ends="steps", amount=2000)


def heavy(kept_gib: float, sample_gib: float, *, script: bool = False) -> Profile:
    """A job that keeps so much, in parameters, gradients and optimizer state alike, and takes so much a sample."""
    part = max(1, int(kept_gib * GIB / 4))
    memory = TrainingMemory(
        parameter_bytes=part,
        buffer_bytes=0,
        gradient_bytes=part,
        optimizer_bytes=2 * part,
        steps=tuple(
            StepMemory(samples=n, computing_bytes=max(1, int(n * sample_gib * GIB)), updating_bytes=0)
            for n in (1, 4, 16)
        ),
    )
    profile = make_profile(batch_size=256)
    devices = (profile.devices[0].model_copy(update={"memory": memory}), *profile.devices[1:])
    job = profile.job.model_copy(update={"script": ("train.py",) if script else ()})
    return profile.model_copy(update={"devices": devices, "job": job})


def planned(catalog: Catalog, profile: Profile, **more: object) -> Plan:
    options = Options(trials=0, mixed_types=1, max_workers=4, only_types=TYPES, **more)  # type: ignore[arg-type]
    return recommend(PlanRequest(profile, catalog, STEPS, options), seed=0, now=NOW)


def check(plan: Plan) -> None:
    """Of every candidate, by the law itself and not by the planner's own arithmetic."""
    memory = plan.profile.devices[0].memory
    assert memory is not None
    table = {one.instance_type: one for one in plan.memory}
    for candidate in (plan.chosen, *plan.pareto):
        workers = sum(len(group.local_batch_sizes) for group in candidate.groups)
        exchange = exchange_memory(
            candidate.compression, gradient_bytes=memory.gradient_bytes, workers=workers, sync=candidate.sync
        )
        for group in candidate.groups:
            assert group.assumed is not None
            together = min(max(group.local_batch_sizes), group.assumed.together or 10**9)
            assert memory.peak_bytes(together, exchange) <= table[group.instance_type].usable_bytes
    for one in plan.memory:
        assert one.usable_bytes < one.device_bytes
        assert one.peak_bytes <= one.usable_bytes
        assert sum(one.parts) == pytest.approx(one.peak_bytes, abs=1)
        assert one.micro_batch <= one.local_batch_size
        assert one.largest_micro_batch is None or one.micro_batch <= one.largest_micro_batch


def test_a_local_batch_that_does_not_fit_at_once_is_computed_in_micro_batches(catalog: Catalog) -> None:
    plan = planned(catalog, heavy(4, 0.25))
    check(plan)
    (group,) = plan.chosen.groups
    assert group.assumed is not None
    part = group.assumed.micro_batch
    assert part is not None
    assert max(group.local_batch_sizes) > part
    assert group.micro_batch_in_words is not None
    assert group.micro_batch_in_words.startswith(f"takes micro-batches of {part} sample")
    assert {worker.max_local_batch_size for worker in plan.run.workers} == {part}, "launch starts what was planned"
    assert plan.chosen.prediction.compute_s >= group.assumed.time_s(max(group.local_batch_sizes))
    assert NOT_COUNTED not in plan.explanation


def test_a_step_in_micro_batches_is_predicted_as_it_is_planned(catalog: Catalog) -> None:
    profile = heavy(4, 0.25)
    # Without a compressor to choose: else micro-batches leave room for the largest of them.
    dense = tuple(device.model_copy(update={"compressors": ()}) for device in profile.devices)
    plan = planned(catalog, profile.model_copy(update={"devices": dense}), minimum_gain=1.0)
    (group,) = plan.chosen.groups
    assert group.assumed is not None
    assert group.assumed.micro_batch is not None
    assert max(group.local_batch_sizes) > group.assumed.micro_batch
    asked = Configuration(
        nodes=group.machines * (Node(type=group.instance_type, workers=group.workers_per_machine),),
        local_batch_size=group.local_batch_sizes,
    )
    told = plan.chosen.prediction.step_time_s
    assert AskedSteps.of(plan.profile, catalog).step(asked).step_time_s == pytest.approx(told.value)


def test_micro_batches_cost_their_fixed_part_and_nothing_where_all_fits(catalog: Catalog) -> None:
    light, tight = planned(catalog, heavy(4, 1e-6)), planned(catalog, heavy(4, 2.0))
    check(light)
    check(tight)
    assert all((worker.max_local_batch_size or 256) >= 256 for worker in light.run.workers)
    assert all(group.micro_batch_in_words is None for group in light.chosen.groups)
    (group,) = tight.chosen.groups
    assert group.assumed is not None
    samples, time = max(group.local_batch_sizes), group.assumed
    assert time.micro_batch is not None
    more = -(-samples // time.micro_batch) - 1
    assert time.time_s(samples) == pytest.approx(
        time.fixed_s + time.per_sample_s * samples + more * (time.fixed_s - time.once_s)
    )


def test_a_script_is_given_no_more_than_fits_at_once(catalog: Catalog) -> None:
    plan = planned(catalog, heavy(4, 0.1, script=True))
    check(plan)
    for group in plan.chosen.groups:
        assert group.assumed is not None
        assert group.assumed.micro_batch is None
        assert max(group.local_batch_sizes) <= (group.assumed.max_samples or 10**9)


@settings(max_examples=12, deadline=None)
@given(kept=st.floats(0.1, 30), sample=st.floats(0.001, 30), script=st.booleans())
def test_it_is_refused_if_and_only_if_no_device_holds_a_sample(
    catalog: Catalog, kept: float, sample: float, script: bool
) -> None:
    profile = heavy(kept, sample, script=script)
    memory = profile.devices[0].memory
    assert memory is not None
    room = max(
        0.9 * gpu.memory_bytes - 750 * 2**20
        for name in TYPES
        if (gpu := catalog.instance_type(name).accelerator) is not None
    )
    fits = memory.peak_bytes(1) <= room
    batch = 1 if script else None
    if fits:
        check(planned(catalog, profile, batch_size=batch))
    else:
        with pytest.raises(NoFeasiblePlan, match="holds a training step of one sample"):
            planned(catalog, profile, batch_size=batch)
