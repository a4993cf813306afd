"""Rents machines: all of an order in one zone, or in the next, or none and nothing left behind; and for a run that goes
on, those that it misses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.edge import LEDGER_FILE, SETTLES_S, Made, made, read_ledger
from hetopt.backends.ec2.renter.order import UNPLACED_S, Order, Role, Zone, filters, places_of
from hetopt.backends.ec2.renter.removal import Found, Remover, is_dying, until
from hetopt.backends.ec2.renter.request import Answer, ApiRefused, Edge, Request, instances_in, meaning_of, read
from hetopt.backends.host.protocol import placement_json, ranked_spec, without
from hetopt.core.errors import CloudRefused, HetoptError
from hetopt.core.run_spec import RunSpec

ADDRESSES_WITHIN_S = 180.0
_LOOK_S = 3.0
_ATTEMPTS_AN_ASK = 100
"""Tokens of later asks must differ from those of the zones that were tried first."""

Tell = Callable[[str], None]
Accept = Callable[[RunSpec], bool]
"""Whether a run may begin as it would be on what was granted."""


@dataclass(frozen=True, kw_only=True)
class Rented:
    """The machines that were granted: where, which host each is, the run as it starts on them, and whether the account
    ends them."""

    zone: Zone
    assigned: Mapping[str, Answer]
    spec: RunSpec
    ends_outside: bool = False


class NoCapacity(CloudRefused):
    """A pool had not enough to give. What it gave all the same has been given back."""


@dataclass(frozen=True, kw_only=True)
class Renter:
    """Rents the machines of a run.

    Attributes:
        edge: carries out calls, writes the ledger, tries again.
        order: what is rented.
        run_dir: the run's folder here, with its ledger.
        clock: seconds since the epoch.
        sleep: waits for so many seconds.
        tell: says what goes on.
        accept: whether the run may begin on fewer machines, when no zone has all; absent: all or none.
    """

    edge: Edge
    order: Order
    run_dir: Path
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    tell: Tell = lambda _: None
    accept: Accept | None = None
    _granted: list[str] = field(default_factory=list, repr=False, compare=False)
    """Machines that answers have named, and that are not given back."""

    @property
    def made(self) -> Made:
        """What the run's ledger knows to be there."""
        return made(read_ledger(self.run_dir / LEDGER_FILE), self.clock())

    def rent(
        self,
        spec: RunSpec,
        contents: Mapping[str, bytes],
        bundle: bytes,
        *,
        generation: int = 0,
        resume_from: str | None = None,
    ) -> Rented:
        """Rent everything, and tell the machines who they are. Whatever goes wrong, nothing stays.

        Args:
            spec: the run, on the order's hosts.
            contents: objects of the run, by name.
            bundle: the code.
            generation: of the placement; grows when a run is resumed.
            resume_from: the checkpoint that all machines go on from.

        Raises:
            CloudRefused: it cannot be had; everything that was made on the way has been removed.
        """
        try:
            for request in calls.object_calls(self.order, contents, bundle):
                self.edge(request)
            zone, ids, left = self._somewhere(spec, self._templates(self._group()))
            ends = self._end_outside(ids.values())
            self.tell("waiting for the machines' addresses")
            assigned = self.machines_of(ids)
            places = places_of(assigned)
            ends = ends and self.end_later(list(places), self.order.outside_end_s())
            placed = ranked_spec(left, places.values())
            self.edge(calls.placement_call(self.order, placement_json(placed, places, generation, resume_from)))
            return Rented(zone=zone, assigned=assigned, spec=placed, ends_outside=ends)
        except BaseException as error:
            self._clear_after(error)
            raise

    def _group(self) -> str:
        """The id of the machines' security group, which is made where none is named."""
        if self.order.network.security_group is not None:
            return self.order.network.security_group
        group = str(self.edge(calls.security_group_call(self.order, self.order.zones[0]))["GroupId"])
        for request in calls.rule_calls(self.order, group):
            self.edge(request)
        return group

    def _group_again(self) -> str:
        """The id of that group once it was made.

        Raises:
            CloudRefused: it is not listed.
        """
        if self.order.network.security_group is not None:
            return self.order.network.security_group
        purpose = "the group that was made for the run"
        look = read("ec2", "describe_security_groups", purpose, Filters=filters(self.order.run_id))
        groups = self.edge(look)["SecurityGroups"]
        if not groups:
            raise CloudRefused(
                f"the security group of {self.order.run_id} is not listed, so nothing can be rented into it.",
                hint="look again with `hetopt status` in a minute; if it was removed, stop the run and resume it",
            )
        return str(groups[0]["GroupId"])

    def _templates(self, group: str, ask: int = 0, end_s: float | None = None) -> dict[str, str]:
        """Make launch templates, for machines that end when the others do; their ids by the kind of machine."""
        requests = calls.template_calls(self.order, group, generation=ask, end_s=end_s)
        made_by = {kind: self.edge(request) for kind, request in requests.items()}
        return {kind: str(answer["LaunchTemplate"]["LaunchTemplateId"]) for kind, answer in made_by.items()}

    def _somewhere(self, spec: RunSpec, templates: Mapping[str, str]) -> tuple[Zone, dict[str, str], RunSpec]:
        """The first zone that has all machines; where none has, and fewer may do, the first with some.

        Returns:
            the zone, the machines' ids by host, and the run on them.
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
                for error in refused:
                    reasons.setdefault(error.message, []).append(zone.name)
                hint = next((error.hint for error in refused), hint)
            elif (left := self._on_fewer(spec, ids, refused)) is not None:
                if self.accept is not None and self.accept(left):
                    return zone, ids, left
                hint = "launch again later, or plan with other types"
                break
            if ids:
                # Other groups of the same zone were granted: they are paid for, and of no use alone.
                self._release()
        told = " ".join(f"{', '.join(dict.fromkeys(zones))}: {message}" for message, zones in reasons.items())
        raise CloudRefused(f"no zone has all machines of the plan. {told}", hint=hint)

    def _in_zone(
        self,
        roles: Sequence[Role],
        zone: Zone,
        attempt: int,
        templates: Mapping[str, str],
        *,
        together: bool,
    ) -> tuple[dict[str, str], list[NoCapacity]]:
        """The ids of the machines that a zone has, by host, and why it has not the others.

        Where only all of them together are of use, the first role that it has not ends the asking.
        """
        ids: dict[str, str] = {}
        refused: list[NoCapacity] = []
        for role in roles:
            try:
                # The hosts of a role are alike.
                ids |= zip(role.hosts, sorted(self._fleet(role, zone, attempt, templates)), strict=True)
            except NoCapacity as error:
                refused.append(error)
                if together:
                    break
        return ids, refused

    def _on_fewer(self, spec: RunSpec, there: Collection[str], refused: Sequence[NoCapacity]) -> RunSpec | None:
        """The run on the hosts that a zone has; None where they cannot do it."""
        for error in refused:
            self.tell(error.message)
        try:
            return without(spec, {host for role in self.order.roles for host in role.hosts if host not in there})
        except CloudRefused as error:
            self.tell(error.message)
            return None

    def ask(
        self, roles: Sequence[Role], zone: Zone, *, ask: int, end_s: float | None
    ) -> tuple[Mapping[str, Answer], list[str]]:
        """Rent for a run that goes on: the machines that were granted, by host, and the hosts that could not be had.

        Args:
            roles: with the hosts that are wanted.
            zone: where.
            ask: how often it was asked: each time has tokens and templates of its own.
            end_s: when the machines end, as the others do; absent: when the order's do.

        Raises:
            CloudRefused: for another reason than capacity. Whatever ends the asking, what was granted is given back.
        """
        try:
            templates = self._templates(self._group_again(), ask, end_s)
            attempt = ask * _ATTEMPTS_AN_ASK
            ids, _ = self._in_zone(roles, zone, attempt, templates, together=False)
            if ids:
                self._end_outside(ids.values(), end_s)
            assigned = self.machines_of(ids) if ids else {}
        except BaseException as error:
            # Nobody would know them, and they would be paid until they end by themselves.
            try:
                self.give_back()
            except CloudRefused as stayed:
                _also(
                    error,
                    f"machines that were granted could not be ended ({stayed.message}): `hetopt gc --on ec2 --remove`",
                    self.tell,
                )
            raise
        return assigned, [host for role in roles for host in role.hosts if host not in assigned]

    def _fleet(self, role: Role, zone: Zone, attempt: int, templates: Mapping[str, str]) -> list[str]:
        """Rent the machines of one role; answers their ids. Fewer than that are given back at once.

        Raises:
            NoCapacity: the zone has not all of them.
            CloudRefused: it cannot be had anywhere, or what was granted cannot be given back.
        """
        request = calls.fleet_call(self.order, role, zone, templates[role.image_kind], attempt=attempt)
        try:
            answer = self.edge(request)
        except ApiRefused as refused:
            if refused.reaction == "elsewhere":
                raise NoCapacity(refused.message, hint=refused.hint) from None
            raise
        ids = [id_ for one in answer.get("Instances", ()) for id_ in one["InstanceIds"]]
        self._granted.extend(ids)
        if len(ids) >= role.machines:
            self.give_back(ids[role.machines :])
            return ids[: role.machines]
        why = self._why_short(request, answer, len(ids), role)
        try:
            # All or none is what was asked for, but refusals have come with machines all the same.
            self.give_back(ids)
        except CloudRefused as stayed:
            raise CloudRefused(
                f"{why.message} {len(ids)} machines were granted all the same, and could not be ended: "
                f"{stayed.message}",
                hint="end them at once: `hetopt gc --on ec2 --remove`",
            ) from None
        raise why

    def _end_outside(self, ids: Iterable[str], lease_end_s: float | None = None) -> bool:
        """Have the account end machines that come to no place; whether it may have been told of any."""
        at_s = min(self.clock() + UNPLACED_S, self.order.outside_end_s(lease_end_s))
        requests = calls.end_calls(self.order, ids, at_s)
        for request in requests:
            try:
                self.edge(request)
            except CloudRefused as refused:
                self._tell_no_end(refused)
                return request is not requests[0]
        return len(requests) > 0

    def end_later(self, ids: Sequence[str], at_s: float) -> bool:
        """Have the account end machines at another time; whether it does.

        Raises:
            CloudRefused: it may end them sooner, as its answers are not heard.
        """
        try:
            for id_ in ids:
                self.edge(calls.end_call(self.order, id_, at_s, moves=True))
        except ApiRefused as refused:
            self.edge(calls.no_end_call(self.order))
            self._tell_no_end(refused)
            return False
        return True

    def _tell_no_end(self, refused: CloudRefused) -> None:
        self.tell(f"nothing outside the machines ends them: {refused.message} {refused.hint or ''}".rstrip())

    def give_back(self, ids: Sequence[str] | None = None) -> None:
        """End machines by the ids that answers named; absent: all that are left of what was granted.

        Raises:
            CloudRefused: they cannot be ended.
        """
        ids = list(self._granted if ids is None else ids)
        self._remover(ids).end_machines(ids)
        self._granted[:] = [id_ for id_ in self._granted if id_ not in ids]

    def _why_short(self, request: Request, answer: Answer, granted: int, role: Role) -> CloudRefused:
        """A fleet that was accepted, and not filled: its errors are inside the answer."""
        errors = [(str(one.get("ErrorCode")), str(one.get("ErrorMessage", ""))) for one in answer.get("Errors", ())]
        for code, text in errors:
            if meaning_of(code).reaction == "stop":
                return ApiRefused(request, code, text)
        if errors:
            code, text = errors[0]
            refused = ApiRefused(request, code, text)
            return NoCapacity(refused.message, hint=refused.hint)
        return NoCapacity(
            f"{granted} of {role.machines} {role.instance_types[0]} were granted, without a reason.",
            hint="wait some minutes and launch again",
        )

    def machines_of(self, ids: Mapping[str, str]) -> dict[str, Answer]:
        """What EC2 says of machines, by host, once it knows all of them and their addresses.

        Args:
            ids: of the machines, by host.

        Raises:
            CloudRefused: one ended before it began, or they do not appear.
        """
        found: dict[str, Answer] = {}

        def have_addresses() -> bool:
            listed = instances_in(self.edge(calls.addresses_call(self.order)))
            found.clear()
            found.update({host: listed[id_] for host, id_ in ids.items() if id_ in listed})
            for one in found.values():
                if is_dying(one):
                    reason = one.get("StateReason", {}).get("Message") or "EC2 does not say why"
                    raise CloudRefused(
                        f"{one['InstanceId']} ({one['InstanceType']}) ended before it began: {reason}.",
                        hint="it may not use the key of the disks: `aws kms create-grant` for the role "
                        "AWSServiceRoleForEC2Spot, or `aws ec2 reset-ebs-default-kms-key-id`"
                        if facts.KEY_REFUSED in reason
                        else "launch again, or plan with other types",
                    )
            return len(found) == len(ids) and all(one.get("PrivateIpAddress") for one in found.values())

        if not until(have_addresses, self.sleep, every_s=_LOOK_S, within_s=ADDRESSES_WITHIN_S):
            raise CloudRefused(
                f"{len(ids) - len(found)} of {len(ids)} machines have not appeared in {ADDRESSES_WITHIN_S:.0f} s.",
                hint="launch again; `hetopt gc --on ec2` shows whether anything is left",
            )
        return found

    def _release(self) -> None:
        """Give back machines, and keep what the next zone needs. Ids in hand go first: lists lag."""
        ids = list(self._granted)
        remover = self._remover(ids)
        self.give_back()
        listed = [one for one in remover.look(self.order.run_id).found if one.kind == "instance"]
        # They count against the quota until they have ended.
        named = [Found(kind="instance", id=id_, run_id=self.order.run_id) for id_ in ids]
        remover.remove(list({one.id: one for one in (*named, *listed)}.values()))

    def _clear_after(self, error: BaseException) -> None:
        """Remove what was made before it went wrong; the first reason stays the one that is told."""
        known, run_id = self.made, self.order.run_id
        soon = "; EC2 may take a minute to list all of it" if known.hanging else ""
        self.tell(f"removing what was made{soon}")
        try:
            self._remover(dict.fromkeys((*self._granted, *known.ids)), hanging=known.hanging).remove_run(run_id)
        except HetoptError as stayed:
            also = f"something may be left of run {run_id} ({stayed.message}): `hetopt gc --on ec2 --remove`"
            _also(error, also, self.tell)

    def _remover(self, ids: Iterable[str], *, hanging: bool = False) -> Remover:
        known = Made(ids=tuple(ids), settles_s=SETTLES_S, hanging=hanging)
        return Remover(edge=self.edge, sleep=self.sleep, made=known)


def _also(error: BaseException, also: str, tell: Tell) -> None:
    """Tell another thing beside an error; the first reason stays the one that is told first."""
    if isinstance(error, HetoptError):
        error.hint = f"{error.hint}; {also}" if error.hint else also
    else:
        tell(also)
