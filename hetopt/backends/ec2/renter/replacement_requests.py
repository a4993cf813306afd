"""Rents machines for hosts of a run that goes on; they wait for their places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.backends.ec2.renter.order import Order, Role, Zone
from hetopt.backends.ec2.renter.placement import Machine, Seat
from hetopt.backends.ec2.renter.renting import NoCapacity, Renter, Tell
from hetopt.backends.ec2.renter.request import Answer, Edge
from hetopt.backends.ec2.renter.watch import Watcher
from hetopt.core.errors import CloudRefused, HetoptError

_ATTEMPTS_AN_ASK = 100
"""Tokens of later asks must differ from those of the zones that were tried first."""


def roles_for(order: Order, hosts: Collection[str], *, on_demand: bool) -> list[Role]:
    """An order's roles with these of their hosts alone.

    Args:
        order: of the run.
        hosts: that machines are wanted for.
        on_demand: all of them, whatever the order says.
    """
    market = {"market": "on-demand"} if on_demand else {}
    narrowed = ((role, tuple(host for host in role.hosts if host in hosts)) for role in order.roles)
    return [role.model_copy(update={"hosts": mine, **market}) for role, mine in narrowed if mine]


@dataclass(frozen=True, kw_only=True)
class Asker:
    """Asks for machines, which wait for their places from then on.

    Attributes:
        clock: seconds since the epoch.
    """

    edge: Edge
    sleep: Callable[[float], None]
    tell: Tell
    clock: Callable[[], float]

    def ask(
        self, order: Order, watcher: Watcher, seen: ClusterState, roles: Sequence[Role], zone: Zone
    ) -> tuple[ClusterState, list[str]]:
        """Rent the machines of these roles; the hosts that could not be had come second.

        Args:
            order: of the run.
            watcher: keeps what was granted.
            seen: the run's last look.
            roles: with the hosts that are wanted.
            zone: where.

        Raises:
            CloudRefused: for another reason than capacity. Whatever ends the asking, what was granted is given back.
        """
        ask = seen.asks + 1
        # Before anything is rented: whatever ends this process, the next ask has other tokens.
        seen = seen.model_copy(update={"asks": ask, "asked_s": self.clock()})
        watcher.save(seen)
        renter = Renter(edge=self.edge, sleep=self.sleep, tell=self.tell)
        ids: dict[str, str] = {}
        missing: list[str] = []
        try:
            templates = self._templates(order, zone, ask, seen.lease_end_s)
            for role in roles:
                try:
                    granted = renter.fleet(order, role, zone, ask * _ATTEMPTS_AN_ASK, templates)
                    ids |= dict(zip(role.hosts, granted, strict=False))
                except NoCapacity:
                    missing += role.hosts
            if not ids:
                return seen, missing
            (found,) = renter.machines(order, zone, [list(ids.values())])
        except BaseException as error:
            # Nobody would know them, and they would be paid until they end by themselves.
            self._give_back(renter, error)
            raise
        by_id: dict[str, Machine] = {machine.id: machine for machine in found}
        seats = [Seat(host=host, machine=by_id[id_]) for host, id_ in ids.items()]
        new = watcher.granted(seats, zone, seen, on_demand=seen.on_demand, duty="waits")
        seen = seen.model_copy(update={"machines": (*seen.machines, *new)})
        watcher.save(seen)
        return seen, missing

    def _give_back(self, renter: Renter, error: BaseException) -> None:
        """End what was granted by its ids; the first reason stays the one that is told."""
        try:
            renter.give_back()
        except CloudRefused as stayed:
            also = f"machines that were granted could not be ended ({stayed.message}): `hetopt gc --on ec2 --remove`"
            self.tell(also)
            if isinstance(error, HetoptError):
                error.hint = f"{error.hint}; {also}" if error.hint else also

    def _templates(self, order: Order, zone: Zone, ask: int, end_s: float | None) -> dict[str, Answer]:
        """Launch templates by their steps, for machines that end when the others do."""
        lookup = calls.group_calls(order, zone)[0].if_exists
        assert lookup is not None
        try:
            results = {calls.GROUP_STEP: lookup.entity(self.edge(lookup))}
        except IndexError:
            raise CloudRefused(
                f"the security group of {order.run_id} is not listed, so nothing can be rented into it.",
                hint="look again with `hetopt status` in a minute; if it was removed, stop the run and resume it",
            ) from None
        for request in calls.template_calls(order, generation=ask, end_s=end_s):
            resolved = request.resolved(results)
            results[request.step] = resolved.entity(self.edge(resolved))
        return results
