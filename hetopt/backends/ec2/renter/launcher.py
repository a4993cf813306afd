"""Runs on EC2: rents, looks, decides by `reconcile`, records, acts, records, and gives back.

All machines of an order are rented in one zone, or in the next, or none and nothing is left behind. A look is two
lists, whatever the run's size, and what the machines have written since the last look, by which the run's folder is
brought up to date; of several terminals one looks at a time. The folder has everything that must be known, so that a
process goes on with what an earlier one meant to do, whatever ended that.
"""

from __future__ import annotations

import datetime
import fcntl
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hetopt.backends.backend import RunHandle, advances, is_finished, until
from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.order import (
    BOOT_FOLDER,
    ORDER_FILE,
    SEEN_FILE,
    UNPLACED_S,
    ClusterState,
    Duty,
    MachineState,
    Order,
    Role,
    Zone,
    billed_from_s,
    ending_of,
    failed_s,
    filters,
    judged,
    last_seen,
    price_request,
    rebilled,
    remember,
    spot_prices_due,
    stepped_s,
    stopped_s,
    why_failed,
)
from hetopt.backends.ec2.renter.reconcile import (
    ASK_AGAIN_S,
    Action,
    Announce,
    Clear,
    End,
    Extend,
    Observed,
    Place,
    Rent,
    Stop,
    moved,
    reconcile,
)
from hetopt.backends.ec2.renter.removal import LOOK_S, Remover, TaggedResource
from hetopt.backends.ec2.renter.request import (
    LEDGER_FILE,
    SETTLES_S,
    Answer,
    ApiRefused,
    Edge,
    Made,
    Request,
    connect_run,
    if_there,
    instances_in,
    made,
    read,
    read_ledger,
)
from hetopt.backends.host.protocol import (
    LOG_TAIL_BYTES,
    Latest,
    Lease,
    Place as Seat,
    placement_json,
    without,
)
from hetopt.backends.processes import locks
from hetopt.core.artifact import write_atomically
from hetopt.core.budget_law import HEARTBEAT_S, LEASE_OBJECT, SHUTDOWN_S
from hetopt.core.errors import BadInput, CloudRefused, HetoptError
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.paths import inside
from hetopt.core.run_folder import BUNDLE_FILE, LATEST_OBJECT, LOG_FOLDER, read_spec, write_spec
from hetopt.core.run_spec import RunSpec, host_names
from hetopt.core.run_status import RunState, RunStatus, last_events, log_bytes
from hetopt.optimizer.plan import Market

PLAN_OBJECT = "plan.json"

_STOP_PATIENCE_S = 120.0
_EVENTS_NAME = re.compile(r"([0-9]{1,15})\.jsonl")
_ENDED_AT = re.compile(facts.ENDED_AT)

UNLISTED_S = 900.0
"""Seconds after its grant from which a machine that no list has counts as ended: lists lag by minutes."""

LARGEST_EVENTS_BYTES = 256 * 2**20
"""Largest part of an event log that is read: machines send what a log has gained in seconds, so larger objects are none
of their parts."""

_MOST_ROUNDS = 16
"""Of decisions upon one look: far more than any run needs."""


ADDRESSES_WITHIN_S = 180.0
"""Seconds within which granted machines must be listed with an address."""
_ADDRESSES_EVERY_S = 3.0
_ATTEMPTS_AN_ASK = 100
"""Tokens of later asks must differ from those of the zones that were tried first."""


