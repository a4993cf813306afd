"""Laws of membership: who may go on, and that generations form over a store whatever comes in between."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from hetopt.core.artifact import parse_from_peer
from hetopt.core.batch_partition import spec_of_living
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.elastic.rendezvous import (
    LOOK_S,
    Abandoned,
    Generation,
    Member,
    Patience,
    Version,
    may_close,
    meet_again,
    wanted,
)

from ..scenarios import toy_spec
from ..virtual_time import VirtualClock

PATIENCE = Patience(start_s=100.0, regroup_s=3.0)


class MemoryStore:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def text(self, key: str) -> str:
        return self.values.get(key, "")

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def compare_set(self, key: str, expected: str, value: str) -> str:
        if self.text(key) == expected:
            self.values[key] = value
        return self.text(key)


def survivors(places: Sequence[int], of: Sequence[int]) -> dict[int, Member]:
    return {place: Member(place=place, life="a", joined=0, beside=tuple(of)) for place in places}


@given(st.sets(st.integers(0, 9), min_size=1), st.data())
def test_two_parts_of_a_group_never_both_go_on(of: set[int], data: st.DataObject) -> None:
    """Whatever each knows of who is lost: nobody goes on without worker 0."""
    part, lost = (data.draw(st.sets(st.sampled_from(sorted(of)))) for _ in range(2))
    halves = [half for half in (part, of - part) if half]
    assert sum(
        may_close(survivors(sorted(half), sorted(of)), range(10), 99.0, PATIENCE, lost.__contains__) for half in halves
    ) == (0 in of)


TWO = {place: Member(place=place, life="a") for place in range(2)}
NEW = {place: Member(place=place, life="b") for place in range(3)}


@pytest.mark.parametrize(
    ("there", "workers", "waited_s", "lost", "closes"),
    [
        (TWO, 2, 0.0, (), True),
        (TWO, 3, 99.0, (), False),  # a run starts with everyone
        (TWO, 3, 0.0, (2,), True),  # whose host is there,
        (survivors([0, 1], range(3)), 3, 2.9, (), False),
        (survivors([0, 1], range(3)), 3, 3.0, (), True),  # and goes on with those that are left,
        (survivors([0, 1], range(3)), 3, 0.0, (2,), True),  # at once where the others are known to be lost,
        (survivors([1, 2], range(3)), 3, 99.0, (0,), False),  # but not without worker 0.
        ({**survivors([2], range(3)), 0: NEW[0]}, 3, 2.9, (), False),
        ({**survivors([2], range(3)), 0: NEW[0], 1: NEW[1]}, 3, 0.0, (), True),  # Nobody waits for who was replaced.
    ],
)
def test_who_is_waited_for(
    there: dict[int, Member], workers: int, waited_s: float, lost: tuple[int, ...], closes: bool
) -> None:
    assert may_close(there, range(workers), waited_s, PATIENCE, lost.__contains__) is closes


COUNTS = st.integers(0, 2**40)


@st.composite
def _members(draw: st.DrawFn) -> Member:
    life = st.from_regex(r"[0-9]{1,3}\.[0-9]{1,6}", fullmatch=True)
    return Member(
        place=draw(st.integers(0, 50)),
        life=draw(life),
        share=draw(COUNTS),
        joined=draw(st.integers(-1, 9)),
        beside=tuple(draw(st.lists(st.integers(0, 9)))),
        version=Version(agreed=draw(st.integers(-1, 9)), step=draw(COUNTS), decisions=draw(COUNTS)),
    )


def _damaged(value: object, draw: st.DrawFn) -> object:
    """A message with one of its parts gone, or something else in its place."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        rest = {name: each for name, each in value.items() if name != key}
        return rest if draw(st.booleans()) else {**rest, key: _damaged(value[key], draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [_damaged(value[0], draw), *value[1:]]
    return draw(st.sampled_from([None, True, -1, 1e400, 10**30, "", "x", [], {}, [[]], {"a": {}}, [1], "[" * 5000]))


@given(st.data(), _members(), st.sampled_from([Member, Generation]))
def test_a_message_of_a_stranger_is_read_or_refused_in_one_sentence(
    data: st.DataObject, member: Member, kind: type[Member] | type[Generation]
) -> None:
    good = member if kind is Member else Generation(number=3, members=(member,))
    text = json.dumps(_damaged(json.loads(good.model_dump_json()), data.draw))
    try:
        read: Member | Generation = parse_from_peer(kind, text, "a worker")
    except RunFailed as error:
        told = error.message
    else:
        told = "."
        registered = {one.place: one for one in (read.members if isinstance(read, Generation) else (read,))}
        may_close(registered, range(3), 0.0, PATIENCE)
    assert told.endswith(".")


def test_the_generation_that_agreed_last_counts_before_the_step() -> None:
    """Somebody who was cut off may have done a step that the others have done differently since."""
    versions = [
        Version(),
        Version(agreed=3, step=51),
        Version(agreed=4, step=50),
        Version(agreed=4, step=50, decisions=1),
    ]
    assert all(older < newer for older, newer in pairwise(versions))


def together(store: MemoryStore, members: Sequence[Member], workers: int, clock: VirtualClock) -> dict[int, Generation]:
    """Let workers meet in turns until all of them have; pauses pass on the clock."""
    meetings = {one.place: meet_again(store, one, range(workers), patience=PATIENCE, clock=clock) for one in members}
    found: dict[int, Generation] = {}
    while meetings:
        for place, meeting in list(meetings.items()):
            try:
                pause_s = next(meeting)
            except StopIteration as done:
                found[place] = done.value
                del meetings[place]
        clock.now_s += pause_s / len(members)
    return found


def test_workers_meet_lose_one_and_take_it_back() -> None:
    store, clock = MemoryStore(), VirtualClock()
    first = together(store, [Member(place=place, life="a") for place in range(3)], 3, clock)
    assert {generation.number for generation in first.values()} == {0}
    left = [
        Member(place=place, life="a", joined=0, beside=(0, 1, 2), version=Version(agreed=0, step=7)) for place in (0, 2)
    ]
    begun_s = clock.now_s
    second = together(store, left, 3, clock)
    assert all(generation.places == (0, 2) and generation.number == 1 for generation in second.values())
    assert PATIENCE.regroup_s <= clock.now_s - begun_s < PATIENCE.regroup_s + 1
    # Whoever comes back asks for the generation, and so is the first to register.
    again = [Member(place=1, life="b"), *(Member(place=place, life="a", joined=1, beside=(0, 2)) for place in (0, 2))]
    begun_s = clock.now_s
    third = together(store, again, 3, clock)
    assert all(generation.places == (0, 1, 2) and generation.number == 2 for generation in third.values())
    assert clock.now_s - begun_s < 1, "nobody waits when everybody is there"


def test_a_worker_of_another_version_is_kept_out_and_disturbs_nobody() -> None:
    store, clock = MemoryStore(), VirtualClock()
    together(store, [Member(place=place, life="a", hetopt="1.0") for place in range(3)], 3, clock)
    other = meet_again(store, Member(place=2, life="b", hetopt="1.1"), range(3), patience=PATIENCE, clock=clock)
    with pytest.raises(BadInput, match=r"worker 2 has hetopt 1\.1, and the workers that train have 1\.0"):
        next(other)
    assert wanted(store) == 0, "nobody is asked to meet again"
    alike = meet_again(store, Member(place=2, life="c", hetopt="1.0"), range(3), patience=PATIENCE, clock=clock)
    next(alike)
    assert wanted(store) == 1


def test_a_member_that_dies_before_it_is_there_is_not_waited_for() -> None:
    store, clock = MemoryStore(), VirtualClock()
    dead = meet_again(store, Member(place=1, life="a"), range(2), patience=PATIENCE, clock=clock)
    next(dead)
    other = meet_again(store, Member(place=0, life="a"), range(2), patience=PATIENCE, clock=clock)
    next(other)  # has closed the generation with both, and looks for the dead one
    assert store.text("0/closed")
    clock.now_s += PATIENCE.regroup_s
    next(other)
    assert wanted(store) == 1, "another generation is wanted"


@pytest.mark.parametrize("comes_first", [0, 1])
def test_of_two_processes_that_are_one_worker_one_ends(comes_first: int) -> None:
    """Else each would want another generation as soon as one has begun with the other in it."""
    store, clock = MemoryStore(), VirtualClock()
    twins = [Member(place=0, life="a"), Member(place=0, life="b")]
    members = {"a": twins[comes_first], "b": twins[1 - comes_first], "c": Member(place=1, life="c")}
    meetings = {name: meet_again(store, one, range(2), patience=PATIENCE, clock=clock) for name, one in members.items()}
    trains: dict[str, Generation] = {}
    ended = []
    for _ in range(2000):
        clock.now_s += LOOK_S
        for name in list(members):
            if name in trains and wanted(store) > trains[name].number:
                one = members[name] = members[name].model_copy(
                    update={"joined": trains.pop(name).number, "beside": (0, 1)}
                )
                meetings[name] = meet_again(store, one, range(2), patience=PATIENCE, clock=clock)
            if name in trains:
                continue
            try:
                next(meetings[name])
            except StopIteration as reached:
                trains[name] = reached.value
            except Abandoned as why:
                ended.append((name, str(why)))
                del members[name]
    assert [why for _, why in ended] == ["another process is worker 0 of this run."]
    assert set(trains) == set(members)
    assert len({one.number for one in trains.values()}) == 1
    assert wanted(store) <= 8, "the others met again a few times, and then never"


def test_who_waits_in_vain_gives_up_with_a_sentence() -> None:
    store, clock = MemoryStore(), VirtualClock()
    lonely = Member(place=1, life="a", joined=0, beside=(0, 1, 2))
    meeting = meet_again(store, lonely, range(3), patience=PATIENCE, clock=clock)
    next(meeting)
    clock.now_s += PATIENCE.start_s
    with pytest.raises(RunFailed, match="workers 0, 2 have not come in 100 s"):
        next(meeting)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.data())
def test_the_batch_stays_whoever_is_left(sizes: list[int], data: st.DataObject) -> None:
    spec = RunSpec.model_validate_json(json.dumps(toy_spec(shares=tuple(sizes))))
    places = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    known = data.draw(st.dictionaries(st.sampled_from(places), st.integers(1, 40)))
    living = spec_of_living(spec, places, known)
    assert living.global_batch_size == spec.global_batch_size
    assert [worker.host for worker in living.workers] == [spec.workers[place].host for place in places]
    assert min(worker.local_batch_size for worker in living.workers) >= 1
    assert spec_of_living(spec, range(len(sizes)), {}) == spec


@given(st.lists(st.integers(1, 12).map(lambda size: 4 * size), min_size=2, max_size=6), st.data())
def test_who_comes_back_gets_the_part_of_the_batch_that_it_was_planned_with(
    sizes: list[int], data: st.DataObject
) -> None:
    """The shares of the others have grown meanwhile; what they were planned with has not."""
    spec = RunSpec.model_validate_json(json.dumps(toy_spec(shares=tuple(sizes))))
    everybody = range(len(sizes))
    left = sorted(data.draw(st.sets(st.sampled_from(everybody), min_size=1)))
    shares = dict(zip(left, (one.local_batch_size for one in spec_of_living(spec, left, {}).workers), strict=True))
    again = [one.local_batch_size for one in spec_of_living(spec, everybody, shares).workers]
    assert all(abs(one - planned) <= 1 + planned / 4 for one, planned in zip(again, sizes, strict=True))
