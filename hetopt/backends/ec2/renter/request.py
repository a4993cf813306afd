"""One call to the cloud as plain data: what is asked, why, what it costs, and which earlier answers it stands on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

Kind = Literal["instance", "fleet", "security-group", "launch-template", "volume", "schedule-group", "object"]
"""What a call can make."""

Answer = Mapping[str, Any]
"""What the cloud says to a call, as botocore parses it."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A value that an earlier call will answer."""

    step: str
    key: str

    def __str__(self) -> str:
        return f"<{self.key} of {self.step}>"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call.

    Attributes:
        step: names the call within its sequence, so that later ones can refer to it.
        service: of the API, such as ec2.
        operation: as botocore's clients spell it, such as create_fleet.
        parameters: may hold `Reference` anywhere, until they are resolved.
        purpose: why, for whoever reads the list before saying yes.
        makes: what exists afterwards that did not before.
        result: where in the answer the thing is that references look into.
        tolerates: error codes that mean that it is so already.
        if_exists: how to find the thing when the cloud says that its name is taken.
        passing: error codes that go away by themselves, and are waited for.
        usd_per_hour: what it costs from then on, at the prices of the moment.
        worst_usd_per_hour: what it can cost at most.
    """

    step: str
    service: str
    operation: str
    parameters: Mapping[str, Any]
    purpose: str
    makes: Kind | None = None
    result: tuple[str | int, ...] = ()
    tolerates: frozenset[str] = frozenset()
    if_exists: Request | None = None
    passing: frozenset[str] = frozenset()
    usd_per_hour: float = 0.0
    worst_usd_per_hour: float = 0.0

    @property
    def reads_only(self) -> bool:
        """Whether the request only reads."""
        return self.operation.startswith(("describe_", "get_", "head_", "list_", "simulate_"))

    @property
    def api_name(self) -> str:
        """Service and operation as AWS spells them: 'ec2:CreateFleet'."""
        return f"{self.service}:{''.join(word.capitalize() for word in self.operation.split('_'))}"

    def resolved(self, results: Mapping[str, Answer]) -> Request:
        """The request with every reference replaced.

        Args:
            results: of the steps before, by name.
        """

        def value(found: object) -> object:
            return results[found.step][found.key] if isinstance(found, Reference) else found

        existing = self.if_exists.resolved(results) if self.if_exists is not None else None
        return replace(self, parameters=_mapped(self.parameters, value), if_exists=existing)

    def shown(self) -> dict[str, object]:
        """Its parameters as JSON for people: references and contents stand as what they are."""

        def value(found: object) -> object:
            if isinstance(found, bytes):
                return f"<{len(found)} bytes, sha256 {hashlib.sha256(found).hexdigest()[:12]}>"
            return str(found) if isinstance(found, Reference) else found

        shown: dict[str, object] = _mapped(self.parameters, value)
        return shown

    def entity(self, answer: Answer) -> Answer:
        """The thing that the answer is about."""
        found: Any = answer
        for key in self.result:
            found = found[key]
        entity: Answer = found
        return entity


def read(service: str, operation: str, purpose: str, **parameters: Any) -> Request:
    """A call that changes nothing, named by its operation."""
    return Request(step=operation, service=service, operation=operation, parameters=parameters, purpose=purpose)


class Edge(Protocol):
    """Carries requests out: AWS itself, or what wraps it with retries and a ledger."""

    def __call__(self, request: Request) -> Answer:
        """Carry out one request whose references are resolved.

        Raises:
            CloudRefused: the cloud said no.
        """
        ...


def _mapped(found: Any, value: Callable[[object], object]) -> Any:
    if isinstance(found, Mapping):
        return {key: _mapped(inner, value) for key, inner in found.items()}
    if isinstance(found, Sequence) and not isinstance(found, str | bytes):
        return [_mapped(inner, value) for inner in found]
    return value(found)
