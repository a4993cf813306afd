"""What can go wrong at a call of a run's life: refused with an error, or a dead process."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from hetopt.backends.ec2.renter.request import Answer, ApiRefused, Edge, Request


class Killed(BaseException):
    """What kill -9 is from inside: nothing that comes after happens, and no handler runs to any effect."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        call: at which call of the run's life, from 0; how often it is tried does not count.
        kind: a code of the API, or the moment of the kill. ``lost``: it is carried out, and the answer never arrives.
    """

    call: int
    kind: str
    step: str = ""

    def __str__(self) -> str:
        return f"{self.call} {self.step}: {self.kind}"


@dataclass
class Faulty:
    """Passes calls on, but for one. The same request again is the same call: an error lasts."""

    inner: Edge
    fault: Fault | None
    steps: list[str] = field(default_factory=list)
    dead: bool = False
    _last: Request | None = None

    def __call__(self, request: Request) -> Answer:
        if self.dead:
            raise Killed
        if request != self._last:
            self._last = request
            self.steps.append(f"{request.api_name} {request.step}")
        fault = self.fault
        if fault is None or len(self.steps) - 1 != fault.call:
            return self.inner(request)
        match fault.kind:
            case "killed before":
                self.dead = True
                raise Killed
            case "killed after":
                self.dead = True
                with suppress(ApiRefused):  # whatever the answer was
                    self.inner(request)
                raise Killed
            case "lost":
                self.inner(request)
                raise ApiRefused(request, "ReadTimeoutError", "the answer was lost")
        raise ApiRefused(request, fault.kind, "as the test wants it")
