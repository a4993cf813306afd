"""After a loss: the machines that are left keep their places, only what was lost is rented again, in the same zone.

Where it is not to be had, those that are left share the batch among themselves. All go on from one checkpoint, which is
named here, so that nobody resumes from another than the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetopt.optimizer.ec2 import calls
from hetopt.optimizer.ec2.errors import ApiRefused
from hetopt.optimizer.ec2.order import Order, Zone
from hetopt.optimizer.ec2.placement import Machine, Seat, placement_json, seated_spec, without
from hetopt.optimizer.ec2.renting import NoCapacity, Renter, Tell
from hetopt.optimizer.ec2.request import Answer, Edge
from hetopt.optimizer.ec2.seen import Seen
from hetopt.optimizer.ec2.watch import Watcher
from hetopt.trainer.launch.ec2.protocol import LATEST_OBJECT, checkpoint_name
from hetopt.trainer.launch.nodes import host_names
from hetopt.trainer.run_folder import read_spec, write_spec
from hetopt.trainer.spec import RunSpec

_ATTEMPTS_A_GENERATION = 100
"""Tokens of later generations must differ from those of the zones that were tried first."""


def lost_hosts(seen: Seen, spec: RunSpec) -> list[str]:
    """Hosts of the run that no living machine is."""
    alive = {machine.host for machine in seen.alive}
    return [host for host in host_names(spec) if host not in alive]


def needs_machines(seen: Seen, spec: RunSpec) -> bool:
    """Whether some, but not all, of the run's hosts are lost."""
    lost = lost_hosts(seen, spec)
    return bool(lost) and len(lost) < len(host_names(spec)) and seen.stop_wished_s is None


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Replaces what was lost."""

    edge: Edge
    sleep: Callable[[float], None]
    tell: Tell

    def replace(self, order: Order, watcher: Watcher, seen: Seen) -> Seen:
        """Rent what was lost, and tell all machines their new places.

        Raises:
            CloudRefused: for another reason than capacity, or too little is left to go on.
        """
        spec = read_spec(watcher.run_dir)
        lost = lost_hosts(seen, spec)
        self.tell(f"lost {', '.join(lost)}; asking for them again")
        generation = seen.generation + 1
        zone = next((zone for zone in order.zones if zone.name == seen.zone), order.zones[0])
        renter = Renter(edge=self.edge, sleep=self.sleep, tell=self.tell)
        templates = self._templates(order, zone, generation, seen.lease_end_s)
        ids, missing = self._rent(renter, order, zone, lost, generation, templates)
        if missing:
            self.tell(f"there is no capacity for {', '.join(missing)}; the others go on without")
            spec = without(spec, missing)
        hosts = {machine.host: machine.id for machine in seen.alive} | ids
        kept = {host: hosts[host] for host in host_names(spec)}
        (found,) = renter.machines(order, zone, [list(kept.values())])
        by_id: dict[str, Machine] = {machine.id: machine for machine in found}
        seats = [Seat(host=host, machine=by_id[id_]) for host, id_ in kept.items()]
        placed = seated_spec(spec, seats)
        body = placement_json(placed, seats, generation, latest_checkpoint(self.edge, order))
        self.edge(calls.placement_call(order, body))
        write_spec(watcher.run_dir, placed)
        new = watcher.granted((one for one in seats if one.host in ids), zone)
        after = seen.model_copy(update={"machines": (*seen.machines, *new), "generation": generation})
        watcher.save(after)
        return after

    def _rent(
        self,
        renter: Renter,
        order: Order,
        zone: Zone,
        lost: list[str],
        generation: int,
        templates: dict[str, Answer],
    ) -> tuple[dict[str, str], list[str]]:
        """Ids of new machines by the host that each is to be, and the hosts that cannot be had."""
        ids: dict[str, str] = {}
        missing: list[str] = []
        for role in order.roles:
            mine = [host for host in role.hosts if host in lost]
            if not mine:
                continue
            wanted = role.model_copy(update={"hosts": tuple(mine)})
            try:
                granted = renter.fleet(order, wanted, zone, generation * _ATTEMPTS_A_GENERATION, templates)
                ids |= dict(zip(mine, granted, strict=False))
            except NoCapacity:
                missing += mine
        return ids, missing

    def _templates(self, order: Order, zone: Zone, generation: int, end_s: float | None) -> dict[str, Answer]:
        """Launch templates by their steps, for machines that end when the others do."""
        lookup = calls.group_calls(order, zone)[0].if_exists
        assert lookup is not None
        results = {calls.GROUP_STEP: lookup.entity(self.edge(lookup))}
        for request in calls.template_calls(order, generation=generation, end_s=end_s):
            resolved = request.resolved(results)
            results[request.step] = resolved.entity(self.edge(resolved))
        return results


def latest_checkpoint(edge: Edge, order: Order) -> str | None:
    """The newest checkpoint that is complete; None where there is none yet."""
    try:
        body: bytes = edge(calls.get_object(order, f"{order.prefix}/{LATEST_OBJECT}"))["Body"]
    except ApiRefused as refused:
        if refused.code in ("NoSuchKey", "404"):
            return None
        raise
    return checkpoint_name(body.decode("ascii", errors="replace").strip())
