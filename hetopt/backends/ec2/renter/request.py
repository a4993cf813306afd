"""Describes one call to the cloud as plain data, and what each refusal of it means.

A call says what is asked, why, and what it costs. A refusal is one line of cause,
the next command to try, and whether trying again can help (``errors.toml``); the names of botocore's own exceptions
stand for what goes wrong before a call leaves this machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

from hetopt.backends.ec2 import facts
from hetopt.core.errors import CloudRefused
from hetopt.optimizer.market.quota import quota_of

Kind = Literal["instance", "fleet", "security-group", "launch-template", "volume", "schedule-group", "object"]
"""What a call can make."""

Answer = Mapping[str, Any]
"""What the cloud says to a call, as botocore parses it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call.

    Attributes:
        step: names the call within its sequence.
        service: of the API, such as ec2.
        operation: as botocore's clients spell it, such as create_fleet.
        parameters: as botocore takes them.
        purpose: why, for whoever reads the list before saying yes.
        makes: what exists afterwards that did not before.
        tolerates: error codes that mean that it is so already.
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
    tolerates: frozenset[str] = frozenset()
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

    def shown(self) -> dict[str, object]:
        """Its parameters as JSON for people: contents stand as what they are."""

        def value(found: object) -> object:
            if isinstance(found, bytes):
                return f"<{len(found)} bytes, sha256 {hashlib.sha256(found).hexdigest()[:12]}>"
            return found

        shown: dict[str, object] = _mapped(self.parameters, value)
        return shown


def read(service: str, operation: str, purpose: str, **parameters: Any) -> Request:
    """A call that changes nothing, named by its operation."""
    return Request(step=operation, service=service, operation=operation, parameters=parameters, purpose=purpose)


class Edge(Protocol):
    """Carries requests out: AWS itself, or what wraps it with retries and a ledger."""

    def __call__(self, request: Request) -> Answer:
        """Carry out one request.

        Raises:
            CloudRefused: the cloud said no.
        """


def _mapped(found: Any, value: Callable[[object], object]) -> Any:
    if isinstance(found, Mapping):
        return {key: _mapped(inner, value) for key, inner in found.items()}
    if isinstance(found, Sequence) and not isinstance(found, str | bytes):
        return [_mapped(inner, value) for inner in found]
    return value(found)


Reaction = Literal["again", "elsewhere", "passing", "stop"]
"""``again``: the same call, later. ``elsewhere``: another pool, at once; the same one has nothing for minutes.
``passing``: goes away by itself where the caller knows that. ``stop``: a person must do something."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """One row of the table. ``cause`` and ``hint`` may name what the call was about, see `_words`."""

    codes: tuple[str, ...]
    reaction: Reaction
    cause: str
    hint: str
    source: str


_READ = facts.read_table("renter/errors.toml")
TABLE = tuple(Meaning(**row) for row in _READ["refusal"])
"""The last row, for whatever has no other, is `UNKNOWN`."""
UNKNOWN = TABLE[-1]


def meaning_of(code: str) -> Meaning:
    """The row for a code. An exact name wins over a pattern, an earlier row over a later."""
    exact = (row for row in TABLE if code in row.codes)
    return next(exact, None) or next(row for row in TABLE if any(fnmatchcase(code, pattern) for pattern in row.codes))


class ApiRefused(CloudRefused):
    """One call that the cloud refused, in words.

    Attributes:
        code: of the API.
        text: what the API said.
        reaction: whether trying again can help.
        is_known: whether the table has the code.
        may_be_done: whether it, or an attempt before the one that was refused, may have been carried out.
    """

    def __init__(self, request: Request, code: str, text: str, *, endpoint: str = "AWS") -> None:
        row = meaning_of(code)
        words = _words(request, code, text, endpoint)
        hint = next((denier["hint"] for denier in _READ["denier"] if denier["text"] in text), row.hint)
        super().__init__(f"{row.cause.format_map(words)}.", hint=hint.format_map(words))
        self.code = code
        self.text = text
        self.request = request
        self.reaction = row.reaction
        self.is_known = row is not UNKNOWN
        self.may_be_done = row.reaction == "again"


def if_there(edge: Edge, request: Request, absent: Collection[str] = facts.NO_OBJECT) -> Answer | None:
    """What the cloud answers about a thing; None where it is not there, by these codes.

    Raises:
        CloudRefused: for any other reason.
    """
    try:
        return edge(request)
    except ApiRefused as refused:
        if refused.code in absent:
            return None
        raise


def instances_in(answer: Answer) -> dict[str, Answer]:
    """The machines that DescribeInstances tells of, by id."""
    return {one["InstanceId"]: one for reservation in answer["Reservations"] for one in reservation["Instances"]}


def _words(request: Request, code: str, text: str, endpoint: str) -> dict[str, str]:
    types = instance_types_of(request)
    market = market_of(request)
    quota = quota_of(types[0], market) if types else None
    fleet = request.operation == "create_fleet" and "spot" not in text.lower()
    return {
        "action": request.api_name,
        "service": request.service,
        "code": code,
        # Some refusals begin with what was just said, and end with a page of what only AWS can decode.
        "text": " ".join(text.partition("Encoded authorization failure message")[0].split())
        .removeprefix(facts.DENIED_SENTENCE)
        .strip()[:300]
        .rstrip(" .")
        or "no reason was given",
        "endpoint": endpoint,
        "types": ", ".join(types) or "machines",
        "quota": f"{quota.name}, {quota.code}" if quota else code,
        "quota_code": quota.code if quota else "CODE",
        "linked_role": facts.FLEET_SERVICE if fleet else facts.SPOT_SERVICE,
        "linked_name": "fleets" if fleet else "spot machines",
        "bucket": str(request.parameters.get("Bucket", "")),
        "key": str(request.parameters.get("Key", "")),
    }


def instance_types_of(request: Request) -> list[str]:
    """The types that a call asks for."""
    configs = request.parameters.get("LaunchTemplateConfigs", ())
    found = [override["InstanceType"] for config in configs for override in config["Overrides"]]
    return list(dict.fromkeys(found))


def market_of(request: Request) -> Literal["spot", "on-demand"]:
    """The market that a fleet is asked for on."""
    target = request.parameters.get("TargetCapacitySpecification", {})
    return "on-demand" if target.get("DefaultTargetCapacityType") == "on-demand" else "spot"
