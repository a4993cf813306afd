"""Laws of supervision: slow to change its mind, never for more than it saves, never too late for a deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.backend import Pools
from hetopt.backends.supervisor.acting import (
    LONGER,
    SLOW,
    Supervision,
    in_other_zones,
    with_another_for_each_host,
    with_more_of_each_type,
    without_each_host,
)
from hetopt.backends.supervisor.decide import Alternative, Decision, Hysteresis, PredictedGain, RunProgress, Supervisor
from hetopt.core.errors import BudgetStop, CloudRefused
from hetopt.core.events.log import DECISIONS_FILE, read_events
from tests.logs import events_of

PROMISE = PredictedGain(step_time_s=1.0, step_time_low_s=0.9, step_time_high_s=1.1, steps=10_000, usd_per_hour=3.6)
QUICK = Hysteresis(looks=3, rest_s=300.0, margin=0.05, reserve_s=60.0)


def promise(**changes: Any) -> PredictedGain:
    return PredictedGain(**{**vars(PROMISE), **changes})


def standing(step_time_s: float | None, step: int = 1000, at_s: float = 1000.0, seen: int = 1000) -> RunProgress:
    return RunProgress(step=step, steps_seen=seen, step_time_s=step_time_s, began_s=0.0, now_s=at_s, workers=2)


def other(step_time_s: float = 0.5, usd_per_hour: float = 3.6, **changes: Any) -> Alternative:
    usual = {"action": "add", "name": "4 x g5.xlarge", "changeover_s": 200.0}
    return Alternative(step_time_s=step_time_s, usd_per_hour=usd_per_hour, **{**usual, **changes})


def looks(supervisor: Supervisor, times: int, *, every_s: float = 30.0, **arguments: Any) -> list[Decision]:
    decisions = []
    for number in range(times):
        at = arguments.get("now") or standing(1.5, at_s=1000.0 + number * every_s)
        at = replace(at, steps_seen=at.steps_seen + number)
        supervisor, decision = supervisor.look(at, arguments.get("alternatives", ()))
        decisions.append(decision)
    return decisions


def look_later(supervision: Supervision) -> str | None:
    """Look once more has been measured."""
    supervision.standing = replace(supervision.standing, steps_seen=supervision.standing.steps_seen + 1)
    return supervision.look()


def test_a_run_outside_its_interval_is_planned_again_after_three_looks_and_then_left_in_peace() -> None:
    actions = [one.action for one in looks(Supervisor(promise=PROMISE, hysteresis=QUICK), 13)]
    assert actions[:4] == ["keep", "keep", "replan", "keep"]
    assert [number for number, action in enumerate(actions) if action == "replan"] == [2, 12], "300 s of rest"


def test_looks_that_see_the_same_measurement_are_one() -> None:
    """A run that pauses for a machine to join is not slow three times."""
    supervisor = Supervisor(promise=PROMISE, hysteresis=QUICK)
    for number in range(9):
        now = standing(1.5, at_s=30.0 * number, seen=number // 5)
        supervisor, decision = supervisor.look(now, [other(action="replace", name="h3")])
        assert decision.action == "keep"
    assert supervisor.called_for == ("replace h3", 2)


def test_what_saves_money_is_taken_with_its_gain_and_measured_once() -> None:
    supervisor, alternatives = Supervisor(promise=PROMISE, hysteresis=QUICK), [other(action="drop", name="h3")]
    for number in range(3):
        now = standing(1.5, at_s=30.0 * number, seen=998 + number)
        supervisor, decision = supervisor.look(now, alternatives)
    assert (decision.action, decision.name) == ("drop", "h3")
    assert decision.expected_saving_s == pytest.approx(9000 * 1.5 - 200 - 9000 * 0.5)
    assert decision.expected_saving_usd == pytest.approx(decision.expected_saving_s / 3600 * 3.6)
    supervisor, told = supervisor.measured(standing(0.6, seen=1050))
    assert told is not None
    assert supervisor.measured(standing(0.6, seen=2000))[1] is None, "it is told once"


@given(st.floats(0.2, 3.0), st.floats(0.2, 3.0), st.floats(0.5, 20.0), st.floats(0.0, 2000.0))
def test_no_action_costs_more_than_it_saves(
    now_s: float, then_s: float, usd_per_hour: float, changeover_s: float
) -> None:
    one = other(then_s, usd_per_hour, changeover_s=changeover_s)
    supervisor = Supervisor(promise=PROMISE, hysteresis=Hysteresis(looks=1))
    _, decision = supervisor.look(standing(now_s), [one])
    if decision.acts:
        left_usd = 9000 * now_s / 3600 * 3.6
        assert one.cost_usd(9000) <= left_usd
        assert one.cost_usd(9000) <= 0.95 * left_usd or one.total_s(9000) <= 0.95 * 9000 * now_s


@given(st.floats(0.2, 3.0), st.integers(0, 9_999), st.floats(0.0, 900.0), st.floats(0.0, 40_000.0))
def test_who_follows_the_deadline_rule_keeps_it_if_machines_on_demand_do(
    step_s: float, step: int, changeover_s: float, deadline_s: float
) -> None:
    """At the last look before the rule acts, all can be lost, and what is left still fits."""
    safe = other(step_s, float("inf"), action="on-demand", name="x", changeover_s=changeover_s, holds=True)
    supervisor = Supervisor(promise=promise(deadline_s=deadline_s), hysteresis=QUICK)
    left_s = (10_000 - step) * step_s
    decision = supervisor.look(standing(step_s, step=step, at_s=0.0), [safe])[1]
    if decision.action == "on-demand":
        assert changeover_s + left_s <= deadline_s, "nothing is paid for what comes too late"
    elif deadline_s >= changeover_s + left_s:
        assert 2 * changeover_s + left_s + QUICK.reserve_s <= deadline_s


def supervising(
    run_dir: Path,
    hands: dict[str, Callable[[Alternative, float], None]],
    standing: RunProgress,
    *,
    hysteresis: Hysteresis,
    until_there_s: float = 300.0,
    deadline_s: float | None = None,
    **more: Any,
) -> Supervision:
    return Supervision(
        run_dir=run_dir,
        usd_per_hour=PRICES,
        hands=hands,
        until_there_s=until_there_s,
        supervisor=Supervisor(promise=promise(deadline_s=deadline_s), hysteresis=hysteresis),
        standing=standing,
        **more,
    )


def test_a_run_moves_once_when_only_machines_on_demand_keep_its_deadline(tmp_path: Path) -> None:
    asked: list[float] = []

    def supervision(deadline_s: float) -> Supervision:
        hands = {"on-demand": lambda _, needed_s: asked.append(needed_s)}
        now = standing(1.0, at_s=600.0)
        return supervising(tmp_path, hands, now, hysteresis=QUICK, until_there_s=200.0, deadline_s=deadline_s)

    assert supervision(1e6).look() is None
    one = supervision(10_000.0)
    assert str(one.look()).startswith("moves to the same machines on demand: only 200 s are left")
    assert one.look() is None
    assert asked == [pytest.approx(9200.0)]
    (acted,) = read_events(tmp_path / DECISIONS_FILE)
    assert (acted["event"], acted["action"]) == ("supervisor_acted", "on-demand")
    assert supervision(9_700.0).look() is None, "it would be too late anyway"


@given(
    st.lists(st.floats(0.2, 5.0), min_size=4, max_size=4),
    st.floats(0.0, 1.0),
    st.floats(0.0, 600.0),
    st.floats(2_000.0, 40_000.0),
)
def test_as_few_machines_are_added_as_keep_the_deadline(
    times_s: list[float], sync_s: float, until_there_s: float, deadline_s: float
) -> None:
    late = replace(slowed(tuple(times_s), sync_s=sync_s), types=("a", "b", "b", "a"), now_s=0.0)
    told = promise(deadline_s=deadline_s)
    found = with_more_of_each_type(late, told, PRICES, until_there_s=until_there_s)
    assert late.step_time_s is not None
    if 9000 * late.step_time_s <= deadline_s:
        assert found == [], "it is in time"
    for one in found:
        assert one.total_s(9000) <= deadline_s
        assert one.name in ("h0", "h1")
        assert 1 <= one.machines <= 4
        assert one.usd_per_hour == pytest.approx(told.usd_per_hour + 0.9 * one.machines)
        own = 24 / times_s[HOSTS.index(one.name)]
        fewer_s = 96 / (sum(24 / t for t in times_s) + (one.machines - 1) * own) + sync_s
        change_s = until_there_s * max(0.0, 1 - fewer_s / late.step_time_s)
        assert one.machines == 1 or change_s + 9000 * fewer_s > deadline_s, "one less would be too few"


def test_a_run_that_would_be_late_gets_more_machines_if_its_budget_pays_for_them(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def add(one: Alternative, needed_s: float) -> None:
        asked.append((one.name, one.machines))

    def refuse(*_: object) -> None:
        raise BudgetStop("$5.00 do not pay for it.")

    def supervision(hand: Callable[[Alternative, float], None], deadline_s: float) -> Supervision:
        now = replace(slowed((2.0, 2.0, 2.0, 2.0)), types=("a",) * 4)
        return supervising(tmp_path, {"add": hand}, now, hysteresis=Hysteresis(looks=2), deadline_s=deadline_s)

    assert supervision(add, 20_000.0).look() is None, "18,000 s are left: it will be in time"
    one = supervision(add, 14_000.0)
    assert look_later(one) is None
    assert str(look_later(one)).startswith("adds machines like h0: 2 more like h0 saves")
    (acted,) = read_events(tmp_path / DECISIONS_FILE)
    assert (acted["action"], acted["step_time_expected_s"]) == ("add", pytest.approx(2.0 * 4 / 6))
    for later in range(1, 9):
        one.standing = replace(one.standing, now_s=1000.0 + 400.0 * later)
        look_later(one)
    assert asked == [("h0", 2)], "they are on their way, and nobody asks for more meanwhile"
    assert supervision(add, 5_000.0).look() is None, "no number of machines that is known about would do"
    poor = supervision(refuse, 14_000.0)
    assert [look_later(poor) for _ in range(3)] == [None, "$5.00 do not pay for it.", None]


HOSTS = ("h0", "h1", "h2", "h3")
PRICES = dict.fromkeys(HOSTS, 0.9)


def slowed(times_s: tuple[float, ...], shares: tuple[int, ...] = (24, 24, 24, 24), sync_s: float = 0.0) -> RunProgress:
    return RunProgress(
        step=1000,
        steps_seen=1000,
        step_time_s=max(times_s) + sync_s,
        compute_s=times_s,
        sync_s=sync_s,
        began_s=0.0,
        now_s=1000.0,
        workers=4,
        hosts=HOSTS,
        shares=shares,
    )


def test_a_host_that_costs_more_than_it_brings_is_dropped_and_what_follows_is_promised_anew() -> None:
    at = slowed((1.0, 1.0, 1.0, 10.0))
    (found,) = without_each_host(at, PROMISE, PRICES)
    assert (found.name, found.action) == ("h3", "drop")
    assert found.step_time_s == pytest.approx(4 / 3)
    assert found.usd_per_hour == pytest.approx(2.7)
    supervisor = Supervisor(promise=PROMISE, hysteresis=Hysteresis(looks=1))
    supervisor, decision = supervisor.look(at, [found])
    assert (decision.action, decision.name) == ("drop", "h3")
    assert decision.reason.startswith("going on without h3 saves")
    assert supervisor.promise.usd_per_hour == pytest.approx(2.7)
    assert supervisor.promise.step_time_high_s == pytest.approx(1.1 * 4 / 3)


@given(st.lists(st.floats(0.1, 20.0), min_size=4, max_size=4), st.floats(0.0, 5.0))
def test_nobody_is_dropped_to_shrink_the_cluster(times_s: list[float], sync_s: float) -> None:
    at = slowed(tuple(times_s), sync_s=sync_s)
    assert at.step_time_s is not None
    found = without_each_host(at, PROMISE, PRICES)
    assert all(one.step_time_s <= LONGER * at.step_time_s for one in found)
    assert at.step_time_s > PROMISE.step_time_high_s or not found, "as predicted is left alone"
    assert not without_each_host(slowed((5.0,) * 4), PROMISE, PRICES), "equals stay"


QUICKEST = {"c7i.large": 24.0}


def become_slow(times_s: tuple[float, ...] = (1.0, 1.0, 1.0, 10.0), **changes: Any) -> RunProgress:
    return replace(slowed(times_s), types=("c7i.large",) * 4, quickest=QUICKEST, **changes)


@given(st.lists(st.floats(0.1, 20.0), min_size=4, max_size=4), st.floats(0.0, 5.0), st.floats(0.0, 1000.0))
def test_a_replacement_never_promises_less_than_what_is_lost(
    times_s: list[float], sync_s: float, until_there_s: float
) -> None:
    at = replace(become_slow(tuple(times_s)), sync_s=sync_s, step_time_s=max(times_s) + sync_s)
    for one in with_another_for_each_host(at, PROMISE, until_there_s=until_there_s):
        assert 0 <= one.changeover_s <= until_there_s
        assert at.step_time_s is not None
        assert one.step_time_s <= at.step_time_s * (1 + 1e-9)
        assert at.speeds[HOSTS.index(one.name)] <= SLOW * QUICKEST["c7i.large"]


def test_a_replacement_is_measured_once_the_new_machine_trains() -> None:
    at = become_slow()
    supervisor = Supervisor(promise=PROMISE, hysteresis=Hysteresis(looks=1))
    supervisor, decision = supervisor.look(at, with_another_for_each_host(at, PROMISE, until_there_s=300.0))
    assert (decision.action, decision.name) == ("replace", "h3")
    assert "another machine in the place of h3 saves" in decision.reason
    assert supervisor.promise == PROMISE, "the cluster is to be what it was"
    without = replace(at, steps_seen=1200, changes=1, changed_at=1000, workers=3)
    assert supervisor.measured(without)[1] is None, "it has not come yet"
    there = replace(at, steps_seen=1240, changes=2, changed_at=1200, step_time_s=1.02)
    assert supervisor.measured(there)[1] is None, "too early to tell"
    told = supervisor.measured(replace(there, steps_seen=1250))[1]
    assert told is not None
    assert (told["action"], told["step_time_before_s"], told["step_time_measured_s"]) == ("replace", 10.0, 1.02)


def test_a_rented_host_that_has_become_slow_is_given_back_once(tmp_path: Path) -> None:
    given_back: list[str] = []
    hands = {"replace": lambda one, _: given_back.append(one.name)}
    one = supervising(tmp_path, hands, become_slow(), hysteresis=Hysteresis(looks=1, rest_s=0.0))
    assert str(one.look()).startswith("replaces h3: another machine in the place of h3 saves")
    (acted,) = read_events(tmp_path / DECISIONS_FILE)
    assert (acted["event"], acted["action"], acted["host"]) == ("supervisor_acted", "replace", "h3")
    for _ in range(5):
        one.look()
    assert given_back == ["h3"], "a second machine would have no better luck"


def test_a_cloud_that_does_not_answer_ends_no_run_and_is_asked_again(tmp_path: Path) -> None:
    gone = CloudRefused("The network is gone.")
    answers: list[Exception | None] = [gone, gone, None]

    def give_back(*_: object) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    supervision = supervising(tmp_path, {"replace": give_back}, become_slow(), hysteresis=Hysteresis(looks=1))
    assert supervision.look() == "The network is gone. h3 stays for now."
    assert supervision.look() is None, "it is said once"
    assert not (tmp_path / DECISIONS_FILE).exists()
    assert str(supervision.look()).startswith("replaces h3")


def test_the_best_that_a_type_has_shown_is_remembered() -> None:
    workers = [{"host": "h0", "type": "c7i.large"}, {"host": "h1", "type": "c6i.large"}]
    started = {"event": "run_started", "time_s": 0.0, "workers": workers}

    def steps(count: int, second_s: float) -> list[dict[str, Any]]:
        told = {"event": "step", "time_s": 1.0, "step": 10, "steps": 10, "step_time_s": 1.0, "sync_s": [0.1, 0.1]}
        return [{**told, "local_batch_sizes": [10, 20], "compute_s": [1.0, second_s]} for _ in range(count)]

    assert RunProgress.of(events_of([started, *steps(3, 1.0)])).quickest == {}, "first steps tell little"
    known = RunProgress.of(events_of([started, *steps(4, 1.0), *steps(40, 4.0)]))
    assert known.quickest == {"c7i.large": 10.0, "c6i.large": 20.0}
    assert known.speeds[1] == pytest.approx(5.0, rel=0.01)
    again = RunProgress.of(events_of([started, *steps(4, 1.0), started]))
    assert again.quickest == {"c7i.large": 10.0, "c6i.large": 20.0}
    assert (again.changes, again.changed_at, again.speeds) == (2, 40, ())


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
    seen = RunProgress.of(events_of(events))
    assert (seen.step, seen.steps_seen, seen.workers) == (20, 20, 2)
    assert (seen.began_s, seen.now_s) == (1.0, 21.0)
    assert seen.step_time_s == pytest.approx(1.3)
    assert seen.steps_left(PROMISE) == 9980
    lost = [
        {"event": "worker_lost", "time_s": 22.0, "host": "h1"},
        {**started, "time_s": 23.0, "workers": [{"host": "h0"}]},
    ]
    after = RunProgress.of(events_of([*events, *lost]))
    assert (after.losses, after.workers, after.step_time_s) == (1, 1, None), "other workers, other times"


def pools(here: float = 0.9, zone: str = "a", **elsewhere: float) -> Pools:
    return Pools(zone=zone, usd_per_hour=dict.fromkeys(HOSTS, here), elsewhere_usd_per_hour=elsewhere)


def others(
    found: Pools, *, at: RunProgress | None = None, boot_s: float = 200.0, **promises: Any
) -> tuple[Alternative, ...]:
    now = at or standing(1.0)
    return tuple(in_other_zones(now, promise(**promises), found, boot_s=boot_s, until_there_s=300.0))


def test_a_pool_that_has_become_dear_is_left_after_some_looks_and_not_for_a_dip() -> None:
    (cheap,) = others(pools(b=1.8, c=3.6))
    assert (cheap.action, cheap.name, cheap.step_time_s, cheap.usd_per_hour) == ("switch", "b", 1.0, 1.8)
    decisions = looks(Supervisor(promise=PROMISE, hysteresis=QUICK), 3, now=standing(1.0), alternatives=[cheap])
    assert [one.action for one in decisions] == ["keep", "keep", "switch"]
    assert decisions[-1].expected_saving_usd == pytest.approx(9.0 - (9200 * 1.8 + 400 * 3.6) / 3600)
    assert decisions[-1].reason.startswith("the same machines in b saves $4.0")
    supervisor = Supervisor(promise=PROMISE, hysteresis=QUICK)
    for number in range(12):
        dip = others(pools(b=1.8)) if number % 3 else ()
        supervisor, decision = supervisor.look(standing(1.0, at_s=30.0 * number, seen=number), dip)
        assert decision.action == "keep"


@given(
    here=st.floats(0.01, 5.0),
    there=st.floats(0.01, 20.0),
    left=st.integers(1, 9_999),
    boot_s=st.floats(1.0, 900.0),
    slack_s=st.floats(-2000.0, 5000.0),
)
def test_a_zone_is_only_left_for_what_both_clusters_cost_within_the_deadline(
    here: float, there: float, left: int, boot_s: float, slack_s: float
) -> None:
    now = standing(1.0, step=10_000 - left)
    limits = {"deadline_s": 1000.0 + left + slack_s, "usd_per_hour": 4 * here}
    found = others(pools(here, b=there), at=now, boot_s=boot_s, **limits)
    supervisor = Supervisor(promise=promise(**limits), hysteresis=Hysteresis(looks=1))
    _, decision = supervisor.look(now, found)
    if decision.action == "switch":
        both_usd = 2 * boot_s * (4 * here + there) / 3600
        rest_usd = max(0.0, left - boot_s) * there / 3600
        assert both_usd + rest_usd <= 0.95 * left * 4 * here / 3600 + 1e-9
        assert slack_s >= boot_s + 2 * 300.0 - 1e-6, "machines on demand could still keep the deadline"


def test_a_run_follows_its_prices_and_leaves_once(tmp_path: Path) -> None:
    asked: list[tuple[str, float]] = []
    seen: list[Pools | None] = [pools(b=3.5)]
    one = supervising(
        tmp_path,
        {"switch": lambda one, needed_s: asked.append((one.name, needed_s))},
        standing(1.0),
        hysteresis=Hysteresis(looks=2),
        pools=lambda: seen[0],
        boot_s=200.0,
    )
    assert [look_later(one) for _ in range(3)] == [None, None, None], "it would save less than it costs"
    seen[0] = pools(1.8, b=3.5)
    assert look_later(one) is None
    assert str(look_later(one)).startswith("leaves for b: the same machines in b saves $")
    assert one.supervisor.promise.usd_per_hour == pytest.approx(7.2), "what it costs now"
    assert asked == [("b", pytest.approx(9300.0))]
    (acted,) = read_events(tmp_path / DECISIONS_FILE)
    assert (acted["action"], acted["host"]) == ("switch", "b")
    seen[0] = None  # machines come
    one.look()
    assert one.supervisor.last is not None
    given_up = replace(one, supervisor=one.supervisor)
    seen[0] = pools(1.8)
    given_up.look()
    assert given_up.supervisor.last is None, "what was given up has no gain"
    seen[0] = pools(0.875, zone="b", a=7.2)
    one.standing = replace(one.standing, now_s=5000.0, steps_seen=1060, changes=1, changed_at=1005)
    assert one.look() == "in b a step takes 1 s (1 s before, 1 s expected)"
    assert one.supervisor.promise.usd_per_hour == pytest.approx(3.5)
