"""The fold of a log into moments and happenings: nothing is lost, and what is not known is passed over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.events.fold import RunFold, RunHistory
from hetopt.core.events.log import Event
from hetopt.core.events.records import LogEvent
from hetopt.reports import timeline as reports
from hetopt.reports.timeline import Happening, happening
from tests.logs import an_event, events_of


def happenings(events: Iterable[LogEvent], **options: Any) -> tuple[Happening, ...]:
    return reports.happenings(RunHistory.of(events), **options)


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
    told = happenings(events_of(events), time_factor=5.0)
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
    told = happenings(events_of([*events, changed("h2", 1.02, speed=0.2), changed("h2", 9.0, speed=0.2)]))
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


@given(st.lists(st.sampled_from([DENSE, THIN, None]), min_size=1, max_size=40))
def test_what_was_sent_is_added_up(exchanges: list[Event | None]) -> None:
    events = exchanging(*exchanges)
    told = RunFold.of(events_of(events)).traffic
    known = [exchange for exchange in exchanges if exchange is not None]
    assert (told is None) == (not known)
    if told is not None:
        assert told.sent_bytes == sum(10 * one["sent_bytes"] for one in known)
        assert told.dense_bytes == 10 * 4000 * len(known)
        assert sum(told.steps.values()) == 10 * len(known)
        assert told.way == known[-1]["way"]
