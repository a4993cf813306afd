"""A run that was stopped, went on and lost workers is one run: its parts add up, and pauses count for nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.events.fold import RunClock, RunFold, RunHistory
from hetopt.core.events.log import EventReader, read_log
from hetopt.core.events.records import LogEvent, RunStarted, StepsLogged, TrainingFinished
from hetopt.core.run_status import RunState, end_reason
from hetopt.reports.live_run import LiveRun
from hetopt.reports.scalars import Exposed, exposition
from hetopt.reports.series import over_time
from hetopt.reports.timeline import happenings
from tests.logs import an_event

RUNS = Path(__file__).resolve().parents[1] / "recorded" / "runs"
STARTUP_S, STEP_S = 10.0, 0.5


def session(
    at_s: float, steps: int, *, first: int = 0, hosts: Sequence[str] = ("h0", "h1"), ends: bool = True
) -> list[LogEvent]:
    """A session that was launched at a moment and did so many steps, one a line."""
    workers = [{"host": host, "type": "c7i.large", "local_batch_size": 8} for host in hosts]
    now_s = at_s + STARTUP_S
    events = [
        an_event("run_started", time_s=now_s, workers=workers, resumed_step=first),
        an_event("training_started", time_s=now_s, step=first),
    ]
    for number in range(steps):
        now_s += STEP_S
        step: dict[str, Any] = {"step": first + number + 1, "step_time_s": STEP_S, "compute_s": [0.4] * len(hosts)}
        events.append(an_event("step", time_s=now_s, **step))
    if ends:
        told = {"step": first + steps, "reason": "stopped", "training_s": steps * STEP_S}
        events.append(an_event("training_finished", time_s=now_s, **told))
    return events


SESSIONS = st.lists(
    st.tuples(st.integers(1, 6), st.floats(0.0, 1e6), st.integers(0, 3)), min_size=1, max_size=5
)  # steps, pause before, steps that are lost


@given(SESSIONS)
def test_sessions_add_up_and_pauses_count_for_nothing(told: list[tuple[int, float, int]]) -> None:
    events: list[LogEvent] = []
    starts, now_s, step, lost, done = [], 1e6, 0, 0, 0
    for number, (steps, pause_s, back) in enumerate(told):
        now_s += pause_s if number else 0.0
        again = min(back, step)
        starts.append(now_s)
        events += session(now_s, steps, first=step - again)
        now_s += STARTUP_S + steps * STEP_S
        step, lost, done = step - again + steps, lost + again, done + steps
    history = RunHistory.of(events, starts)
    progress = history.run
    assert (progress.sessions, progress.step, progress.lost_steps) == (len(told), step, lost)
    assert progress.logged_steps == done
    assert progress.startup_s == pytest.approx(len(told) * STARTUP_S, abs=1e-3)
    assert progress.training_s == pytest.approx(done * STEP_S, abs=1e-3)
    assert progress.elapsed_s == pytest.approx(len(told) * STARTUP_S + done * STEP_S, abs=1e-3)
    assert progress.restarts == 0
    assert progress.recovery_s == 0
    drawn = over_time(history)
    assert drawn.end_s[-1] == pytest.approx((len(told) - 1) * STARTUP_S + done * STEP_S, abs=2e-3)
    assert list(drawn.end_s) == sorted(drawn.end_s)
    assert sum(one.kind == "resumed" for one in happenings(history)) == len(told) - 1


@given(st.lists(st.sets(st.sampled_from(["h0", "h1", "h2"]), min_size=1), min_size=1, max_size=6))
def test_each_worker_keeps_its_place_whoever_else_is_there(crews: list[set[str]]) -> None:
    events: list[LogEvent] = []
    for number, crew in enumerate(crews):
        events += session(1000.0 + 100 * number, 2, first=2 * number, hosts=sorted(crew), ends=False)
    history = RunHistory.of(events)
    progress, drawn = history.run, over_time(history)
    hosts = [worker.host for worker in progress.workers]
    assert sorted(hosts) == sorted(set().union(*crews))
    assert [curve.label for curve in drawn.series if curve.key.startswith("share")] == hosts
    for place, worker in enumerate(progress.workers):
        there = sum(worker.host in crew for crew in crews)
        assert worker.steps == 2 * there
        assert worker.mean_compute_s == pytest.approx(0.4)
        assert worker.is_present == (worker.host in crews[-1])
        assert sum(drawn.values(f"compute{place}") > 0) == 2 * there
    told = re.findall(r'hetopt_compute_seconds{.*host="(\w+)"', exposition([Exposed(name="run", run=progress)]))
    assert set(told) == crews[-1], "who is gone computes nothing"
    assert progress.restarts == len(crews) - 1


def test_steps_of_workers_that_were_never_announced_are_theirs() -> None:
    events = [one for one in session(1000.0, 3) if isinstance(one, StepsLogged)]
    history = RunHistory.of(events)
    progress = history.run
    assert [worker.host for worker in progress.workers] == ["worker 0", "worker 1"]
    assert (progress.logged_steps, len(over_time(history).end_s)) == (3, 3)
    assert progress.startup_s == 0.0


def test_a_clock_that_was_set_moves_no_time() -> None:
    events = session(1000.0, 4)
    jump = an_event("clock_jumped", time_s=events[3].time_s + 3600.0, by_s=3600.0)
    later = [one.__class__(**{**vars(one), "time_s": one.time_s + 3600.0}) for one in events[4:]]
    assert RunFold.of([*events[:4], jump, *later], [1000.0]).elapsed_s == pytest.approx(STARTUP_S + 4 * STEP_S)


def test_time_never_goes_back() -> None:
    clock = RunClock()
    times = []
    for time_s in (5.0, 9.0, 7.0, 8.0, 20.0):
        clock.take(an_event("training_started", time_s=time_s))
        times.append(clock.now_s)
    assert times == [0, 4, 4, 4, 15]


def read(name: str) -> tuple[list[LogEvent], RunHistory, tuple[float, ...]]:
    events = read_log(RUNS / f"{name}.jsonl").events
    starts = [events[0].time_s - 12.0]
    stops = [place for place, event in enumerate(events) if isinstance(event, TrainingFinished)]
    for place in stops[:-1]:
        again = next(event for event in events[place:] if isinstance(event, RunStarted))
        starts.append(again.time_s - 8.0)
    return events, RunHistory.of(events, starts), tuple(starts)


def test_a_real_run_that_was_stopped_and_went_on() -> None:
    events, history, starts = read("resumed")
    progress = history.run
    first, last = (event for event in events if isinstance(event, TrainingFinished))
    assert (progress.sessions, progress.lost_steps, progress.finish_reason) == (2, 0, "epochs")
    assert progress.startup_s == pytest.approx(20.0, abs=0.1)
    # The trainer's own clock adds its sessions up as well.
    assert progress.training_s == pytest.approx(last.training_s, rel=0.01)
    assert progress.clock.idle_s == pytest.approx(starts[1] - first.time_s)
    assert progress.elapsed_s == pytest.approx(20.0 + (last.training_s or 0.0), rel=0.01)


@pytest.mark.parametrize("state", RunState)
@pytest.mark.parametrize("reason", ["stopped", "epochs"])
def test_only_a_run_that_is_over_says_why(state: RunState, reason: str, tmp_path: Path) -> None:
    """Workers that stopped and are started again are a run that goes on."""
    *events, stopped = session(1000.0, 4)
    live = LiveRun.of(tmp_path, None)
    for event in (*events, replace(stopped, reason=reason)):  # type: ignore[type-var]  # all events are records
        live.progress.take(event)
    said = {reason} - {state.value} if state.is_over else set()
    assert end_reason(state, live.progress) == live.summary("run", state, now_s=2000.0).reason == next(iter(said), None)


def test_a_real_run_that_lost_a_worker() -> None:
    _, history, _ = read("lost-worker")
    progress = history.run
    assert (progress.sessions, progress.restarts, progress.lost_steps) == (1, 2, 0)
    assert [worker.host for worker in progress.workers] == ["local-0", "local-1"]
    assert 3.3 < progress.recovery_s < 6.0, "as the log tells of it, and the step that was not told of"
    assert progress.workers[1].steps < progress.workers[0].steps
    drawn = over_time(history)
    alone = np.isnan(drawn.values("compute1"))
    assert set(drawn.values("share0")[alone]) == {32}
    assert np.isnan(drawn.values("share1")[alone]).all()


def test_what_a_step_tells_is_finite_in_all_that_is_made_of_it() -> None:
    _, history, _ = read("lost-worker")
    assert json.loads(over_time(history).model_dump_json())["series"]


LOGS = {name: (RUNS / f"{name}.jsonl").read_bytes() for name in ("resumed", "lost-worker")}
STRANGE = (b"[]", b"{", b'{"event": "of_a_later_version", "time_s": 1e9}', b'{"event": "step", "time_s": 1e9}', b"\xff")


@given(
    st.sampled_from(sorted(LOGS)),
    st.lists(st.floats(0, 1), max_size=5),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(STRANGE)), max_size=4),
)
def test_however_a_log_grows_and_whatever_else_is_in_it_the_fold_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, name: str, cuts: list[float], strange: list[tuple[float, bytes]]
) -> None:
    """Read in parts that end anywhere, looked at in between, with lines that are no events among the others."""
    whole = RunHistory.of(read_log(RUNS / f"{name}.jsonl").events)
    lines = LOGS[name].splitlines()
    for part, line in strange:
        lines.insert(round(part * len(lines)), line)
    data = b"".join(line + b"\n" for line in lines)
    ends = [*sorted(round(part * len(data)) for part in cuts), len(data)]
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    reader, history = EventReader(path=path), RunHistory()
    for end in ends:
        path.write_bytes(data[:end])
        for event in reader.read():
            history.take(event)
        assert len(history.run.workers) == len(history.run.roster.workers)
        assert exposition([Exposed(name=name, run=history.run)])
    assert history == whole
    assert history.run.workers == whole.run.workers
    assert reader.unread.lines == len(strange)
    assert (over_time(history), happenings(history)) == (over_time(whole), happenings(whole))


def test_the_sums_of_many_steps_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    events = session(1000.0, 50)
    whole = RunFold.of(events)
    monkeypatch.setattr("hetopt.core.events.fold._SUMMED_AT_ONCE", 7)
    few = RunFold.of(events)
    assert len(few._unsummed) <= 7
    for one, other in zip(few.workers, whole.workers, strict=True):
        assert one.steps == other.steps == 50
        assert one.compute_s == pytest.approx(other.compute_s) == pytest.approx(50 * 0.4)
