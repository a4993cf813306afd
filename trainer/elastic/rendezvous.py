"""How workers agree on the next generation over a store that all of them reach.

    generation          number of the newest generation that anybody wants
    G/member/PLACE      who has registered for generation G
    G/closed            the generation, once it has begun; only the first who writes it counts
    closed              number of the newest one that has
    G/here/PLACE        who has seen that it has: a generation whose members do not all come is passed over

The protocol is a generator of pauses, so that the same code runs in real time and in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.elastic.membership import (
    NO_GENERATION,
    Generation,
    Member,
    NothingKnown,
    Patience,
    Presence,
    is_hopeless,
    may_close,
)

LOOK_S = 0.05

_TAKEN = 3
"""Generations that have another process in the place of one who looks for the others. One who has died is in one of
them at most, and two who live would have all the others meet again for ever."""


class Abandoned(RuntimeError):
    """Nobody is to look for the others any longer: the run was asked to stop, is over, or has this worker twice."""


class RendezvousStore(Protocol):
    """What a meeting needs of a key-value store."""

    def get(self, key: str) -> str:
        """The value; empty: there is none."""
        ...

    def set(self, key: str, value: str) -> None:
        """Write ``value`` under ``key``, whatever was there."""
        ...

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write a value where the present one is as expected (empty: there is none); the value after that."""
        ...


def wanted(store: RendezvousStore) -> int:
    """The newest generation that anybody wants; -1: nobody has come yet."""
    return int(store.get("generation") or -1)


def begun(store: RendezvousStore) -> int:
    """The newest generation that has begun in this store; -1: none."""
    return int(store.get("closed") or -1)


def want(store: RendezvousStore, number: int) -> None:
    """Let everybody know that this generation is wanted, or a newer one."""
    while (present := store.get("generation")) == "" or int(present) < number:
        store.compare_set("generation", present, str(number))


def meet_again(
    store: RendezvousStore,
    me: Member,
    places: Sequence[int],
    *,
    patience: Patience,
    clock: Callable[[], float],
    stop_wished: Callable[[], bool] = lambda: False,
    presence: Presence = NothingKnown(),  # noqa: B008  # it has no state
) -> Generator[float, None, Generation]:
    """Register until part of a new generation; yields seconds to wait before it goes on.

    Args:
        store: of the run.
        me: who wants to train.
        places: of all workers of the run.
        patience: with the others.
        clock: seconds.
        stop_wished: whether nobody is to wait any longer.
        presence: what is known of the others.

    Raises:
        BadInput: the others train already, with another version of hetopt.
        RunFailed: too many of the others do not come.
        Abandoned: somebody has asked the run to stop, or another process is this worker.
    """
    if me.joined == NO_GENERATION:
        _check_version(store, me)
    begun_s, number, taken = clock(), me.joined, 0
    while True:
        number = max(wanted(store), number + 1)
        want(store, number)
        store.set(f"{number}/member/{me.place}", me.to_json())
        registered_s = clock()
        while True:
            closed = store.get(f"{number}/closed")
            if closed:
                generation = Generation.of_json(closed)
                if generation.rank(me) is not None and (yield from _all_here(store, generation, me, patience, clock)):
                    return generation
                taken += any(one.place == me.place and one.life != me.life for one in generation.members)
                if taken == _TAKEN:
                    raise Abandoned(f"another process is worker {me.place} of this run.")
                break
            if wanted(store) > number:
                number -= 1
                break
            registered = _registered(store, number, places)
            if may_close(registered, places, clock() - registered_s, patience, presence):
                members = tuple(registered[place] for place in sorted(registered))
                store.compare_set(f"{number}/closed", "", Generation(number=number, members=members).to_json())
                store.set("closed", str(max(begun(store), number)))
                continue
            if stop_wished():
                raise Abandoned
            if is_hopeless(registered, clock() - begun_s, patience):
                missing = ", ".join(str(place) for place in places if place not in registered)
                raise RunFailed(
                    f"workers {missing} are gone, and too few are left to go on without them.",
                    hint="launch the run again: it resumes from its last checkpoint",
                )
            yield LOOK_S


def _check_version(store: RendezvousStore, me: Member) -> None:
    """Keep a worker out that the others would not understand, before they stop for it."""
    closed = store.get(f"{begun(store)}/closed")
    there = Generation.of_json(closed).members[0].hetopt if closed else me.hetopt
    if there != me.hetopt:
        raise BadInput(
            f"worker {me.place} has hetopt {me.hetopt}, and the workers that train have {there}.",
            hint=f"install hetopt {there} on its machine; the others go on without it",
        )


def _all_here(
    store: RendezvousStore, generation: Generation, me: Member, patience: Patience, clock: Callable[[], float]
) -> Generator[float, None, bool]:
    """Whether all members come; false as soon as another generation is wanted, or nobody waits any longer."""
    number, called_s = generation.number, clock()
    store.set(f"{number}/here/{me.place}", me.life)
    while any(store.get(f"{number}/here/{one.place}") != one.life for one in generation.members):
        if wanted(store) > number or clock() - called_s >= patience.regroup_s:
            return False
        yield LOOK_S
    return True


def _registered(store: RendezvousStore, number: int, places: Sequence[int]) -> dict[int, Member]:
    texts = {place: store.get(f"{number}/member/{place}") for place in places}
    return {place: Member.of_json(text) for place, text in texts.items() if text}
