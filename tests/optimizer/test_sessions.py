"""A run that was stopped, went on and lost workers is one run: its parts add up, and pauses count for nothing.

The fold of a log into moments and happenings: nothing is lost, and what is not known is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetopt.core.events.fold import RunFold, RunHistory
from hetopt.core.events.log import Event, EventReader, read_log
from hetopt.core.events.records import LogEvent, RunStarted, TrainingFinished
from hetopt.reports.series import over_time
from hetopt.reports.timeline import happenings
from tests.logs import an_event, events_of

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
    assert (progress.clock.sessions, progress.step, progress.lost_steps) == (len(told), step, lost)
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
    hosts = [worker.host for worker in progress.roster.workers]
    assert sorted(hosts) == sorted(set().union(*crews))
    assert [curve.label for curve in drawn.series if curve.key.startswith("share")] == hosts
    for place, worker in enumerate(progress.roster.workers):
        there = sum(worker.host in crew for crew in crews)
        assert worker.steps == 2 * there
        assert worker.compute_s / worker.steps == pytest.approx(0.4)
        assert (place in progress.roster.present) == (worker.host in crews[-1])
        (computing,) = (curve.values for curve in drawn.series if curve.key == f"compute{place}")
        assert sum(value is not None for value in computing) == 2 * there
    assert progress.restarts == len(crews) - 1


def test_a_clock_that_was_set_moves_no_time() -> None:
    events = session(1000.0, 4)
    jump = an_event("clock_jumped", time_s=events[3].time_s + 3600.0, by_s=3600.0)
    later = [one.__class__(**{**vars(one), "time_s": one.time_s + 3600.0}) for one in events[4:]]
    assert RunFold.of([*events[:4], jump, *later], [1000.0]).elapsed_s == pytest.approx(STARTUP_S + 4 * STEP_S)


def read(name: str) -> tuple[list[LogEvent], RunHistory, tuple[float, ...]]:
    events = read_log(RUNS / f"{name}.jsonl")
    starts = [events[0].time_s - 12.0]
    stops = [place for place, event in enumerate(events) if isinstance(event, TrainingFinished)]
    for place in stops[:-1]:
        again = next(event for event in events[place:] if isinstance(event, RunStarted))
        starts.append(again.time_s - 8.0)
    return events, RunHistory.of(events, starts), tuple(starts)


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
    whole = RunHistory.of(read_log(RUNS / f"{name}.jsonl"))
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
    assert history == whole
    assert history.run.roster == whole.run.roster
    assert reader.unread.lines == len(strange)
    assert (over_time(history), happenings(history)) == (over_time(whole), happenings(whole))


def started(*hosts: str) -> list[Event]:
    workers = [{"host": host, "type": "local", "slowdown": 1, "local_batch_size": 8} for host in hosts]
    return [
        {"event": "run_started", "time_s": 990.0, "task": "digits", "workers": workers, "global_batch_size": 8},
        {"event": "training_started", "time_s": 1000.0, "step": 0},
    ]


def period(end_s: float, *, step: int, steps: int, compute_s: Sequence[float]) -> Event:
    return {
        "event": "step",
        "time_s": 1000.0 + end_s,
        "step": step,
        "steps": steps,
        "step_time_s": 0.1,
        "local_batch_sizes": [8] * len(compute_s),
        "compute_s": list(compute_s),
        "wait_s": [0.0] * len(compute_s),
        "sync_s": [0.01] * len(compute_s),
        "epoch": 0.1,
        "samples_seen": 8 * step,
        "loss": 1.0,
    }


def traffic(way: str, *, ratio: float, sent_bytes: int, gain: float = 1.0, sync_s: float = 0.01) -> Event:
    name, _, collective = way.partition(" by ")
    return {
        "way": way,
        "compressor": name.split()[0],
        "ratio": ratio,
        "collective": collective,
        "gain": gain,
        "sent_bytes": sent_bytes,
        "dense_bytes": 4000,
        "compress_s": 0.002,
        "sync_s": sync_s,
        "exchanges": 3,
    }


DENSE = traffic("identity by all_reduce", ratio=1.0, sent_bytes=4000)
THIN = traffic("topk 0.01 by all_gather", ratio=0.01, sent_bytes=80, gain=0.4)


def exchanging(*exchanges: Event | None, steps: int = 10) -> list[Event]:
    events = started("h0", "h1")
    for place, exchange in enumerate(exchanges, start=1):
        event = period(10.0 * place, step=steps * place, steps=steps, compute_s=[0.1, 0.1])
        events.append(event if exchange is None else {**event, "exchange": exchange})
    return events


@given(st.lists(st.sampled_from([DENSE, THIN, None]), min_size=1, max_size=40))
def test_what_was_sent_is_added_up(exchanges: list[Event | None]) -> None:
    events = exchanging(*exchanges)
    told = RunFold.of(events_of(events))
    known = [exchange for exchange in exchanges if exchange is not None]
    assert told.sent_bytes == sum(10 * one["sent_bytes"] for one in known)
    assert told.dense_bytes == 10 * 4000 * len(known)
    assert list(told.ways) == list(dict.fromkeys(one["way"] for one in known))
    assert sum(told.ways.values()) == 10 * len(known)
