"""One look at a run: two lists, whatever its size, and what the machines have written since the last look.

The run's folder is brought up to date as if the run were here: its events and logs grow in the same files, so that
`status`, `logs` and `report` need to know nothing of the cloud. Several terminals may look at the same time; one does.
"""

from __future__ import annotations

import errno
import fcntl
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.protocol import Lease
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState, Duty, MachineState, ending_of
from hetopt.backends.ec2.renter.errors import if_there
from hetopt.backends.ec2.renter.order import Order, Zone
from hetopt.backends.ec2.renter.placement import Machine
from hetopt.backends.ec2.renter.request import Answer, Edge, read
from hetopt.backends.ec2.renter.run_status import BOOT_FOLDER
from hetopt.backends.ec2.uploads import LOG_TAIL_BYTES
from hetopt.core.artifact import write_atomically
from hetopt.core.bucket_traffic import HEARTBEAT_S, LEASE_OBJECT
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.events.records import CheckpointSaved, ProbeEvent, StepsLogged
from hetopt.core.paths import inside, shown
from hetopt.core.run_status import last_events
from hetopt.core.worker_logs import LOG_FOLDER

_EVENTS_NAME = re.compile(r"([0-9]{1,15})\.jsonl")
_ENDED_AT = re.compile(facts.ENDED_AT.value)

UNLISTED_S = 900.0
"""A machine that no list has so long after it was granted has ended: lists lag by minutes (`facts.LISTS_LAG`)."""

