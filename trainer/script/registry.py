"""The session of this process that is open, if there is one; and how a script ends when the run is asked to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetopt.core.errors import BadInput


@dataclass
class Registry:
    """Knows the open session.

    Attributes:
        open: it, or nothing.
        begun: sessions that there ever were in this process.
    """

    open: tuple[Any, ...] = ()
    begun: int = 0

    def enter(self, session: object) -> None:
        """Note that a session begins.

        Raises:
            BadInput: another is open.
        """
        if self.open:
            raise BadInput(
                "A session began while another was open.",
                hint="give one session all models and optimizers: session((G, D), (optimizer_g, optimizer_d))",
            )
        self.open, self.begun = (session,), self.begun + 1


REGISTRY = Registry()


class Stopped(BaseException):
    """Somebody asked the run to end. Raised on all workers between the same two steps; no script catches it."""
