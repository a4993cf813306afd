"""Laws of supervision: slow to change its mind, never for more than it saves, never too late for a deadline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetopt.backends.backend import RunHandle
from hetopt.backends.supervisor import (
    LOOKS,
    RESERVE_S,
    SLOW,
    Decision,
    RunProgress,
    Supervision,
)
from hetopt.core.errors import BudgetStop, CloudRefused
from hetopt.core.events.fold import Roster, RunFold, WorkerTotals
from hetopt.core.events.log import DECISIONS_FILE, read_events
from hetopt.core.events.records import LogEvent
from hetopt.optimizer.plan import Range
from tests.logs import events_of

PROMISED: dict[str, Any] = {
    "step_time_s": Range(value=1.0, low=0.9, high=1.1),
    "steps": 10_000,
    "usd_per_hour": 3.6,
}


def fold(*types: str, step: int = 1000, at_s: float = 1000.0, seen: int = 1000) -> RunFold:
    """A run with a worker on a host of each type, after so many steps."""
    workers = [WorkerTotals(host=f"h{place}", type=name) for place, name in enumerate(types)]
    roster = Roster(workers=workers, present=tuple(range(len(types))))
    return RunFold(roster=roster, step=step, logged_steps=seen, training_started_s=0.0, last_event_s=at_s)


def seen_more(standing: RunProgress, seen: int) -> RunProgress:
    """The same after so many steps that were logged."""
    return replace(standing, run=replace(standing.run, logged_steps=seen))


def standing(step_time_s: float | None, step: int = 1000, at_s: float = 1000.0, seen: int = 1000) -> RunProgress:
    return RunProgress(run=fold("a", "a", step=step, at_s=at_s, seen=seen), step_time_s=step_time_s)


def other(step_time_s: float = 0.5, **changes: Any) -> Decision:
    return Decision(action="replace", step_time_s=step_time_s, **{"name": "h3", "changeover_s": 200.0, **changes})


def supervising(standing: RunProgress, renting: Any = None, run_dir: Path = Path(), **changes: Any) -> Supervision:
    given = {"until_there_s": 300.0, **PROMISED, **changes}
    return Supervision(run_dir=run_dir, renting=renting, standing=standing, **given)


def decided(one: Supervision, others: list[Decision]) -> Decision | None:
    """What looks at as many measurements as it takes come to."""
    for number in range(LOOKS):
        one.standing = seen_more(one.standing, number)
        decision = one.decide(others, None)
        assert decision is None or number == LOOKS - 1
    return decision


def test_a_run_outside_its_interval_is_planned_again_after_three_looks_and_then_left_in_peace() -> None:
    one, told = supervising(standing(1.5)), list[str | None]()
    for number in range(13):
        one.standing = standing(1.5, at_s=1000.0 + 30.0 * number, seen=number)
        told.append(one.look())
    assert [number for number, said in enumerate(told) if said] == [2, 12], "300 s of rest"


def test_looks_that_see_the_same_measurement_are_one() -> None:
    """A run that pauses for a machine to join is not slow three times."""
    one = supervising(standing(1.5))
    for number in range(9):
        one.standing = standing(1.5, at_s=30.0 * number, seen=number // 5)
        assert one.decide([other()], None) is None
    assert one.called_for == ("replace h3", 2)


def test_what_saves_time_is_taken_with_its_gain() -> None:
    decision = decided(supervising(standing(1.5)), [other()])
    assert decision is not None
    assert replace(decision, reason="", expected_saving_s=0.0) == other()
    assert decision.expected_saving_s == pytest.approx(9000 * 1.5 - 200 - 9000 * 0.5)
    assert f"{decision.expected_saving_s:.0f} s and ${decision.expected_saving_s / 3600 * 3.6:.2f}" in decision.reason


@given(st.floats(0.2, 3.0), st.floats(0.2, 3.0), st.floats(0.0, 2000.0))
def test_no_action_takes_longer_than_it_saves(now_s: float, then_s: float, changeover_s: float) -> None:
    one = other(then_s, changeover_s=changeover_s)
    decision = decided(supervising(standing(now_s)), [one])
    assert (decision is not None) == (one.total_s(9000) <= 0.95 * 9000 * now_s)


@given(st.floats(0.2, 3.0), st.integers(0, 9_999), st.floats(0.0, 900.0), st.floats(0.0, 40_000.0))
def test_who_follows_the_deadline_rule_keeps_it_if_machines_on_demand_do(
    step_s: float, step: int, changeover_s: float, deadline_s: float
) -> None:
    """At the last look before the rule acts, all can be lost, and what is left still fits."""
    safe = other(step_s, name="x", changeover_s=changeover_s)
    left_s = (10_000 - step) * step_s
    now = standing(step_s, step=step, at_s=0.0)
    decision = supervising(now, deadline_s=deadline_s).decide([], safe)
    if decision is not None:
        assert changeover_s + left_s <= deadline_s, "nothing is paid for what comes too late"
    elif deadline_s >= changeover_s + left_s:
        assert 2 * changeover_s + left_s + RESERVE_S <= deadline_s


class Rents:
    """A launcher that notes what is asked of it, and answers as a test wants."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals, self.asked = list(refusals), list[object]()

    def replace(self, handle: RunHandle, host: str) -> None:
        self._answer(host)

    def move(self, handle: RunHandle, needed_s: float) -> None:
        self._answer(needed_s)

    def _answer(self, asked: object) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.asked.append(asked)


