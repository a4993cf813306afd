"""From profile to plan over the whole catalogue: limits, goals, what a plan says, and what is refused.

What the machines of a plan are told about convergence.
A guess is not paid for unless that is said.

Planning with workers that average parameters now and then: what it costs in steps, and when it may be chosen.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetopt.api.planning import PROFILES
from hetopt.backends.prediction import predict_on_local
from hetopt.core.comm.options import AVERAGED, IDENTITY, ROUNDED
from hetopt.core.errors import BadInput
from hetopt.core.profile import Evaluation, Pilot, PilotSync, Profile
from hetopt.core.run_rules import why_not_local
from hetopt.core.run_spec import Synchronization, parse_sync, spell_sync
from hetopt.core.training_laws import Moments, step_worth
from hetopt.optimizer.convergence.compression_penalty import (
    MOST_TIMES_WORKERS,
    PRIOR,
    LocalGate,
    LocalPilot,
    Penalty,
    distance,
)
from hetopt.optimizer.exploring import check_probed
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import SURE, Goal, Plan, ScalingRule
from hetopt.optimizer.recommendation.candidates import STAND_INS
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend, search_problem
from hetopt.optimizer.search.exchange_menu import exchange_menu
from hetopt.optimizer.step_time.local_options import measured_options
from tests.disturbance import PATIENCE_S
from tests.few_types import few

from .conftest import NOW
from .profiles import make_device, make_profile

QUICK = Options(trials=20, max_workers=16, mixed_types=2, market="spot", objective="fastest")
LARGE = make_profile(parameters=5_000_000, per_sample_s=0.02, minimum_steps=2000, minimum_samples=3e6)


@pytest.fixture(scope="module")
def some(catalog: Catalog) -> Catalog:
    return few(catalog)


def _plan(catalog: Catalog, goal: Goal, options: Options = QUICK, *, profile: Profile = LARGE, seed: int = 0) -> Plan:
    return recommend(PlanRequest(profile, catalog, goal, options), seed=seed, now=NOW)


@pytest.fixture(scope="module")
def plan(some: Catalog) -> Plan:
    return _plan(
        some, Goal(ends="target", budget_usd=1.0), replace(QUICK, types=("c7a.*", "c7g.*", "g5.*"), max_workers=8)
    )


def test_a_plan_adds_up(plan: Plan) -> None:
    told = plan.chosen.prediction
    assert plan.insight is not None
    assert plan.insight.chance is not None
    assert plan.insight.chance >= SURE
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
    ("rule", "scale"),
    [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)],
)
def test_the_learning_rate_follows_the_rule(some: Catalog, rule: ScalingRule, scale: float) -> None:
    options = Options(trials=0, batch_size=256, learning_rate_rule=rule, types=("c7a.large",))
    run = _plan(some, Goal(ends="epochs", amount=1, budget_usd=9.0), options, profile=make_profile()).run
    assert run.learning_rate_scale == pytest.approx(scale)


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
    other = _plan(some, Goal(ends="steps", amount=500, budget_usd=2.0), replace(QUICK, batch_size=96))
    assert other.chosen.global_batch_size == 96


@pytest.mark.parametrize(("noise", "grows"), [(1e5, True), (1.0, False), (None, False)])
def test_an_adaptive_batch_begins_where_that_surely_pays_and_follows_the_noise(
    some: Catalog, noise: float | None, grows: bool
) -> None:
    profile, goal = make_profile(noise_scale=noise, pilots=()), Goal(ends="epochs", amount=20, budget_usd=9.0)
    options = replace(QUICK, compression=(IDENTITY,), types=("c7a.large",))
    kept = _plan(some, goal, options, profile=profile)
    assert kept.chosen.global_batch_size == 64, "whoever does not ask keeps the batch size"
    assert any("follow the gradient noise" in reason for reason in kept.reasons) == grows
    plan = _plan(some, goal, replace(options, batch_size="adaptive"), profile=profile)
    run, size = plan.run, plan.chosen.global_batch_size
    assert (run.batch_policy, run.global_batch_size, run.learning_rate_scale) == ("critical", size, 1.0)
    assert (size > 64) == grows
    assert float(run.batch_settings["least"]) * size == pytest.approx(64)
    # The plan's steps are those that the run counts a step of this batch for.
    planned = Moments(gradient_variance=float(run.batch_settings["critical"]), gradient_square=1.0)
    worth = 20 * 50_000 / 64 / plan.chosen.prediction.steps.value
    assert step_worth(planned, size, 64) == pytest.approx(worth, rel=0.02)


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


@pytest.mark.parametrize("path", [*RECORDED, *PROFILES.glob("*.json")], ids=lambda path: path.stem)
def test_a_recorded_profile_prices_four_batch_sizes_at_least(some: Catalog, path: Path) -> None:
    options, goal = replace(QUICK, batch_size="auto"), Goal(ends="epochs", amount=1000, budget_usd=50.0)
    sizes = search_problem(PlanRequest(Profile.load(path), some, goal, options)).space.batch_sizes
    assert len(sizes) >= 4


@pytest.mark.parametrize(
    ("profile", "goal", "options", "message"),
    [
        (make_profile(reached=False), Goal(ends="target", budget_usd=1), QUICK, "no pilot run reached it"),
        (LARGE, Goal(ends="target", budget_usd=1, target_value=0.99), QUICK, "accuracy=0.9"),
        (LARGE, Goal(ends="target", budget_usd=1, target_metric="loss"), QUICK, "accuracy=0.9"),
        (LARGE, Goal(ends="epochs", budget_usd=1), QUICK, "how many epochs"),
        (LARGE, Goal(ends="target", budget_usd=1), Options(types=("c9000.huge",)), "c9000.huge"),
        (LARGE, Goal(ends="target", budget_usd=1), Options(types=("c5.metal",)), "bare metal"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    some: Catalog, profile: Profile, goal: Goal, options: Options, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        _plan(some, goal, options, profile=profile)


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
        "options = Options(market='spot', trials=20, mixed_types=1, max_workers=8)\n"
        "request = PlanRequest(profile, load_catalog(), goal, options)\n"
        "plan = recommend(request, seed=0, now=datetime(2026, 1, 1))\n"
        "assert '1264 offers' in plan.searched and 'bare metal' in plan.searched, plan.searched\n"
        "heavy = {'torch', 'scipy', 'sklearn', 'boto3', 'rich', 'typer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=PATIENCE_S)


def test_a_script_whose_epoch_nothing_tells_is_planned_by_steps_alone(catalog: Catalog) -> None:
    options = Options(trials=0, batch_size=256, types=("c7a.large",))
    profile = make_profile()
    stream = profile.model_copy(update={"job": profile.job.model_copy(update={"counts_epochs": False})})
    plan = recommend(
        PlanRequest(stream, catalog, Goal(ends="steps", amount=50, budget_usd=9.0), options), seed=0, now=NOW
    )
    assert plan.chosen.prediction.steps.value == 50
    with pytest.raises(BadInput, match="how many samples an epoch of"):
        recommend(PlanRequest(stream, catalog, Goal(ends="epochs", amount=1, budget_usd=9.0), options), seed=0, now=NOW)


def _planned(catalog: Catalog, profile: Profile, *types: str) -> Plan:
    options = Options(trials=0, types=types)
    return recommend(
        PlanRequest(profile, catalog, Goal(ends="epochs", amount=1, budget_usd=9), options), seed=0, now=NOW
    )


def test_an_extrapolated_type_is_refused_by_name(catalog: Catalog) -> None:
    plan = _planned(catalog, make_profile(), "c7a.2xlarge")
    with pytest.raises(BadInput, match=r"c7a\.2xlarge") as caught:
        check_probed(plan, unprobed=False)
    assert caught.value.hint is not None
    assert "`unprobed=True`" in caught.value.hint
    check_probed(plan, unprobed=True)


@pytest.mark.parametrize("measured", ["c7a.2xlarge", "c7a.4xlarge"])
def test_a_measured_type_and_its_family_are_let_through(catalog: Catalog, measured: str) -> None:
    plan = _planned(catalog, make_profile(devices=[make_device(type=measured)]), "c7a.2xlarge")
    check_probed(plan, unprobed=False)


SIXTEENTH = Synchronization(name="local-sgd", every_steps=16)
DENSE_STEPS = 1000.0

shares = st.floats(0.01, 1.0)
counts = st.integers(1, 64)


def local_pilot(
    sync: Synchronization = SIXTEENTH,
    *,
    share: float = 1 / 16,
    workers: int = 2,
    reached: float | None = 1050,
    trained: float | None = None,
) -> LocalPilot:
    return LocalPilot(
        sync=sync,
        share=share,
        workers=workers,
        dense_steps=DENSE_STEPS,
        steps_trained=trained or reached or 4000,
        steps_to_target=reached,
    )


@given(shares, shares, counts, counts, st.floats(0, 3))
def test_rarer_averages_of_more_workers_never_cost_less(one: float, other: float, n: int, m: int, c: float) -> None:
    penalty, (rare, often), (few, many) = Penalty(coefficient=c), sorted((one, other)), sorted((n, m))
    assert float(penalty.inflation(often, few)) >= 1
    assert penalty.inflation(often, few) <= penalty.inflation(rare, many) * (1 + 1e-12)
    assert penalty.log_sd(often, few) <= penalty.log_sd(rare, many) + 1e-12
    assert float(penalty.inflation(1.0, many)) == float(penalty.inflation(rare, 1)) == 1
    assert float(penalty.log_sd(1.0, many)) == float(penalty.log_sd(rare, 1)) == 0


def test_pilots_teach_what_it_costs() -> None:
    planted = [
        local_pilot(share=share, workers=workers, reached=DENSE_STEPS * (1 + 0.1 * float(distance(share, workers))))
        for share, workers in ((0.05, 2), (0.02, 4), (0.1, 8))
    ]
    penalty = LocalGate(pilots=tuple(planted)).penalty(SIXTEENTH)
    assert penalty.coefficient == pytest.approx(0.1, abs=0.03)
    assert penalty.coefficient_sd < PRIOR.coefficient_sd / 3
    assert penalty.pilots == 3
    assert LocalGate(pilots=(local_pilot(reached=None),)).penalty(SIXTEENTH) == PRIOR


def test_nothing_is_planned_that_no_pilot_speaks_for() -> None:
    gate = LocalGate(pilots=(local_pilot(),))
    assert gate.objection(SIXTEENTH, 1 / 16) is None
    assert gate.objection(SIXTEENTH.model_copy(update={"every_steps": 4}), 1 / 4) is None, "oftener than measured"
    for sync, share in (
        (SIXTEENTH.model_copy(update={"every_steps": 32}), 1 / 32),
        (Synchronization(name="selsync", delta="auto"), 0.5),
    ):
        assert f'profile with `sync="{spell_sync(sync)}"`' in str(gate.objection(sync, share))
    assert gate.most_workers(SIXTEENTH, 1 / 16) == 2 * MOST_TIMES_WORKERS


def test_a_pilot_that_fell_short_closes_the_gate() -> None:
    failed = LocalGate(pilots=(local_pilot(share=1 / 16, reached=None, trained=9000),))
    assert "did not reach the target in 9000 steps" in str(failed.objection(SIXTEENTH, 1 / 16))
    rarer = LocalGate(pilots=(local_pilot(), *failed.pilots))
    assert rarer.objection(SIXTEENTH, 1 / 16) is not None
    too_short = LocalGate(pilots=(local_pilot(), local_pilot(reached=None, trained=1200)))
    assert too_short.objection(SIXTEENTH, 1 / 16) is None, "that one proves nothing"


def test_averages_are_offered_as_they_were_measured() -> None:
    def offered(pilot: LocalPilot, *, to_target: bool = True) -> dict[str, int]:
        gate = LocalGate(pilots=(pilot,))
        options = measured_options(gate, to_target=to_target, dataset_size=1000, batch=10)
        return {spell_sync(option.sync): option.most_workers for option in options}

    assert offered(local_pilot()) == {"local-sgd(16)": 8}
    fixed = parse_sync("selsync(0.3)")
    assert offered(local_pilot(fixed, share=0.1)) == {"selsync(0.3)": 8}
    assert not offered(local_pilot(parse_sync("fedavg(1,0.1)"), share=0.1))
    assert not offered(local_pilot(reached=None))
    assert not offered(local_pilot(reached=1700), to_target=False), "a run of fixed length may not lose so much"


SLOW_LINKS = make_profile(
    parameters=25_000_000, per_sample_s=0.02, minimum_steps=2000, minimum_samples=3e6, pilots=(64, 256), gain=False
)


def piloted(profile: Profile, *, stretch: float = 1.05, policy: str = "local-sgd(8)", workers: int = 4) -> Profile:
    """With pilots that averaged parameters, and needed so many times as many steps."""
    dense = profile.pilots[0]
    assert dense.steps_to_target is not None
    steps = stretch * dense.steps_to_target
    pilots = tuple(
        Pilot(
            global_batch_size=dense.global_batch_size,
            learning_rate_scale=dense.learning_rate_scale,
            seed=seed,
            evaluations=(Evaluation(step=round(steps) + 1, metric=0.9),),
            steps_to_target=steps,
            sync=PilotSync(policy=policy, workers=workers, share=1 / 8),
        )
        for seed in (1, 2)
    )
    return profile.model_copy(update={"pilots": (*profile.pilots, *pilots)})


def planned(catalog: Catalog, profile: Profile, **options: object) -> Plan:
    few = Options(
        trials=0,
        mixed_types=1,
        max_workers=16,
        types=("c7a.large", "c7a.xlarge"),
        **{"market": "spot", "objective": "fastest", **options},
    )  # type: ignore[arg-type]
    return recommend(PlanRequest(profile, catalog, Goal(ends="target", budget_usd=20.0), few), seed=0, now=NOW)


@pytest.fixture(scope="module")
def measured(catalog: Catalog) -> Plan:
    return planned(catalog, piloted(SLOW_LINKS))


@pytest.fixture(scope="module")
def unmeasured(catalog: Catalog) -> Plan:
    return planned(catalog, SLOW_LINKS)


def test_a_measured_policy_is_chosen_where_links_are_slow(measured: Plan, unmeasured: Plan) -> None:
    assert measured.chosen.sync.name == "local-sgd"
    assert measured.run.sync == measured.chosen.sync
    assert measured.run.is_local
    assert (measured.run.compression.name, measured.run.ratio_policy) == ("int8", "fixed"), "averages, rounded"
    assert why_not_local(measured.run) is None
    assert len(measured.run.workers) <= 4 * MOST_TIMES_WORKERS
    # Fewer bits save most of what averaging does, and cost no steps to speak of.
    assert unmeasured.chosen.compression.name in ROUNDED
    assert measured.chosen.prediction.total_s.value < 0.95 * unmeasured.chosen.prediction.total_s.value
    assert Plan.from_json(measured.to_json(), origin="here") == measured


@pytest.mark.parametrize("to_target", [True, False])
def test_averages_are_priced_as_sums_sent_alike_and_as_rarely(to_target: bool) -> None:
    """Bytes, messages and own work of a share of the steps; the steps of the rounding times those of the averaging."""
    model = fit(piloted(SLOW_LINKS, stretch=1.0))
    [local, *_] = measured_options(model.convergence.local, to_target=to_target, dataset_size=1000, batch=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetopt.optimizer.search.exchange_menu.drop_beaten", tuple)
        offered = exchange_menu(model, minimum_gain=0.05, max_workers=8, local=[local], to_target=to_target)
    averages = [option for option in offered if option.sync.is_local]
    assert [option.compression.name for option in averages] == list(AVERAGED)
    for average in averages:
        assert not average.under_backward
        [summed] = [one for one in offered if one.compression == average.compression and not one.sync.is_local]
        for name in ("messages", "traffic_bytes", "compress_s"):
            price, of_a_sum = (getattr(one, name)[: local.most_workers + 1] for one in (average, summed))
            assert price == pytest.approx(local.communication.share * of_a_sum), name
        assert average.stretch == pytest.approx(local.stretch(np.maximum(np.arange(9), 1)) * summed.stretch)
        assert (average.stretch_log_sd >= summed.stretch_log_sd).all()
        assert (average.gain, average.lost_progress.tolist()) == (summed.gain, summed.lost_progress.tolist())


def test_a_policy_that_costs_too_many_steps_is_not_chosen(catalog: Catalog) -> None:
    assert not planned(catalog, piloted(SLOW_LINKS, stretch=4.0)).chosen.sync.is_local


def test_what_is_asked_for_is_planned_with_and_its_doubt_is_wide(catalog: Catalog, unmeasured: Plan) -> None:
    asked = planned(catalog, SLOW_LINKS, sync=parse_sync("selsync(auto,share=0.05)"))
    assert spell_sync(asked.run.sync) == "selsync(auto, share=0.05)"
    assert asked.run.compression.name == "int8", "when workers average was asked for, not how"
    steps, dense = asked.chosen.prediction.steps, unmeasured.chosen.prediction.steps
    assert steps.high / steps.value > 1.2 * dense.high / dense.value
    assert planned(catalog, piloted(SLOW_LINKS), sync=Synchronization()).chosen == unmeasured.chosen


def test_what_stands_in_keeps_the_limits_and_the_intervals_of_the_plan(catalog: Catalog) -> None:
    profile, goal = make_profile(), Goal(ends="epochs", amount=2, budget_usd=20.0)

    def found(**options: Any) -> Plan:
        asked = Options(trials=0, mixed_types=1, max_workers=4, market="on-demand", **options)
        return recommend(PlanRequest(profile, catalog, goal, asked), seed=0, now=NOW)

    plan = found(types=("c7a.large", "c7a.xlarge", "c6a.large", "c6a.xlarge", "m7a.large"))
    [(group, others)] = plan.with_stand_ins
    assert 2 <= len(others) <= STAND_INS
    assert group.instance_type not in others
    for other in others[:2]:
        assert catalog.instance_type(other).architecture == catalog.instance_type(group.instance_type).architecture
        chosen = found(types=(other,), max_machines=group.machines).chosen
        for figure in ("total_s", "cost_usd"):
            assert getattr(chosen.prediction, figure).value <= getattr(plan.chosen.prediction, figure).high
    assert found(types=(group.instance_type,)).stand_ins == ((),)
