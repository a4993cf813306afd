"""What workers compute in, as a dimension of a plan: what was measured decides; where nothing was, nothing changes.

Plans never ask more of a device than it holds, say at which micro-batch it holds it, and refuse what none holds.

What a GPU holds at once follows from counted tensors; what it does not hold at once is computed in micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from hetopt.api.changes import synchronized
from hetopt.api.options import Changes
from hetopt.backends.prediction import predict_on_local
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.memory import ALONE, Blocks, ExchangeMemory, Precision, StepMemory, TrainingMemory
from hetopt.core.profile import PrecisionTrial, Profile
from hetopt.core.run_spec import Compression
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.convergence.compression_penalty import PILOT_LOG_SD
from hetopt.optimizer.convergence.convergence import precision_loss
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, SearchProblem, recommend, search_problem
from hetopt.optimizer.search.asked_steps import AskedSteps
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.search import Effort, search
from hetopt.optimizer.search.search_space import Cluster
from hetopt.optimizer.step_time.device_memory import exchange_memory, room

from .conftest import NOW
from .profiles import make_device, make_profile

OWN = ("g5.xlarge", "g5.2xlarge", "g5.12xlarge")
"""With the GPU that was profiled: no other's speed has to be inferred, which takes most of a search's time here."""

GPUS = (*OWN, "g4dn.xlarge", "g6.xlarge")
TO_TARGET = Goal(ends="target", budget_usd=50.0)
FEW = Options(trials=0, types=OWN, max_workers=8, mixed_types=2)


SLOWER = st.just(1.0) | st.floats(1.01, 4)
"""Not by less than what fitting a line may round away."""


def gpu_profile(fixed: float = 0.7, per_sample: float = 0.4, *, steps: float | None = 1.0, **also: float) -> Profile:
    """A job on an A10G in fp32; bf16 (and others) take these parts of its times, and so many times its steps."""
    factors = {"bf16": (fixed, per_sample), **{name: (part, part) for name, part in also.items()}}
    usual = make_device(kind="cuda", type="g5.xlarge", per_sample_s=0.004)
    others = (
        make_device(kind="cuda", type="g5.xlarge", fixed_s=0.004 * a, per_sample_s=0.004 * c).model_copy(
            update={"precision": name, "compressors": ()}
        )
        for name, (a, c) in factors.items()
    )
    profile = make_profile(devices=[usual, *others])
    trials = [] if steps is None else [(steps, seed) for seed in range(3)]
    return profile.model_copy(
        update={
            "host": profile.host.model_copy(update={"accelerator": "NVIDIA A10G", "accelerator_count": 1}),
            "precision_trials": tuple(
                PrecisionTrial(precision="bf16", global_batch_size=64, seed=seed, steps=1000 * part, usual_steps=1000)
                for part, seed in trials
            ),
        }
    )


@cache
def known() -> Catalog:
    return load_catalog()


def problem(profile: Profile, goal: Goal = TO_TARGET, options: Options = FEW) -> SearchProblem:
    return search_problem(PlanRequest(profile, known(), goal, options))


def planned(profile: Profile, goal: Goal = TO_TARGET, options: Options = FEW) -> Plan:
    return recommend(PlanRequest(profile, known(), goal, options), seed=0, now=NOW)


@settings(deadline=None, max_examples=5)
@given(SLOWER, SLOWER, st.floats(1, 3), st.booleans())
@example(1.0, 2.0, 1.0, False)
def test_what_is_slower_and_no_better_is_never_chosen(
    fixed: float, per_sample: float, steps: float, to_target: bool
) -> None:
    goal = TO_TARGET if to_target else Goal(ends="epochs", amount=3, budget_usd=50.0)
    slower = gpu_profile(fixed, per_sample, steps=steps)
    alone = slower.model_copy(update={"devices": slower.devices[:1], "precision_trials": ()})
    space, usual = problem(slower, goal).space, problem(alone, goal).space
    assert [way[0] for way in space.ways] == ["fp32"]
    assert [vars(option) for option in space.options] == [vars(option) for option in usual.options]
    assert space.exchanges[0].compress_s.tolist() == usual.exchanges[0].compress_s.tolist()


def test_what_is_faster_is_chosen_said_and_started() -> None:
    profile = gpu_profile()
    plan, usual = planned(profile), planned(profile, options=replace(FEW, precision="fp32"))
    assert (plan.chosen.precision, plan.run.precision) == ("bf16", "bf16")
    assert (usual.chosen.precision, usual.run.precision) == ("fp32", "fp32")
    assert plan.chosen.prediction.total_s.value < usual.chosen.prediction.total_s.value
    again = Plan.from_json(plan.to_json(), origin="memory")
    assert again == plan
    assert predict_on_local(again, (1.0,)).run.precision == "bf16"


@settings(deadline=None, max_examples=4)
@given(
    bf16=st.floats(0.4, 1.5),
    fp16=st.floats(0.4, 1.5),
    weight=st.sampled_from([0.0, 0.5, 1.0]),
    budget=st.sampled_from([2.0, 50.0]),
)
def test_free_choice_is_the_best_of_the_pinned_ones(bf16: float, fp16: float, weight: float, budget: float) -> None:
    """The joint search loses nothing against a search of each precision alone."""
    profile = gpu_profile(bf16, bf16, fp16=fp16)
    goal = Goal(ends="epochs", amount=30, budget_usd=budget)
    options = replace(FEW, time_weight=weight)

    def score(asked: Options) -> tuple[float, Precision, bool]:
        found = problem(profile, goal, asked)
        seen = search(found.space, found.job, asked.limits(goal), effort=Effort(types=asked.mixed_types))
        assert seen.chosen is not None
        scores = asked.limits(goal).expected_score(seen.forecast)  # what plans are ranked by
        chosen = seen.cluster(seen.chosen).machines
        assert len({found.space.options[option].precision for option, _ in chosen}) == 1
        precision = found.space.options[chosen[0][0]].precision
        return float(scores[seen.chosen]), precision, seen.safe

    free, _, safe = score(options)
    pinned = [score(replace(options, precision=one)) for one in profile.precisions]
    assert safe == any(one_safe for *_, one_safe in pinned)
    assert free <= 1.003 * min(one for one, _, one_safe in pinned if one_safe == safe)  # mixes are searched to 0.2 %


def test_a_cpu_speaks_for_its_like_alone() -> None:
    """Which processors have units for bf16, no fact of the catalogue says."""
    usual, half = (
        make_device(type="c7i.large", per_sample_s=per_sample).model_copy(update={"precision": precision})
        for per_sample, precision in ((0.004, "fp32"), (0.001, "bf16"))
    )
    found = problem(make_profile(devices=[usual, half]), options=replace(FEW, types=("c7i.*", "c7a.*", "g5.xlarge")))
    families = {option.name.split(".")[0] for option in found.space.options if option.precision == "bf16"}
    assert families == {"c7i"}
    here, there = (make_device(per_sample_s=0.004), half.model_copy(update={"type": "local"}))
    for cpu, alike in (("AMD EPYC 9R14 Processor", {"c7a"}), ("AMD EPYC", set[str]())):
        local = make_profile(devices=[here, there], cpu_model=cpu)
        found = problem(local, options=replace(FEW, types=("c7i.*", "c7a.*", "c5a.*")))
        assert {option.name.split(".")[0] for option in found.space.options if option.precision == "bf16"} == alike


def trials(*ratios: float) -> Profile:
    profile = gpu_profile()
    return profile.model_copy(
        update={
            "precision_trials": tuple(
                PrecisionTrial(precision="bf16", global_batch_size=64, seed=seed, steps=100 * ratio, usual_steps=100)
                for seed, ratio in enumerate(ratios)
            )
        }
    )


@given(st.lists(st.floats(0.5, 3), max_size=6))
def test_a_loss_is_stated_where_it_shows(ratios: list[float]) -> None:
    loss = precision_loss(trials(*ratios), "bf16")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
    assert loss.stretch in (1.0, pytest.approx(mean))
    seen = bool(ratios) and math.log(mean) > Z90 * PILOT_LOG_SD / math.sqrt(len(ratios))
    assert (loss.stretch > 1) == seen
    assert precision_loss(trials(*ratios), "fp32") == precision_loss(make_profile(), "fp32")
    assert loss.log_sd > 0


def test_a_loss_takes_steps_to_a_target_and_rules_out_runs_of_fixed_length() -> None:
    slower, same = gpu_profile(0.5, 0.5, steps=1.5), gpu_profile(0.5, 0.5)
    pinned = replace(FEW, precision="bf16", batch_size=64, mixed_types=1)
    lost, kept = (planned(one, options=pinned).chosen.prediction.steps for one in (slower, same))
    assert lost.value == pytest.approx(1.5 * kept.value, rel=0.1)
    fixed = Goal(ends="epochs", amount=3, budget_usd=50.0)
    assert [way[0] for way in problem(slower, fixed).space.ways] == ["fp32"]
    assert problem(same, fixed).space.ways[-1][0] == "bf16"


def test_imported_steps_say_what_a_described_job_may_compute_in() -> None:
    """A job profiled in fp32, with steps in bf16 on the same GPU measured elsewhere."""
    profile = gpu_profile()
    samples = tuple(
        StepSample(
            nodes=(Node(type="g5.xlarge", workers=1),), local_batch_size=size, precision=precision, step_time_s=part
        )
        for precision, whole in (("fp32", 1.0), ("bf16", 0.4))
        for size in (32, 64, 128)
        for part in [whole * (0.004 + 0.004 * size)]
    )
    alone = profile.model_copy(update={"devices": profile.devices[:1], "precision_trials": (), "samples": samples})
    found = problem(alone, options=replace(FEW, types=GPUS))
    assert "bf16" in {way[0] for way in found.space.ways}
    assert {option.name for option in found.space.options if option.precision == "bf16"}.isdisjoint({"g4dn.xlarge"})
    plan = planned(alone)
    assert plan.run.precision == "bf16"


GIB = 2**30
TYPES = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge")
STEPS = Goal(ends="steps", amount=2000)


def heavy(kept_gib: float, sample_gib: float, *, script: bool = False, blocks: int | None = None) -> Profile:
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
    divided = {} if blocks is None else {"blocks": blocks, "block_share": 0.9 / blocks}
    job = profile.job.model_copy(update={"script": ("train.py",) if script else (), **divided})
    return profile.model_copy(update={"devices": devices, "job": job})


def planned_on_few(catalog: Catalog, profile: Profile, **more: object) -> Plan:
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
    plan = planned_on_few(catalog, heavy(4, 0.25))
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
    plan = planned_on_few(catalog, profile.model_copy(update={"devices": dense}), compression=("identity",))
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


SHARING = ("g5.xlarge", "g5.12xlarge", "g5.48xlarge", "g4dn.12xlarge")
"""One A10G, four and eight, and four T4."""


def planned_to_share(
    catalog: Catalog, kept_gib: float, *, blocks: int | None = 24, shard: str | None = None, **more: object
) -> Plan:
    options = Options(trials=0, max_workers=16, **{"types": SHARING, **more})  # type: ignore[arg-type]
    profile = heavy(kept_gib, 0.5, blocks=blocks, script=shard is not None)
    profile = profile.model_copy(update={"job": profile.job.model_copy(update={"shard": shard})})
    return recommend(PlanRequest(profile, catalog, STEPS, options), seed=0, now=NOW)


@pytest.mark.parametrize(
    ("shard", "kept_gib", "planned"),
    [("auto", 4, ("none",)), ("auto", 40, ("grads", "full")), ("full", 4, ("full",)), ("grads", 4, ("grads",))],
)
def test_a_script_is_planned_as_it_shares(
    shard: str, kept_gib: int, planned: tuple[str, ...], catalog: Catalog
) -> None:
    plan = planned_to_share(catalog, kept_gib, shard=shard, types=SHARING[1:], batch_size=16)
    assert plan.run.shard in planned
    assert "shares the model over" in str(plan.chosen.groups[0].memory_in_words) or planned == ("none",)


@pytest.mark.parametrize("kept_gib", [24, 40, 60])
def test_a_task_that_one_device_does_not_hold_is_shared_by_those_of_a_machine(catalog: Catalog, kept_gib: int) -> None:
    with pytest.raises(NoFeasiblePlan, match="holds a training step of one sample"):
        planned_to_share(catalog, kept_gib, blocks=None)
    plan = planned_to_share(catalog, kept_gib)
    memory, job = plan.profile.devices[0].memory, plan.profile.job
    assert memory is not None
    assert job.blocks is not None
    assert job.block_share is not None
    blocks = Blocks(job.blocks, job.block_share, memory.parameter_bytes)
    assert plan.run.shard in ("grads", "full")
    for candidate in (plan.chosen, *plan.pareto):
        (devices,) = {group.workers_per_machine for group in candidate.groups}
        assert candidate.compression.name == "identity"
        assert not candidate.sync.is_local
        for group in candidate.groups:
            assert group.assumed is not None
            held = memory.shared(blocks, devices, regathers=group.assumed.shard == "full")
            together = min(max(group.local_batch_sizes), group.assumed.together or 10**9)
            gpu = catalog.instance_type(group.instance_type).accelerator
            assert gpu is not None
            assert held.peak_bytes(together) <= 0.9 * gpu.memory_bytes - 750 * MIB
    (told,) = [one for one in plan.memory if one.instance_type == plan.chosen.groups[0].instance_type]
    assert told.optimizer_bytes == pytest.approx(memory.optimizer_bytes / plan.chosen.groups[0].workers_per_machine)
    assert Plan.from_json(plan.to_json(), origin="memory") == plan
    assert synchronized(Changes(), plan.run) == plan.run
    with pytest.raises(BadInput, match="works on whole matrices"):
        synchronized(Changes(), plan.run.model_copy(update={"compression": Compression(name="powersgd")}))


def test_a_machine_whose_devices_share_a_model_exchanges_as_one_worker() -> None:
    profile, options = heavy(40, 0.5, blocks=24), Options(trials=0, max_workers=64, types=("g5.12xlarge",))
    columns = Columns(problem(profile, STEPS, options).space)
    clusters = ClusterRows.of([Cluster.of([(0, machines)], 0, 0) for machines in range(1, 9)])
    machines = np.arange(1, 9)
    traffic_bytes = tabulate_rows(columns, clusters)[1].traffic_bytes
    assert traffic_bytes == pytest.approx(2 * (machines - 1) / machines * 4 * profile.job.parameters)


def test_what_one_device_holds_is_shared_by_none(catalog: Catalog) -> None:
    """The blocks alone change nothing, and a machine of one device shares with none."""
    plan, usual = (planned_to_share(catalog, 4, blocks=blocks) for blocks in (24, None))
    assert plan.run == usual.run
    assert plan.chosen == usual.chosen
    assert plan.run.shard is None


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
        check(planned_on_few(catalog, profile, batch_size=batch))
    else:
        with pytest.raises(NoFeasiblePlan, match="holds a training step of one sample"):
            planned_on_few(catalog, profile, batch_size=batch)


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
    found = room(model, on_gpu=True, device_bytes=usable, usable=usable, exchange=exchange, time_s=lambda *_: 0.0)
    return 0 if found is None else found.micro_batch


@given(st.integers(1, 200), st.integers(1, 40), st.booleans(), st.integers(1, 3))
def test_a_worker_never_has_more_than_fits_and_is_left_out_where_the_least_does_not(
    usable_mib: int, kept_mib: int, script: bool, least: int
) -> None:
    model = fitted(script=script, least=least, kept_mib=kept_mib)
    found = room(model, on_gpu=True, device_bytes=usable_mib * MIB, usable=usable_mib * MIB, time_s=lambda *_: 0.0)
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
