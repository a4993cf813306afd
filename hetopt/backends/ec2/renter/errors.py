"""What each refusal of the cloud means: one line of cause, the next command to try, and whether trying again can help.

Each row says where its codes were read. The names of botocore's own exceptions stand for what goes wrong before a call
leaves this machine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.request import Answer, Edge, Request
from hetopt.core.errors import CloudRefused
from hetopt.optimizer.market.quota import quota_of

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
