"""Finds what carries hetopt's tags in a region, by tag and by recorded id, and removes it in the order EC2 needs.

A list that cannot be had hides nothing of the others, and is never taken for an empty one. What is gone already is no
error. Lists lag behind what was made, so that recorded ids go first. An instant fleet is no more than the order of its
machines, which carry its tags: it costs nothing, and EC2 forgets it.

A run that was launched here and is over is known by its folder. Of any other, its bucket tells whether it goes on: by
the lease, which is there before any machine is and grows while somebody follows the run, and by heartbeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from hetopt.backends.backend import until
from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import order
from hetopt.backends.ec2.renter.calls import NAMED, prefix_of
from hetopt.backends.ec2.renter.order import last_seen
from hetopt.backends.ec2.renter.ordering import Identity, default_bucket
from hetopt.backends.ec2.renter.request import (
    LEDGER_FILE,
    SETTLES_S,
    Answer,
    ApiRefused,
    Edge,
    Kind,
    Made,
    Request,
    existing_ids,
    if_there,
    instances_in,
    read,
    read_ledger,
    unresolved,
)
from hetopt.backends.host.protocol import Lease
from hetopt.core.budget_law import HEARTBEAT_S, LEASE_OBJECT
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.paths import BUCKET_PATTERN, RUN_PATTERN, is_name

_DELETED: tuple[tuple[Kind, str, str, str], ...] = (
    ("launch-template", "ec2", "delete_launch_template", "LaunchTemplateId"),
    ("security-group", "ec2", "delete_security_group", "GroupId"),
    ("volume", "ec2", "delete_volume", "VolumeId"),
    ("schedule-group", "scheduler", "delete_schedule_group", "Name"),  # last: it ends what nothing else has
)
_LISTED: tuple[tuple[Kind, str, str, str], ...] = (
    ("launch-template", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    ("security-group", "describe_security_groups", "SecurityGroups", "GroupId"),
    ("volume", "describe_volumes", "Volumes", "VolumeId"),
)


@dataclass(frozen=True, kw_only=True)
class TaggedResource:
    """A resource in AWS that carries hetopt's tags.

    Attributes:
        kind: such as ``instance``.
        id: identifier of the resource; of a schedule group, its name.
        run_id: name of the run; ``?``: no tag tells.
        owner: id of the caller who made it; None: no tag tells.
        launched_by: the caller's name; None: no tag tells.
        bucket: S3 bucket of the run; None: no tag tells.
        detail: type, market and state of a machine; else empty.
    """

    kind: Kind
    id: str
    run_id: str
    owner: str | None = None
    launched_by: str | None = None
    bucket: str | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The resources found in a region.

    Attributes:
        resources: all that could be listed.
        unseen: refusal of each kind that could not be listed.
    """

    resources: tuple[TaggedResource, ...]
    unseen: Mapping[Kind, CloudRefused]

    def check(self) -> tuple[TaggedResource, ...]:
        """Return the resources found, once every kind could be listed.

        Raises:
            CloudRefused: a kind could not be listed, so that some resources may be left.
        """
        if self.unseen:
            kinds, first = " and ".join(f"{kind}s" for kind in self.unseen), next(iter(self.unseen.values()))
            raise CloudRefused(
                f"the {kinds} were not looked at, so some may be left: {first.message.rstrip('.')}.", hint=first.hint
            )
        return self.resources


def _alive(edge: Edge, purpose: str, filters: list[dict[str, object]]) -> dict[str, Answer]:
    """Return the machines that have not ended, by id. Asked by filters: naming an id that is gone would be an error."""
    answer = edge(read("ec2", "describe_instances", purpose, Filters=filters))
    return {
        id_: machine
        for id_, machine in instances_in(answer).items()
        if machine["State"]["Name"] not in facts.DEAD_STATES
    }


def _instances(edge: Edge, run_id: str | None) -> list[TaggedResource]:
    return [
        _resource(
            "instance",
            id_,
            machine,
            f"{machine.get('InstanceType', '?')}, {machine.get('InstanceLifecycle', 'on-demand')}, "
            f"{machine['State']['Name']}",
        )
        for id_, machine in _alive(edge, "the machines that are left", order.filters(run_id)).items()
    ]