@dataclass(frozen=True, kw_only=True)
class _Renter:
    """The base of what rents: a clock, and the callbacks to people.

    Attributes:
        clock: returns seconds since the epoch.
        sleep: waits for so many seconds.
        tell: receives lines on what goes on.
        accept: returns whether a run may begin on the fewer machines of its spec, when no zone has all; None: never.
        patience_s: how long machines may take to end by themselves, beside the time that their checkpoint takes.
    """

    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    tell: Callable[[str], None] = lambda _: None
    accept: Callable[[RunSpec], bool] | None = None
    patience_s: float = _STOP_PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class Loop(_Renter):
    """The loop that rents and looks after the machines of one run: observes, records, decides by `reconcile`, acts.

    Attributes:
        edge: makes the calls, writes the ledger, tries again.
        order: what is rented.
        run_dir: the run's folder here, with its ledger.
    """

    edge: Edge
    order: Order
    run_dir: Path

    def begin(self, spec: RunSpec, contents: Mapping[str, bytes], bundle: bytes) -> ClusterState:
        """Rent all machines of the order in one zone and tell each its host; return the state; on an error remove all.

        With ``accept``, fewer machines will do where that agrees.

        Args:
            spec: spec of the run, on the order's hosts.
            contents: objects of the run, by name.
            bundle: archive of the code.

        Raises:
            CloudRefused: no zone has the machines, or a call is refused; everything made on the way has been removed,
                or the hint says what may be left.
        """
        before = last_seen(self.run_dir)
        try:
            written = {request.step: self.edge(request) for request in calls.object_calls(self.order, contents, bundle)}
            zone, ids, left = self._in_any_zone(
                spec, self._templates(self.order.network.security_group or self._group())
            )
            self.order.of_run(left).save(self.run_dir / ORDER_FILE)
            self._end_outside(ids.values())
            state = ClusterState(
                time_s=self.clock(),
                zone=zone.name,
                generation=before.generation + 1 if before.machines else 0,
                lease_end_s=self.order.created_s + self.order.lifetime_s,
                lease_tag=written["lease"]["ETag"],
            )
            self.tell("waiting for the machines' addresses")
            machines = (*before.machines, *self.granted(self.machines_of(ids), state))
            return self._write_placement(state.model_copy(update={"machines": machines}), left)
        except BaseException as error:
            self._clear_after(error)
            raise

    def granted(
        self, assigned: Mapping[str, Answer], seen: ClusterState, duty: Duty = "serves"
    ) -> Iterator[MachineState]:
        """Yield a record, billed from now on, for each machine just granted, from EC2's descriptions by host.

        Args:
            assigned: EC2's descriptions of the machines, by the host that each is or is to be.
            seen: the cluster state, with the prices that are known.
            duty: ``serves``: the machines have their places; ``waits``: not yet.
        """
        for host, machine in assigned.items():
            zone = self.order.zone(machine["Placement"]["AvailabilityZone"])
            market: Market = "spot" if machine.get("InstanceLifecycle") == "spot" else "on-demand"
            yield MachineState(
                id=machine["InstanceId"],
                host=host,
                address=machine.get("PrivateIpAddress", ""),
                instance_type=machine["InstanceType"],
                state="pending",
                since_s=self.clock(),
                zone=zone.name,
                usd_per_hour=seen.usd_per_hour(zone, machine["InstanceType"], market),
                extras_usd_per_hour=self.order.extras_usd_per_hour,
                on_demand=market == "on-demand",
                duty=duty,
                life=self.order.life,
            )

    def save(self, seen: ClusterState) -> ClusterState:
        """Write the cluster state into the run's folder, and return it."""
        seen.save(self.run_dir / SEEN_FILE)
        return seen

    def look(self) -> ClusterState:
        """Update the run's folder from EC2 and the bucket; return the cluster state, recorded.

        Machines' states, events and logs are read, and a lease from another terminal is noted. Where another process
        looks right now, the last state is returned and nothing is read.

        Raises:
            CloudRefused: AWS does not answer, or refuses a call.
        """
        with (self.run_dir / ".watch.lock").open("w") as stream:
            is_alone = locks(stream.fileno(), fcntl.LOCK_EX)
            before = last_seen(self.run_dir)
            if not is_alone:
                return before
            beats = {Path(name).stem: entry["LastModified"].timestamp() for name, entry in self._objects_in("state")}
            machines = self._machines(before, beats) if before.alive else before.machines
            updated = self._with_lease(before) if before.alive else before
            known = log_bytes(self.run_dir)
            # Events last: a run whose machines have ended has written all of them.
            self._fetch_events()
            self._fetch_logs(LOG_FOLDER)
            self._fetch_logs(BOOT_FOLDER)
            stepped = any(map(advances, last_events(self.run_dir, since=known)))
            served = {machine.id for machine in before.serving} if stepped else set()
            seen = updated.model_copy(update={"time_s": self.clock(), "machines": machines})
            seen = seen.with_machines(served, has_stepped=True)
            return self.save(seen)

    def machines_now(self, seen: ClusterState) -> ClusterState:
        """Ask EC2 alone for the machines' states; record and return the cluster state. The bucket is not read.

        Args:
            seen: the last cluster state.

        Raises:
            CloudRefused: AWS does not answer, or refuses the call.
        """
        return self.save(seen.model_copy(update={"time_s": self.clock(), "machines": self._machines(seen, {})}))

    def _machines(self, before: ClusterState, beats: Mapping[str, float]) -> tuple[MachineState, ...]:
        """Return the present states of a run's machines, and of machines that EC2 lists and no record knows.

        The latter were rented by a process that was killed; they are billed, and have the duty 'relieved'.

        Args:
            before: the last cluster state.
            beats: when each machine last said that it lives, epoch seconds by id; none: the bucket was not read.
        """
        listed, now_s = instances_in(self.edge(calls.addresses_call(self.order))), self.clock()
        known, host = {machine.id for machine in before.machines}, self.order.workers[0].host
        for id_, machine in listed.items():
            if id_ not in known and now_s > machine["LaunchTime"].timestamp() + ADDRESSES_WITHIN_S:
                strays = tuple(self.granted({host: machine}, before, "relieved"))
                before = before.model_copy(update={"machines": (*before.machines, *strays)})
        lease_s = now_s if before.lease_end_s is None else min(now_s, before.lease_end_s)
        return tuple(_updated(machine, listed.get(machine.id), beats, now_s, lease_s) for machine in before.machines)

    def _with_lease(self, before: ClusterState) -> ClusterState:
        """Return the cluster state with the lease in the bucket, where another terminal may have wished a stop."""
        written = read_lease(self.edge, self.order)
        if written is None:
            return before
        lease, tag = written
        changes: dict[str, object] = {
            "lease_tag": tag,
            "lease_end_s": lease.end_s,
        }
        if lease.wishes_end and before.stop_wished_s is None:
            changes |= {"stop_wished_s": self.clock(), "stop_reason": "stopped from another terminal"}
        return before.model_copy(update=changes)

    def _fetch_events(self) -> None:
        """Append the bucket's new events to the log here; each of their objects is named by its offset in the log."""
        path, have = self.run_dir / EVENTS_FILE, log_bytes(self.run_dir)
        for name, entry in self._objects_in("events", after=f"{have - 1:015d}~" if have else ""):
            match = _EVENTS_NAME.fullmatch(name)
            if match is None or entry["Size"] > LARGEST_EVENTS_BYTES or int(match[1]) != have:
                continue  # no part of a log, or one that is here already
            try:
                with path.open("ab") as stream:
                    have += stream.write(self.edge(calls.get_object(self.order, entry["Key"]))["Body"])
            except OSError:
                os.truncate(path, have)  # after half of an object no later one would fit
                raise

    def _fetch_logs(self, folder: str) -> None:
        """Fetch the logs that have grown since they were fetched last; of a long one the bucket has only the end.

        Args:
            folder: name of the folder, in the bucket and in the run's folder.
        """
        for name, entry in self._objects_in(folder):
            try:
                path = inside(self.run_dir / folder, name, what="log")
                if path.exists() and path.stat().st_mtime >= entry["LastModified"].timestamp():
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir() or entry["Size"] > 2 * LOG_TAIL_BYTES:
                    continue  # a folder here, or larger than what machines send of a log
            except (BadInput, OSError):
                continue  # it cannot be a file of the run here
            body: bytes = self.edge(calls.get_object(self.order, entry["Key"]))["Body"]
            write_atomically(path, body.decode("utf-8", errors="replace"))

    def _objects_in(self, folder: str, after: str = "") -> Iterator[tuple[str, Answer]]:
        """Yield the names and descriptions of the run's objects in a folder of the bucket, in order.

        Args:
            folder: under the run's prefix.
            after: name that all of them come after; empty: any.
        """
        prefix, place = f"{self.order.prefix}/{folder}/", {"Bucket": self.order.bucket}
        place |= {"Prefix": prefix, "StartAfter": prefix + after, "ExpectedBucketOwner": self.order.account_id}
        listed = self.edge(read("s3", "list_objects_v2", "what the machines wrote", **place))
        for entry in sorted(listed.get("Contents", ()), key=lambda entry: str(entry["Key"])):
            yield entry["Key"].removeprefix(prefix), entry

    def settle(self, state: ClusterState) -> ClusterState:
        """Carry out the actions that `reconcile` asks for, until none is left; return the cluster state recorded last.

        Args:
            state: state as just seen.

        Raises:
            CloudRefused: AWS refuses an action, or the machines that are left cannot hold the batch. The next look
                tries again.
        """
        for _ in range(_MOST_ROUNDS):
            now_s, events = self.clock(), last_events(self.run_dir)
            observed = Observed(
                state=state,
                spec=read_spec(self.run_dir),
                stepped_s=stepped_s(events),
                stopped_s=stopped_s(events),
                is_finished=is_finished(events),
                failed_s=failed_s(self.order, events),
            )
            action = reconcile(self.order, observed, now_s, patience_s=self.patience_s)
            before, state = state, state if action is None else self.act(action)
            if state == before or isinstance(action, Clear):
                break
        return state

    def act(self, action: Action) -> ClusterState:
        """Carry out an action in AWS (rent, end, pause, place, extend, stop, clear); return the recorded cluster state.

        What the action says is told to people first.

        Raises:
            CloudRefused: AWS refuses it.
        """
        state = action.state
        reason = action.say
        if action.unbooted:
            reason = f"{why_failed(self.run_dir, action.unbooted)}. {action.say}"
        if reason is not None:
            self.tell(reason)
        match action:
            case Clear():
                return self.clear(state, reason=reason)
            case Rent():
                return self._rent(action)
            case Extend():
                return self.extend(state, action.end_s)
            case Stop():
                self.edge(calls.lease_call(self.order, state.lease_end_s or self.clock(), 0.0))
            case End():
                Remover(edge=self.edge, sleep=self.sleep).end_machines(action.ids)
            case Announce():
                return self._write_placement(state, read_spec(self.run_dir), pauses=action.pauses)
            case Place():
                return self._write_placement(state, action.spec)
        return self.save(state)

    def _write_placement(self, state: ClusterState, spec: RunSpec, *, pauses: bool = False) -> ClusterState:
        """Write the placement of the machines that serve into the bucket; return the cluster state that was recorded.

        Workers are recorded as of the types that were granted, by which later plans learn from the run.

        Args:
            state: state as last seen, with the generation.
            spec: spec of the run, on the hosts that serve.
            pauses: whether workers are to save a checkpoint and wait for the next generation.
        """
        granted = {machine.host: {"type": machine.instance_type} for machine in state.serving}
        workers = (worker.model_copy(update=granted.get(worker.host, {})) for worker in spec.workers)
        spec = spec.model_copy(update={"workers": tuple(workers)})
        state = self._outlive(state, state.lease_end_s or self.order.created_s + self.order.lifetime_s)
        if state.generation or any(machine.has_stepped for machine in state.machines):
            state = state.model_copy(update={"resume_from": latest_checkpoint(self.edge, self.order)})
        hosts = host_names(spec)
        seats = {
            machine.id: Seat(host=machine.host, address=machine.address)
            for machine in state.serving
            if machine.host in hosts
        }
        body = placement_json(spec, seats, state.generation, state.resume_from, pauses=pauses)
        self.edge(calls.placement_call(self.order, body))
        write_spec(self.run_dir, spec)
        return self.save(state)

    def extend(self, state: ClusterState, end_s: float) -> ClusterState:
        """Write a lease until ``end_s``, unless another terminal wrote a lease since the last look; return the state.

        In the latter case the given state is returned, but for scheduled ends, and nothing is recorded.

        Args:
            state: state as last seen.
            end_s: until when machines live, seconds since the epoch; they train until a last checkpoint is safe by
                then.

        Raises:
            CloudRefused: AWS refuses the call.
        """
        state = self._outlive(state, max(end_s, state.lease_end_s or end_s))
        stop_training_s = end_s - self.order.checkpoint_s
        try:
            answer = self.edge(calls.lease_call(self.order, end_s, stop_training_s, over=state.lease_tag))
        except ApiRefused as refused:
            if refused.code == facts.WRITTEN_MEANWHILE:
                return state  # the next look reads what it was
            raise
        lease = {"lease_end_s": end_s, "lease_tag": answer["ETag"]}
        return self.save(self._outlive(state.model_copy(update=lease), end_s))

    def _outlive(self, state: ClusterState, lease_end_s: float) -> ClusterState:
        """Move the ends that AWS's scheduler has for serving machines to some slack after the lease; return the state.

        Call it before the lease grows, and after it has shrunk. A machine's end is moved once half of its slack is used
        up. Without the scheduler's role nothing is done.

        Args:
            state: the last cluster state.
            lease_end_s: end of the lease, epoch seconds.

        Raises:
            CloudRefused: AWS refuses a move: it may end machines sooner, so that their lease must not grow.
        """
        if self.order.end_role is None:
            return state
        outside_s = self.order.outside_end_s(lease_end_s)
        soonest_s = (outside_s + lease_end_s + SHUTDOWN_S) / 2
        due = [
            machine.id
            for machine in state.serving
            if machine.ends_outside_s is None or not soonest_s <= machine.ends_outside_s <= math.ceil(outside_s)
        ]
        for id_ in due:
            self.edge(calls.end_call(self.order, id_, outside_s, moves=True))
        return state.with_machines(due, ends_outside_s=outside_s)

    def billed(self, state: ClusterState) -> ClusterState:
        """Ask EC2 for spot prices if due; return the cluster state with spot machines billed by them up to now.

        Raises:
            CloudRefused: AWS refuses the call.
        """
        order, now_s = self.order, self.clock()
        if spot_prices_due(order, state, now_s):
            roles = [role for role in order.roles if role.market == "spot"]
            types = list(dict.fromkeys(name for role in roles for name in role.instance_types))
            history = self.edge(price_request(types, billed_from_s(order, state)))
            return self.save(rebilled(order, state, history, now_s))
        return state

    def clear(self, state: ClusterState, reason: str | None = None) -> ClusterState:
        """Remove everything of the run from AWS, then read what its machines wrote last; return the cluster state.

        It is recorded with ``cleared`` once no machine is alive, and what was seen of spot pools is kept for later
        plans. What cannot be read then is only told.

        Args:
            state: state as last seen.
            reason: why the run ends; None: the state's own reason stays.

        Raises:
            CloudRefused: something could not be removed, or not be looked at.
        """
        if reason is not None:
            state = state.model_copy(update={"stop_reason": reason})
            self.save(state)
        Remover(edge=self.edge, sleep=self.sleep, made=self.made).remove_run(self.order.run_id)
        try:
            state = self.look()
        except (HetoptError, OSError, ValueError) as error:
            self.tell(f"What the machines of {self.order.run_id} wrote last could not be read: {error}")
            state = self.machines_now(state)
        state = state.model_copy(update={"cleared": not state.alive})
        self.save(state)
        try:
            state = self.billed(state)  # nobody looks at it again
            if state.cleared:
                remember(state, self.order, self.run_dir)
        except (HetoptError, OSError) as error:  # the run ends all the same
            self.tell(f"What this run has last seen of its spot pools is not kept: {error}")
        return state

    def _rent(self, action: Rent) -> ClusterState:
        """Ask for machines, which end when the others do; return the recorded state with the granted ones.

        Machines for which there is no capacity are missing, and told of. Each time has tokens and templates of its own.

        Raises:
            CloudRefused: for another reason than capacity. Whatever ends the asking, what was granted is given back.
        """
        state, before = action.state, self.made.ids
        self.save(state)  # before anything is rented: whatever ends this process, the next ask has other tokens
        try:
            group = self.order.network.security_group or self._group_again()
            templates = self._templates(group, state.asks, state.lease_end_s)
            zone, attempt = self.order.zone(state.zone), state.asks * _ATTEMPTS_AN_ASK
            ids, _ = self._in_zone(action.roles, zone, attempt, templates, together=False)
            self._end_outside(ids.values(), state.lease_end_s)
            machines = tuple(self.granted(self.machines_of(ids), state, "waits"))
        except BaseException as error:
            # Nobody would know them, and they would be paid until they end by themselves.
            new = [id_ for id_ in self.made.ids if id_.startswith("i-") and id_ not in before]
            self._or_also(
                error,
                "machines that were granted could not be ended",
                partial(self._given(new).end_machines, new),
            )
            raise
        missing = [host for role in action.roles for host in role.hosts if host not in ids]
        if missing:
            self.tell(f"there is no capacity for {', '.join(missing)}; it is asked for again in {ASK_AGAIN_S:.0f} s")
        state = state.model_copy(update={"machines": (*state.machines, *machines)})
        return self.save(state)

    @property
    def made(self) -> Made:
        """The ids of what the run has made in AWS and not removed, by its ledger as of now; asks AWS nothing."""
        return made(read_ledger(self.run_dir / LEDGER_FILE), self.clock())

    def _group(self) -> str:
        """Make the machines' security group, where none is named; return its id."""
        group = str(self.edge(calls.security_group_call(self.order, self.order.zones[0]))["GroupId"])
        for request in calls.rule_calls(self.order, group):
            self.edge(request)
        return group

    def _group_again(self) -> str:
        """Return the id of the security group that was made for the run earlier.

        Raises:
            CloudRefused: it is not listed.
        """
        of_run = filters(self.order.run_id)
        look = read("ec2", "describe_security_groups", "the group that was made for the run", Filters=of_run)
        groups = self.edge(look)["SecurityGroups"]
        if not groups:
            raise CloudRefused(
                f"the security group of {self.order.run_id} is not listed, so nothing can be rented into it.",
                hint="look again with `hetopt status` in a minute; if it was removed, stop the run and resume it",
            )
        return str(groups[0]["GroupId"])

    def _templates(self, group: str, ask: int = 0, end_s: float | None = None) -> dict[str, str]:
        """Make launch templates for machines that end when the others do; return their ids by kind of machine.

        ``end_s`` None: when the order ends.
        """
        requests = calls.template_calls(self.order, group, generation=ask, end_s=end_s)
        return {
            kind: str(self.edge(request)["LaunchTemplate"]["LaunchTemplateId"]) for kind, request in requests.items()
        }

    def _in_any_zone(self, spec: RunSpec, templates: Mapping[str, str]) -> tuple[Zone, dict[str, str], RunSpec]:
        """Rent in the first zone that has all machines; where none has, and fewer may do, in the first with some.

        Returns:
            The zone, the machines' ids by host, and the run on them.

        Raises:
            CloudRefused: no zone has all machines, and fewer do not do, or another refusal; what was granted is given
                back.
        """
        reasons: dict[str, list[str]] = {}
        hint: str | None = None
        fewer = self.order.zones if self.accept is not None else ()
        tries = [*((zone, True) for zone in self.order.zones), *((zone, False) for zone in fewer)]
        for attempt, (zone, together) in enumerate(tries):
            self.tell(f"asking for {self.order.machines} machines in {zone.name}{'' if together else ', or fewer'}")
            ids, refused = self._in_zone(self.order.roles, zone, attempt, templates, together=together)
            if not refused:
                return zone, ids, spec
            if together:
                reasons.setdefault(refused[0].message, []).append(zone.name)
                hint = refused[0].hint
            elif (left := self._on_fewer(spec, ids, refused)) is not None:
                if self.accept is not None and self.accept(left):
                    return zone, ids, left
                hint = "launch again later, or plan with other types"
                break
            if ids:
                # Other groups of the same zone are of no use alone, and count against the quota until they have ended.
                known = self._given(ids.values())
                known.remove(
                    [TaggedResource(kind="instance", id=id_, run_id=self.order.run_id) for id_ in ids.values()]
                )
        why = " ".join(f"{', '.join(zones)}: {message}" for message, zones in reasons.items())
        raise CloudRefused(f"no zone has all machines of the plan. {why}", hint=hint)

    def _in_zone(
        self,
        roles: Sequence[Role],
        zone: Zone,
        attempt: int,
        templates: Mapping[str, str],
        *,
        together: bool,
    ) -> tuple[dict[str, str], list[CloudRefused]]:
        """Rent roles in a zone; return their machines' ids by host, and a refusal for each role that was not granted.

        Args:
            roles: roles to rent, each as a whole or not at all.
            zone: where.
            attempt: number of earlier tries, which makes another token.
            templates: launch templates, by kind of image.
            together: whether the first refusal ends the asking, as the roles are of no use without each other.
        """
        ids: dict[str, str] = {}
        refused: list[CloudRefused] = []
        for role in roles:
            granted, refusal = self._fleet(role, zone, attempt, templates)
            # The hosts of a role are alike.
            ids |= zip(role.hosts, sorted(granted), strict=False)
            if refusal is not None:
                refused.append(refusal)
                if together:
                    break
        return ids, refused

    def _on_fewer(self, spec: RunSpec, hosts: Collection[str], refused: Sequence[CloudRefused]) -> RunSpec | None:
        """Return the run on ``hosts``, which a zone has, and tell the refusals; None: they cannot hold its batch."""
        for error in refused:
            self.tell(error.message)
        try:
            return without(spec, {host for role in self.order.roles for host in role.hosts if host not in hosts})
        except CloudRefused as error:
            self.tell(error.message)
            return None

    def _fleet(
        self, role: Role, zone: Zone, attempt: int, templates: Mapping[str, str]
    ) -> tuple[list[str], CloudRefused | None]:
        """Rent the machines of one role; return their ids and None, or no ids and why the zone has not all of them.

        Machines that come nevertheless are given back.

        Raises:
            CloudRefused: it cannot be had anywhere, or what was granted cannot be given back.
        """
        request = calls.fleet_call(self.order, role, zone, templates[role.image_kind], attempt=attempt)
        try:
            answer = self.edge(request)
        except ApiRefused as refused:
            if refused.reaction != "elsewhere":
                raise
            return [], refused
        ids = [id_ for group in answer.get("Instances", ()) for id_ in group["InstanceIds"]]
        needed = role.machines if len(ids) >= role.machines else 0
        # All or none is what was asked for, but refusals have come with machines all the same.
        self._given(ids[needed:]).end_machines(ids[needed:])
        return ids[:needed], None if needed else _why_short(request, answer, len(ids), role)

    def _end_outside(self, ids: Iterable[str], lease_end_s: float | None = None) -> None:
        """Have AWS's scheduler end new machines `UNPLACED_S` seconds from now, by when they should have a place.

        At the latest they end after the lease (`Order.outside_end_s`). Without the scheduler's role nothing is done.

        Args:
            ids: identifiers of the machines.
            lease_end_s: end of the run's lease, epoch seconds; None: of the first lease, which the order has.
        """
        at_s = min(self.clock() + UNPLACED_S, self.order.outside_end_s(lease_end_s))
        for request in calls.end_calls(self.order, ids, at_s):
            self.edge(request)

    def machines_of(self, ids: Mapping[str, str]) -> dict[str, Answer]:
        """Wait up to 180 s until EC2 lists the machines ``ids`` with addresses; return EC2's descriptions, by host.

        Args:
            ids: instance ids, by host.

        Raises:
            CloudRefused: a machine ended before it began, or not all are listed with addresses in time.
        """
        machines: dict[str, Answer] = {}

        def have_addresses() -> bool:
            """Return whether EC2 lists all machines with addresses; CloudRefused: a machine has ended.

            Keeps the listed machines by host.
            """
            listed = instances_in(self.edge(calls.addresses_call(self.order)))
            machines.clear()
            machines.update({host: listed[id_] for host, id_ in ids.items() if id_ in listed})
            for machine in machines.values():
                if machine["State"]["Name"] in facts.DYING_STATES:
                    reason = machine.get("StateReason", {}).get("Message") or "EC2 does not say why"
                    raise CloudRefused(
                        f"{machine['InstanceId']} ({machine['InstanceType']}) ended before it began: {reason}.",
                        hint="it may not use the key of the disks: `aws kms create-grant` for the role "
                        "AWSServiceRoleForEC2Spot, or `aws ec2 reset-ebs-default-kms-key-id`"
                        if facts.KEY_REFUSED in reason
                        else "launch again, or plan with other types",
                    )
            return len(machines) == len(ids) and all(machine.get("PrivateIpAddress") for machine in machines.values())

        if not until(have_addresses, within_s=ADDRESSES_WITHIN_S, every_s=_ADDRESSES_EVERY_S, sleep=self.sleep):
            raise CloudRefused(
                f"{len(ids) - len(machines)} of {len(ids)} machines have not appeared in {ADDRESSES_WITHIN_S:.0f} s.",
                hint="launch again; `hetopt gc --on ec2` shows whether anything is left",
            )
        return machines

    def _clear_after(self, error: BaseException) -> None:
        """Remove what was made before it went wrong; the first reason stays the one that is told."""
        known, run_id = self.made, self.order.run_id
        soon = "; EC2 may take a minute to list all of it" if known.hanging else ""
        self.tell(f"removing what was made{soon}")
        remover = Remover(edge=self.edge, sleep=self.sleep, made=known)
        self._or_also(error, f"something may be left of run {run_id}", partial(remover.remove_run, run_id))

    def _or_also(self, error: BaseException, otherwise: str, step: Callable[[], None]) -> None:
        """Take a step after an error; where the step fails, too, add what that means to the error's hint, or tell it.

        Args:
            error: error that happened; its own message stays.
            otherwise: half a sentence on what it means where the step fails.
            step: gives back or removes.
        """
        try:
            step()
        except HetoptError as stayed:
            also = f"{otherwise} ({stayed.message}): `hetopt gc --on ec2 --remove`"
            if isinstance(error, HetoptError):
                error.hint = f"{error.hint}; {also}" if error.hint else also
            else:
                self.tell(also)

    def _given(self, ids: Iterable[str]) -> Remover:
        """Return the remover of machines that were just granted: ids in hand are surer than lists, which lag."""
        return Remover(edge=self.edge, sleep=self.sleep, made=Made(ids=tuple(ids), settles_s=SETTLES_S))


