"""The session of this process that is open, if there is one; and how a script ends when the run is asked to."""

from __future__ import annotations

from typing import Protocol

from hetopt.core.errors import BadInput


class Member(Protocol):
    """A session, for whoever ends it."""

    def close(self) -> None:
        """Leave the other workers."""


class Registry:
    """Knows the open session.

    Attributes:
        open: it, or nothing.
        begun: sessions that there ever were in this process.
    """

    def __init__(self) -> None:
        self.open: tuple[Member, ...] = ()
        self.begun = 0

    def enter(self, member: Member) -> None:
        """Note that a session begins.

        Raises:
            BadInput: another is open.
        """
        if self.open:
            raise BadInput(
                "A session began while another was open.",
                hint="give one session all models and optimizers: session((G, D), (optimizer_g, optimizer_d))",
            )
        self.open, self.begun = (member,), self.begun + 1


REGISTRY = Registry()


class Stopped(BaseException):
    """Somebody asked the run to end. Raised on all workers between the same two steps; no script catches it."""