def _schedule_groups(edge: Edge, run_id: str | None) -> list[TaggedResource]:
    """Return the schedule groups of a run (None: all), which cost nothing; none where the caller may not list them."""
    prefix = NAMED if run_id is None else prefix_of(run_id)
    request = read("scheduler", "list_schedule_groups", "the schedules that are left", NamePrefix=prefix)
    listed = if_there(edge, request, (f"{facts.DENIED}Exception",)) or {"ScheduleGroups": ()}
    tags = partial(read, "scheduler", "list_tags_for_resource", "whose schedules they are")
    return [
        _resource("schedule-group", group["Name"], edge(tags(ResourceArn=group["Arn"])))
        for group in listed["ScheduleGroups"]
        if group["State"] != facts.SCHEDULES_GO
    ]


def _resource(kind: Kind, id_: str, answer: Answer, detail: str = "") -> TaggedResource:
    values = {tag["Key"]: tag["Value"] for tag in answer.get("Tags", ())}
    return TaggedResource(
        kind=kind,
        id=id_,
        run_id=values.get(order.RUN_ID, "?"),
        owner=values.get(order.OWNER),
        launched_by=values.get(order.LAUNCHED_BY),
        bucket=values.get(order.BUCKET),
        detail=detail,
    )


INSTANCES_A_CALL = 200
"""Most machines of one call."""

LOOK_S = 5.0
"""Seconds between looks whether machines have ended, or what is removed is gone: calls are few, and nobody waits for
long."""
_ENDED_WITHIN_S = 600.0
_ROUNDS = 4

_KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "i-": "instance",
        "lt-": "launch-template",
        "sg-": "security-group",
        NAMED: "schedule-group",
    }
)
"""What an id is of, by its beginning."""


