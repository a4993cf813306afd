"""Generations of workers: who trains next when a group has fallen apart, and how workers agree on that over a store.

    generation          number of the newest generation that anybody wants
    G/member/PLACE      who has registered for generation G
    G/closed            the generation, once it has begun; only the first who writes it counts
    closed              number of the newest generation that has begun
    G/here/PLACE        who has seen that G has begun: a generation whose members do not all come is passed over

The protocol is a generator of pauses, so that the same code runs in real time and in a simulation.

A *generation* is a group of workers that train together. A worker that is lost ends it: the others leave it, register
for the next one, and so does whoever comes back or is started in place of a lost one. The next generation begins when
all workers of the last one have registered, or when those that have registered have waited long enough and worker 0 is
among them: it writes the log and names checkpoints, and the store is on its host. So two groups that cannot see each
other never both go on, and a run without its first host starts again from a checkpoint.

Any history of generations is one line of training: what is newest is told by the generation that last agreed on a
state, then by the steps done since.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore

from hetopt.core.artifact import Record, parse_from_peer
from hetopt.core.errors import BadInput, RunFailed

NO_GENERATION = -1


@dataclass(frozen=True, kw_only=True, order=True)
class Version:
    """Progress of a worker's training state: generation last agreed in, steps, decisions; the larger of two is newer.

    Attributes:
        agreed: generation in which all workers last had the same state; `NO_GENERATION`: the worker has just started,
            and holds none.
        step: steps done.
        decisions: control periods and evaluations read since the run began, for two states of one step.
    """

    agreed: int = NO_GENERATION
    step: int = 0
    decisions: int = 0


class Member(Record):
    """A worker that registers to train: its number in the run, its process (life), and the state that it holds.

    Attributes:
        place: number of the worker in the run's spec, from 0.
        life: text that tells this process from others that had its place before.
        joined: number of the generation that it was last part of; `NO_GENERATION`: it has just started.
        beside: places of all workers of that generation, itself included; empty: it has just started.
        version: age of the state that it holds.
        share: its last local batch size, in samples; 0: it has just started.
        hetopt: version of hetopt that it runs.
    """

    place: int
    life: str
    hetopt: str = ""
    share: int = 0
    joined: int = NO_GENERATION
    beside: tuple[int, ...] = ()
    version: Version = Version()


class Generation(Record):
    """Group of workers that train together until one is lost or one comes; ranks are in the order of places.

    Attributes:
        number: number of the generation, from 0; later ones have larger numbers.
        members: workers of it, in rank order.
    """

    number: int
    members: tuple[Member, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the generation's workers, in rank order."""
        return tuple(member.place for member in self.members)

    def rank(self, member: Member) -> int | None:
        """Return the rank of a worker's process in this generation.

        None: it is no member, or another process has its place.
        """
        lives = [(candidate.place, candidate.life) for candidate in self.members]
        return lives.index((member.place, member.life)) if (member.place, member.life) in lives else None


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds that registered workers wait for others: for all at the start and for worker 0, and after a loss.

    Attributes:
        start_s: seconds to wait for workers without whom nobody trains.
        regroup_s: seconds to wait for workers of the last generation that may be lost.
    """

    start_s: float = 600.0
    regroup_s: float = 3.0


def may_close(
    registered: Mapping[int, Member],
    places: Sequence[int],
    waited_s: float,
    patience: Patience,
    is_lost: Callable[[int], bool] = lambda place: False,
) -> bool:
    """Return whether the registered may begin a generation: all at first; later worker 0 and those not lost or late.

    Args:
        registered: workers that have registered, by place.
        places: places of all workers of the run.
        waited_s: seconds since the worker that asks has registered.
        patience: seconds to wait.
        is_lost: returns whether the host of the worker at a place is known to be lost.
    """
    last = max((member.joined for member in registered.values()), default=NO_GENERATION)
    is_first = last == NO_GENERATION  # nobody has trained yet: all whose hosts are there are waited for
    beside = places if is_first else next(member.beside for member in registered.values() if member.joined == last)
    missing = [place for place in beside if place not in registered and not is_lost(place)]
    return 0 in registered and (not missing or (not is_first and waited_s >= patience.regroup_s))


LOOK_S = 0.05

_TAKEN = 3
"""Generations that have another process in the place of one who looks for the others. One who has died is in one of
them at most, and two who live would have all the others meet again for ever."""


class Abandoned(Exception):  # not a failure
    """End of the search for other workers: the run was asked to stop, is over, or has this worker twice.

    Its text is empty where the run was asked to stop or is over.
    """


class RendezvousStore(PrefixStore):
    """Store of the keys of one torchrun attempt, in which workers agree on generations; `text` reads without waiting.

    The prefix of its keys is torchrun's attempt to start the run, so that attempts in one store do not mix.
    """

    def text(self, key: str) -> str:
        """Return the value of a key, or an empty text where there is none; does not wait for it."""
        return self.get(key).decode() if self.check([key]) else ""


def wanted(store: RendezvousStore) -> int:
    """Return the number of the newest generation (worker group) that any worker wants; -1: none does yet."""
    return int(store.text("generation") or -1)


def want(store: RendezvousStore, number: int) -> None:
    """Announce that generation ``number`` (worker group) is wanted, unless a newer one is; never lowers it.

    Other workers may raise the number meanwhile.
    """
    while (present := store.text("generation")) == "" or int(present) < number:
        store.compare_set("generation", present, str(number))


def meet_again(
    store: RendezvousStore,
    me: Member,
    places: Sequence[int],
    *,
    patience: Patience,
    clock: Callable[[], float],
    stop_wished: Callable[[], bool] = lambda: False,
    is_lost: Callable[[int], bool] = lambda place: False,
) -> Generator[float, None, Generation]:
    """Yield seconds to sleep until this worker is in a new generation (worker group), and return that generation.

    Args:
        store: store of the run.
        me: member that wants to train.
        places: places of all workers of the run.
        patience: seconds to wait for the others.
        clock: returns seconds.
        stop_wished: returns whether nobody is to wait any longer.
        is_lost: returns whether the host of the worker at a place is known to be lost.

    Raises:
        BadInput: the others train already, with another version of hetopt.
        RunFailed: workers without whom nobody trains have not come within ``patience.start_s``.
        Abandoned: somebody has asked the run to stop, or another process is this worker.
    """
    if me.joined == NO_GENERATION:
        closed = store.text(f"{store.text('closed')}/closed")
        there = parse_from_peer(Generation, closed, "another worker").members[0].hetopt if closed else me.hetopt
        if there != me.hetopt:
            raise BadInput(
                f"worker {me.place} has hetopt {me.hetopt}, and the workers that train have {there}.",
                hint=f"install hetopt {there} on its machine; the others go on without it",
            )
    begun_s, number, taken = clock(), me.joined, 0
    while True:
        number = max(wanted(store), number + 1)
        want(store, number)
        store.set(f"{number}/member/{me.place}", me.model_dump_json())
        registered_s = clock()
        while True:
            closed = store.text(f"{number}/closed")
            if closed:
                generation = parse_from_peer(Generation, closed, "another worker")
                if generation.rank(me) is not None and (yield from _all_here(store, generation, me, patience, clock)):
                    return generation
                taken += any(other.place == me.place and other.life != me.life for other in generation.members)
                if taken == _TAKEN:
                    raise Abandoned(f"another process is worker {me.place} of this run.")
                break
            if wanted(store) > number:
                number -= 1
                break
            texts = {place: store.text(f"{number}/member/{place}") for place in places}
            registered = {
                place: parse_from_peer(Member, text, f"worker {place}") for place, text in texts.items() if text
            }
            if may_close(registered, places, clock() - registered_s, patience, is_lost):
                members = tuple(registered[place] for place in sorted(registered))
                store.compare_set(f"{number}/closed", "", Generation(number=number, members=members).model_dump_json())
                store.set("closed", str(number))
                continue
            if stop_wished():
                raise Abandoned
            if clock() - begun_s >= patience.start_s:
                missing = ", ".join(str(place) for place in places if place not in registered)
                raise RunFailed(
                    f"workers {missing} have not come in {patience.start_s:.0f} s.",
                    hint="launch the run again: it resumes from its last checkpoint",
                )
            yield LOOK_S


def _all_here(
    store: RendezvousStore, generation: Generation, me: Member, patience: Patience, clock: Callable[[], float]
) -> Generator[float, None, bool]:
    """Yield seconds to sleep until all members are here, and return True; False: they are not, within patience.

    It is also False as soon as another generation is wanted.
    """
    number, called_s = generation.number, clock()
    store.set(f"{number}/here/{me.place}", me.life)
    while any(store.text(f"{number}/here/{member.place}") != member.life for member in generation.members):
        if wanted(store) > number or clock() - called_s >= patience.regroup_s:
            return False
        yield LOOK_S
    return True
