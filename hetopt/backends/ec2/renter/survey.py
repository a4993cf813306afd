"""What carries hetopt's tags in a region: machines first, each list by itself, and what could not be looked at.

A list that cannot be had hides nothing of the others, and is never taken for an empty one. What is asked for by its id
may be forgotten: EC2 refuses a call that names an unknown fleet, so those are dropped one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from hetopt.backends.ec2.renter import tags
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.ledger import Made
from hetopt.backends.ec2.renter.request import Answer, Edge, Kind, Request
from hetopt.core.errors import CloudRefused

FLEETS_A_CALL = 25
"""More in one call, and EC2 deletes none (DeleteFleets reference)."""

DEAD = ("terminated",)
_LIVE_FLEETS = ("submitted", "active", "modifying")

_LISTED: tuple[tuple[Kind, str, str, str], ...] = (
    ("launch-template", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    ("security-group", "describe_security_groups", "SecurityGroups", "GroupId"),
    ("volume", "describe_volumes", "Volumes", "VolumeId"),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """One thing that is there, with what its tags say."""

    kind: Kind
    id: str
    run_id: str
    expires_at_s: float | None = None
    owner: str | None = None
    launched_by: str | None = None
    bucket: str | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A list that could not be had, so that nobody knows what is on it."""

    kind: Kind
    refused: CloudRefused


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is there, and what could not be looked at."""

    found: tuple[Found, ...]
    unseen: tuple[Unseen, ...] = ()

    def check(self) -> None:
        """Do not take for an all-clear what is none.

        Raises:
            CloudRefused: something could not be looked at.
        """
        if self.unseen:
            kinds = " and ".join(dict.fromkeys(f"{one.kind}s" for one in self.unseen))
            first = self.unseen[0].refused
            raise CloudRefused(
                f"the {kinds} were not looked at, so some may be left: {first.message.rstrip('.')}.", hint=first.hint
            )


def surveyed(edge: Edge, run_id: str | None, made: Made) -> Survey:
    """Look at every list.

    Args:
        edge: carries out calls.
        run_id: of the run whose things are wanted; absent: of any.
        made: what a ledger knows; instant fleets are in no list unless they are named.
    """
    found: list[Found] = []
    unseen: list[Unseen] = []

    def list_(kind: Kind, step: Callable[[], list[Found]]) -> None:
        try:
            found.extend(step())
        except CloudRefused as refused:
            unseen.append(Unseen(kind=kind, refused=refused))

    def tagged(kind: Kind, operation: str, key: str, id_: str) -> list[Found]:
        answer = ask(edge, operation, {"Filters": tags.filters(run_id)}, f"the {kind}s that are left")
        return [_found(kind, one[id_], one) for one in answer[key] if one.get("State") != "deleting"]

    list_("instance", partial(_instances, edge, run_id))
    list_("fleet", partial(_fleets, edge, run_id, made))
    for kind, operation, key, id_ in _LISTED:
        list_(kind, partial(tagged, kind, operation, key, id_))
    return Survey(found=tuple(found), unseen=tuple(unseen))


def _instances(edge: Edge, run_id: str | None) -> list[Found]:
    answer = ask(edge, "describe_instances", {"Filters": tags.filters(run_id)}, "the machines that are left")
    found = [one for reservation in answer["Reservations"] for one in reservation["Instances"]]
    return [
        _found("instance", one["InstanceId"], one, _about(one)) for one in found if one["State"]["Name"] not in DEAD
    ]


def _fleets(edge: Edge, run_id: str | None, made: Made) -> list[Found]:
    listed = ask(
        edge,
        "describe_tags",
        {"Filters": [{"Name": "resource-type", "Values": ["fleet"]}, {"Name": "key", "Values": [tags.RUN_ID]}]},
        "the fleets that are left",
    )["Tags"]
    named = [tag["ResourceId"] for tag in listed if run_id in (None, tag["Value"])]
    ids = list(dict.fromkeys([*named, *made.of_kind("fleet-")]))
    fleets = [fleet for batch in batches(ids, FLEETS_A_CALL) for fleet in _fleets_of(edge, batch)]
    alive = [one for one in fleets if str(one.get("FleetState", "active")).startswith(_LIVE_FLEETS)]
    return [_found("fleet", one["FleetId"], one) for one in alive]


def _fleets_of(edge: Edge, ids: Sequence[str]) -> list[Answer]:
    """Those of them that EC2 still knows: it forgets instant fleets after some days, and then refuses the call."""
    try:
        return list(ask(edge, "describe_fleets", {"FleetIds": list(ids)}, "whether the fleets still stand")["Fleets"])
    except ApiRefused as refused:
        if not refused.code.startswith("InvalidFleetId"):
            raise
        if len(ids) == 1:
            return []
        return [fleet for id_ in ids for fleet in _fleets_of(edge, [id_])]


def _found(kind: Kind, id_: str, answer: Answer, detail: str = "") -> Found:
    values = tags.of_aws(answer.get("Tags", ()))
    return Found(
        kind=kind,
        id=id_,
        run_id=values.get(tags.RUN_ID, "?"),
        expires_at_s=tags.from_iso(values.get(tags.EXPIRES_AT, "")),
        owner=values.get(tags.OWNER),
        launched_by=values.get(tags.LAUNCHED_BY),
        bucket=values.get(tags.BUCKET),
        detail=detail,
    )


def _about(instance: Answer) -> str:
    market = "spot" if instance.get("InstanceLifecycle") == "spot" else "on-demand"
    return f"{instance.get('InstanceType', '?')}, {market}, {instance['State']['Name']}"


def ask(edge: Edge, operation: str, parameters: Mapping[str, Any], purpose: str) -> Answer:
    """One reading call to EC2."""
    return edge(Request(step=operation, service="ec2", operation=operation, parameters=parameters, purpose=purpose))


def batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Items, so many at a time."""
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
