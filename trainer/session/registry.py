"""The sessions of this process that are open: those without a loader follow the batches of one that has one.

An optimizer that is in no session would step by the gradient of its worker's samples alone: while a session is open, it
is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hetopt.trainer.session.batches import Part


class Member(Protocol):
    """What the others need of an open session."""

    @property
    def follows(self) -> bool:
        """Whether it has no loader of its own."""
        ...

    @property
    def has_batches(self) -> bool:
        """Whether its loader, or another session's, has given a batch."""
        ...

    def has_summed(self, optimizer: Optimizer) -> bool:
        """Whether all there is of an optimizer's gradient went through `backward` or `sync`."""
        ...

    def take(self, part: Part) -> None:
        """Note the part of a batch that the script is given."""
        ...

    def end_epoch(self, shares: Sequence[int]) -> None:
        """An epoch is over, in which the workers had such shares."""
        ...

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether these are its parameters."""
        ...

    def meet_another(self) -> None:
        """Another session begins."""
        ...

    def meet_own(self, optimizer: Optimizer) -> None:
        """An optimizer of its parameters is about to step."""
        ...

    def meet_stranger(self, optimizer: Optimizer) -> None:
        """An optimizer that is in no session is about to step."""
        ...

    def close(self) -> None:
        """Leave the other workers."""
        ...


class Registry:
    """The sessions of one process, and the hook that notices optimizers in none of them."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._begun = 0
        self._hook: RemovableHandle | None = None

    def enter(self, member: Member, *, sums: bool) -> None:
        """A session is open from here on.

        Args:
            member: the session.
            sums: whether optimizers in no session would do harm.
        """
        for one in self._members:
            one.meet_another()
        self._members.append(member)
        if sums and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_any_step)

    def leave(self, member: Member) -> None:
        """Remove a session; without any, the hook goes as well."""
        self._members = [one for one in self._members if one is not member]
        if not self._members and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def of(self, optimizer: Optimizer) -> Member | None:
        """The open session that trains an optimizer's parameters; None: it is in none."""
        return next((one for one in self._members if one.trains(optimizer)), None)

    @property
    def begun(self) -> int:
        """Sessions that there ever were in this process."""
        return self._begun

    @property
    def open(self) -> tuple[Member, ...]:
        """The sessions that are open, the last begun first: so they are closed."""
        return tuple(reversed(self._members))

    def next_number(self) -> int:
        """Of one more session, in the order in which they begin."""
        self._begun += 1
        return self._begun

    def listeners(self, member: Member) -> list[Member]:
        """The session that has a batch, and those that follow."""
        if len(self._members) == 1 and self._members[0] is member:
            return self._members
        return [member, *(one for one in self._members if one is not member and one.follows)]

    def _before_any_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if not self._members:
            return
        member = self.of(optimizer)
        if member is None:
            self._members[-1].meet_stranger(optimizer)
        else:
            member.meet_own(optimizer)


REGISTRY = Registry()
