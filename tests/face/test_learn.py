"""What a run measured goes back into the profile, and the next recommendation is nearer to the truth."""

from __future__ import annotations

import math
import os
import platform
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetopt as library
from hetopt.backends.on_this_machine import LocalBackend
from hetopt.backends.options import Local
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.profile import PilotSync, Profile
from hetopt.core.synchronization import parse_sync
from hetopt.optimizer.convergence.convergence import fit_convergence
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import OWN, Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.step_time.earlier_runs import OF_THE_TYPE, EarlierRuns, RunOnType, job_named
from hetopt.optimizer.step_time.host_level import RUN_TO_RUN_LOG_SD, followed, host_named, told_of_host
from hetopt.reports.learn import learn
from tests.face.conftest import Answer
from tests.logs import history_of, recorded_run

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
STEPS = 2000
SLOWER = 2.2
"""Than was predicted: about the spread of GPU types around a roofline."""


def plan_from(profile: Profile, types: tuple[str, ...], earlier: EarlierRuns | None = None) -> Plan:
    goal = Goal(budget_usd=5.0, ends="epochs", amount=20.0)
    options = Options(batch_size=256, max_workers=4, trials=20, only_types=types, earlier=earlier)
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


def test_the_next_recommendation_is_nearer_to_the_truth(first: Plan) -> None:
    launch = launched(first)
    truth_s = SLOWER * first.chosen.prediction.step_time_s.value
    learned = learn(first.profile, launch, history_of(log_of(launch, truth_s))).profile
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


def test_other_jobs_expect_of_a_machine_type_what_a_run_found_there(first: Plan) -> None:
    """A part of it after one job; the plan says so, and a run of that plan tells the same, not the rest of it."""
    launch, kind = launched(first), first.chosen.groups[0].instance_type
    truth_s = SLOWER * first.chosen.prediction.step_time_s.value
    (found,) = learn(first.profile, launch, history_of(log_of(launch, truth_s))).types
    assert (found.instance_type, found.log_factor) == (kind, pytest.approx(math.log(SLOWER), abs=0.05))
    before, after = plan_from(first.profile, (kind,)), plan_from(first.profile, (kind,), EarlierRuns(runs=(found,)))
    one, other = before.chosen.groups[0], after.chosen.groups[0]
    assert one.assumed is not None
    assert other.assumed is not None
    assert other.assumed.time_s(64) / one.assumed.time_s(64) == pytest.approx(SLOWER**OF_THE_TYPE, rel=0.03)
    assert other.earlier is not None
    again = launched(after)
    step_s = after.chosen.prediction.step_time_s.value * SLOWER / math.exp(other.earlier.log_factor)
    (same,) = learn(after.profile, again, history_of(log_of(again, step_s))).types
    assert same.log_factor == pytest.approx(math.log(SLOWER), abs=0.1)


def test_machines_of_ones_own_teach_their_steps_and_their_gpu(first: Plan) -> None:
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
    learned = learn(first.profile, launch, history_of(log_of(launch, truth_s)))
    assert {node.type for sample in learned.profile.samples for node in sample.nodes} == {"desk"}
    assert EarlierRuns(runs=learned.types).told(group.instance_type, 0.4, learned.types[0].device) is not None


def test_links_that_a_run_found_slow_are_expected_to_be_slower_by_a_part_of_it(first: Plan) -> None:
    """The cluster's level: it is told beside the device's, counted in once, and said."""
    (group,) = first.chosen.groups
    assert group.assumed is not None
    pair = group.model_copy(update={"machines": 2, "local_batch_sizes": (128, 128)})
    plan = first.model_copy(update={"chosen": first.chosen.model_copy(update={"groups": (pair,)})})
    launch = launched(plan)
    rate = group.assumed.link_bytes_per_s / 2
    seen = [
        {"event": "network_measured", "time_s": 1300.0, "step": 0, "latency_s": 1e-4, "bytes_per_s": rate * factor}
        for factor in (0.9, 1.0, 1.1)
    ]
    steps = log_of(launch, first.chosen.prediction.step_time_s.value)
    (found,) = learn(first.profile, launch, history_of([*steps[:2], *seen, *steps[2:]])).types
    assert found.link_log_factor == pytest.approx(math.log(2), abs=1e-3)
    told = EarlierRuns(runs=(found,)).told_of_links(group.instance_type, 0.35)
    assert told is not None
    assert told.log_factor == pytest.approx(OF_THE_TYPE * math.log(2), abs=1e-3)
    after = plan_from(first.profile, (group.instance_type,), EarlierRuns(runs=(found,)))
    assumed = after.chosen.groups[0].assumed
    assert assumed is not None
    assert assumed.link_bytes_per_s == pytest.approx(group.assumed.link_bytes_per_s / math.exp(told.log_factor))
    counted = pair.model_copy(update={"earlier_links": told, "assumed": assumed})
    again = launch.model_copy(
        update={"plan": plan.model_copy(update={"chosen": plan.chosen.model_copy(update={"groups": (counted,)})})}
    )
    (same,) = learn(first.profile, again, history_of([*steps[:2], *seen, *steps[2:]])).types
    assert same.link_log_factor == pytest.approx(found.link_log_factor, abs=1e-3)