def read_lease(edge: Edge, order: Order) -> tuple[Lease, str] | None:
    """Read the lease in the bucket, with the ETag of its version; None: the object is absent or no lease.

    Raises:
        CloudRefused: AWS does not answer, or refuses the call.
    """
    answer = if_there(edge, calls.get_object(order, f"{order.prefix}/{LEASE_OBJECT}"))
    lease = None if answer is None else Lease.of_json(answer["Body"])
    return None if answer is None or lease is None else (lease, str(answer["ETag"]))


def _updated(
    machine: MachineState, now: Answer | None, beats: Mapping[str, float], now_s: float, lease_s: float
) -> MachineState:
    """Return a machine's state now, by EC2's description and its own heartbeats; of an ended machine it is kept.

    EC2 forgets machines an hour after their end, and knows new ones after seconds.

    Args:
        machine: machine as last recorded.
        now: EC2's description; None: EC2 does not list it, so that it is new, or ended an hour ago at least.
        beats: when machines last said that they live, epoch seconds by id.
        now_s: seconds since the epoch.
        lease_s: latest moment at which a machine that EC2 has forgotten can have ended.
    """
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
    if state not in facts.STOPPED_STATES:
        return machine.model_copy(update={"state": state, **started, **beat})
    # Such as 'User initiated (2026-11-20 12:00:00 GMT)'.
    ended = _ENDED_AT.search(str(now.get("StateTransitionReason", "")))
    ended_s = now_s if ended is None else datetime.datetime.fromisoformat(f"{ended[1]}+00:00").timestamp()
    return machine.model_copy(
        update={
            "state": state,
            "reason": reason.get("Message") or None,
            "ending": ending_of(str(reason.get("Code", ""))),
            "until_s": ended_s,
            **started,
            **beat,
        }
    )


