"""Events for tests: what a test says nothing of is filled in, so that it can tell of one thing alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hetopt.core.events.fold import RunHistory
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.events.records import ANY_EVENT, Happened, LogEvent
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch

BY_KIND: dict[str, type[Happened]] = {
    kind: record for record in get_args(get_args(LogEvent)[0]) for kind in get_args(get_type_hints(record)["event"])
}
KNOWN = frozenset(BY_KIND)

_REST: Mapping[str, Mapping[str, Any]] = {
    "run_started": {"task": "digits", "workers": [{"host": "h0"}]},
    "step": {"step": 1, "steps": 1, "step_time_s": 0.1, "epoch": 0.1, "samples_seen": 8, "loss": 1.0},
    "evaluated": {"step": 1, "metrics": {}},
    "training_finished": {"step": 1, "reason": "epochs", "training_s": 1.0},
    "shares_changed": {"step": 1, "after": [8]},
    "exchange_changed": {"step": 1, "after": "identity"},
    "worker_lost": {"worker": 0, "host": "h0"},
    "condition_changed": {"host": "h0"},
    "miniature_slowed": {"factor": 2.0},
}


def fields(name: str, **given: Any) -> dict[str, Any]:
    """One event as it is written; lists of a step are as long as the one that is given."""
    filled = {"event": name, "time_s": 1.0, **_REST.get(name, {}), **given}
    if name == "step":
        lists = ("local_batch_sizes", "compute_s", "sync_s", "wait_s")
        workers = next((len(filled[key]) for key in (*lists, "pace_use") if filled.get(key)), 1)
        filled = {**{key: [8 if key == "local_batch_sizes" else 0.01] * workers for key in lists}, **filled}
    return filled


def event_of(fields: Mapping[str, Any]) -> LogEvent:
    """The event with these fields, as if it had been written and read."""
    return ANY_EVENT.validate_json(json.dumps(fields))


def an_event(name: str, **given: Any) -> LogEvent:
    """One event as it is read."""
    return event_of(fields(name, **given))


def recorded_run(folder: Path, launch: Launch, log: Iterable[Mapping[str, Any] | str]) -> Path:
    """The folder of a run, made with its launch and its log: events, or lines as they are."""
    folder.mkdir(parents=True)
    launch.save(folder / LAUNCH_FILE)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in log]
    (folder / EVENTS_FILE).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


def history_of(log: Iterable[Mapping[str, Any]], starts: Iterable[float] = ()) -> RunHistory:
    """The history of such a log."""
    return RunHistory.of(events_of(log), starts)


def events_of(log: Iterable[Mapping[str, Any]]) -> list[LogEvent]:
    """The events of a log as it is written; those of later versions are passed over."""
    return [
        an_event(one["event"], **{k: v for k, v in one.items() if k != "event"}) for one in log if one["event"] in KNOWN
    ]