factors = st.floats(-1.5, 1.5)


def on_type(job: str, factor: float, run: str = "") -> RunOnType:
    return RunOnType(run=run or job, job=job, instance_type="g5.xlarge", log_factor=factor, day="2026-11-20")


@given(found=st.lists(factors, min_size=1, max_size=6), log_sd=st.floats(0.05, 1.0))
def test_what_jobs_agree_on_is_believed_more_and_never_beyond_them(found: list[float], log_sd: float) -> None:
    told = EarlierRuns(runs=tuple(on_type(str(n), factor) for n, factor in enumerate(found))).told("g5.xlarge", log_sd)
    assert told is not None
    assert told.jobs == told.runs == len(found)
    mean = sum(found) / len(found)
    assert abs(told.log_factor) <= abs(mean) + 1e-12
    assert told.log_factor * mean >= 0
    alike = EarlierRuns(runs=tuple(on_type(str(n), mean) for n in range(len(found)))).told("g5.xlarge", log_sd)
    assert alike is not None
    assert alike.log_sd <= log_sd
    assert alike.log_sd <= told.log_sd + 1e-12


@given(first=factors, second=factors)
def test_files_of_two_machines_are_merged_in_any_order_and_a_run_counts_once(first: float, second: float) -> None:
    one, other = on_type("a", first), on_type("b", second)
    left, right = EarlierRuns(runs=(one, other)).adding((one,)), EarlierRuns(runs=(other,)).adding((one,))
    assert left == right
    several = EarlierRuns(runs=(one, on_type("a", first, run="again"))).told("g5.xlarge", 0.3)
    alone = EarlierRuns(runs=(one,)).told("g5.xlarge", 0.3)
    assert several is not None
    assert alone is not None
    assert several.log_factor == pytest.approx(alone.log_factor)


def test_runs_that_contradict_each_other_widen_what_they_say() -> None:
    torn = EarlierRuns(runs=(on_type("a", 1.0), on_type("b", -1.0))).told("g5.xlarge", 0.2)
    assert torn is not None
    assert torn.log_factor == pytest.approx(0)
    assert torn.log_sd > 1
    assert EarlierRuns(runs=(on_type("a", 1.0),)).told("c7i.large", 0.2) is None


def test_the_way_to_the_target_is_one_more_pilot(first: Plan) -> None:
    launch = launched(first)
    learned = learn(first.profile, launch, history_of(log_of(launch, 0.01)))
    pilot = learned.profile.pilots[-1]
    assert len(learned.profile.pilots) == len(first.profile.pilots) + 1
    assert (pilot.global_batch_size, pilot.steps_to_target) == (256, 800)


def test_provisioning_is_learned_of_rented_machines_alone(first: Plan) -> None:
    """Machines that took twice as long as foretold: the next plan expects more, though not yet twice."""
    launch = launched(first)
    foretold_s = first.chosen.prediction.startup_s
    history = history_of(log_of(launch, 0.01))
    history.run.startup_s = 2 * foretold_s
    learned = learn(first.profile, launch, history).profile
    assert [one.took_s for one in learned.provisioned] == [pytest.approx(2 * foretold_s, abs=0.1)]
    kind = first.chosen.groups[0].instance_type
    assert 1.2 < plan_from(learned, (kind,)).chosen.prediction.startup_s / foretold_s < 1.9
    here = launch.model_copy(update={"on": "local"})
    assert learn(first.profile, here, history).profile.provisioned == ()


def test_the_same_run_teaches_once(first: Plan) -> None:
    launch = launched(first)
    events = log_of(launch, 0.01)
    once = learn(first.profile, launch, history_of(events)).profile
    with pytest.raises(BadInput, match="measured nothing that the profile lacks"):
        learn(once, launch, history_of(events))


def test_a_profile_of_another_job_is_refused(first: Plan) -> None:
    launch = launched(first)
    with pytest.raises(BadInput, match="trained digits"):
        learn(Profile.load(RECORDED / "lstm-small.json"), launch, history_of(log_of(launch, 0.01)))


