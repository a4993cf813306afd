"""Laws of buffers and replays, on a clock that only sleeping moves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from hetopt.core.errors import RunFailed
from hetopt.core.run_spec import BufferPolicy, Stream
from hetopt.trainer.data.cursor import StreamCursor, every_nth_of_all, first_kept
from tests.trainer.virtual_time import VirtualClock

POLICIES: list[BufferPolicy] = ["persistence", "truncation", "bounded_age"]
SIZE = 50


def replay_of(
    clock: VirtualClock, *, rate: float = 10.0, policy: BufferPolicy = "persistence", rank: int = 0, **fields: object
) -> StreamCursor:
    rates = (rate, 2 * rate, 3 * rate)
    stream = Stream.model_validate({"rates": rates, "buffer": policy, **fields})
    order = every_nth_of_all(SIZE, 0, rank, 3)
    return StreamCursor(stream, rank, order=order, dataset_size=SIZE, clock=clock, sleep=clock.sleep)


@given(
    rate=st.floats(1, 500),
    step_s=st.floats(0, 3),
    count=st.integers(1, 200),
    steps=st.integers(1, 20),
)
def test_waits_and_buffer_follow_the_published_recurrence(rate: float, step_s: float, count: int, steps: int) -> None:
    clock = VirtualClock()
    replay = replay_of(clock, rate=rate, patience_s=1e6)
    replay.begin()
    buffered, waited_s = 0.0, 0.0
    for _ in range(steps):
        replay.arriving(count)
        # q = S t + buffer; q >= b: no wait, q - b stay; else the wait is (b - q) / S and nothing stays.
        if buffered >= count - 1e-6:
            buffered -= count
        else:
            waited_s += (count - buffered) / rate
            buffered = 0.0
        clock.sleep(step_s)
        buffered += rate * step_s
    flow = replay.flow()
    assert flow["stream_wait_s"] == pytest.approx(waited_s, abs=1e-6 * steps)
    assert flow["stream_dropped"] == 0


@given(
    policy=st.sampled_from(POLICIES),
    taken=st.integers(0, 100),
    waiting=st.integers(0, 300),
    young=st.integers(0, 400),
    count=st.integers(1, 100),
)
def test_no_policy_drops_what_a_batch_lacks_or_brings_back_what_was_taken(
    policy: BufferPolicy, taken: int, waiting: int, young: int, count: int
) -> None:
    arrived = taken + waiting
    first = first_kept(policy, taken=taken, arrived=arrived, aged=arrived - young, count=count)
    kept = arrived - first
    assert taken <= first <= arrived
    assert kept >= min(waiting, count)
    if policy == "truncation":
        assert kept <= count
    if policy == "bounded_age":
        assert kept <= max(count, young)
    if policy == "persistence":
        assert kept == waiting


@given(
    policy=st.sampled_from(POLICIES), rate=st.floats(1, 200), steps=st.lists(st.floats(0, 2), min_size=1, max_size=12)
)
def test_every_sample_that_arrived_is_taken_or_dropped_or_waits(
    policy: BufferPolicy, rate: float, steps: list[float]
) -> None:
    clock = VirtualClock()
    replay = replay_of(clock, rate=rate, policy=policy, max_age_s=0.7, patience_s=1e6)
    replay.begin()
    taken = dropped = 0
    for step_s in steps:
        taken += len(replay.arriving(7)[0])
        clock.sleep(step_s)
        flow = replay.flow()
        dropped += flow["stream_dropped"]
        arrived = math.floor(clock.now_s * rate + 1e-9)
        if policy == "persistence":
            assert arrived - taken <= flow["stream_buffered"]
        if policy == "truncation":
            assert flow["stream_buffered"] <= 7
        if policy == "bounded_age":
            assert flow["stream_buffered"] <= max(7, 0.7 * rate + 1)
    assert replay.taken == taken + dropped


def test_workers_of_a_replay_see_the_data_once_an_epoch() -> None:
    clock = VirtualClock()
    seen: list[int] = []
    for rank in range(3):
        replay = replay_of(clock, rank=rank)
        replay.begin()
        own = len(every_nth_of_all(SIZE, 0, rank, 3)(0))
        names, epochs = replay.arriving(own)
        assert set(epochs.tolist()) == {0}
        seen += names.tolist()
        assert set(replay.arriving(1)[1].tolist()) == {1}
    assert sorted(seen) == list(range(SIZE))


def test_a_resumed_replay_goes_on_behind_its_last_sample() -> None:
    clock = VirtualClock()
    whole, first = replay_of(clock), replay_of(clock)
    whole.begin(), first.begin()
    expected = [whole.arriving(9)[0].tolist() for _ in range(6)]
    found = [first.arriving(9)[0].tolist() for _ in range(3)]
    place = {"position": 27, "taken_by_0": first.taken, "taken_by_1": 0, "taken_by_2": 0}
    clock.sleep(1000.0)  # away: what would have arrived meanwhile did not
    second = replay_of(clock)
    second.at(place)
    second.begin()
    found += [second.arriving(9)[0].tolist() for _ in range(3)]
    assert found == expected
    assert second.flow()["stream_buffered"] == 0


def test_a_place_of_other_workers_is_shared_out_by_rate() -> None:
    replay = replay_of(VirtualClock(), rank=1)
    replay.at({"position": 60, "taken_by_0": 30, "taken_by_1": 30})
    assert replay.taken == 20


def test_a_wait_beyond_patience_is_refused_before_it_begins() -> None:
    clock = VirtualClock()
    replay = replay_of(clock, rate=0.5, patience_s=60)
    replay.begin()
    with pytest.raises(RunFailed, match=r"would wait 128 s for a batch of 64: its stream brings 0\.5 samples a second"):
        replay.arriving(64)
    assert clock.now_s == 0
