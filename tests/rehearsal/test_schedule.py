"""What happens to the hosts of a rehearsal and when, and how far a miniature is slowed down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.emulation.conductor import FitWatch, HostNow, Moment, split, still_to_come
from hetopt.core.events.records import LogEvent
from hetopt.core.run_status import RunState, exit_code, judge
from hetopt.core.scaled_emulation import Change, EmulatedHost
from tests.logs import an_event

HOST = HostNow.as_described(EmulatedHost(name="h1", speed=2, rate_bits_per_s=1e8))

changes = st.builds(
    lambda host, when, speed: Change(host=host, speed=speed, **when),
    st.sampled_from(["h0", "h1", "*"]),
    st.one_of(
        st.just({}),
        st.floats(0, 100).map(lambda at_s: {"at_s": at_s}),
        st.integers(0, 100).map(lambda at_step: {"at_step": at_step}),
    ),
    st.floats(0.1, 10),
)


def test_nothing_that_has_a_moment_is_due_before_training_begins() -> None:
    at_once, at_start, at_step = (
        Change(host="*", speed=1),
        Change(host="*", at_s=0, speed=1),
        Change(host="*", at_step=0, speed=1),
    )
    assert split([at_once, at_start, at_step], Moment()) == ([at_once], [at_start, at_step])
    assert split([at_once, at_start, at_step], Moment(training_s=0))[1] == []


@given(st.lists(changes), st.lists(st.tuples(st.floats(0, 50), st.integers(0, 50)), min_size=1))
def test_every_change_is_due_once_and_in_time(scheduled: list[Change], walk: list[tuple[float, int]]) -> None:
    pending, done, now_s, step = scheduled, [], 0.0, 0
    for more_s, more_steps in [*walk, (100, 100)]:
        now_s, step = now_s + more_s, step + more_steps
        due, pending = split(pending, Moment(training_s=now_s, step=step))
        assert all((change.at_s or 0) <= now_s and (change.at_step or 0) <= step for change in due)
        done += due
    assert pending == []
    assert sorted(map(repr, done)) == sorted(map(repr, scheduled))


def test_a_change_touches_what_it_names_and_leaves_the_rest() -> None:
    assert HOST.after(Change(host="h2", speed=9)) == HOST
    assert HOST.after(Change(host="*", speed=9)) == HostNow(name="h1", speed=9, rate_bits_per_s=1e8)
    assert HOST.after(Change(host="h1", rate_bits_per_s=5)) == HostNow(name="h1", speed=2, rate_bits_per_s=5)
    dead = HOST.after(Change(host="h1", dies=True))
    assert not dead.alive
    assert dead.after(Change(host="h1", speed=9)) == dead


def test_a_host_is_cut_off_until_it_heals_or_dies() -> None:
    cut = HOST.after(Change(host="h1", cut=True))
    assert cut.cut
    assert cut.after(Change(host="h1", speed=9)).cut
    for end in (Change(host="h1", heals=True), Change(host="h1", dies=True)):
        assert not cut.after(end).cut
    assert HOST.after(Change(host="h1", heals=True)) == HOST


def test_a_resumed_run_does_not_lose_the_same_host_again() -> None:
    death, drift = Change(host="h1", at_step=40, dies=True), Change(host="h1", at_step=20, speed=1)
    everybody = Change(host="*", at_step=90, dies=True)
    assert still_to_come([drift, death, everybody], []) == [drift, death, everybody]
    assert still_to_come([drift, death], [an_event("condition_changed", host="h1", dies=True)]) == [drift]
    assert still_to_come([drift, death], [an_event("condition_changed", host="h1", dies=False)]) == [drift, death]


def step(end_s: float, *use: float) -> LogEvent:
    return an_event("step", time_s=end_s, steps=10, step_time_s=0.1, pace_use=list(use))


def test_what_does_not_fit_slows_the_miniature_once() -> None:
    watch = FitWatch()
    assert [watch.look(step(10.0 + n, 0.9, 0.5), 10.0 + n) for n in range(5)] == [None] * 5
    # One slow period is no reason.
    assert watch.look(step(15, 0.9, 7.0), 15) is None
    assert watch.look(step(16, 0.9, 0.5), 16) is None
    assert watch.look(step(17, 0.9, 1.5), 17) == 1
    assert watch.slowdown == 1.8  # 1.5 x 1.15, rounded up
    # A period that began before it was slowed says nothing any more.
    assert [watch.look(step(17.5 + n / 10, 0.9, 1.5), 17.5 + n / 10) for n in range(4)] == [None] * 4
    assert [watch.look(step(19.0 + n, 0.9, 1.1), 19.0 + n) for n in range(3)] == [None, None, 1]
    assert watch.slowdown == 2.3


def test_runs_without_declared_times_are_never_slowed() -> None:
    watch = FitWatch()
    assert [watch.look(an_event("step", time_s=1e9, pace_use=use), 0) for use in (None, [], None)] == [None] * 3
    assert watch.look(an_event("step", time_s=1e9), 0) is None
    assert watch.look(an_event("evaluated", time_s=5.0), 0) is None
    assert watch.slowdown == 1


@pytest.mark.parametrize("last", ["condition_changed", "miniature_slowed"])
def test_what_happens_to_the_hosts_says_nothing_about_how_the_run_is(last: str) -> None:
    def state(*names: str, alive: bool) -> RunState:
        events = [
            an_event(name, reason="steps") if name != "condition_changed" else an_event(name, host="h0")
            for name in names
        ]
        return judge(events, alive=alive, stop_wished=False, last_line=None).state

    assert state("run_started", last, alive=True) == RunState.STARTING
    assert state("run_started", "training_started", last, alive=True) == RunState.RUNNING
    assert state("run_started", "training_started", "training_finished", last, alive=False) == RunState.FINISHED
    assert state("run_started", "run_failed", last, alive=False) == RunState.FAILED


def test_the_most_specific_exit_code_is_the_runs() -> None:
    assert exit_code([0, 0], host_died=False) == 0
    assert exit_code([6, 2, 0], host_died=False) == 2
    assert exit_code([143, 6], host_died=False) == 6
    assert exit_code([-9, 0], host_died=False) == 6
    assert exit_code([1, 0], host_died=False) == 6
    assert exit_code([0, 2, -9], host_died=True) == 6
