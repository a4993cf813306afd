"""Finding what runs left in a region, by tag and by recorded id, and removing it in the order that EC2 needs.

What it takes is the same however many machines there are: a few lists, each in pages. Whatever may be gone already is
no error: removing is the same twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from hetopt.optimizer.ec2 import tags
from hetopt.optimizer.ec2.errors import ApiRefused
from hetopt.optimizer.ec2.request import Answer, Edge, Kind, Request
from hetopt.profiler.errors import CloudRefused

INSTANCES_A_CALL = 200
FLEETS_A_CALL = 25
"""More in one call, and EC2 deletes none (DeleteFleets reference)."""

_GONE = frozenset(
    {
        "InvalidGroup.NotFound",
        "InvalidGroupId.NotFound",
        "InvalidLaunchTemplateId.NotFound",
        "InvalidLaunchTemplateName.NotFoundException",
        "InvalidLaunchTemplateId.NotFoundException",
        "InvalidVolume.NotFound",
        "InvalidFleetId.NotFound",
    }
)
_IN_USE = frozenset({"DependencyViolation", "VolumeInUse", "InvalidGroup.InUse"})
_DEAD = ("terminated",)
_DYING = ("terminated", "shutting-down")
_LIVE_FLEETS = ("submitted", "active", "modifying")
_ENDING_S = 5.0
_ENDED_WITHIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """One thing that is there."""

    kind: Kind
    id: str
    run_id: str
    expires_at_s: float | None = None
    owner: str | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Remover:
    """Finds and removes, in one region.

    Attributes:
        edge: carries out calls; those that remove are in the ledger of the run.
        sleep: waits between looks at machines that end.
        fleet_ids: that a ledger knows. Instant fleets are not listed unless they are named.
    """

    edge: Edge
    sleep: Callable[[float], None]
    fleet_ids: Sequence[str] = field(default=())

    def find(self, run_id: str | None = None) -> list[Found]:
        """Everything of one run, or of any, that is still there."""
        instances = [found for found in self._instances(run_id) if found["State"]["Name"] not in _DEAD]
        found = [_found("instance", one["InstanceId"], one, _about(one)) for one in instances]
        found += [_found("fleet", one["FleetId"], one) for one in self._fleets(run_id)]
        listed: tuple[tuple[Kind, str, str, str], ...] = (
            ("launch-template", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
            ("security-group", "describe_security_groups", "SecurityGroups", "GroupId"),
            ("volume", "describe_volumes", "Volumes", "VolumeId"),
        )
        for kind, operation, list_, key in listed:
            answer = self._ask(operation, {"Filters": tags.filters(run_id)}, f"the {kind}s that are left")
            found += [_found(kind, one[key], one) for one in answer[list_] if one.get("State") != "deleting"]
        return found

    def remove(self, found: Sequence[Found]) -> None:
        """Remove all of it. What cannot be removed does not keep the rest from going.

        Raises:
            CloudRefused: something stayed; the first reason is told.
        """
        refused: list[CloudRefused] = []

        def attempt(step: Callable[[], None]) -> None:
            try:
                step()
            except CloudRefused as error:
                refused.append(error)

        def each(kind: Kind, operation: str, key: str) -> None:
            for id_ in by_kind.get(kind, ()):
                attempt(partial(self._delete, operation, key, id_))

        by_kind: dict[str, list[str]] = {}
        for one in found:
            by_kind.setdefault(one.kind, []).append(one.id)
        # A fleet goes with its machines; those that it does not know (any more) are ended by their own ids.
        for batch in _batches(by_kind.get("fleet", ()), FLEETS_A_CALL):
            attempt(partial(self._delete_fleets, batch))
        instances = by_kind.get("instance", [])
        for batch in _batches(instances, INSTANCES_A_CALL):
            attempt(partial(self.end_machines, batch))
        if instances:
            attempt(partial(self._wait_for_end, instances))
        each("launch-template", "delete_launch_template", "LaunchTemplateId")
        each("security-group", "delete_security_group", "GroupId")
        if by_kind.get("volume") and instances:
            # Disks go with their machines; what is deleted one by one is only what did not.
            by_kind["volume"] = self._remaining(by_kind["volume"])
        each("volume", "delete_volume", "VolumeId")
        if refused:
            raise refused[0]

    def remove_run(self, run_id: str) -> list[Found]:
        """Remove everything of a run, and look again until nothing is left; answers what there was."""
        everything: dict[str, Found] = {}
        for _ in range(3):
            found = self.find(run_id)
            if not found:
                break
            everything.update({one.id: one for one in found})
            self.remove(found)
        return list(everything.values())

    def _instances(self, run_id: str | None) -> list[Answer]:
        answer = self._ask("describe_instances", {"Filters": tags.filters(run_id)}, "the machines that are left")
        return [one for reservation in answer["Reservations"] for one in reservation["Instances"]]

    def _fleets(self, run_id: str | None) -> list[Answer]:
        listed = self._ask(
            "describe_tags",
            {"Filters": [{"Name": "resource-type", "Values": ["fleet"]}, {"Name": "key", "Values": [tags.RUN_ID]}]},
            "the fleets that are left",
        )["Tags"]
        named = [tag["ResourceId"] for tag in listed if run_id in (None, tag["Value"])]
        ids = list(dict.fromkeys([*named, *self.fleet_ids]))
        fleets: list[Answer] = []
        for batch in _batches(ids, FLEETS_A_CALL):
            fleets += self._ask("describe_fleets", {"FleetIds": batch}, "whether the fleets still stand")["Fleets"]
        return [fleet for fleet in fleets if str(fleet.get("FleetState", "active")).startswith(_LIVE_FLEETS)]

    def _ask(self, operation: str, parameters: Mapping[str, Any], purpose: str) -> Answer:
        return self.edge(
            Request(step=operation, service="ec2", operation=operation, parameters=parameters, purpose=purpose)
        )

    def _delete_fleets(self, ids: Sequence[str]) -> None:
        request = Request(
            step="delete-fleets",
            service="ec2",
            operation="delete_fleets",
            # Deleting an instant fleet always ends its machines.
            parameters={"FleetIds": list(ids), "TerminateInstances": True},
            purpose="the fleets, and the machines in them",
            tolerates=_GONE,
        )
        try:
            answer = self.edge(request)
        except ApiRefused as refused:
            if refused.code != "InvalidParameterCombination":
                raise
            # All machines of a fleet have ended already, and an empty list of them cannot be ended.
            answer = self.edge(replace(request, parameters={"FleetIds": list(ids), "TerminateInstances": False}))
        for failed in answer.get("UnsuccessfulFleetDeletions", ()):
            code = failed.get("Error", {}).get("Code", "")
            if code not in ("fleetIdDoesNotExist", "fleetNotInDeletableState"):
                raise CloudRefused(
                    f"the fleet {failed.get('FleetId')} was not deleted: "
                    f"{str(failed.get('Error', {}).get('Message', code)).rstrip('.')}.",
                    hint="try again in a minute: `hetopt gc --on ec2 --remove`",
                )

    def end_machines(self, ids: Sequence[str]) -> None:
        """End machines. One id that EC2 does not know spares all the others, so then each goes by itself."""
        request = Request(
            step="terminate",
            service="ec2",
            operation="terminate_instances",
            parameters={"InstanceIds": list(ids)},
            purpose="the machines",
        )
        try:
            self.edge(request)
        except ApiRefused as refused:
            if not refused.code.startswith("InvalidInstanceID"):
                raise
            if len(ids) == 1:
                return  # it is gone
            for one in ids:
                self.end_machines([one])

    def _wait_for_end(self, ids: Iterable[str]) -> None:
        """Groups and volumes are in use until the machines have ended."""
        waiting, waited_s = set(ids), 0.0
        while waited_s < _ENDED_WITHIN_S:
            alive = {one["InstanceId"] for one in self._instances(None) if one["State"]["Name"] not in _DEAD}
            waiting &= alive
            if not waiting:
                return
            self.sleep(_ENDING_S)
            waited_s += _ENDING_S
        raise CloudRefused(
            f"{len(waiting)} machines have not ended after {_ENDED_WITHIN_S / 60:.0f} minutes.",
            hint="try again: `hetopt gc --on ec2 --remove`",
        )

    def _remaining(self, volumes: Iterable[str]) -> list[str]:
        answer = self._ask("describe_volumes", {"Filters": tags.filters(None)}, "disks that outlived their machines")
        there = {one["VolumeId"] for one in answer["Volumes"]}
        return [id_ for id_ in volumes if id_ in there]

    def _delete(self, operation: str, key: str, id_: str) -> None:
        self.edge(
            Request(
                step=operation.replace("_", "-"),
                service="ec2",
                operation=operation,
                parameters={key: id_},
                purpose=f"what the run made: {id_}",
                tolerates=_GONE,
                passing=_IN_USE,
            )
        )


def is_dying(instance: Answer) -> bool:
    """Whether a machine has ended, or is about to."""
    return instance["State"]["Name"] in _DYING


def _found(kind: Kind, id_: str, answer: Answer, detail: str = "") -> Found:
    values = tags.of_aws(answer.get("Tags", ()))
    return Found(
        kind=kind,
        id=id_,
        run_id=values.get(tags.RUN_ID, "?"),
        expires_at_s=tags.from_iso(values.get(tags.EXPIRES_AT, "")),
        owner=values.get(tags.OWNER),
        detail=detail,
    )


def _about(instance: Answer) -> str:
    market = "spot" if instance.get("InstanceLifecycle") == "spot" else "on-demand"
    return f"{instance.get('InstanceType', '?')}, {market}, {instance['State']['Name']}"


def _batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
