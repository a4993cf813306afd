"""The fold of a log into moments and happenings: nothing is lost, and what is not known is passed over."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.events.fold import RunFold, RunHistory
from hetopt.core.events.log import Event
from hetopt.core.events.records import LogEvent
from hetopt.reports import timeline as reports
from hetopt.reports.timeline import Timeline, happening
from tests.logs import an_event, event_of, events_of


def timeline(events: Iterable[LogEvent], **options: Any) -> Timeline:
    return reports.timeline(RunHistory.of(events), **options)


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


PERIODS = st.lists(st.tuples(st.integers(1, 20), st.tuples(st.floats(0, 9), st.floats(0, 9))), min_size=1, max_size=60)


@given(PERIODS, st.integers(1, 70))
def test_coarser_moments_keep_steps_and_means(periods: list[tuple[int, tuple[float, float]]], most: int) -> None:
    events, step = started("h0", "h1"), 0
    for place, (steps, compute_s) in enumerate(periods):
        step += steps
        events.append(period(10.0 * (place + 1), step=step, steps=steps, compute_s=compute_s))
    told = timeline(events_of(events), most=most)
    assert 1 <= len(told.moments) <= most
    assert sum(moment.steps for moment in told.moments) == step == told.moments[-1].step
    assert told.moments[-1].end_s == 10.0 * len(periods)
    assert all(earlier.end_s <= later.end_s for earlier, later in itertools.pairwise(told.moments))
    for rank in (0, 1):
        whole = sum(steps * compute_s[rank] for steps, compute_s in periods)
        assert sum(m.steps * m.compute_s[rank] for m in told.moments) == pytest.approx(whole, abs=1e-3)


def test_time_counts_from_the_first_start_of_training_across_restarts() -> None:
    events = [*started("h0"), period(5.0, step=10, steps=10, compute_s=[0.1])]
    again = [{**event, "time_s": event["time_s"] + 60} for event in started("h0")]
    told = timeline(events_of([*events, *again, period(70.0, step=12, steps=2, compute_s=[0.1])]))
    assert [(moment.begin_s, moment.end_s) for moment in told.moments] == [(4.0, 5.0), (69.8, 70.0)]


def test_a_log_without_a_step_has_no_moments() -> None:
    assert timeline([]).moments == ()
    assert timeline(events_of(started("h0"))).moments == ()


def test_events_of_every_day_and_of_later_versions_are_no_happenings() -> None:
    for name in ("evaluated", "training_finished", "training_started"):
        assert happening(an_event(name), str) is None


def changed(host: str, at_s: float, **condition: object) -> Event:
    whole = {"speed": 1.0, "rate_bits_per_s": None, "dies": False, "step": 40, **condition}
    return {"event": "condition_changed", "time_s": 1000.0 + at_s, "host": host, **whole}


def test_happenings_say_what_and_where() -> None:
    events = [
        *started("h0", "h1"),
        changed("h1", 1.0, speed=0.25, rate_bits_per_s=2e6),
        {"event": "memory_bound_learned", "time_s": 1002.0, "rank": 1, "samples": 12},
        {"event": "shares_changed", "time_s": 1003.0, "step": 50, "before": [8, 8], "after": [9, 7], "reason": "why"},
        {"event": "miniature_slowed", "time_s": 1004.0, "step": 60, "factor": 1.3, "reason": "it does not fit"},
        changed("h0", 5.0, dies=True),
    ]
    told = timeline(events_of(events), time_factor=5.0).happenings
    assert [one.sentence for one in told] == [
        "h1: speed 0.25, link 10 Mbit/s",
        "h1: holds no more than 12 samples at a time",
        "local batch sizes 9, 7 (why)",
        "it does not fit",
        "h0: dead",
    ]
    assert [one.time_s for one in told] == [1, 2, 3, 4, 5]
    assert [one.step for one in told] == [40, 0, 50, 60, 40], "without a step of its own: the step reached"


def test_what_happens_to_several_hosts_at_once_is_one_thing() -> None:
    events = [*started("h0", "h1", "h2"), changed("h0", 1.0, speed=0.5), changed("h1", 1.01, speed=0.5)]
    told = timeline(events_of([*events, changed("h2", 1.02, speed=0.2), changed("h2", 9.0, speed=0.2)])).happenings
    assert [(one.hosts, one.text) for one in told] == [
        (("h0", "h1"), "speed 0.5"),
        (("h2",), "speed 0.2"),
        (("h2",), "speed 0.2"),
    ]


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


def test_moments_tell_what_was_exchanged() -> None:
    first, second = timeline(events_of(exchanging(DENSE, THIN))).moments
    assert first.exchange is not None
    assert second.exchange is not None
    assert (first.exchange.sent_share, first.exchange.gain, first.exchange.ratio) == (1, 1, 1)
    assert (second.exchange.way, second.exchange.sent_share) == ("topk 0.01 by all_gather", 0.02)
    assert second.exchange.time_s == pytest.approx(0.012)


def test_logs_without_exchanges_are_read_as_before() -> None:
    assert [moment.exchange for moment in timeline(events_of(exchanging(None, THIN, None))).moments][::2] == [
        None,
        None,
    ]
    assert RunFold.of(events_of(exchanging(None, None))).traffic is None


@given(st.lists(st.sampled_from([DENSE, THIN, None]), min_size=1, max_size=40), st.integers(1, 50))
def test_coarser_moments_keep_what_was_sent(exchanges: list[Event | None], most: int) -> None:
    events = exchanging(*exchanges)
    moments = timeline(events_of(events), most=most).moments
    together = -(-len(exchanges) // most)
    for start, moment in zip(range(0, len(exchanges), together), moments, strict=True):
        own = [exchange for exchange in exchanges[start : start + together] if exchange is not None]
        if not own:
            assert moment.exchange is None
            continue
        assert moment.exchange is not None
        assert moment.exchange.way == own[-1]["way"]
        for name in ("sent_bytes", "gain", "ratio", "sync_s"):
            assert getattr(moment.exchange, name) == pytest.approx(sum(one[name] for one in own) / len(own))
    told = RunFold.of(events_of(events)).traffic
    known = [exchange for exchange in exchanges if exchange is not None]
    assert (told is None) == (not known)
    if told is not None:
        assert told.sent_bytes == sum(10 * one["sent_bytes"] for one in known)
        assert told.dense_bytes == 10 * 4000 * len(known)
        assert sum(told.steps.values()) == 10 * len(known)
        assert told.way == known[-1]["way"]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            "the gradient's norm changed by 30%: 1 % (100x)",
            "now B 0.1 by C (the gradient's norm changed by 30%: 1 % (100x))",
        ),
        (
            "B 0.1 by C instead of A: 20% less time to the target",
            "B 0.1 by C instead of A: 20% less time to the target",
        ),
    ],
)
def test_a_changed_exchange_names_its_way_once(reason: str, text: str) -> None:
    event = {"event": "exchange_changed", "time_s": 5.0, "step": 7, "before": "A", "after": "B 0.1 by C"}
    told = happening(event_of({**event, "reason": reason}), str)
    assert told is not None
    assert told.text == text
    assert told.step == 7
    assert told.is_routine
    assert RunFold.of(events_of([*started("h0"), {**event, "reason": reason}])).exchange_changes == 1


@pytest.mark.parametrize(
    ("says", "told"),
    [("harmless", "learns as fast"), ("harmful", "falls behind"), ("undecided", "cannot be compared yet")],
)
def test_what_twins_have_shown_is_told(says, told):
    event = {"event": "twins_tried", "time_s": 3.0, "step": 5, "ratio": 0.001, "says": says, "took_s": 2.5}
    found = happening(event_of(event), str, at_s=2.0)
    assert (found.kind, found.step, found.time_s) == ("twins_tried", 5, 2.0)
    assert "0.1 % of the gradient" in found.text
    assert "2.5 s" in found.text
    assert told in found.text


@pytest.mark.parametrize(
    ("action", "acted", "measured"),
    [
        ("drop", "dropped: it costs more than it brings", "a step takes 120 ms without h1; 100 ms was expected"),
        (
            "replace",
            "another machine takes its place: it costs more than it brings",
            "a step takes 120 ms with another machine as h1; 100 ms was expected",
        ),
    ],
)
def test_what_the_supervisor_did_and_what_came_of_it_is_told(action: str, acted: str, measured: str) -> None:
    did = {"event": "supervisor_acted", "time_s": 3.0, "step": 5, "action": action, "host": "h1"}
    found = happening(event_of({**did, "reason": "it costs more than it brings"}), str)
    assert found is not None
    assert found.sentence == f"h1: {acted}"
    times = {"step_time_before_s": 0.5, "step_time_expected_s": 0.1, "step_time_measured_s": 0.12}
    told = {"event": "supervisor_measured", "time_s": 9.0, "step": 60, "action": action, "name": "h1", **times}
    found = happening(event_of(told), str)
    assert found is not None
    assert found.text == f"{measured}, 500 ms before"
