"""A run leaves its zone for another: all of its machines are rented there first, and take over together, or not at all.

Workers in two zones would pay for what they send each other, and wait longer for it. So those in the other zone wait
until all of them live; then one pause, and all have their places at once. Whatever comes between is answered by giving
the new ones back: those that train were never disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.backends.ec2.renter.order import Order, Role
from hetopt.backends.ec2.renter.placing import Placer
from hetopt.backends.ec2.renter.rank_assignment import lost_hosts, with_places, without_waiting
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.replacement_requests import Asker
from hetopt.backends.ec2.renter.watch import Watcher
from hetopt.core.errors import CloudRefused
from hetopt.core.run_folder import read_spec
from hetopt.core.run_spec import RunSpec

BOOTED_WITHIN_S = 600.0
"""All of them live by then, or the switch is given up; `budget.MOVE_S` counts on it."""


def roles_as_they_are(order: Order, seen: ClusterState) -> list[Role]:
    """The roles of a run with the types that its machines really have: substitutes would take other times."""
    types = {machine.host: machine.instance_type for machine in seen.serving}
    roles = []
    for role in order.roles:
        for name in dict.fromkeys(types[host] for host in role.hosts if host in types):
            mine = tuple(host for host in role.hosts if types.get(host) == name)
            # What is asked for has its token by the role's name.
            called = role.name if name == role.instance_types[0] else f"{role.name}-as-{name.replace('.', '-')}"
            roles.append(role.model_copy(update={"name": called, "instance_types": (name,), "hosts": mine}))
    return roles


@dataclass(frozen=True, kw_only=True)
class ZoneSwitch:
    """Takes a run to the zone that it is wanted in.

    Attributes:
        asker: rents the machines.
        placer: gives them their places.
        clock: seconds since the epoch.
    """

    asker: Asker
    placer: Placer
    clock: Callable[[], float]

    def step(self, order: Order, watcher: Watcher, seen: ClusterState) -> ClusterState:
        """Do what is to be done next. Once nothing is, the run has no zone where it is wanted any more.

        Raises:
            CloudRefused: the cloud does not answer.
        """
        spec = read_spec(watcher.run_dir)
        if not seen.serving:
            # Nobody trains in the old zone any more, so that nothing is mixed: who has come goes on alone.
            return self._keep(watcher, seen.model_copy(update={"zone": seen.zone_wanted, "zone_wanted": None}))
        why = self._why_not(seen, spec)
        if why is not None:
            return self._give_up(watcher, seen, why)
        if seen.asked_s is None:
            return self._ask(order, watcher, seen)
        if any(machine.heartbeat_s is None for machine in seen.waiting):
            return seen
        if seen.paused_s is None:
            return self.placer.pause(order, watcher, seen)
        return self._take_over(order, watcher, seen, spec) if self.placer.has_paused(seen) else seen

    def _why_not(self, seen: ClusterState, spec: RunSpec) -> str | None:
        """Why the run stays where it is; None where nothing speaks against leaving."""
        if seen.on_demand:
            return "the run moves to on-demand machines"
        if lost_hosts(seen, spec):
            return "a machine that trained was lost"
        if seen.absent:
            return "more machines are asked for"
        if seen.asked_s is None:
            return None
        if len(seen.waiting) < len(seen.serving):
            return "not all of its machines are there"
        late = self.clock() > seen.asked_s + BOOTED_WITHIN_S
        if late and any(machine.heartbeat_s is None for machine in seen.waiting):
            return f"not all of its machines have booted in {BOOTED_WITHIN_S:.0f} s"
        return None

    def _ask(self, order: Order, watcher: Watcher, seen: ClusterState) -> ClusterState:
        zone = order.zone(seen.zone_wanted or seen.zone)
        self.asker.tell(f"asking for the same machines in {zone.name}")
        try:
            seen, missing = self.asker.ask(order, watcher, seen, roles_as_they_are(order, seen), zone)
        except CloudRefused as refused:
            return self._give_up(watcher, watcher.last(), refused.message.rstrip("."))
        if missing:
            return self._give_up(watcher, seen, f"there is no capacity for {', '.join(missing)}")
        return seen

    def _give_up(self, watcher: Watcher, seen: ClusterState, why: str) -> ClusterState:
        """Give back what has come, and leave those that train alone."""
        self.asker.tell(f"the run stays in {seen.zone} and does not leave for {seen.zone_wanted}: {why}")
        return send_away(self.asker, watcher, seen)

    def _take_over(self, order: Order, watcher: Watcher, seen: ClusterState, spec: RunSpec) -> ClusterState:
        """All at once. What is meant is kept first: a process that dies now is followed by one that goes on with it."""
        hosts = {machine.host for machine in seen.waiting}
        self.asker.tell(f"{len(hosts)} machines in {seen.zone_wanted} take over")
        there = seen.model_copy(update={"zone": seen.zone_wanted, "zone_wanted": None, "asked_s": None})
        after = self._keep(watcher, with_places(there, hosts))
        return self.placer.place(order, watcher, after, spec)

    def _keep(self, watcher: Watcher, seen: ClusterState) -> ClusterState:
        watcher.save(seen)
        return seen


def send_away(asker: Asker, watcher: Watcher, seen: ClusterState) -> ClusterState:
    """Give back all that wait for a place.

    Args:
        asker: who asked for them.
        watcher: keeps it first, so that the next look goes on with it.
        seen: the run's last look.

    Raises:
        CloudRefused: the cloud does not answer; the next look tries again.
    """
    ids = [machine.id for machine in seen.waiting]
    after = without_waiting(seen)
    watcher.save(after)
    if ids:
        Remover(edge=asker.edge, sleep=asker.sleep).end_machines(ids)
    return after
