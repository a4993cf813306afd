"""What a run measured goes back into the profile, and the next recommendation is nearer to the truth."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.profile import PilotSync, Profile
from hetopt.core.synchronization import parse_sync
from hetopt.optimizer.convergence.convergence import fit_convergence
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import OWN, Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.step_time.earlier_runs import OF_THE_TYPE, EarlierRuns, RunOnType, device_of
from hetopt.reports.learn import learn
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
    assert one.earlier is None
    assert other.earlier is not None
    assert f"Counted in for {kind}: 1 run of 1 job until 2026-11-20: 27 % slower than foreseen." in after.explanation
    again = launched(after)
    step_s = after.chosen.prediction.step_time_s.value * SLOWER / math.exp(other.earlier.log_factor)
    (same,) = learn(after.profile, again, history_of(log_of(again, step_s))).types
    assert same.log_factor == pytest.approx(math.log(SLOWER), abs=0.1)


def test_other_sizes_with_the_same_gpu_gain_from_a_run_and_other_gpus_do_not(first: Plan) -> None:
    """The device is what computes, whatever the size of the machine around it."""
    launch, kind = launched(first), first.chosen.groups[0].instance_type
    truth_s = SLOWER * first.chosen.prediction.step_time_s.value
    (found,) = learn(first.profile, launch, history_of(log_of(launch, truth_s))).types
    assert first.chosen.groups[0].hardware is not None
    assert found.device == first.chosen.groups[0].hardware.gpu is not None
    runs = EarlierRuns(runs=(found,))
    types = load_catalog().instance_types
    sibling = next(name for name, one in types.items() if device_of(one) == found.device and name != kind)
    stranger = next(name for name, one in types.items() if one.accelerator and device_of(one) != found.device)
    told = runs.told(sibling, 0.4, device_of(types[sibling]))
    assert told == runs.told(kind, 0.4, found.device)
    assert runs.told(stranger, 0.4, device_of(types[stranger])) is None


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
    assert "the target after 800 steps of 256 samples" in learned.news


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


def test_the_next_plan_of_another_job_moves_towards_what_a_run_found_and_says_so(
    first: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hetopt: Callable[..., Any]
) -> None:
    """By commands alone: report --learn, then predict and recommend of another job, on another size with that GPU."""
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    launch = launched(first).model_copy(update={"on": "local"})
    truth_s = SLOWER * first.chosen.prediction.step_time_s.value
    recorded_run(tmp_path / "runs" / launch.run_id, launch, log_of(launch, truth_s))
    ran = first.chosen.groups[0].instance_type
    kind = next(size for size in (f"{ran.partition('.')[0]}.{n}xlarge" for n in ("", "2")) if size != ran)
    other = RECORDED / "lstm-small.json"
    queries = tmp_path / "queries.jsonl"
    queries.write_text(json.dumps({"nodes": [{"type": kind, "workers": 1}], "local_batch_size": 32}) + "\n")

    def plan_and_step() -> tuple[dict[str, Any], float]:
        planned = hetopt("recommend", other, "--budget", 5, "--types", kind, "--json")
        asked = hetopt("predict", other, queries)
        assert (planned.code, asked.code) == (0, 0)
        return json.loads(planned.out), json.loads(asked.out)["step_time_s"]

    before, step_before_s = plan_and_step()
    assert hetopt("report", "--learn", tmp_path / "learned.json").code == 0
    after, step_after_s = plan_and_step()
    told = after["chosen"]["groups"][0]["earlier"]
    assert before["chosen"]["groups"][0]["earlier"] is None
    assert told["log_factor"] == pytest.approx(OF_THE_TYPE * math.log(SLOWER), abs=0.05)
    assert math.log(step_after_s / step_before_s) == pytest.approx(told["log_factor"], rel=0.2)
    assert any(line.startswith(f"Counted in for {kind}: 1 run of 1 job") for line in after["explanation"])


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
        assert pilot.steps_to_target == 800
        assert learned.samples[-1].sync == "local-sgd(4)"
        assert fit_convergence(learned).local.objection(sync, 0.25) is None


def test_the_command_begins_a_profile_and_goes_on_with_it(
    first: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hetopt: Callable[..., Any]
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    launch = launched(first).model_copy(update={"on": "local"})
    recorded_run(tmp_path / "runs" / launch.run_id, launch, log_of(launch, 0.01))
    path = tmp_path / "learned.json"
    answer = hetopt("report", "--learn", path)
    assert answer.code == 0
    assert "has learned 5 step times" in answer.err
    assert len(Profile.load(path).samples) == 5
    kind = first.chosen.groups[0].instance_type
    assert f"earlier-runs.json has learned how fast {kind} computes" in " ".join(answer.err.split())
    assert [one.instance_type for one in EarlierRuns.load(tmp_path / "earlier-runs.json").runs] == [kind]
    again = hetopt("report", "--learn", path)
    assert (again.code, "measured nothing that the profile lacks" in again.err) == (2, True)
