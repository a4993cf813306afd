"""What a run measured goes back into the profile, and the next recommendation is nearer to the truth."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.profile import PilotSync, Profile
from hetopt.core.run_spec import parse_sync
from hetopt.optimizer.convergence.convergence import fit_convergence
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import OWN, Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.reports.learn import learn
from hetopt.reports.series import over_time
from tests.logs import history_of

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
STEPS = 2000
SLOWER = 2.2
"""Than was predicted: about the spread of GPU types around a roofline."""


def plan_from(profile: Profile, types: tuple[str, ...]) -> Plan:
    goal = Goal(budget_usd=5.0, ends="epochs", amount=20.0)
    options = Options(batch_size=256, max_workers=4, trials=0, types=types)
    return recommend(
        PlanRequest(profile, load_catalog(), goal, options), seed=0, now=datetime(2026, 11, 20, tzinfo=UTC)
    )


def launched(plan: Plan) -> Launch:
    return Launch(
        created="2026-11-20T00:00:00+00:00",
        started_s=1000.0,
        run_id="20261120-000000-digits-0002",
        on="ec2",
        plan=plan,
        spec=plan.run,
        prediction=plan.chosen.prediction,
    )


def log_of(launch: Launch, step_time_s: float) -> list[Event]:
    """The log of a run whose steps take so long, give or take a percent."""
    draw, now_s, spec = random.Random(0), 1300.0, launch.spec
    shares = [worker.local_batch_size for worker in spec.workers]
    said = launch.prediction
    part = said.compute_s / (said.compute_s + said.communication_s)
    workers = [
        {"host": w.host, "type": w.type, "slowdown": 1, "local_batch_size": w.local_batch_size} for w in spec.workers
    ]
    started = {"task": spec.task, "workers": workers, "global_batch_size": spec.global_batch_size, "resumed_step": 0}
    events: list[Event] = [
        {"event": "run_started", "time_s": now_s, **started},
        {"event": "training_started", "time_s": now_s, "step": 0},
    ]
    for step in range(20, STEPS + 1, 20):
        took_s = step_time_s * draw.gauss(1, 0.01)
        now_s += 20 * took_s
        event = {
            "event": "step", "time_s": now_s, "step": step, "steps": 20, "step_time_s": took_s,
            "epoch": step * 256 / 1438, "samples_seen": step * 256, "local_batch_sizes": shares, "loss": 0.1,
            "compute_s": [part * took_s] * len(shares), "wait_s": [0.0] * len(shares),
            "sync_s": [(1 - part) * took_s] * len(shares),
        }  # fmt: skip
        events.append(event)
        if step % 200 == 0:
            metrics = {"accuracy": 1 - 0.2 * math.exp(-step / 300)}
            told = {"step": step, "epoch": step * 256 / 1438, "metrics": metrics, "evaluation_s": 0.1}
            events.append({"event": "evaluated", "time_s": now_s, **told})
    return events


@pytest.fixture(scope="module")
def first() -> Plan:
    return plan_from(Profile.load(RECORDED / "digits.json"), ("g4dn.*", "g5.*"))


@pytest.fixture(scope="module")
def launch(first: Plan) -> Launch:
    return launched(first)


def test_the_next_recommendation_is_nearer_to_the_truth(first: Plan, launch: Launch) -> None:
    truth_s = SLOWER * first.chosen.prediction.step_time_s.value
    learned, _ = learn(first.profile, launch, history_of(log_of(launch, truth_s)))
    kind = first.chosen.groups[0].instance_type
    again = plan_from(learned, (kind,))
    before = plan_from(first.profile, (kind,))
    same = [c for c in (again.chosen, *again.pareto) if c.groups == first.chosen.groups]
    told = (same[0] if same else again.chosen).prediction.step_time_s
    error, error_before = (
        abs(math.log(prediction.value / truth_s)) for prediction in (told, before.chosen.prediction.step_time_s)
    )
    assert error < 0.25 * error_before
    assert told.high / told.low < before.chosen.prediction.step_time_s.high / before.chosen.prediction.step_time_s.low


def test_machines_of_ones_own_teach_their_steps(first: Plan) -> None:
    (group,) = first.chosen.groups
    own = group.model_copy(update={"instance_type": "desk", "region": OWN})
    workers = tuple(worker.model_copy(update={"type": "desk"}) for worker in first.run.workers)
    plan = first.model_copy(
        update={
            "chosen": first.chosen.model_copy(update={"groups": (own,)}),
            "run": first.run.model_copy(update={"workers": workers}),
        }
    )
    launch = launched(plan).model_copy(update={"on": "ssh"})
    truth_s = SLOWER * first.chosen.prediction.step_time_s.value
    learned, _ = learn(first.profile, launch, history_of(log_of(launch, truth_s)))
    assert {node.type for sample in learned.samples for node in sample.nodes} == {"desk"}


def test_the_way_to_the_target_is_one_more_pilot(first: Plan, launch: Launch) -> None:
    learned, _ = learn(first.profile, launch, history_of(log_of(launch, 0.01)))
    pilot = learned.pilots[-1]
    assert len(learned.pilots) == len(first.profile.pilots) + 1
    assert (pilot.global_batch_size, pilot.steps_to_target) == (256, 800)


def test_the_noise_of_a_whole_run_takes_the_place_of_a_profile_s_first_steps(first: Plan, launch: Launch) -> None:
    """Noise that grows tenfold: smoothed, at even distances, and a curve on the run's page."""
    events = log_of(launch, 0.01)
    for event in events:
        if event["event"] == "step":
            growth = 1 + 9 * event["step"] / STEPS
            event["noise"] = {"gradient_square": 1.0, "gradient_variance": 50.0 * growth}
    history = history_of(events)
    learned, news = learn(first.profile, launch, history)
    scales = [noise.gradient_variance / noise.gradient_square for noise in learned.noise]
    assert scales == sorted(scales)
    assert scales[0] < 100 < 400 < scales[-1] < 500
    assert learned.noise[-1].samples_seen == STEPS * 256
    assert any("noise over 2000 steps" in text for text in news)
    (curve,) = (series.values for series in over_time(history).series if series.key == "noise")
    assert curve[-1] == pytest.approx(scales[-1], rel=1e-3)


