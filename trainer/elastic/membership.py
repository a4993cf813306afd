"""Who trains next: pure rules for closing a new generation of workers when the one before has fallen apart.

A *generation* is a group of workers that train together. A worker that is lost ends it: the others leave it, register
for the next one, and so does whoever comes back or is started in place of a lost one. The next generation begins when
all workers of the run have registered, or those that have waited long enough and are entitled to go on without the
rest: more than half of the generation that was last, or exactly half of it with its first worker. So two groups that
cannot see each other never both go on.

Any history of generations is one line of training: what is newest is told by the generation that last agreed on a
state, then by the steps done since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

NO_GENERATION = -1


@dataclass(frozen=True, kw_only=True, order=True)
class Version:
    """How far the training is that a worker holds; the largest is the newest.

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
        """Whether there is a state at all: a worker that has just started holds none."""
        return self.agreed != NO_GENERATION


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker that wants to train.

    Attributes:
        place: its number in the run's spec.
        life: tells it from others that had its place before.
        joined: the generation that it was last part of.
        beside: places of all workers of that generation, itself included.
        version: of the state that it holds.
        share: its last local batch size, samples; 0: it has just started.
    """

    place: int
    life: str
    share: int = 0
    joined: int = NO_GENERATION
    beside: tuple[int, ...] = ()
    version: Version = Version()

    def to_json(self) -> str:
        """As it is registered."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "beside": tuple(data["beside"]), "version": Version(**data["version"])})


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A group of workers that train together; ranks are in the order of their places."""

    number: int
    members: tuple[Member, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Of its workers, in rank order."""
        return tuple(member.place for member in self.members)

    def rank(self, member: Member) -> int | None:
        """The rank of a worker in it; None: it is not part of it."""
        for rank, one in enumerate(self.members):
            if (one.place, one.life) == (member.place, member.life):
                return rank
        return None

    @property
    def newest(self) -> Version:
        """Of the states that its workers brought."""
        return max(member.version for member in self.members)

    def to_json(self) -> str:
        """As it is closed."""
        return json.dumps({"number": self.number, "members": [member.to_json() for member in self.members]})

    @classmethod
    def of_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        data = json.loads(text)
        return cls(number=data["number"], members=tuple(map(Member.of_json, data["members"])))


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long those who have registered wait for the others.

    Attributes:
        start_s: when the run starts; then everyone is needed.
        regroup_s: when workers were lost.
        give_up_s: when too few are left to go on.
    """

    start_s: float = 600.0
    regroup_s: float = 3.0
    give_up_s: float = 60.0


def may_close(registered: Mapping[int, Member], places: Sequence[int], waited_s: float, patience: Patience) -> bool:
    """Whether those who have registered are to begin without waiting any longer.

    Args:
        registered: by place.
        places: of all workers of the run.
        waited_s: since whoever asks registered.
        patience: how long to wait.
    """
    if set(places) <= set(registered):
        return True
    return waited_s >= patience.regroup_s and entitled(registered)


def entitled(registered: Mapping[int, Member]) -> bool:
    """Whether those who have registered are enough of the last generation to go on without the rest."""
    last = max((member.joined for member in registered.values()), default=NO_GENERATION)
    if last == NO_GENERATION:
        return False
    present = {member.place for member in registered.values() if member.joined == last}
    before = next(member.beside for member in registered.values() if member.joined == last)
    return 2 * len(present) > len(before) or (2 * len(present) == len(before) and min(before) in present)


def is_hopeless(registered: Mapping[int, Member], waited_s: float, patience: Patience) -> bool:
    """Whether to stop waiting for the rest; the run then ends, and can be launched again from its checkpoint."""
    has_begun = any(member.joined != NO_GENERATION for member in registered.values())
    return waited_s >= (patience.give_up_s if has_begun else patience.start_s)
