"""From profile to plan over the whole catalogue: limits, goals, what a plan says, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.core.comm.options import ROUNDED
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.profile import Profile
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import SURE, Goal, Plan, ScalingRule
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, evaluation_period_epochs, recommend
from tests.disturbance import PATIENCE_S
from tests.few_types import few

from .conftest import NOW
from .profiles import make_device, make_profile

QUICK = Options(trials=60, max_workers=16, market="spot", objective="fastest")
CHEAPEST = replace(QUICK, objective="cheapest")
LARGE = make_profile(parameters=5_000_000, per_sample_s=0.02, minimum_steps=2000, minimum_samples=3e6)


@pytest.fixture(scope="module")
def some(catalog: Catalog) -> Catalog:
    return few(catalog)


def _plan(catalog: Catalog, goal: Goal, options: Options = QUICK, *, profile: Profile = LARGE, seed: int = 0) -> Plan:
    return recommend(PlanRequest(profile, catalog, goal, options), seed=seed, now=NOW)


def _chance(plan: Plan) -> float:
    assert plan.insight is not None
    assert plan.insight.chance is not None
    return plan.insight.chance


@pytest.fixture(scope="module")
def plan(some: Catalog) -> Plan:
    return _plan(some, Goal(ends="target", budget_usd=1.0))


def test_a_plan_adds_up(plan: Plan) -> None:
    told = plan.chosen.prediction
    assert _chance(plan) >= SURE
    assert sum(term.usd for term in told.cost_terms) == pytest.approx(told.cost_usd.value)
    assert told.compute_s + told.communication_s == pytest.approx(told.step_time_s.value)
    assert told.training_s.value == pytest.approx(told.steps.value * told.step_time_s.value, rel=0.2)
    assert told.total_s.value >= told.startup_s + told.training_s.value
    assert plan.run.global_batch_size == plan.chosen.global_batch_size
    assert len(plan.run.workers) == sum(len(group.local_batch_sizes) for group in plan.chosen.groups)
    assert plan.run.stop.target
    assert plan.run.stop.max_steps is not None
    assert plan.run.stop.max_steps > told.steps.high
    assert plan.run.learning_rate_scale == pytest.approx(plan.chosen.global_batch_size / 64)
    assert plan.goal.target_metric == "accuracy"
    # One process a device, and devices of one machine share its name.
    machines = {worker.host for worker in plan.run.workers}
    assert len(machines) == sum(group.machines for group in plan.chosen.groups)


@pytest.mark.parametrize(
    ("rule", "scale", "told"),
    [("none", 1.0, "fixed"), ("linear", 4.0, "fixed"), ("sqrt", 2.0, "fixed"), ("adascale", 3.389, "adascale")],
)
def test_the_learning_rate_follows_the_rule(some: Catalog, rule: ScalingRule, scale: float, told: str) -> None:
    options = Options(trials=20, batch_size=256, learning_rate_rule=rule, only_types=("c7a.large",))
    run = _plan(some, Goal(ends="epochs", amount=1, budget_usd=9.0), options, profile=make_profile()).run
    # The planted noise scale is 1000 samples: (1 + 1000 / 64) / (1 + 1000 / 256) = 3.389.
    assert run.learning_rate_scale == pytest.approx(scale, rel=1e-3)
    assert run.learning_rate_rule == told


def test_adascale_begins_by_the_square_root_where_no_noise_was_measured(some: Catalog) -> None:
    options = Options(trials=20, batch_size=256, learning_rate_rule="adascale", only_types=("c7a.large",))
    goal = Goal(ends="epochs", amount=1, budget_usd=9.0)
    assert _plan(some, goal, options, profile=make_profile(noise_scale=None)).run.learning_rate_scale == 2.0


def test_a_plan_can_be_cut_short_and_shared_otherwise(plan: Plan) -> None:
    adjusted = plan.adjusted(steps=40, policy="dynamic")
    assert (adjusted.run.stop.max_steps, adjusted.run.stop.target) == (40, False)
    assert adjusted.run.batch_policy == "dynamic"
    assert predict_on_local(adjusted, (1.0,)).prediction.steps.value == 40
    assert adjusted.chosen == plan.chosen
    assert plan.adjusted() == plan


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_every_alternative_is_a_real_choice(plan: Plan) -> None:
    figures = [(c.prediction.total_s.value, c.prediction.cost_usd.value) for c in plan.pareto]
    assert len(figures) > 3
    assert figures == sorted(figures)
    assert [cost for _, cost in figures] == sorted((cost for _, cost in figures), reverse=True)


def test_the_same_seed_gives_the_same_plan(some: Catalog, plan: Plan) -> None:
    assert _plan(some, Goal(ends="target", budget_usd=1.0)) == plan


def test_more_money_is_never_slower(some: Catalog) -> None:
    times = [
        _plan(some, Goal(ends="target", budget_usd=budget)).chosen.prediction.total_s.value
        for budget in (1.0, 2.0, 8.0)
    ]
    assert times[1] <= 1.02 * times[0]
    assert times[2] <= 1.02 * times[1]


def test_a_later_deadline_makes_the_cheapest_cheaper(some: Catalog) -> None:
    hasty, patient = (_plan(some, Goal(ends="target", deadline_s=deadline), CHEAPEST) for deadline in (1800, 36_000))
    assert min(map(_chance, (hasty, patient))) >= SURE
    assert patient.chosen.prediction.cost_usd.value < hasty.chosen.prediction.cost_usd.value


def test_a_budget_that_only_fits_on_expectation_says_so(some: Catalog) -> None:
    with pytest.raises(NoFeasiblePlan):
        _plan(some, Goal(ends="target", budget_usd=0.01))
    cheapest = _plan(some, Goal(ends="target", budget_usd=1000.0)).pareto[-1].prediction.cost_usd
    tight = _plan(some, Goal(ends="target", budget_usd=(cheapest.value + cheapest.low) / 2 + cheapest.value / 2))
    assert tight.chosen.prediction.cost_usd.value <= (tight.goal.budget_usd or 0)
    assert tight.chosen.prediction.cost_usd.high > (tight.goal.budget_usd or 0)
    assert tight.explanation[0].startswith("No plan found stays within the budget")
    assert tight.risk is not None


def test_nothing_fits_names_the_plan_that_would(some: Catalog) -> None:
    with pytest.raises(NoFeasiblePlan, match="cheapest plan is") as caught:
        _plan(some, Goal(ends="target", budget_usd=0.001))
    assert caught.value.hint is not None
    enough = float(caught.value.hint.split("$")[1].split(",")[0])
    assert _plan(some, Goal(ends="target", budget_usd=enough)).chosen
    cheapest = _plan(some, Goal(ends="target", budget_usd=1000.0), replace(QUICK, objective="cheapest")).chosen
    assert f"cheapest plan is {cheapest.in_words}, about" in caught.value.message, "as every other question has it"
    with pytest.raises(NoFeasiblePlan, match="quickest plan is"):
        _plan(some, Goal(ends="target", deadline_s=60))


def test_fixed_lengths(some: Catalog) -> None:
    epochs = _plan(some, Goal(ends="epochs", amount=2, budget_usd=2.0))
    batch = epochs.chosen.global_batch_size
    assert epochs.chosen.prediction.steps.value == -(-2 * 50_000 // batch)
    assert epochs.chosen.prediction.steps.low == epochs.chosen.prediction.steps.high
    assert epochs.run.stop.max_epochs == 2
    steps = _plan(some, Goal(ends="steps", amount=500, budget_usd=2.0))
    assert steps.chosen.prediction.steps.value == 500
    assert steps.chosen.global_batch_size == 64
    assert steps.run.stop.max_steps == 500
    other = _plan(some, Goal(ends="steps", amount=500, budget_usd=2.0), Options(trials=20, batch_size=96))
    assert other.chosen.global_batch_size == 96


def test_markets_and_types_narrow_the_search(some: Catalog) -> None:
    goal = Goal(ends="target", budget_usd=20.0)
    demand = _plan(some, goal, Options(market="on-demand", trials=20, max_workers=16))
    assert {group.market for group in demand.chosen.groups} == {"on-demand"}
    assert all("interruptions" not in term.name for term in demand.chosen.prediction.cost_terms)
    only = _plan(some, goal, Options(only_types=("c7a.xlarge", "c7a.2xlarge"), trials=20))
    assert {group.instance_type for group in only.chosen.groups} <= {"c7a.xlarge", "c7a.2xlarge"}
    without = _plan(some, goal, Options(only_types=("c7a.xlarge", "c7a.2xlarge"), exclude_types=("c7a.xlarge",)))
    assert {group.instance_type for group in without.chosen.groups} == {"c7a.2xlarge"}
    few = _plan(some, goal, Options(max_machines=1, trials=20))
    assert sum(group.machines for group in few.chosen.groups) == 1


def test_compression_wins_where_the_network_binds(some: Catalog) -> None:
    profile = make_profile(parameters=25_000_000, per_sample_s=0.02, minimum_steps=200, minimum_samples=3e6)
    options = Options(only_types=("c7a.4xlarge",), trials=20, batch_size=512)
    plan = _plan(some, Goal(ends="target", deadline_s=36_000 * 10, budget_usd=500), options, profile=profile)
    dense = make_profile(parameters=25_000_000, per_sample_s=0.02, minimum_steps=200, minimum_samples=3e6, gain=False)
    without = _plan(some, Goal(ends="target", budget_usd=500), options, profile=dense)
    # What rounding keeps is known of every gradient; what a selection keeps only where it was measured.
    assert without.chosen.compression.name in ROUNDED
    assert (without.run.compression, without.run.ratio_policy) == (without.chosen.compression, "fixed")
    assert any("Not considered: " in sentence and "topk" in sentence for sentence in without.explanation)
    quick = _plan(some, Goal(ends="target", budget_usd=500), options, profile=profile)
    assert quick.chosen.compression.name != "identity"
    assert quick.chosen.prediction.total_s.value <= 1.02 * without.chosen.prediction.total_s.value
    assert plan.chosen.prediction.cost_usd.value <= quick.chosen.prediction.cost_usd.value


RECORDED = sorted((Path(__file__).parent.parent / "recorded").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_profiles_can_be_planned(some: Catalog, path: Path) -> None:
    goals = [Goal(ends="epochs", amount=10, budget_usd=50.0), Goal(ends="target", budget_usd=50.0)]
    profile = Profile.load(path)
    reached = any(pilot.steps_to_target is not None for pilot in profile.pilots)
    for goal in goals if reached else goals[:1]:
        plan = _plan(some, goal, profile=profile)
        assert plan.chosen.prediction.cost_usd.high <= 50
        here = predict_on_local(plan, (1, 2))
        run, told = here.run, here.prediction
        assert run.workers[0].local_batch_size >= run.workers[1].local_batch_size
        assert told.total_s.low < told.total_s.value < told.total_s.high


def test_a_measured_machine_is_trusted_more(some: Catalog) -> None:
    profile = make_profile(devices=[make_device(type="c7a.2xlarge", per_sample_s=0.002)])
    plan = _plan(some, Goal(ends="target", budget_usd=1.0), Options(only_types=("c7a.2xlarge",)), profile=profile)
    assert {group.evidence for group in plan.chosen.groups} == {"measured"}
    told = plan.chosen.prediction.step_time_s
    assert told.high / told.low < 3


@pytest.mark.parametrize(
    ("profile", "goal", "options", "message"),
    [
        (make_profile(reached=False), Goal(ends="target", budget_usd=1), QUICK, "no pilot run reached it"),
        (LARGE, Goal(ends="target", budget_usd=1, target_value=0.99), QUICK, "accuracy=0.9"),
        (LARGE, Goal(ends="target", budget_usd=1, target_metric="loss"), QUICK, "accuracy=0.9"),
        (LARGE, Goal(ends="epochs", budget_usd=1), QUICK, "how many epochs"),
        (LARGE, Goal(ends="target", budget_usd=1), Options(only_types=("c9000.huge",)), "c9000.huge"),
        (LARGE, Goal(ends="target", budget_usd=1), Options(only_types=("c5.metal",)), "bare metal"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    some: Catalog, profile: Profile, goal: Goal, options: Options, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        _plan(some, goal, options, profile=profile)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"market": "black"},
        {"max_machines": 0},
        {"max_machines": 4097},
        {"batch_size": 0},
        {"minimum_gain": 1.5},
        {"startup_s": -1.0},
    ],
)
def test_impossible_options_are_refused(kwargs: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        Options(**kwargs)  # type: ignore[arg-type]  # impossible on purpose


def test_a_short_run_to_a_target_is_looked_at_more_often() -> None:
    goal = Goal(ends="target", budget_usd=1.0)
    short = fit(make_profile(minimum_steps=100, minimum_samples=50_000, evaluation_s=0.01))
    costly = fit(make_profile(minimum_steps=100, minimum_samples=50_000, evaluation_s=10.0))
    assert evaluation_period_epochs(short, goal) < 0.2
    assert evaluation_period_epochs(costly, goal) == 1.0
    assert evaluation_period_epochs(short, Goal(ends="epochs", amount=1)) == 1.0


def test_planning_is_light(tmp_path: Path) -> None:
    """The whole catalogue is planned without a heavy import (how long it takes is a benchmark's business)."""
    make_profile().save(tmp_path / "profile.json")
    program = (
        "import sys; from datetime import datetime; from pathlib import Path\n"
        "from hetopt.optimizer.market.catalog import load_catalog\n"
        "from hetopt.optimizer.plan import Goal\n"
        "from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend\n"
        "from hetopt.core.profile import Profile\n"
        f"profile = Profile.load(Path({str(tmp_path / 'profile.json')!r}))\n"
        "goal = Goal(ends='target', budget_usd=5.0)\n"
        "options = Options(market='spot')\n"
        "request = PlanRequest(profile, load_catalog(), goal, options)\n"
        "plan = recommend(request, seed=0, now=datetime(2026, 1, 1))\n"
        "assert '1264 offers' in plan.searched and 'bare metal' in plan.searched, plan.searched\n"
        "heavy = {'torch', 'scipy', 'sklearn', 'boto3', 'rich', 'typer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=PATIENCE_S)