def _why_short(request: Request, answer: Answer, granted: int, role: Role) -> CloudRefused:
    """Return the refusal of a fleet that was accepted and not filled, by the errors inside the answer.

    Args:
        request: request for the fleet.
        answer: answer of EC2.
        granted: number of machines that came.
        role: role of the machines.

    Raises:
        ApiRefused: trying elsewhere cannot help.
    """
    errors = [
        ApiRefused(request, str(problem.get("ErrorCode")), str(problem.get("ErrorMessage", "")))
        for problem in answer.get("Errors", ())
    ]
    for error in errors:
        if error.reaction == "stop":
            raise error
    return next(iter(errors), None) or CloudRefused(
        f"{granted} of {role.machines} {role.instance_types[0]} were granted, without a reason.",
        hint="wait some minutes and launch again",
    )


def latest_checkpoint(edge: Edge, order: Order) -> str | None:
    """Read the name of a run's newest complete checkpoint from the bucket; None: there is none yet.

    Raises:
        CloudRefused: AWS does not answer, or refuses the call.
    """
    answer = if_there(edge, calls.get_object(order, f"{order.prefix}/{LATEST_OBJECT}"))
    latest = None if answer is None else Latest.of_json(answer["Body"])
    return None if latest is None else latest.checkpoint


@dataclass(frozen=True, kw_only=True)
class Ec2Launcher(_Renter):
    """The launcher of runs on EC2, which rents machines, looks after them at each poll, and gives them back.

    Attributes:
        home: folder in which the regions that were ever used are kept.
        inner: makes the calls; None: boto3, with retries.
    """

    home: Path
    inner: Edge | None = None
    _next_look_s: dict[Path, float] = field(default_factory=dict, repr=False, compare=False)
    _said: dict[Path, str] = field(default_factory=dict, repr=False, compare=False)

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Rent the machines that the run folder's order lists, and tell them to begin the run.

        Args:
            spec: spec of the run; its workers are put into the order that their machines' addresses come to have.
            run_dir: folder that holds the order and the bundle.
            environment: not used; none of it is sent anywhere.

        Raises:
            CloudRefused: the machines cannot be had; nothing of them is left.
            BadInput: the order in the folder cannot be read.
        """
        Order.load(run_dir / ORDER_FILE).of_run(spec).save(run_dir / ORDER_FILE)
        # What other terminals need to look after the run.
        objects = {name: path.read_bytes() for name in (PLAN_OBJECT, ORDER_FILE) if (path := run_dir / name).exists()}
        self._opened(run_dir).begin(spec, objects, (run_dir / BUNDLE_FILE).read_bytes())
        return RunHandle(run_dir=run_dir)

    def poll(self, handle: RunHandle) -> RunStatus:
        """Look after a run, every 15 s at most: bill, replace, extend, end; return its status, the last if AWS fails.

        Between two looks, the status is that of the folder. A network or a login that is gone for a while is no reason
        to end a run: its machines go on until their lease ends, and the refusal is told once.

        Raises:
            BadInput: the records in the run's folder cannot be read.
        """
        try:
            return self.look(handle)
        except CloudRefused as refused:
            if refused.message != self._said.get(handle.run_dir):
                self._said[handle.run_dir] = refused.message
                self.tell(
                    f"{refused.message} {refused.hint or ''} The run goes on; nobody grants it more time meanwhile."
                )
            return judged(handle.run_dir, last_seen(handle.run_dir))

    def look(self, handle: RunHandle) -> RunStatus:
        """Look after a run and return its status, as `poll` does, but raise where AWS does not answer.

        A folder without an order gives a failed status: nothing was rented.

        Raises:
            CloudRefused: AWS does not answer, or refuses a call.
            BadInput: the records in the run's folder cannot be read.
        """
        run_dir = handle.run_dir
        if not (run_dir / ORDER_FILE).exists():
            return RunStatus(state=RunState.FAILED, reason="nothing was rented")
        loop, state = self._opened(handle.run_dir), last_seen(run_dir)
        if not state.cleared and state.machines and self.clock() >= self._next_look_s.get(run_dir, 0.0):
            self._next_look_s[run_dir] = self.clock() + HEARTBEAT_S  # machines write so often what they have to tell
            state = loop.settle(loop.billed(loop.look()))
        return judged(run_dir, state)

    def stop(self, handle: RunHandle) -> None:
        """Let a run's machines save a checkpoint, end them, and remove all from AWS; wait for it. Idempotent.

        Damaged records stop nothing: whatever carries the run's name is removed. What machines wrote last is read at
        the end; what cannot be read is told.

        Raises:
            CloudRefused: something could not be removed, or not be looked at.
        """
        run_dir = handle.run_dir
        if not (run_dir / ORDER_FILE).exists():
            return
        loop = self._opened(handle.run_dir)
        try:
            state = last_seen(run_dir)
        except BadInput as damaged:
            self.tell(f"{damaged.message} Whatever carries the name of {loop.order.run_id} is removed.")
            state = ClusterState(time_s=self.clock())
        if state.cleared:
            return
        if state.alive:
            try:
                wished = {"stop_wished_s": self.clock(), "stop_reason": "stopped by hand"}
                state = loop.act(Stop(state=state.model_copy(update=wished)))
                # Those that never began have no checkpoint to save.
                began = any(machine.heartbeat_s is not None for machine in state.alive) or log_bytes(run_dir)
                within_s = loop.order.checkpoint_s + self.patience_s if began else 0.0
                until(
                    lambda: not loop.machines_now(last_seen(run_dir)).alive,
                    within_s=within_s,
                    every_s=LOOK_S,
                    sleep=self.sleep,
                )
                state = last_seen(run_dir)
            except CloudRefused as refused:
                self.tell(f"{refused.message} {refused.hint or ''} The machines end now, without a last checkpoint.")
        loop.clear(state)

    def move(self, handle: RunHandle, needed_s: float) -> None:
        """Record that a run moves from spot to on-demand machines, if the budget pays for it; later polls do it.

        Args:
            handle: handle of the run.
            needed_s: seconds from now to the run's end, for which the budget must pay.

        Raises:
            BadInput: the run is moving already, is over, or has no spot machines.
            BudgetStop: the budget does not pay on-demand machines for so long.
        """
        loop = self._opened(handle.run_dir)
        loop.save(moved(loop.order, last_seen(loop.run_dir), needed_s, self.clock()))
        self._next_look_s[handle.run_dir] = self.clock()

    def _opened(self, run_dir: Path) -> Loop:
        """Open the loop that looks after a run, by the order in its folder."""
        order = Order.load(run_dir / ORDER_FILE)
        return Loop(
            edge=connect_run(order.region, run_dir, self.home, self.inner, clock=self.clock),
            order=order,
            run_dir=run_dir,
            clock=self.clock,
            sleep=self.sleep,
            tell=self.tell,
            accept=self.accept,
            patience_s=self.patience_s,
        )
