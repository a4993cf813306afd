"""When the watch of a network says that something has changed, and when it has the network measured again."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.core.comm.cost import TRAINER, LinkSpeed, Operation, dense, gathered
from hetopt.trainer.comm.network_tracker import (
    ANOTHER,
    MEASURED_AFTER,
    MEASURED_ANYWAY_AFTER,
    NetworkWatch,
    Timed,
    measured,
)

WORKERS = 4
LINK = LinkSpeed(latency_s=0.0005, bytes_per_s=5e6)
STEP_S, SYNC_S = 0.2, 0.1


def timed(primitive, size, link=LINK):
    operation = Operation(primitive=primitive, payload_bytes=size, members=WORKERS)
    return Timed(operation=operation, time_s=link.time_s(operation.terms(TRAINER)))


def fresh():
    return NetworkWatch(
        network=measured([timed(p, size) for p in ("all_reduce", "all_gather") for size in (256, 65_536, 1 << 20)])
    )


def after(watch, times, *, way="dense", sends_all=True, steps=10):
    for factor in times:
        watch = watch.after(way, factor * STEP_S, factor * SYNC_S, steps=steps, sends_all=sends_all)
    return watch


def measured_again(watch, link=LINK):
    return watch.measured([timed("all_reduce", size, link) for size in (256, 2048, 65_536)])


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_run_shows_no_change_however_long(seed):
    draw = random.Random(seed)
    watch = after(fresh(), [math.exp(draw.gauss(0, 0.07)) for _ in range(300)])
    assert watch.changes == 0


@given(factor=st.one_of(st.floats(0.02, 0.75), st.floats(1.35, 50)), before=st.integers(1, 50))
@settings(max_examples=40)
def test_a_change_shows_in_two_periods(factor, before):
    watch = after(fresh(), [1.0] * before)
    watch = after(watch, [factor])
    assert watch.is_suspect
    assert watch.changes == 0
    watch = after(watch, [factor])
    assert watch.changes == 1
    assert not watch.is_suspect
    assert after(watch, [factor] * 10).changes == 1, "that is how it is now"


def test_one_disturbed_period_changes_nothing():
    watch = after(fresh(), [1.0] * 5 + [3.0, 1.0] * 5)
    assert watch.changes == 0


def test_a_change_shows_whichever_ways_are_in_use():
    watch = fresh()
    for factor in (1.0, 1.0, 1.0, 2.0, 2.0):
        for way, times in (("dense", 1.0), ("thin", 0.3)):
            watch = after(watch, [factor * times], way=way)
    assert watch.changes == 1


def test_what_ways_were_like_is_forgotten_once_something_has_changed():
    watch = after(after(fresh(), [1.0] * 3, way="thin"), [1.0, 1.0, 3.0, 3.0])
    assert watch.changes == 1
    assert after(watch, [5.0, 5.0], way="thin").changes == 1


def test_the_network_is_measured_once_something_has_changed_and_seldom_otherwise():
    watch = after(fresh(), [1.0] * 5)
    assert not watch.wants_measurement
    watch = after(watch, [2.0, 2.0])
    assert watch.wants_measurement
    watch = measured_again(watch)
    assert not watch.wants_measurement
    for factor in itertools.islice(itertools.cycle((1.0, 1.0, 2.0, 2.0)), 40):
        watch = after(watch, [factor], steps=1)
        if watch.wants_measurement:
            assert watch.since_s >= MEASURED_AFTER * watch.cost_s
            watch = measured_again(watch)


def test_whoever_sends_everything_is_left_alone_and_others_pay_a_hundredth():
    """A quicker network shows in the steps of the first; of few bytes it does not."""
    watch = measured_again(fresh())
    for sends_all in (True, False):
        trained_s = count = 0.0
        for _ in range(300):
            watch = after(watch, [1.0], sends_all=sends_all)
            trained_s += 10 * STEP_S
            if watch.wants_measurement:
                count += 1
                watch = measured_again(watch)
        cost_s = count * watch.cost_s
        assert cost_s <= trained_s / MEASURED_ANYWAY_AFTER
        assert (count > 0) is not sends_all


@pytest.mark.parametrize("factor", [1.0, 0.1, 8.0])
def test_a_network_that_is_measured_unasked_is_known_anew_and_what_steps_took_stays(factor):
    watch = after(fresh(), [1.0] * 5, way="thin", sends_all=False)
    link = LinkSpeed(latency_s=LINK.latency_s, bytes_per_s=LINK.bytes_per_s * factor)
    measured = measured_again(watch, link)
    assert (measured.changes, measured.usual) == (0, watch.usual)
    for operations in (dense(400_000, WORKERS), gathered(400_000, WORKERS)):
        true_s = sum(link.time_s(operation.terms(TRAINER)) for operation in operations)
        assert measured.network.expected_s(operations) == pytest.approx(true_s, rel=0.1)


def test_an_alarm_is_above_what_is_usual_of_the_way_and_of_no_other():
    watch = after(fresh(), [1.0, 1.1, 0.9])
    alarm_s = watch.alarm_s("dense")
    assert alarm_s is not None
    assert alarm_s > SYNC_S
    assert STEP_S + alarm_s - SYNC_S > ANOTHER * STEP_S, "what rings is looked at as a change"
    assert watch.alarm_s("thin") is None