@dataclass(frozen=True, kw_only=True)
class Remover:
    """The remover of hetopt's resources in a region.

    Attributes:
        edge: makes the calls; those that remove are in the ledger of the run.
        sleep: waits for so many seconds between looks at machines that end.
        made: ids by a run's ledger. Ids in hand are surer than lists, which lag.
    """

    edge: Edge
    sleep: Callable[[float], None]
    made: Made = field(default=Made())

    def look(self, run_id: str | None = None) -> Survey:
        """List the resources of a run, or of all runs, kind by kind; a refused list hides none of the others.

        Args:
            run_id: name of the run; None: any run of hetopt.
        """

        def tagged(kind: Kind, operation: str, key: str, id_: str) -> list[TaggedResource]:
            request = read("ec2", operation, f"the {kind}s that are left", Filters=order.filters(run_id))
            return [
                _resource(kind, resource[id_], resource)
                for resource in self.edge(request)[key]
                if resource.get("State") != "deleting"
            ]

        resources, unseen = list[TaggedResource](), dict[Kind, CloudRefused]()
        lists: dict[Kind, Callable[[], list[TaggedResource]]] = {
            "instance": partial(_instances, self.edge, run_id),
            "schedule-group": partial(_schedule_groups, self.edge, run_id),
            **{kind: partial(tagged, kind, operation, key, id_) for kind, operation, key, id_ in _LISTED},
        }
        for kind, list_ in lists.items():
            try:
                resources += list_()
            except CloudRefused as refused:
                unseen[kind] = refused
        return Survey(resources=tuple(resources), unseen=unseen)

    def remove(self, resources: Sequence[TaggedResource]) -> None:
        """Remove resources, machines first, waiting up to 10 minutes for their end; go on after a refusal.

        What is gone already is no error.

        Args:
            resources: resources to remove.

        Raises:
            CloudRefused: something stayed; the first refusal is raised at the end.
        """
        refused: list[CloudRefused] = []
        attempt = partial(_attempt, refused)
        instances = [resource.id for resource in resources if resource.kind == "instance"]
        attempt(partial(self.end_machines, instances))
        if instances and not refused:
            attempt(partial(self._wait_for_end, instances))
        for kind, service, operation, key in _DELETED:
            for resource in resources:
                # Disks go with their machines: the next look finds what did not.
                if resource.kind == kind and not (kind == "volume" and instances):
                    attempt(partial(self._until_known, [resource.id], partial(self._delete, service, operation, key)))
        if refused:
            raise refused[0]

    def remove_run(self, run_id: str) -> None:
        """Remove everything of a run, by ledger and lists, until lists show nothing; wait for machines to end.

        What the ledger knows goes first, by its ids. Then the lists are looked at, and once more when they have
        settled, if machines may have been rented by a call whose answer nobody has.

        Raises:
            CloudRefused: something stayed, or a kind could not be listed.
        """
        refused: list[CloudRefused] = []
        attempt = partial(_attempt, refused)
        attempt(lambda: self.remove(self._known()))
        # What could not be removed by its id may be in no list yet: a list without it is no sign that it is gone.
        settled = not self.made.hanging and not refused
        for _ in range(_ROUNDS):
            survey = self.look(run_id)
            if survey.resources:
                refused.clear()  # it is tried again now
                attempt(partial(self.remove, survey.resources))
            elif settled:
                break
            else:
                self.sleep(self.made.settles_s)
                settled = True
        if refused:
            raise refused[0]
        survey.check()

    def end_machines(self, ids: Sequence[str]) -> None:
        """End machines by their ids, and do not wait for their end; ids that EC2 does not know yet are tried again.

        Raises:
            CloudRefused: AWS refuses a call.
        """
        for at in range(0, len(ids), INSTANCES_A_CALL):
            self._until_known(ids[at : at + INSTANCES_A_CALL], self._terminate)

    def _until_known(self, ids: Sequence[str], step: Callable[[Sequence[str]], list[str]]) -> None:
        """Repeat a step, for as long as EC2 takes to list what it has made, on resources that it does not know yet.

        Args:
            ids: identifiers of the resources.
            step: acts on resources; returns the ids of those that EC2 does not know. Recorded ones are tried again.
        """
        left = list(ids)

        def is_done() -> bool:
            left[:] = [id_ for id_ in step(left) if id_ in self.made.ids]
            return not left

        until(is_done, within_s=self.made.settles_s, every_s=LOOK_S, sleep=self.sleep)

    def _known(self) -> list[TaggedResource]:
        """Return the resources that exist by the ledger; of machines old enough to be listed, those that are listed."""
        known = {kind: [id_ for id_ in self.made.ids if id_.startswith(prefix)] for prefix, kind in _KINDS.items()}
        if not self.made.settles_s:
            known["instance"] = self._alive(known["instance"])
        return [TaggedResource(kind=kind, id=id_, run_id="?") for kind, ids in known.items() for id_ in ids]

    def _terminate(self, ids: Sequence[str]) -> list[str]:
        """End machines, and return the ids that EC2 does not know.

        Where one is unknown, EC2 ends none of a call: then each is ended by a call of its own.
        """
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
            if not refused.code.startswith(facts.MACHINES_NOT_KNOWN_YET.partition(".")[0]):
                raise
            return list(ids) if len(ids) == 1 else [id_ for each in ids for id_ in self._terminate([each])]
        return []

    def _wait_for_end(self, ids: Sequence[str]) -> None:
        """Wait until machines have ended: groups and volumes are in use until then. A machine that is not listed has
        ended, or is so new that its group is waited for.
        """
        if not until(lambda: not self._alive(ids), within_s=_ENDED_WITHIN_S, every_s=LOOK_S, sleep=self.sleep):
            raise CloudRefused(
                f"some of {len(ids)} machines have not ended after {_ENDED_WITHIN_S / 60:.0f} minutes.",
                hint="try again: `hetopt gc --on ec2 --remove`",
            )

    def _alive(self, ids: Sequence[str]) -> list[str]:
        """Return the ids of the machines that have not ended."""
        alive = list[str]()
        for at in range(0, len(ids), INSTANCES_A_CALL):
            some: dict[str, object] = {"Name": "instance-id", "Values": list(ids[at : at + INSTANCES_A_CALL])}
            alive += _alive(self.edge, "whether the machines have ended", [some])
        return alive

    def _delete(self, service: str, operation: str, key: str, ids: Sequence[str]) -> list[str]:
        """Delete one resource; return its id if EC2 does not know it."""
        request = Request(
            step=operation.replace("_", "-"),
            service=service,
            operation=operation,
            parameters={key: ids[0]},
            purpose=f"what the run made: {ids[0]}",
            passing=facts.IN_USE,
        )
        return list(ids) if if_there(self.edge, request, facts.GONE) is None else []


