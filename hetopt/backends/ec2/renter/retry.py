"""When a refused call is made again: the same call with the same token, later, and never at an exhausted pool.

What makes things carries a token, or a name that only one thing can have, so the second call answers what the first one
made. What removes is the same twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.request import Answer, Edge, Request

ATTEMPTS = 6
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 20.0
LISTED_WITHIN_S = 30.0
PATIENCE_S = 300.0
"""For what goes away by itself: interfaces leave a group when their machines have ended, which takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Retrying:
    """Makes calls again where that can help, waiting longer each time, by a random part of the wait (full jitter)."""

    inner: Edge
    sleep: Callable[[float], None]
    random: Random
    attempts: int = ATTEMPTS
    patience_s: float = PATIENCE_S

    def __call__(self, request: Request) -> Answer:
        """Make the call, several times if need be.

        Raises:
            ApiRefused: as it was refused last.
        """
        waited_s, attempt = 0.0, 0
        while True:
            attempt += 1
            try:
                return self.inner(request)
            except ApiRefused as refused:
                if refused.code in request.tolerates:
                    return {}
                if request.if_exists is not None and _name_is_taken(refused.code):
                    return _nested(request.result, self._found(request.if_exists, refused))
                passing = refused.code in request.passing and waited_s < self.patience_s
                again = refused.reaction == "again" and attempt < self.attempts
                if not (passing or again):
                    raise
            wait_s = wait_before(attempt, self.random)
            self.sleep(wait_s)
            waited_s += wait_s

    def _found(self, lookup: Request, refused: ApiRefused) -> Answer:
        """What bears the name already, if it is of this run. Lists may not show for seconds what was just made."""
        waited_s, attempt = 0.0, 0
        while True:
            attempt += 1
            answer = self(lookup)
            try:
                return lookup.entity(answer)
            except (KeyError, IndexError):
                if waited_s >= LISTED_WITHIN_S:
                    raise refused from None
            wait_s = wait_before(attempt, self.random)
            self.sleep(wait_s)
            waited_s += wait_s


def _nested(path: tuple[str | int, ...], entity: Answer) -> Answer:
    """An answer in which the entity is where the call that makes it would have put it."""
    for key in reversed(path):
        entity = {str(key): entity}
    return entity


def wait_before(attempt: int, random: Random) -> float:
    """Seconds to wait after so many attempts: up to twice as long each time."""
    ceiling = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempt - 1, 10))
    return random.uniform(ceiling / 2, ceiling)


def _name_is_taken(code: str) -> bool:
    return code in ("InvalidGroup.Duplicate", "InvalidLaunchTemplateName.AlreadyExistsException")
