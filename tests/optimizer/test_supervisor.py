"""Laws of supervision: a run moves once, never for nothing, and never too late for its deadline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetopt.backends.backend import RunHandle
from hetopt.backends.supervisor import RESERVE_S, Supervision
from hetopt.core.errors import BadInput, BudgetStop
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import DECISIONS_FILE, read_events
from hetopt.core.events.records import LogEvent
from tests.logs import events_of


class Rents:
    """A launcher that notes what is asked of it, and answers as a test wants."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals, self.asked = list(refusals), list[float]()

    def move(self, handle: RunHandle, needed_s: float) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.asked.append(needed_s)


def supervising(
    renting: Any = None, run_dir: Path = Path(), step: int = 1000, at_s: float = 0.0, **changes: Any
) -> Any:
    """A run of 10,000 steps of a second, which has begun."""
    run = RunFold(step=step, training_started_s=0.0, last_event_s=at_s)
    given = {"steps": 10_000, "step_time_s": 1.0, "until_there_s": 200.0, **changes}
    return Supervision(run_dir=run_dir, run=run, renting=renting, **given)


@given(st.floats(0.2, 3.0), st.integers(0, 9_999), st.floats(0.0, 900.0), st.floats(0.0, 40_000.0))
def test_who_follows_the_deadline_rule_keeps_it_if_machines_on_demand_do(
    step_s: float, step: int, changeover_s: float, deadline_s: float
) -> None:
    """At the last look before the rule acts, all can be lost, and what is left still fits."""
    rents, left_s = Rents(BudgetStop("asked")), (10_000 - step) * step_s
    one = supervising(rents, step=step, step_time_s=step_s, until_there_s=changeover_s, deadline_s=deadline_s)
    if one.look() is not None:
        assert changeover_s + left_s <= deadline_s, "nothing is paid for what comes too late"
    elif deadline_s >= changeover_s + left_s:
        assert 2 * changeover_s + left_s + RESERVE_S <= deadline_s


def test_a_run_moves_once_when_only_machines_on_demand_keep_its_deadline(tmp_path: Path) -> None:
    rents = Rents()

    def supervision(deadline_s: float | None, renting: Any = rents) -> Supervision:
        made: Supervision = supervising(renting, tmp_path, at_s=600.0, deadline_s=deadline_s)
        return made

    assert supervision(1e6).look() is None
    assert supervision(None).look() is None
    one = supervision(10_000.0)
    assert str(one.look()).startswith("moves to the same machines on demand: only 200 s are left")
    assert one.look() is None
    assert rents.asked == [pytest.approx(9200.0)]
    (acted,) = read_events(tmp_path / DECISIONS_FILE)
    assert (acted["event"], acted["action"]) == ("supervisor_acted", "on-demand")
    assert supervision(9_700.0).look() is None, "it would be too late anyway"
    poor = supervision(10_000.0, Rents(BudgetStop("$5.00 do not pay for it.")))
    assert [poor.look() for _ in range(3)] == ["$5.00 do not pay for it.", None, None]
    assert supervision(10_000.0, Rents(BadInput("it is over."))).look() is None


def follow(one: Supervision, events: Iterable[LogEvent]) -> None:
    for event in events:
        one.run.take(event)
        one.take(event)


def test_a_step_takes_what_it_took_with_all_workers() -> None:
    def step(at_s: float, number: int, step_time_s: float, workers: int = 2, **more: float) -> dict[str, Any]:
        times = {"step_time_s": step_time_s, "compute_s": [0.1] * workers, "sync_s": [0.05] * workers}
        return {"event": "step", "time_s": at_s, "step": number, "steps": 10, **times, **more}

    one = supervising(step=0)
    follow(one, events_of([step(11.0, 10, 2.0), step(21.0, 20, 2.0)]))
    assert one.step_time_s == pytest.approx(1.51), "from what was predicted on"
    assert one.steps_left == 9980
    follow(one, events_of([step(31.0, 30, 9.0, workers=1)]))
    assert one.step_time_s == pytest.approx(1.51), "those that are away come back with the move"
    follow(one, events_of([step(41.0, 40, 1.51, worth=2.0, planned_step=40.0)]))
    assert one.steps_left == 4980, "a step of a batch that has grown is worth two"