def _attempt(refused: list[CloudRefused], step: Callable[[], None]) -> None:
    """Call ``step``, and append a `CloudRefused` that it raises to ``refused``, so that further steps can follow."""
    try:
        step()
    except CloudRefused as error:
        refused.append(error)


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run on EC2 as its folder on this machine tells it: where it rented, whether it is over, what may be left.

    Attributes:
        folder: the run's folder.
        region: AWS region in which it rented.
        over: whether it was stopped, its machines were seen to end, or its records are damaged.
        made_s: time of the newest call whose end nobody knows, or, in a run that is over, of the newest resource not
            known to be removed, seconds since the epoch; None: there is neither.
    """

    folder: Path
    region: str
    over: bool
    made_s: float | None


def local_runs(folders: Iterable[Path]) -> dict[str, LocalRun]:
    """Return the EC2 runs among run folders, by name; skip folders in which nothing was ever asked for.

    A run with damaged records counts as over.
    """
    runs = {}
    for folder in folders:
        entries = read_ledger(folder / LEDGER_FILE)
        if not entries:
            continue  # nothing was ever asked for
        try:
            seen = last_seen(folder)
            over = seen.cleared or not seen.alive
        except BadInput:
            over = True
        moments = [entry.time_s for entry in unresolved(entries)] + list(existing_ids(entries).values() if over else ())
        made_s = max(moments, default=None)
        runs[folder.name] = LocalRun(folder=folder, region=entries[0].region, over=over, made_s=made_s)
    return runs


def settle(runs: Mapping[str, LocalRun], now_s: float, sleep: Callable[[float], None]) -> None:
    """Sleep until 60 s after the newest resource that dead processes made, or may have: EC2's lists show it then.

    What was made by a clock ahead of this one counts as of now.

    Args:
        runs: runs by name, as of `local_runs`.
        now_s: seconds since the epoch.
        sleep: waits for so many seconds; not called where nothing is that new.
    """
    made_s = max((run.made_s for run in runs.values() if run.made_s is not None), default=-math.inf)
    if made_s + SETTLES_S > now_s:
        sleep(min(made_s + SETTLES_S - now_s, SETTLES_S))


SILENT_S = 5 * HEARTBEAT_S
"""Seconds of silence after which machines are taken to be gone."""

_ABSENT = frozenset({*facts.NO_OBJECT, facts.NO_BUCKET})


def is_of(resource: TaggedResource, who: Identity) -> bool:
    """Return whether a resource's owner is this caller of AWS, in any session.

    Args:
        resource: resource with its tags.
        who: caller of AWS.
    """
    return resource.owner in (who.owner, who.user_id) or (resource.owner or "").partition(":")[0] == who.owner


def owner_named(things: Iterable[TaggedResource]) -> str:
    """Return the name of the owner of resources, by the first tag that has one, for people; else a phrase."""
    named = (name for thing in things for name in (thing.launched_by, thing.owner) if name)
    return next(named, "nobody whose name is on it")


def why_leave(edge: Edge, region: str, account_id: str, things: Sequence[TaggedResource], now_s: float) -> str | None:
    """Ask S3 whether the run of ``things`` goes on; return a sentence on why to leave them alone, None if it is over.

    A run whose state cannot be read is left alone. One whose name, or whose bucket's, hetopt cannot have given is over.

    Args:
        edge: makes calls in the run's region.
        region: region of its machines.
        account_id: number of the account that must own its bucket.
        things: resources of one run, at least one.
        now_s: seconds since the epoch.
    """
    run_id = things[0].run_id
    bucket = next((thing.bucket for thing in things if thing.bucket), default_bucket(account_id, region))
    if not (is_name(RUN_PATTERN, run_id) and is_name(BUCKET_PATTERN, bucket)):
        return None
    place, run = {"Bucket": bucket, "ExpectedBucketOwner": account_id}, f"runs/{run_id}"
    until = read("s3", "get_object", "until when its machines may live", Key=f"{run}/{LEASE_OBJECT}", **place)
    alive = read("s3", "list_objects_v2", "when its machines last said that they live", Prefix=f"{run}/state/", **place)
    try:
        written, states = if_there(edge, until, _ABSENT), if_there(edge, alive, _ABSENT) or {}
    except CloudRefused as refused:
        return f"whether its run goes on cannot be read: {refused.message.rstrip('.')}"
    silent_s = now_s - max(
        (state["LastModified"].timestamp() for state in states.get("Contents", ())), default=-math.inf
    )
    if silent_s < SILENT_S:
        return f"its machines said {max(0.0, silent_s):.0f} s ago that they live"
    lease = None if written is None else Lease.of_json(written["Body"])
    if lease is None or lease.wishes_end or now_s >= lease.end_s:
        return None
    return f"its run goes on, for up to {(lease.end_s - now_s) / 3600:.1f} h"