def test_a_run_moves_once_when_only_machines_on_demand_keep_its_deadline(tmp_path: Path) -> None:
    rents = Rents()

    def supervision(deadline_s: float, renting: Any = rents) -> Supervision:
        now = standing(1.0, at_s=600.0)
        return supervising(now, renting, tmp_path, until_there_s=200.0, deadline_s=deadline_s)

    assert supervision(1e6).look() is None
    one = supervision(10_000.0)
    assert str(one.look()).startswith("moves to the same machines on demand: only 200 s are left")
    assert one.look() is None
    assert rents.asked == [pytest.approx(9200.0)]
    (acted,) = read_events(tmp_path / DECISIONS_FILE)
    assert (acted["event"], acted["action"]) == ("supervisor_acted", "on-demand")
    assert supervision(9_700.0).look() is None, "it would be too late anyway"
    poor = supervision(10_000.0, Rents(BudgetStop("$5.00 do not pay for it.")))
    assert [poor.look() for _ in range(3)] == ["$5.00 do not pay for it.", None, None]


HOSTS = ("h0", "h1", "h2", "h3")


def slowed(times_s: tuple[float, ...], shares: tuple[int, ...] = (24, 24, 24, 24), sync_s: float = 0.0) -> RunProgress:
    return RunProgress(
        run=fold(*["c7i.large"] * 4),
        step_time_s=max(times_s) + sync_s,
        compute_s=times_s,
        sync_s=sync_s,
        shares=shares,
    )


QUICKEST = {"c7i.large": 24.0}


def become_slow(times_s: tuple[float, ...] = (1.0, 1.0, 1.0, 10.0), **changes: Any) -> RunProgress:
    return replace(slowed(times_s), quickest=QUICKEST, **changes)


@given(st.lists(st.floats(0.1, 20.0), min_size=4, max_size=4), st.floats(0.0, 5.0), st.floats(0.0, 1000.0))
def test_a_replacement_never_promises_less_than_what_is_lost(
    times_s: list[float], sync_s: float, until_there_s: float
) -> None:
    at = replace(become_slow(tuple(times_s)), sync_s=sync_s, step_time_s=max(times_s) + sync_s)
    for one in supervising(at, Rents(), until_there_s=until_there_s).replacements():
        assert 0 <= one.changeover_s <= until_there_s
        assert at.step_time_s is not None
        assert one.step_time_s <= at.step_time_s * (1 + 1e-9)
        assert at.speeds[HOSTS.index(one.name)] <= SLOW * QUICKEST["c7i.large"]