def test_provisioning_is_learned_of_rented_machines_alone(first: Plan, launch: Launch) -> None:
    """Machines that took twice as long as foretold: the next plan expects more, though not yet twice."""
    foretold_s = first.chosen.prediction.startup_s
    history = history_of(log_of(launch, 0.01))
    history.run.startup_s = 2 * foretold_s
    learned, _ = learn(first.profile, launch, history)
    assert [one.took_s for one in learned.provisioned] == [pytest.approx(2 * foretold_s, abs=0.1)]
    kind = first.chosen.groups[0].instance_type
    assert 1.2 < plan_from(learned, (kind,)).chosen.prediction.startup_s / foretold_s < 1.9
    here = launch.model_copy(update={"on": "local"})
    assert learn(first.profile, here, history)[0].provisioned == ()


def test_the_same_run_teaches_once(first: Plan, launch: Launch) -> None:
    events = log_of(launch, 0.01)
    once, _ = learn(first.profile, launch, history_of(events))
    with pytest.raises(BadInput, match="measured nothing that the profile lacks"):
        learn(once, launch, history_of(events))


def test_a_profile_of_another_job_is_refused(first: Plan, launch: Launch) -> None:
    with pytest.raises(BadInput, match="trained digits"):
        learn(Profile.load(RECORDED / "lstm-small.json"), launch, history_of(log_of(launch, 0.01)))


def test_paced_workers_teach_no_step_times(first: Plan) -> None:
    workers = tuple(worker.model_copy(update={"slowdown": 2.0}) for worker in first.run.workers)
    launch = launched(first).model_copy(update={"spec": first.run.model_copy(update={"workers": workers})})
    learned, _ = learn(first.profile, launch, history_of(log_of(launch, 0.01)))
    assert learned.samples == first.profile.samples


def test_a_run_whose_workers_averaged_is_a_pilot_of_that_and_none_of_dense_training(first: Plan) -> None:
    plan = plan_from(Profile.load(RECORDED / "digits.json"), ("c7a.*",))
    workers = (plan.run.workers[0],) * 2
    for text, synchronised in (("local-sgd(4)", 5), ("local-sgd(4)", 0)):
        sync = parse_sync(text)
        launch = launched(plan).model_copy(
            update={"spec": plan.run.model_copy(update={"workers": workers, "sync": sync})}
        )
        told = {"sync": {"policy": sync.name, "synchronised": synchronised, "local": 20 - synchronised}}
        events = [event | (told if event["event"] == "step" else {}) for event in log_of(launch, 0.01)]
        learned, _ = learn(plan.profile, launch, history_of(events))
        if not synchronised:
            assert learned.pilots == plan.profile.pilots
            continue
        pilot = learned.pilots[-1]
        assert pilot.sync == PilotSync(policy="local-sgd(4)", workers=2, share=0.25)
        assert learned.samples[-1].sync == "local-sgd(4)"
        assert fit_convergence(learned).local.objection(sync, 0.25) is None
