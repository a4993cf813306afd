"""What workers compute in, as a dimension of a plan: what was measured decides; where nothing was, nothing changes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings, strategies as st

from hetopt.backends.prediction import predict_on_local
from hetopt.core.memory import Precision
from hetopt.core.profile import PrecisionTrial, Profile
from hetopt.core.step_samples import Node, StepSample
from hetopt.optimizer.convergence.convergence import SEED_LOG_SD, precision_loss
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, SearchProblem, recommend, search_problem
from hetopt.optimizer.search.search import Effort, search

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
    assert space.precisions == ("fp32",)
    assert space.options == usual.options
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
        time_s, cost_usd = seen.forecast.total_s[seen.chosen], seen.forecast.cost_usd[seen.chosen]
        chosen = seen.cluster(seen.chosen).machines
        assert len({found.space.options[option].precision for option, _ in chosen}) == 1
        precision = found.space.options[chosen[0][0]].precision
        return float(time_s**weight * cost_usd ** (1 - weight)), precision, seen.safe

    free, _, safe = score(options)
    pinned = [score(replace(options, precision=one)) for one in profile.precisions]
    assert safe == any(one_safe for *_, one_safe in pinned)
    assert free <= 1.021 * min(one for one, _, one_safe in pinned if one_safe == safe)  # within 2 % is equal


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
    seen = bool(ratios) and math.log(mean) > Z90 * math.sqrt(2 / len(ratios)) * SEED_LOG_SD
    assert (loss.stretch > 1) == seen
    assert precision_loss(trials(*ratios), "fp32") == precision_loss(make_profile(), "fp32")
    assert loss.log_sd > 0


def test_a_loss_takes_steps_to_a_target_and_rules_out_runs_of_fixed_length() -> None:
    slower, same = gpu_profile(0.5, 0.5, steps=1.5), gpu_profile(0.5, 0.5)
    pinned = replace(FEW, precision="bf16", batch_size=64, mixed_types=1)
    lost, kept = (planned(one, options=pinned).chosen.prediction.steps for one in (slower, same))
    assert lost.value == pytest.approx(1.5 * kept.value, rel=0.1)
    fixed = Goal(ends="epochs", amount=3, budget_usd=50.0)
    assert problem(slower, fixed).space.precisions == ("fp32",)
    assert problem(same, fixed).space.precisions[-1] == "bf16"


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
    assert "bf16" in found.space.precisions
    assert {option.name for option in found.space.options if option.precision == "bf16"}.isdisjoint({"g4dn.xlarge"})
    plan = planned(alone)
    assert plan.run.precision == "bf16"