def looked(one: Supervision, times: int = LOOKS) -> str | None:
    """What a person is told after so many looks at new measurements."""
    for _ in range(times):
        one.standing = seen_more(one.standing, one.standing.run.logged_steps + 1)
        said = one.look()
    return said


def test_a_rented_host_that_has_become_slow_is_given_back_once(tmp_path: Path) -> None:
    """One that does less than half of its kind."""
    rents = Rents()
    one = supervising(become_slow(), rents, tmp_path)
    assert str(looked(one)).startswith("replaces h3: another machine in the place of h3 saves")
    (acted,) = read_events(tmp_path / DECISIONS_FILE)
    assert (acted["event"], acted["action"], acted["host"]) == ("supervisor_acted", "replace", "h3")
    looked(one, 5)
    assert rents.asked == ["h3"], "a second machine would have no better luck"


def test_a_cloud_that_does_not_answer_ends_no_run_and_is_asked_again(tmp_path: Path) -> None:
    gone = CloudRefused("The network is gone.")
    supervision = supervising(become_slow(), Rents(gone, gone), tmp_path)
    assert looked(supervision) == "The network is gone. h3 stays for now."
    assert looked(supervision, 1) is None, "it is said once"
    assert not (tmp_path / DECISIONS_FILE).exists()
    assert str(looked(supervision, 1)).startswith("replaces h3")


def progress(events: Iterable[LogEvent]) -> RunProgress:
    """After all of these events."""
    standing = RunProgress()
    for event in events:
        standing.take(event)
    return standing


def test_the_best_that_a_type_has_shown_is_remembered() -> None:
    workers = [{"host": "h0", "type": "c7i.large"}, {"host": "h1", "type": "c6i.large"}]
    started = {"event": "run_started", "time_s": 0.0, "workers": workers}

    def steps(count: int, second_s: float) -> list[dict[str, Any]]:
        told = {"event": "step", "time_s": 1.0, "step": 10, "steps": 10, "step_time_s": 1.0, "sync_s": [0.1, 0.1]}
        return [{**told, "local_batch_sizes": [10, 20], "compute_s": [1.0, second_s]} for _ in range(count)]

    assert progress(events_of([started, *steps(3, 1.0)])).quickest == {}, "first steps tell little"
    known = progress(events_of([started, *steps(4, 1.0), *steps(40, 4.0)]))
    assert known.quickest == {"c7i.large": 10.0, "c6i.large": 20.0}
    assert known.speeds[1] == pytest.approx(5.0, rel=0.01)
    again = progress(events_of([started, *steps(4, 1.0), started]))
    assert again.quickest == {"c7i.large": 10.0, "c6i.large": 20.0}
    assert again.speeds == ()


def test_standing_follows_the_log() -> None:
    def step(at_s: float, number: int, step_time_s: float) -> dict[str, Any]:
        times = {"step_time_s": step_time_s, "compute_s": [0.1, 0.2], "sync_s": [0.05, 0.05]}
        return {"event": "step", "time_s": at_s, "step": number, "steps": 10, **times}

    started = {"event": "run_started", "time_s": 0.0, "workers": [{"host": "h0"}, {"host": "h1"}]}
    events = [
        started,
        {"event": "training_started", "time_s": 1.0, "step": 0},
        step(11.0, 10, 1.0),
        step(21.0, 20, 2.0),
    ]
    seen = progress(events_of(events))
    assert (len(seen.workers), seen.now_s) == (2, 21.0)
    assert seen.step_time_s == pytest.approx(1.3)
    assert supervising(seen).steps_left == 9980
    grown = progress(events_of([*events, {**step(31.0, 30, 3.0), "worth": 2.0, "planned_step": 40.0}]))
    assert supervising(grown).steps_left == 4980, "a step of a batch that has grown is worth two"
    lost = [
        {"event": "worker_lost", "time_s": 22.0, "host": "h1"},
        {**started, "time_s": 23.0, "workers": [{"host": "h0"}]},
    ]
    after = progress(events_of([*events, *lost]))
    assert (len(after.workers), after.step_time_s) == (1, None), "other workers, other times"
