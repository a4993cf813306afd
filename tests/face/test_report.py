"""Reports hold the events of a run against its prediction, and say so honestly."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.api.run import Run
from hetopt.backends.backend import Prepared
from hetopt.backends.emulation.description import parse_hosts
from hetopt.backends.emulation.plan import rehearse
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.cli import follow
from hetopt.cli.follow import finish
from hetopt.cli.status import resume_command
from hetopt.core import formatting
from hetopt.core.errors import BadInput, RunStopped
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import Event
from hetopt.core.events.records import LogEvent
from hetopt.core.profile import Profile
from hetopt.core.run_folder import CHECKPOINT_FOLDER, LATEST_FILE
from hetopt.core.run_spec import Stream
from hetopt.core.run_status import RunState, RunStatus
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan, Range
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.reports.report import Report, make_report
from hetopt.reports.timeline import pause
from tests.logs import an_event, history_of, recorded_run

Golden = Callable[[str, str], None]


@pytest.fixture(scope="module")
def plan() -> Plan:
    profile = Profile.load(Path(__file__).resolve().parents[1] / "recorded" / "digits.json")
    goal = Goal(budget_usd=2.0, ends="epochs", amount=100.0)
    options = Options(batch_size=256, market="spot", objective="fastest")
    return recommend(
        PlanRequest(profile, load_catalog(), goal, options), seed=0, now=datetime(2026, 11, 20, tzinfo=UTC)
    )


@pytest.fixture(scope="module")
def launch(plan: Plan) -> Launch:
    here = predict_on_local(plan, (1.0, 2.0))
    return Launch(
        created="2026-11-20T00:00:00+00:00",
        started_s=1000.0,
        run_id="20261120-000000-digits-0000",
        on="local",
        plan=plan,
        spec=here.run,
        prediction=here.prediction,
        notes=here.notes,
    )


def _events(launch: Launch, *, slowdown: float = 1.0, resumed_step: int = 0, reason: str = "epochs") -> list[Event]:
    """The log of a run that took ``slowdown`` times as long as predicted."""
    said, spec = launch.prediction, launch.spec
    shares = [worker.local_batch_size for worker in spec.workers]
    begun_s = launch.started_s + said.startup_s
    steps = round(said.steps.value)
    step_time_s, training_s = slowdown * said.step_time_s.value, slowdown * said.training_s.value
    workers = [
        {"host": w.host, "type": w.type, "slowdown": w.slowdown, "local_batch_size": w.local_batch_size}
        for w in spec.workers
    ]
    return [
        {
            "event": "run_started",
            "time_s": begun_s,
            "task": spec.task,
            "workers": workers,
            "global_batch_size": spec.global_batch_size,
            "resumed_step": resumed_step,
        },
        {"event": "training_started", "time_s": begun_s, "step": resumed_step},
        {
            "event": "step",
            "time_s": begun_s + training_s,
            "step": steps,
            "epoch": 100.0,
            "samples_seen": steps * spec.global_batch_size,
            "local_batch_sizes": shares,
            "step_time_s": step_time_s,
            "compute_s": [0.9 * step_time_s] * len(shares),
            "sync_s": [0.08 * step_time_s] * len(shares),
            "wait_s": [0.02 * step_time_s, 0.0],
            "loss": 0.05,
            "steps": steps - resumed_step,
        },
        {"event": "an event of a later version", "time_s": begun_s + training_s},
        {
            "event": "training_finished",
            "time_s": begun_s + training_s,
            "step": steps,
            "epoch": 100.0,
            "reason": reason,
            "training_s": training_s,
            "metrics": {"accuracy": 0.99},
        },
    ]


@pytest.fixture(scope="module")
def rehearsed(plan: Plan) -> Launch:
    hosts = parse_hosts("speed=1,rate=100mbit x2; speed=0.25,rate=25mbit,workers=2")
    rehearsal = rehearse(plan, ThisMachine(processors=2, operating_system="Linux 6.18.44-fc-v595"), hosts)
    return Launch(
        created="2026-11-20T00:00:00+00:00",
        started_s=1000.0,
        run_id="20261120-000000-digits-0001",
        on="rehearsal",
        plan=plan,
        spec=rehearsal.run,
        prediction=rehearsal.prediction,
        notes=rehearsal.notes,
    )


def _disturbed(launch: Launch) -> list[Event]:
    """The log of a rehearsal in which a host slows down to a third, and the shares follow."""
    begun_s, now_s, step = 1012.0, 1012.0, 0
    spec = launch.spec
    shares = [worker.local_batch_size for worker in spec.workers]
    speeds = {"h0": 1.0, "h1": 1.0, "h2": 0.25}
    events = _events(launch)[:2]
    events[0]["workers"] = [
        {"host": w.host, "type": w.type, "slowdown": w.slowdown, "local_batch_size": w.local_batch_size}
        for w in spec.workers
    ]
    events[1]["time_s"] = begun_s

    def condition(host: str, **changed: object) -> None:
        whole = {"speed": speeds[host], "rate_bits_per_s": None, "dies": False, **changed}
        events.append({"event": "condition_changed", "time_s": now_s, "host": host, "step": step, **whole})

    for number in range(20):
        if number == 8:
            speeds["h1"] = 0.3333
            condition("h1", speed=0.3333, rate_bits_per_s=2.5e7)
        if number == 11:
            before, shares = shares, [shares[0] + shares[1] - shares[1] // 3, shares[1] // 3, *shares[2:]]
            events.append(
                {
                    "event": "shares_changed",
                    "time_s": now_s,
                    "step": step,
                    "before": before,
                    "after": shares,
                    "reason": "worker 1 became 3.0 times slower",
                }
            )
        if number == 15:
            reason = "the computation of worker 3 on h2 does not fit into its declared time"
            events.append({"event": "miniature_slowed", "time_s": now_s, "step": step, "factor": 1.3, "reason": reason})
        compute_s = [0.0004 * samples / speeds[w.host] for samples, w in zip(shares, spec.workers, strict=True)]
        step_time_s = max(compute_s) + 0.1
        step, now_s = step + 10, now_s + 10 * step_time_s
        events.append(
            {
                "event": "step",
                "time_s": now_s,
                "step": step,
                "epoch": step * spec.global_batch_size / 1438,
                "samples_seen": step * spec.global_batch_size,
                "local_batch_sizes": shares,
                "step_time_s": step_time_s,
                "compute_s": compute_s,
                "sync_s": [0.1] * len(shares),
                "wait_s": [max(compute_s) - one for one in compute_s],
                "loss": 0.05,
                "steps": 10,
            }
        )
        if number % 7 == 6:
            now_s += 1.5
            evaluated = {"metrics": {"accuracy": 0.9}, "epoch": 1.0, "step": step, "evaluation_s": 1.5}
            events.append({"event": "evaluated", "time_s": now_s, **evaluated})
    finish = {"step": step, "epoch": 35.6, "reason": "epochs", "training_s": now_s - begun_s, "metrics": {}}
    return [*events, {"event": "training_finished", "time_s": now_s, **finish}]


def _compressed(launch: Launch) -> list[Event]:
    """The log of `_disturbed` where less was sent from the sixth period on."""
    events, number = [], 0
    thin, dense = "topk 0.01 by all_gather", "identity by all_reduce"
    for event in _disturbed(launch):
        if event["event"] == "step":
            number += 1
            way, ratio, gain, sent, sync_s = (
                (thin, 0.01, 0.31, 7860, 0.008) if number > 5 else (dense, 1.0, 1.0, 393_000, 0.11)
            )
            exchange = {"way": way, "compressor": way.split()[0], "ratio": ratio, "collective": way.split()[-1]}
            exchange |= {"gain": gain, "sent_bytes": sent, "dense_bytes": 393_000, "exchanges": 10}
            event = {**event, "exchange": {**exchange, "compress_s": 0.001 * (number > 5), "sync_s": sync_s}}
        events.append(event)
        if event["event"] == "step" and number == 5:
            reason = (
                f"{thin} instead of {dense}: 1 % (100x) sent, about 31% of the energy kept: 24% less time to the target"
            )
            told = {"before": dense, "after": thin, "reason": reason, "step": event["step"], "time_s": event["time_s"]}
            events.append({"event": "exchange_changed", **told})
    return events


def _report(launch: Launch, events: list[Event]) -> Report:
    history = history_of(events, launch.starts)
    return make_report(launch, history, state="finished")


def test_a_run_as_predicted_is_within_the_promise(launch: Launch) -> None:
    report = _report(launch, _events(launch))
    errors = {figure.name: figure.error for figure in report.compared}
    assert errors.pop("steps") == pytest.approx(0, abs=0.01)
    assert all(error == pytest.approx(0, abs=1e-9) for error in errors.values())
    assert report.within_tolerance is True
    assert "within 10 %, which is the goal" in report.verdict[0]
    assert "not within" not in report.verdict[0]
    assert "lies in the predicted" in report.verdict[-1]


@given(
    slowdown=st.floats(1.3, 3.0) | st.floats(0.3, 0.7),
    contention=st.none() | st.floats(1.3, 30.0),
    waited_s=st.just(0.0) | st.floats(1.0, 60.0),
    changes=st.booleans(),
)
def test_a_verdict_cites_what_the_log_holds_and_nothing_else(
    launch: Launch, slowdown: float, contention: float | None, waited_s: float, changes: bool
) -> None:
    streaming = launch.spec.model_copy(update={"stream": Stream(source="replay", rates=(40.0, 80.0))})
    events = _events(launch, slowdown=slowdown)
    step = events[2]
    if contention is not None:
        step |= {"processor_s": [worker_s / contention for worker_s in step["compute_s"]]}
    if waited_s:
        nothing = [0, 0]
        flow = {"rate_per_s": [1.0, 1.0], "buffered": nothing, "dropped": nothing, "repeated": nothing}
        step |= {"stream": {**flow, "wait_s": [waited_s, 0.0]}}
    if changes:
        events.insert(2, {"event": "condition_changed", "time_s": events[1]["time_s"], "host": "local-0", "speed": 0.5})
    report = _report(launch.model_copy(update={"spec": streaming}), events)
    cited = {
        "its conditions changed": changes,
        f"steps waited {formatting.duration(waited_s)} for samples to arrive": bool(waited_s),
        f"computing took {contention or 0:.1f} times its processor time": contention is not None and slowdown > 1,
    }
    assert "in the step time" in report.verdict[1]
    assert {text: text in report.verdict[1] for text in cited} == cited
    assert ("no event of the run says why" in report.verdict[1]) == (not any(cited.values()))
    assert report.contention is not None
    assert report.contention.measured == (None if contention is None else pytest.approx(contention, rel=1e-3))


def test_cost_is_the_run_time_at_the_plans_hourly_rate(launch: Launch) -> None:
    figures = {figure.name: figure for figure in _report(launch, _events(launch)).compared}
    hours = figures["run time"].measured / 3600
    assert figures["cost at the plan's rate"].measured == pytest.approx(hours * launch.hourly_usd)


@pytest.mark.parametrize("change", [{"reason": "stopped"}, {"resumed_step": 50}])
def test_only_the_step_time_of_half_a_run_is_compared(launch: Launch, change: dict[str, object]) -> None:
    report = _report(launch, _events(launch, **change))  # type: ignore[arg-type]  # one keyword of several types
    assert [figure.name for figure in report.compared] == ["step time"]
    assert report.within_tolerance is None


def test_a_run_without_a_step_has_no_report(launch: Launch) -> None:
    with pytest.raises(BadInput, match="has not logged a step yet"):
        _report(launch, _events(launch)[:2])


def test_restarts_are_counted_and_progress_goes_on(launch: Launch) -> None:
    events = _events(launch)
    progress = history_of([*events[:3], {**events[0], "resumed_step": 400}, *events[1:]], launch.starts).run
    assert progress.restarts == 1
    assert progress.first_step == 0
    assert progress.step == events[-1]["step"]


def test_a_disturbed_rehearsal_draws_its_shares_and_says_what_was_not_predicted(rehearsed: Launch) -> None:
    report = _report(rehearsed, _disturbed(rehearsed))
    shares = report.over_time.values("share0")
    assert (report.over_time.step[-1], shares[0] < shares[-1]) == (200, True)
    assert [one.kind for one in report.happenings] == ["condition_changed", "shares_changed", "miniature_slowed"]
    assert "The prediction does not count: its conditions changed; the emulation slowed down." in report.verdict
    assert [worker.speed for worker in report.workers] == [1, 1, 0.25, 0.25]
    assert Report.from_json(report.to_json(), origin="itself") == report


def test_a_compressed_run_tells_what_it_sent(rehearsed: Launch) -> None:
    report = _report(rehearsed, _compressed(rehearsed))
    assert report.sent is not None
    assert report.sent.sent_bytes == 50 * 393_000 + 150 * 7860
    assert report.sent.dense_bytes == 200 * 393_000
    assert [(way.way.split()[0], way.steps) for way in report.sent.ways] == [("identity", 50), ("topk", 150)]
    assert report.sent.changes == 1
    assert [one.kind for one in report.happenings].count("exchange_changed") == 1
    assert Report.from_json(report.to_json(), origin="itself") == report


def test_a_run_without_exchanges_tells_nothing_of_them(launch: Launch) -> None:
    report = _report(launch, _events(launch))
    assert report.sent is None
    assert not {"ratio", "sent"} & {series.key for series in report.over_time.series}


def test_a_stopped_run_goes_on_only_where_it_has_a_checkpoint(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    folder = recorded_run(tmp_path / "runs" / launch.run_id, launch, _events(launch, reason="stopped"))
    with pytest.raises(RunStopped) as stopped:
        finish(Run.find(launch.run_id), rented=False, as_json=False)
    assert stopped.value.hint == "it has no checkpoint to go on from: launch its plan anew"
    (folder / CHECKPOINT_FOLDER).mkdir()
    (folder / CHECKPOINT_FOLDER / LATEST_FILE).write_text("step-7\n", encoding="utf-8")
    with pytest.raises(RunStopped) as kept:
        finish(Run.find(launch.run_id), rented=False, as_json=False)
    assert kept.value.hint == f"go on with `hetopt launch --on local --resume {launch.run_id}`"


def test_a_run_costs_what_it_runs_on(launch: Launch) -> None:
    """Here nothing, on one's own hosts what their owner said, whatever the plan's machines would cost."""
    assert launch.hourly_usd > 0
    assert launch.running_usd_per_hour == 0
    took = launch.prediction.total_s
    priced = launch.prediction.model_copy(update={"cost_usd": Range(value=took.value, low=took.low, high=took.high)})
    own = launch.model_copy(update={"on": "ssh", "prediction": priced})
    assert own.running_usd_per_hour == pytest.approx(3600)
    costs = [one for one in _report(own, _events(own)).compared if one.unit == "USD"]
    assert [(one.name, one.predicted) for one in costs] == [("cost", pytest.approx(took.value))]
    assert own.model_copy(update={"on": "ec2"}).running_usd_per_hour == launch.hourly_usd


@pytest.mark.parametrize(("on", "kept"), [("local", "checkpoint/LATEST"), ("ssh", "objects/ckpt/LATEST")])
def test_a_checkpoint_is_found_wherever_the_run_was(launch: Launch, tmp_path: Path, on: str, kept: str) -> None:
    folder = tmp_path / launch.run_id
    (folder / kept).parent.mkdir(parents=True)
    stopped = RunStatus(state=RunState.STOPPED)
    assert resume_command(folder, stopped, on) is None
    (folder / kept).write_text("step-7\n", encoding="utf-8")
    assert resume_command(folder, stopped, on) == f"hetopt launch --on {on} --resume {launch.run_id}"
    assert resume_command(folder, RunStatus(state=RunState.RUNNING), on) is None


def test_a_run_that_failed_before_its_first_step_is_told_so(launch: Launch) -> None:
    history = history_of(_events(launch)[:2], launch.starts)
    with pytest.raises(BadInput, match="failed before its first step"):
        make_report(launch, history, state="failed")


def test_nobody_is_asked_where_nothing_leaves_this_machine(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(follow, "is_attended", lambda: True)
    monkeypatch.setattr(follow.typer, "confirm", lambda text, **_: asked.append(text) or True)
    assert follow.confirmed(Prepared(launch=launch), yes=False).launch is launch
    assert asked == []
    follow.confirmed(Prepared(launch=launch, connects_to=("box1",)), yes=False)
    assert asked == ["Start?"]


@pytest.mark.parametrize(
    ("hosts", "fates", "said"),
    [
        ("ab", ["cut"], "b is not heard for 8 s: unless it is heard again, the others go on without it"),
        ("ab", ["dies"], "b is gone for 8 s: the others go on from the last checkpoint"),
        ("ab", ["returns"], "b is there again: all save a checkpoint and workers start anew, for 8 s so far"),
        ("ab", ["notice"], "b has to leave: all save a checkpoint and workers start anew, for 8 s so far"),
        ("b", ["dies"], "b is gone for 8 s: the run waits for it"),
        ("ab", ["dies", "workers"], "workers start on a from step 40, for 8 s so far"),
        ("ab", ["cut", "heals"], None),
        ("ab", ["dies", "workers", "training"], None),
        ("ab", ["returns", "step"], None),
    ],
)
def test_a_run_that_stands_still_says_why_since_when_and_what_follows(
    hosts: str, fates: list[str], said: str | None
) -> None:
    def started(names: str, step: int) -> LogEvent:
        workers = [{"host": name} for name in names]
        return an_event("run_started", time_s=1000.0, workers=workers, resumed_step=step)

    def told(fate: str) -> LogEvent:
        match fate:
            case "workers":
                return started("a", 40)
            case "training":
                return an_event("training_started", time_s=1000.0)
            case "step":
                return an_event("step", time_s=1000.0)
            case _:
                return an_event("condition_changed", time_s=1000.0, host="b", **{fate: True})

    run = RunFold.of([started(hosts, 0), an_event("training_started"), *map(told, fates)])
    assert pause(run, 1008.0) == said