_STRANGE_SHOWN = 8
LARGEST_EVENTS_BYTES = 256 * 2**20
"""Machines send what a log has gained in seconds; what is larger is none of their parts."""


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """Looks after one run.

    Attributes:
        order: what was rented.
        run_dir: the run's folder here.
        clock: seconds since the epoch.
    """

    edge: Edge
    order: Order
    run_dir: Path
    clock: Callable[[], float]

    def last(self) -> ClusterState:
        """The cluster as it was last observed; as it was ordered before the first look."""
        path = self.run_dir / SEEN_FILE
        return ClusterState.load(path) if path.exists() else ClusterState(time_s=self.order.created_s)

    def begin(self, assigned: Mapping[str, Machine], zone: Zone, *, ends_outside: bool = True) -> ClusterState:
        """Write down the machines that were granted, with what each costs an hour, beside those of earlier lives."""
        before, outside_s = self.last(), self.order.outside_end_s() if ends_outside else None
        granted = self.granted(assigned, zone, ClusterState(time_s=self.clock()))
        seen = ClusterState(
            time_s=self.clock(),
            zone=zone.name,
            generation=self.next_generation(),
            machines=(
                *before.machines,
                *(one.model_copy(update={"ends_outside_s": outside_s}) for one in granted),
            ),
            ends_outside=ends_outside,
            lease_end_s=self.order.created_s + self.order.lifetime_s,
        )
        self.save(seen)
        return seen

    def next_generation(self) -> int:
        """The generation of the next placement: 0 for a run that never had machines."""
        before = self.last()
        return before.generation + 1 if before.machines else 0

    def granted(
        self,
        assigned: Mapping[str, Machine],
        zone: Zone,
        seen: ClusterState,
        *,
        on_demand: bool = False,
        duty: Duty = "serves",
    ) -> tuple[MachineState, ...]:
        """Machines that are on the bill from now on.

        Args:
            assigned: the machines, by the host that each is or is to be.
            zone: where they are.
            seen: the prices that are known.
            on_demand: all of them, whatever the order says.
            duty: whether they have their place.
        """
        now_s = self.clock()

        def on_the_bill(host: str, machine: Machine) -> MachineState:
            market = "on-demand" if on_demand else self.order.market_of(host)
            return MachineState(
                id=machine.id,
                host=host,
                instance_type=machine.instance_type,
                state="pending",
                since_s=now_s,
                zone=zone.name,
                usd_per_hour=seen.usd_per_hour(zone, machine.instance_type, market),
                extras_usd_per_hour=self.order.extras_usd_per_hour,
                on_demand=market == "on-demand",
                duty=duty,
                address=machine.address,
                life=self.order.life,
            )

        return tuple(on_the_bill(host, machine) for host, machine in assigned.items())

    def save(self, seen: ClusterState) -> None:
        """Write the observed cluster into the run's folder."""
        seen.save(self.run_dir / SEEN_FILE)

    def look(self) -> ClusterState:
        """Bring the folder up to date. Where another process is just doing that, what it saw last is answered.

        Raises:
            CloudRefused: the cloud does not answer.
        """
        with self._alone() as alone:
            before = self.last()
            if not alone:
                return before
            objects = self._list(f"{self.order.prefix}/state/")
            beats = {Path(one["Key"]).stem: one["LastModified"].timestamp() for one in objects}
            machines = self._machines(before, beats) if before.alive else before.machines
            heard = self._hear(before) if before.alive else before
            path, progress = self.run_dir / EVENTS_FILE, StepsLogged | CheckpointSaved | ProbeEvent
            known = path.stat().st_size if path.exists() else 0
            # Events last: a run whose machines have ended has written all of them.
            strange = [*self._fetch_events(), *self._fetch_logs(LOG_FOLDER), *self._fetch_logs(BOOT_FOLDER)]
            stepped = any(isinstance(event, progress) for event in last_events(self.run_dir, since=known))
            served = {machine.id for machine in before.serving} if stepped else set()
            seen = heard.model_copy(
                update={
                    "time_s": self.clock(),
                    "machines": tuple(
                        machine.model_copy(update={"has_stepped": True}) if machine.id in served else machine
                        for machine in machines
                    ),
                    "strange_objects": tuple(strange[:_STRANGE_SHOWN]),
                }
            )
            self.save(seen)
            return seen

    def machines_now(self, seen: ClusterState) -> ClusterState:
        """What EC2 says of the machines; nothing of what they have written is read.

        Raises:
            CloudRefused: the cloud does not answer.
        """
        after = seen.model_copy(update={"time_s": self.clock(), "machines": self._machines(seen, {})})
        self.save(after)
        return after

    def _machines(self, before: ClusterState, beats: Mapping[str, float]) -> tuple[MachineState, ...]:
        answer = self.edge(calls.addresses_call(self.order))
        found = {one["InstanceId"]: one for group in answer["Reservations"] for one in group["Instances"]}
        now_s = self.clock()
        lease_s = now_s if before.lease_end_s is None else min(now_s, before.lease_end_s)
        return tuple(_updated(machine, found.get(machine.id), beats, now_s, lease_s) for machine in before.machines)

    def _hear(self, before: ClusterState) -> ClusterState:
        """What the lease in the bucket says: a terminal on another machine may have wished that the run ends."""
        found = read_lease(self.edge, self.order)
        if found is None:
            return before
        lease, tag = found
        heard: dict[str, object] = {
            "lease_tag": tag,
            "lease_end_s": lease.end_s,
            "lease_renews": lease.renewal is not None,
        }
        if lease.wishes_end and before.stop_wished_s is None:
            heard |= {"stop_wished_s": self.clock(), "stop_reason": "stopped from another terminal"}
        return before.model_copy(update=heard)

    def _fetch_events(self) -> list[str]:
        """Append what is new; each object is named by the place in the log where it begins.

        Returns:
            names of objects that are no part of a log.
        """
        strange: list[str] = []
        path = self.run_dir / EVENTS_FILE
        have = path.stat().st_size if path.exists() else 0
        prefix = f"{self.order.prefix}/events/"
        for one in self._list(prefix, after=f"{prefix}{have - 1:015d}~" if have else None):
            name = one["Key"].removeprefix(prefix)
            match = _EVENTS_NAME.fullmatch(name)
            if match is None or one["Size"] > LARGEST_EVENTS_BYTES:
                strange.append(shown(f"events/{name}"))
                continue
            if int(match[1]) != have:
                continue  # a part that is here already
            body: bytes = self.edge(calls.get_object(self.order, one["Key"]))["Body"]
            with path.open("ab") as stream:
                stream.write(body)
            have += len(body)
        return strange

    def _fetch_logs(self, folder: str) -> list[str]:
        """Take whatever log has grown. The machines keep only the end of a long one.

        Args:
            folder: in the bucket, and in the run's folder.

        Returns:
            names of objects that cannot be files of the run here.
        """
        strange: list[str] = []
        prefix = f"{self.order.prefix}/{folder}/"
        for one in self._list(prefix):
            name = one["Key"].removeprefix(prefix)
            try:
                path = inside(self.run_dir / folder, name, what="log")
                if path.exists() and path.stat().st_mtime >= one["LastModified"].timestamp():
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir() or one["Size"] > 2 * LOG_TAIL_BYTES:
                    raise OSError(errno.EISDIR, "it is a folder here, or larger than what machines send of a log")
            except (BadInput, OSError):
                strange.append(shown(f"{folder}/{name}"))
                continue
            body: bytes = self.edge(calls.get_object(self.order, one["Key"]))["Body"]
            write_atomically(path, body.decode("utf-8", errors="replace"))
        return strange

    def _list(self, prefix: str, after: str | None = None) -> list[Answer]:
        parameters: dict[str, Any] = {
            "Bucket": self.order.bucket,
            "Prefix": prefix,
            "ExpectedBucketOwner": self.order.account_id,
        }
        if after is not None:
            parameters["StartAfter"] = after
        request = read("s3", "list_objects_v2", "what the machines wrote", **parameters)
        return sorted(self.edge(request).get("Contents", ()), key=lambda one: str(one["Key"]))

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        with (self.run_dir / ".watch.lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def read_lease(edge: Edge, order: Order) -> tuple[Lease, str] | None:
    """The lease in the bucket and the tag of its version; None where there is none that can be read.

    Raises:
        CloudRefused: the cloud does not answer.
    """
    answer = if_there(edge, calls.get_object(order, f"{order.prefix}/{LEASE_OBJECT}"))
    lease = None if answer is None else Lease.of_json(answer["Body"])
    return None if answer is None or lease is None else (lease, str(answer["ETag"]))


def _updated(
    machine: MachineState, now: Answer | None, beats: Mapping[str, float], now_s: float, lease_s: float
) -> MachineState:
    """A machine after a look. EC2 forgets machines an hour after their end, and knows new ones after seconds."""
    if not machine.alive:
        return machine
    said_s = beats.get(machine.id, machine.heartbeat_s)
    beat = {"heartbeat_s": said_s}
    if now is None:
        if machine.state in ("pending", "unseen") and now_s < machine.since_s + UNLISTED_S:
            return machine.model_copy(update={"state": "unseen", **beat})
        # It ended an hour ago at least: after it last said that it lives, and before its lease did.
        until_s = max(machine.since_s, lease_s if said_s is None else min(now_s, said_s + HEARTBEAT_S))
        return machine.model_copy(update={"state": "gone", "until_s": until_s, "ending": "unknown", **beat})
    state, reason = now["State"]["Name"], now.get("StateReason", {})
    # A machine that somebody has stopped and started again has a new LaunchTime, and was paid for before.
    is_new = machine.state in ("pending", "unseen") and "LaunchTime" in now
    started = {"since_s": now["LaunchTime"].timestamp()} if is_new else {}
    if state not in facts.STOPPED_STATES.value:
        return machine.model_copy(update={"state": state, **started, **beat})
    return machine.model_copy(
        update={
            "state": state,
            "reason": reason.get("Message") or None,
            "ending": ending_of(str(reason.get("Code", ""))),
            "until_s": _ended_s(str(now.get("StateTransitionReason", "")), now_s),
            **started,
            **beat,
        }
    )


def _ended_s(told: str, now_s: float) -> float:
    """When a machine ended, from 'User initiated (2026-11-20 12:00:00 GMT)'; now, where EC2 does not say."""
    import datetime

    found = _ENDED_AT.search(told)
    if found is None:
        return now_s
    return datetime.datetime.fromisoformat(f"{found[1]}+00:00").timestamp()
