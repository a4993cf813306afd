"""What the supervisor did, in a log beside the run's own: that of a rented run is a copy, and grows from the cloud."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from hetopt.core import formatting
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.events.reader import EventsRead, read_log

DECISIONS_FILE = "decisions.jsonl"


def write_decision(run_dir: Path, event: str, fields: Mapping[str, Any]) -> None:
    """Append an event of the supervisor."""
    with closing(EventLog(run_dir / DECISIONS_FILE)) as decisions:
        decisions.write(event, **fields)


def read_with_decisions(run_dir: Path) -> EventsRead:
    """The run's events and the supervisor's, in the order of their times; none of a run that has not begun.

    Raises:
        BadInput: a log cannot be read.
    """
    decisions = read_log(run_dir / DECISIONS_FILE)
    run = read_log(run_dir / EVENTS_FILE)
    if not decisions.events:
        return EventsRead(events=run.events, unread=run.unread + decisions.unread)
    merged = list(heapq.merge(run.events, decisions.events, key=lambda event: event.time_s))
    return EventsRead(events=merged, unread=run.unread + decisions.unread)


_HOW = {
    "drop": "without",
    "replace": "with another machine as",
    "on-demand": "on",
    "add": "with more like",
    "switch": "in",
}


def gain_in_words(told: Mapping[str, Any], sentence: str) -> str:
    """What came of a decision, by the fields of the event that says so.

    Args:
        told: the fields of ``supervisor_measured``.
        sentence: with places for ``how`` (whom the run does without, whose place was taken, or where it is now) and
            for the times of a step ``before``, ``expected`` and ``measured``.
    """
    times = {which: formatting.duration(told[f"step_time_{which}_s"]) for which in ("before", "expected", "measured")}
    return sentence.format(how=f"{_HOW[told['action']]} {told['name']}", **times)
