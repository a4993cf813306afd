"""How workers agree on the next generation over a store that all of them reach.

    generation          number of the newest generation that anybody wants
    G/member/PLACE      who has registered for generation G
    G/closed            the generation, once it has begun; only the first who writes it counts
    closed              number of the newest one that has
    G/here/PLACE        who has seen that it has: a generation whose members do not all come is passed over

The protocol is a generator of pauses, so that the same code runs in real time and in a simulation.

Who trains next: pure rules for closing a new generation of workers when the one before has fallen apart.

A *generation* is a group of workers that train together. A worker that is lost ends it: the others leave it, register
for the next one, and so does whoever comes back or is started in place of a lost one. The next generation begins when
all workers of the run have registered, or those that have waited long enough and are entitled to go on without the
rest: more than half of the generation that was last, or exactly half of it with its first worker. So two groups that
cannot see each other never both go on. Who is known to be dead is no part of any group: it does not count.

Any history of generations is one line of training: what is newest is told by the generation that last agreed on a
state, then by the steps done since.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import model_validator
from torch._C._distributed_c10d import PrefixStore

from hetopt.core.artifact import Record, ReplacedRecord, parse_from_peer
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.run_folder import Hosts, HostThere

NO_GENERATION = -1


@dataclass(frozen=True, kw_only=True, order=True)
class Version:
    """Progress of the training state that a worker holds; of two, the larger is the newer.

    Attributes:
        agreed: generation in which all workers last had the same state.
        step: steps done.
        decisions: control periods and evaluations read since the run began, for two states of one step.
    """

    agreed: int = NO_GENERATION
    step: int = 0
    decisions: int = 0

    @property
    def is_held(self) -> bool:
        """True where there is a state at all: a worker that has just started holds none."""
        return self.agreed != NO_GENERATION


class Member(Record):
    """A worker that registers to train: its number in the run, its process (life), and the state that it holds.

    Attributes:
        place: its number in the run's spec.
        life: tells it from others that had its place before.
        joined: the generation that it was last part of.
        beside: places of all workers of that generation, itself included.
        lives: of the same; empty: not known.
        version: of the state that it holds.
        share: its last local batch size, samples; 0: it has just started.
        hetopt: the version of hetopt that it runs.
    """

    place: int
    life: str
    hetopt: str = ""
    share: int = 0
    joined: int = NO_GENERATION
    beside: tuple[int, ...] = ()
    lives: tuple[str, ...] = ()
    version: Version = Version()

    @model_validator(mode="after")
    def _lives_are_of_the_places(self) -> Self:
        if self.lives and len(self.lives) != len(self.beside):
            raise ValueError(f"{len(self.lives)} lives of {len(self.beside)} workers")
        return self


class Generation(Record):
    """Group of workers that train together until one is lost or one comes; ranks are in the order of places."""

    number: int
    members: tuple[Member, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the generation's workers, in rank order."""
        return tuple(member.place for member in self.members)

    @property
    def lives(self) -> tuple[str, ...]:
        """The lives of the generation's workers, in rank order."""
        return tuple(member.life for member in self.members)

    def rank(self, member: Member) -> int | None:
        """Return the rank of a worker's process in this generation; None: it is no member."""
        lives = [(candidate.place, candidate.life) for candidate in self.members]
        return lives.index((member.place, member.life)) if (member.place, member.life) in lives else None


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds that registered workers wait for others: at the start, after a loss, and before giving up.

    Attributes:
        start_s: when the run starts; then everyone is needed.
        regroup_s: when workers were lost.
        give_up_s: when too few are left to go on.
    """

    start_s: float = 600.0
    regroup_s: float = 3.0
    give_up_s: float = 60.0


class Presence:
    """Hosts that are known to be up or gone, from a file of the process that starts and ends them; else unknown.

    Without one nothing is: a worker that does not come may be cut off. A look costs one system call.

    Args:
        file: in the run's folder; None: there will be none.
        hosts: of the workers, by place.
    """

    def __init__(self, file: ReplacedRecord[Hosts] | None = None, hosts: Sequence[str] = ()) -> None:
        self._file, self._hosts = file, tuple(hosts)

    def is_away(self, place: int) -> bool:
        """Return whether the host of worker ``place`` is known to be gone; False: it is up, or nothing is known."""
        there = self._now()
        return there is not None and self._hosts[place] not in there

    def is_dead(self, place: int, life: str) -> bool:
        """Return whether process ``life`` of worker ``place`` is known to have ended with its host; False: unknown."""
        there = self._now()
        if there is None:
            return False
        host = there.get(self._hosts[place])
        return host is None or int(life.partition(".")[0]) < host.incarnation

    @property
    def all_leave(self) -> bool:
        """True where every host is leaving: what the workers have in memory will be lost."""
        there = self._now() or {}
        return bool(there) and all(host.leaving for host in there.values())

    def _now(self) -> Mapping[str, HostThere] | None:
        hosts = None if self._file is None else self._file.now()
        return None if hosts is None else hosts.there


def may_close(
    registered: Mapping[int, Member],
    places: Sequence[int],
    waited_s: float,
    patience: Patience,
    presence: Presence = Presence(),  # noqa: B008  # it has no state
) -> bool:
    """Return whether the registered workers may begin a generation now, after waiting ``waited_s`` for the rest.

    Args:
        registered: by place.
        places: of all workers of the run.
        waited_s: since whoever asks registered.
        patience: how long to wait.
        presence: what is known of those who have not.
    """
    electorate = _electorate(registered, presence)
    if electorate is None:
        # Nobody has trained yet: everyone is needed who has a host.
        return all(place in registered or presence.is_away(place) for place in places)
    if set(electorate) <= set(registered):
        return True
    return waited_s >= patience.regroup_s and entitled(registered, presence)


def entitled(registered: Mapping[int, Member], presence: Presence = Presence()) -> bool:  # noqa: B008  # likewise
    """Return whether registered workers are most of the last generation's living, or half with the lowest place.

    Two groups that both are would be more than all who live, whatever each knows of the dead: the larger number of dead
    that one knows of is at most the number that there are.
    """
    electorate = _electorate(registered, presence)
    if electorate is None:
        return False
    last = max(member.joined for member in registered.values())
    present = {member.place for member in registered.values() if member.joined == last}
    return 2 * len(present) > len(electorate) or (2 * len(present) == len(electorate) and min(electorate) in present)


def _electorate(registered: Mapping[int, Member], presence: Presence) -> list[int] | None:
    """Return the places of the last generation's workers that may be alive; None: nobody here was part of one.

    A place that somebody else has registered for was given to it because the worker that had it before is dead.
    """
    last = max((member.joined for member in registered.values()), default=NO_GENERATION)
    if last == NO_GENERATION:
        return None
    witness = next(member for member in registered.values() if member.joined == last)
    lives = witness.lives or ("",) * len(witness.beside)
    return [
        place
        for place, life in zip(witness.beside, lives, strict=True)
        if not (life and (presence.is_dead(place, life) or (place in registered and registered[place].life != life)))
    ]


def is_hopeless(registered: Mapping[int, Member], waited_s: float, patience: Patience) -> bool:
    """Return whether, after ``waited_s``, the registered workers should give up waiting for others and end the run.

    It can be launched again from its checkpoint.
    """
    has_begun = any(member.joined != NO_GENERATION for member in registered.values())
    return waited_s >= (patience.give_up_s if has_begun else patience.start_s)


LOOK_S = 0.05

_TAKEN = 3
"""Generations that have another process in the place of one who looks for the others. One who has died is in one of
them at most, and two who live would have all the others meet again for ever."""


class Abandoned(Exception):  # not a failure
    """End of the search for other workers: the run was asked to stop, is over, or has this worker twice."""


class RendezvousStore(PrefixStore):
    """Connection to the key-value store in which workers agree on generations, under one attempt's prefix.

    Its prefix is the attempt of torchrun to start the run: those that share a store know nothing of each other.
    """

    def text(self, key: str) -> str:
        """Return the value of a key, or an empty text where there is none; does not wait for it."""
        return self.get(key).decode() if self.check([key]) else ""


def wanted(store: RendezvousStore) -> int:
    """Return the number of the newest generation (worker group) that any worker wants; -1: none does yet."""
    return int(store.text("generation") or -1)


def begun(store: RendezvousStore) -> int:
    """Return the number of the newest generation (worker group) that has begun in this store; -1: none has."""
    return int(store.text("closed") or -1)


def want(store: RendezvousStore, number: int) -> None:
    """Announce that generation ``number`` (worker group) is wanted, unless a newer one is; never lowers it."""
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
    presence: Presence = Presence(),  # noqa: B008  # it has no state
) -> Generator[float, None, Generation]:
    """Register for a new generation (worker group) until part of one, and return it; yield seconds to sleep.

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
            if may_close(registered, places, clock() - registered_s, patience, presence):
                members = tuple(registered[place] for place in sorted(registered))
                store.compare_set(f"{number}/closed", "", Generation(number=number, members=members).model_dump_json())
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
    """Refuse a worker that the others would not understand, before they stop for it."""
    closed = store.text(f"{begun(store)}/closed")
    there = parse_from_peer(Generation, closed, "another worker").members[0].hetopt if closed else me.hetopt
    if there != me.hetopt:
        raise BadInput(
            f"worker {me.place} has hetopt {me.hetopt}, and the workers that train have {there}.",
            hint=f"install hetopt {there} on its machine; the others go on without it",
        )


def _all_here(
    store: RendezvousStore, generation: Generation, me: Member, patience: Patience, clock: Callable[[], float]
) -> Generator[float, None, bool]:
    """Return whether all members come; false once another generation is wanted, or patience is over."""
    number, called_s = generation.number, clock()
    store.set(f"{number}/here/{me.place}", me.life)
    while any(store.text(f"{number}/here/{member.place}") != member.life for member in generation.members):
        if wanted(store) > number or clock() - called_s >= patience.regroup_s:
            return False
        yield LOOK_S
    return True