def test_paced_workers_teach_no_step_times(first: Plan) -> None:
    workers = tuple(worker.model_copy(update={"slowdown": 2.0}) for worker in first.run.workers)
    launch = launched(first).model_copy(update={"spec": first.run.model_copy(update={"workers": workers})})
    learned = learn(first.profile, launch, history_of(log_of(launch, 0.01)))
    assert learned.profile.samples == first.profile.samples


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
        learned = learn(plan.profile, launch, history_of(events)).profile
        if not synchronised:
            assert learned.pilots == plan.profile.pilots
            continue
        pilot = learned.pilots[-1]
        assert pilot.sync == PilotSync(policy="local-sgd(4)", workers=2, share=0.25)
        assert learned.samples[-1].sync == "local-sgd(4)"
        assert fit_convergence(learned).local.objection(sync, 0.25) is None


# Runs on this machine teach how fast it is in earnest: a real one, and the same with a log of a slower machine.

THRICE = 3.0


def taken_here(name: str) -> Profile:
    """A recorded profile as if it had been taken on this machine, which it was on one like it."""
    profile = Profile.load(RECORDED / f"{name}.json")
    here = {
        "logical_cpus": len(os.sched_getaffinity(0)),
        "operating_system": f"{platform.system()} {platform.release()}",
    }
    return profile.model_copy(update={"host": profile.host.model_copy(update=here)})


def planned(profile: Profile) -> Plan:
    return library.recommend(profile, budget_usd=2, epochs=8, types="c7i.*", max_workers=2, batch_size=64, trials=0)


def test_a_run_on_this_machine_teaches_the_next_plan_of_it(
    hetopt: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    profile = taken_here("digits")

    def prepared(plan: Plan) -> Launch:
        return LocalBackend().prepare(plan, plan, Local(slowdowns=(1.0,))).launch

    def learned(name: str, launch: Launch, slower: float) -> float:
        """What a run tells whose computing took so many times its predicted processor time."""
        took = {"processor_s": [slower * launch.prediction.compute_s]}
        log = [event | (took if event["event"] == "step" else {}) for event in log_of(launch, 5.0)]
        recorded_run(
            tmp_path / "runs" / name,
            launch.model_copy(update={"run_id": name, "created": "2026-11-20T00:00:00+00:00"}),
            log,
        )
        assert hetopt("report", name, "--learn", tmp_path / f"{name}.json").code == 0
        runs = EarlierRuns.load(tmp_path / "earlier-runs.json").runs
        return next(one.log_factor for one in runs if one.run == name)

    before = planned(profile)
    first = prepared(before)
    assert (first.host, first.earlier) == (host_named(profile.host), None)
    slow = learned("slow", first, THRICE)
    assert slow == pytest.approx(math.log(THRICE), abs=1e-3), "what others' programs cost says nothing of its speed"
    after = planned(profile)
    expected = followed(slow, math.hypot(RUN_TO_RUN_LOG_SD, profile.yardstick_log_sd or 0.0))
    (here, told) = (next(way for way in plan.choices if way.names == ("here",)) for plan in (before, after))
    assert told.earlier is not None
    assert told.earlier.log_factor == pytest.approx(expected)
    assert told.total_s.value == pytest.approx(math.exp(expected) * here.total_s.value)
    second = prepared(after)
    assert second.earlier == told.earlier
    assert learned("again", second, THRICE) == pytest.approx(math.log(THRICE) + expected, abs=1e-3), "counted once"


def test_a_profile_of_another_machine_learns_nothing_of_this_one() -> None:
    profile = taken_here("digits")
    elsewhere = profile.model_copy(update={"host": profile.host.model_copy(update={"operating_system": "Other 1"})})
    plan = planned(elsewhere)
    launch = LocalBackend().prepare(plan, plan, Local(slowdowns=(1.0,))).launch
    assert (launch.host, launch.earlier) == (None, None)


several = st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=5)


@given(own=several, others=several)
def test_runs_of_the_very_job_count_more_than_those_of_others_and_none_beyond_what_it_found(
    own: list[float], others: list[float]
) -> None:
    profile = Profile.load(RECORDED / "digits.json")
    name, job = host_named(profile.host), job_named(profile.job)

    def kept(*named: tuple[str, float]) -> EarlierRuns:
        return EarlierRuns(
            runs=tuple(
                RunOnType(run=f"{n}", job=job, instance_type=name, log_factor=factor, day="2026-11-27")
                for n, (job, factor) in enumerate(named)
            )
        )

    mine, theirs = [(job, one) for one in own], [(f"job {n}", one) for n, one in enumerate(others)]
    told, both = told_of_host(kept(*mine), profile), told_of_host(kept(*mine, *theirs), profile)
    assert told is not None
    assert both == told
    mean = sum(own) / len(own)
    assert abs(told.log_factor) <= abs(mean)
    assert told.log_factor * mean >= 0
    elsewhere = told_of_host(kept(*theirs), profile)
    assert elsewhere is not None
    assert abs(elsewhere.log_factor) <= abs(sum(others) / len(others)) + 1e-12
    assert told_of_host(None, profile) is None
