"""Plans never ask more of a device than it holds, say at which micro-batch it holds it, and refuse what none holds.

What a GPU holds at once follows from counted tensors; what it does not hold at once is computed in micro-batches.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from hetopt.core.errors import NoFeasiblePlan
from hetopt.core.memory import ALONE, ExchangeMemory, StepMemory, TrainingMemory
from hetopt.core.profile import Profile
from hetopt.core.step_samples import Configuration, Node
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.search.asked_steps import AskedSteps
from hetopt.optimizer.step_time.device_memory import exchange_memory, room
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
    options = Options(trials=0, mixed_types=1, max_workers=4, types=TYPES, **more)  # type: ignore[arg-type]
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
        held = (one.parameter_bytes, one.gradient_bytes, one.optimizer_bytes, one.residual_bytes, one.activation_bytes)
        assert sum(held) == pytest.approx(one.peak_bytes, abs=1)
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
    assert {worker.max_local_batch_size for worker in plan.run.workers} == {part}, "launch starts what was planned"
    assert plan.chosen.prediction.compute_s >= group.assumed.time_s(max(group.local_batch_sizes))


def test_a_step_in_micro_batches_is_predicted_as_it_is_planned(catalog: Catalog) -> None:
    profile = heavy(4, 0.25)
    # Without a compressor to choose: else micro-batches leave room for the largest of them.
    dense = tuple(device.model_copy(update={"compressors": ()}) for device in profile.devices)
    plan = planned(catalog, profile.model_copy(update={"devices": dense}), compression=("identity",))
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


RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "digits.json"
MIB = 2**20
PROFILE = Profile.load(RECORDED)


def fitted(*, script: bool = False, least: int = 1, kept_mib: int = 10) -> FittedModel:
    """The recorded profile, with 3 ``kept_mib`` counted that stay, and one MiB a sample."""
    memory = TrainingMemory(
        parameter_bytes=kept_mib * MIB,
        buffer_bytes=0,
        gradient_bytes=kept_mib * MIB,
        optimizer_bytes=kept_mib * MIB,
        steps=tuple(StepMemory(samples=n, computing_bytes=n * MIB, updating_bytes=0) for n in (1, 8, 64)),
    )
    first, *others = PROFILE.devices
    job = PROFILE.job.model_copy(update={"script": ("train.py",) if script else (), "least_local_batch_size": least})
    devices = (first.model_copy(update={"memory": memory}), *others)
    return fit(PROFILE.model_copy(update={"devices": devices, "job": job}))


def held(model: FittedModel, usable: int, exchange: ExchangeMemory = ALONE) -> int | None:
    """Samples that a GPU with so much memory for training holds at once; 0: it is not planned with."""
    found = room(model, on_gpu=True, device_bytes=usable, usable=usable, exchange=exchange)
    return 0 if found is None else found.micro_batch


@given(st.integers(1, 200), st.integers(1, 40), st.booleans(), st.integers(1, 3))
def test_a_worker_never_has_more_than_fits_and_is_left_out_where_the_least_does_not(
    usable_mib: int, kept_mib: int, script: bool, least: int
) -> None:
    model = fitted(script=script, least=least, kept_mib=kept_mib)
    found = room(model, on_gpu=True, device_bytes=usable_mib * MIB, usable=usable_mib * MIB)
    left = usable_mib - 3 * kept_mib
    assert (found is None) == (left < least)
    if found is None:
        return
    assert found.micro_batch == left
    assert found.step_bytes <= found.free_bytes  # type: ignore[operator]  # counted
    if script:
        assert (found.part, found.most_samples) == (None, left), "it computes what its loader gives at once"
    elif found.part is not None:
        # The smallest part of any larger batch, cut evenly, still has the least samples.
        assert all(batch // -(-batch // left) >= least for batch in range(left + 1, 3 * left + 2))
    else:
        assert found.most_samples == left


@given(st.integers(31, 200), st.integers(31, 200))
def test_more_memory_never_holds_less(one: int, other: int) -> None:
    few, many = sorted((one, other))
    model = fitted()
    assert (held(model, few * MIB) or 0) <= (held(model, many * MIB) or 0)
