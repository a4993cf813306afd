"""After a loss: those that are left go on at once, only what was lost is rented again, and joins when it has booted.

Nothing waits for a machine that is not there yet. The survivors share the batch among themselves from the newest
checkpoint; once the new machines say that they live, all save a checkpoint at one step and go on together. Who goes on
from which checkpoint is named here, so that nobody resumes from another than the rest.

A run that moves to on-demand machines goes the same way: one is asked for beside every machine on spot, and only in the
pause in which it takes over nothing is trained. What is relieved ends after that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from hetopt.optimizer.ec2 import calls
from hetopt.optimizer.ec2.errors import ApiRefused
from hetopt.optimizer.ec2.order import Order, Zone
from hetopt.optimizer.ec2.placement import Machine, Seat, placement_json, seated_spec, shared, without
from hetopt.optimizer.ec2.removal import Remover
from hetopt.optimizer.ec2.renting import NoCapacity, Renter, Tell
from hetopt.optimizer.ec2.request import Answer, Edge
from hetopt.optimizer.ec2.seen import Seen, SeenMachine
from hetopt.optimizer.ec2.watch import Watcher
from hetopt.profiler.errors import CloudRefused
from hetopt.trainer.launch.ec2.protocol import LATEST_OBJECT, Latest
from hetopt.trainer.launch.nodes import host_names
from hetopt.trainer.run_folder import read_spec, write_spec
from hetopt.trainer.spec import RunSpec, WorkerSpec

_ATTEMPTS_AN_ASK = 100
"""Tokens of later asks must differ from those of the zones that were tried first."""

ASK_AGAIN_S = 300.0
"""A pool that had nothing is asked again so much later: outages last for minutes or for hours."""

GATHERED_WITHIN_S = 300.0
"""Machines that were asked for at the same time boot within so long, or the others do not wait for them."""

PAUSE_PATIENCE_S = 300.0
"""Machines that have not saved their checkpoint by then are told their new places all the same."""


def lost_hosts(seen: Seen, spec: RunSpec) -> list[str]:
    """Hosts of the run that no living machine is."""
    there = {machine.host for machine in seen.serving}
    return [host for host in host_names(spec) if host not in there]


def needs_machines(seen: Seen, spec: RunSpec) -> bool:
    """Whether some, but not all, of the run's hosts are lost."""
    lost = lost_hosts(seen, spec)
    return bool(lost) and len(lost) < len(host_names(spec)) and seen.stop_wished_s is None


def unasked_hosts(seen: Seen, now_s: float) -> list[str]:
    """Hosts that no machine is, or none on demand of a run that moves there, and that may be asked for now."""
    if seen.stop_wished_s is not None or (seen.asked_s is not None and now_s < seen.asked_s + ASK_AGAIN_S):
        return []
    had = {
        machine.host
        for machine in seen.alive
        if machine.duty != "relieved" and (machine.on_demand or not seen.on_demand)
    }
    hosts = [*(machine.host for machine in seen.serving), *(worker.host for worker in seen.absent)]
    return [host for host in dict.fromkeys(hosts) if host not in had]


def joining(seen: Seen, now_s: float) -> list[SeenMachine]:
    """Machines that have said that they live, and that are given a place now.

    What was lost is missed, and comes back as soon as it can. Those that relieve others come together, but for one that
    takes too long: each time costs all of them a pause.
    """
    there = {machine.host for machine in seen.serving}
    relieving = [machine for machine in seen.waiting if machine.host in there]
    in_time = seen.asked_s is not None and now_s < seen.asked_s + GATHERED_WITHIN_S
    if in_time and any(machine.heartbeat_s is None for machine in relieving):
        return [machine for machine in seen.waiting if machine.heartbeat_s is not None and machine.host not in there]
    return [machine for machine in seen.waiting if machine.heartbeat_s is not None]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Brings a run back to all of its machines.

    Attributes:
        clock: seconds since the epoch.
        stopped_s: when the run last stopped with a checkpoint, by its events; absent: it goes on.
    """

    edge: Edge
    sleep: Callable[[float], None]
    tell: Tell
    clock: Callable[[], float]
    stopped_s: float | None

    def step(self, order: Order, watcher: Watcher, seen: Seen) -> Seen:
        """Do what is to be done next, if anything is.

        Raises:
            CloudRefused: for another reason than capacity, or too little is left to go on.
        """
        relieved = [machine.id for machine in seen.alive if machine.duty == "relieved"]
        if relieved:
            Remover(edge=self.edge, sleep=self.sleep).end_machines(relieved)
        if needs_machines(seen, read_spec(watcher.run_dir)):
            seen = self._go_on_without(order, watcher, seen)
        asked = unasked_hosts(seen, self.clock())
        if asked:
            seen = self._ask(order, watcher, seen, asked)
        new = joining(seen, self.clock())
        if not new or seen.stop_wished_s is not None:
            return seen
        if not seen.serving:
            return self._take_over(order, watcher, seen, new)
        if seen.paused_s is None:
            return self._pause(order, watcher, seen)
        saved = self.stopped_s is not None and self.stopped_s >= seen.placed_s
        if saved or self.clock() > seen.paused_s + PAUSE_PATIENCE_S:
            return self._join(order, watcher, seen, new)
        return seen

    def _take_over(self, order: Order, watcher: Watcher, seen: Seen, new: Iterable[SeenMachine]) -> Seen:
        """All who trained were lost at once: those that were to join or to relieve them have nobody to wait for."""
        hosts, spec = {machine.host for machine in new}, read_spec(watcher.run_dir)
        everybody = (*spec.workers, *seen.absent)
        there = [worker for worker in everybody if worker.host in hosts]
        absent = tuple(worker for worker in everybody if worker.host not in hosts)
        self.tell(f"all that trained are lost; {', '.join(sorted(hosts))} goes on")
        after = _with_places(seen.model_copy(update={"absent": absent, "asked_s": None, "paused_s": None}), hosts)
        return self._place(order, watcher, after, shared(spec, there, spec.global_batch_size))

    def _go_on_without(self, order: Order, watcher: Watcher, seen: Seen) -> Seen:
        """Tell those that are left to go on."""
        spec = read_spec(watcher.run_dir)
        lost = lost_hosts(seen, spec)
        try:
            left = without(spec, lost)
        except CloudRefused as refused:
            return self._replace(order, watcher, seen, spec, lost, refused)
        gone = [worker for worker in spec.workers if worker.host in lost]
        batch = spec.global_batch_size
        growth = batch / (batch - sum(worker.local_batch_size for worker in gone))
        absent = _scaled((*seen.absent, *gone), growth)
        after = seen.model_copy(update={"absent": absent, "asked_s": None, "paused_s": None})
        self.tell(f"lost {', '.join(lost)}; the others go on without")
        return self._place(order, watcher, after, left)

    def _replace(
        self, order: Order, watcher: Watcher, seen: Seen, spec: RunSpec, lost: Sequence[str], refused: CloudRefused
    ) -> Seen:
        """The others cannot hold the batch alone: they wait for what was lost, if it is to be had."""
        coming = {machine.host for machine in seen.waiting}
        missing = [host for host in lost if host not in coming]
        if missing:
            if seen.asked_s is not None and self.clock() < seen.asked_s + ASK_AGAIN_S:
                return seen
            seen = self._ask(order, watcher, seen, missing)
        seen = _with_places(seen, lost)
        if lost_hosts(seen, spec):
            watcher.save(seen)
            raise refused
        return self._place(order, watcher, seen.model_copy(update={"asked_s": None}), spec)

    def _ask(self, order: Order, watcher: Watcher, seen: Seen, hosts: Sequence[str]) -> Seen:
        """Rent what was lost or is to be relieved, in the same zone."""
        zone = _zone_of(order, seen)
        ask = seen.asks + 1
        renter = Renter(edge=self.edge, sleep=self.sleep, tell=self.tell)
        # Before anything is rented: whatever ends this process, the next ask has other tokens.
        seen = seen.model_copy(update={"asks": ask, "asked_s": self.clock()})
        watcher.save(seen)
        self.tell(f"asking for {', '.join(hosts)} {'on demand' if seen.on_demand else 'again'}")
        wanted = _on_demand(order) if seen.on_demand else order
        ids, missing = self._rent(renter, wanted, zone, hosts, ask, self._templates(order, zone, ask, seen.lease_end_s))
        if missing:
            self.tell(f"there is no capacity for {', '.join(missing)}; it is asked for again in {ASK_AGAIN_S:.0f} s")
        if not ids:
            return seen
        (found,) = renter.machines(order, zone, [list(ids.values())])
        by_id: dict[str, Machine] = {machine.id: machine for machine in found}
        seats = [Seat(host=host, machine=by_id[id_]) for host, id_ in ids.items()]
        new = watcher.granted(seats, zone, on_demand=seen.on_demand, duty="waits")
        seen = seen.model_copy(update={"machines": (*seen.machines, *new)})
        watcher.save(seen)
        return seen

    def _pause(self, order: Order, watcher: Watcher, seen: Seen) -> Seen:
        """Tell those that train to save a checkpoint and to wait for the next generation."""
        spec, seats = self._seated(order, seen, read_spec(watcher.run_dir))
        body = placement_json(spec, seats, seen.generation, seen.resume_from, pauses=True)
        self.edge(calls.placement_call(order, body))
        after = seen.model_copy(update={"paused_s": self.clock()})
        watcher.save(after)
        return after

    def _join(self, order: Order, watcher: Watcher, seen: Seen, new: Iterable[SeenMachine]) -> Seen:
        """Give the new machines their places, and let those go whose places they were."""
        hosts = {machine.host for machine in new}
        spec, back = read_spec(watcher.run_dir), [worker for worker in seen.absent if worker.host in hosts]
        self.tell(f"{', '.join(sorted(hosts))} joins")
        batch = spec.global_batch_size
        shrinking = batch / (batch + sum(worker.local_batch_size for worker in back))
        absent = _scaled((worker for worker in seen.absent if worker.host not in hosts), shrinking)
        after = _with_places(seen.model_copy(update={"absent": absent, "paused_s": None}), hosts)
        return self._place(order, watcher, after, shared(spec, (*spec.workers, *back), batch))

    def _place(self, order: Order, watcher: Watcher, seen: Seen, spec: RunSpec) -> Seen:
        """Begin the next generation of a run, from the newest checkpoint."""
        after = seen.model_copy(
            update={
                "generation": seen.generation + 1,
                "placed_s": self.clock(),
                "resume_from": latest_checkpoint(self.edge, order),
            }
        )
        placed, seats = self._seated(order, after, spec)
        self.edge(calls.placement_call(order, placement_json(placed, seats, after.generation, after.resume_from)))
        write_spec(watcher.run_dir, placed)
        watcher.save(after)
        return after

    def _seated(self, order: Order, seen: Seen, spec: RunSpec) -> tuple[RunSpec, list[Seat]]:
        ids = {machine.host: machine.id for machine in seen.serving}
        hosts = host_names(spec)
        renter = Renter(edge=self.edge, sleep=self.sleep, tell=self.tell)
        (found,) = renter.machines(order, _zone_of(order, seen), [[ids[host] for host in hosts]])
        by_id = {machine.id: machine for machine in found}
        seats = [Seat(host=host, machine=by_id[ids[host]]) for host in hosts]
        return seated_spec(spec, seats), seats

    def _rent(
        self,
        renter: Renter,
        order: Order,
        zone: Zone,
        lost: Sequence[str],
        ask: int,
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
                granted = renter.fleet(order, wanted, zone, ask * _ATTEMPTS_AN_ASK, templates)
                ids |= dict(zip(mine, granted, strict=False))
            except NoCapacity:
                missing += mine
        return ids, missing

    def _templates(self, order: Order, zone: Zone, ask: int, end_s: float | None) -> dict[str, Answer]:
        """Launch templates by their steps, for machines that end when the others do."""
        lookup = calls.group_calls(order, zone)[0].if_exists
        assert lookup is not None
        results = {calls.GROUP_STEP: lookup.entity(self.edge(lookup))}
        for request in calls.template_calls(order, generation=ask, end_s=end_s):
            resolved = request.resolved(results)
            results[request.step] = resolved.entity(self.edge(resolved))
        return results


def _with_places(seen: Seen, hosts: Collection[str]) -> Seen:
    """The machines that wait to be these hosts are them from now on, and who was it is relieved."""
    new = {machine.host for machine in seen.waiting if machine.host in hosts}

    def after(machine: SeenMachine) -> SeenMachine:
        if not machine.alive or machine.host not in new or machine.duty == "relieved":
            return machine
        return machine.model_copy(update={"duty": "serves" if machine.duty == "waits" else "relieved"})

    return seen.model_copy(update={"machines": tuple(after(machine) for machine in seen.machines)})


def _on_demand(order: Order) -> Order:
    """The same machines, which nobody takes back."""
    roles = (role.model_copy(update={"market": "on-demand"}) for role in order.roles)
    return order.model_copy(update={"roles": tuple(roles)})


def _scaled(workers: Iterable[WorkerSpec], factor: float) -> tuple[WorkerSpec, ...]:
    """Workers who are away, with shares that keep their proportion to those of who is there."""
    return tuple(
        worker.model_copy(update={"local_batch_size": max(1, round(worker.local_batch_size * factor))})
        for worker in workers
    )


def _zone_of(order: Order, seen: Seen) -> Zone:
    return next((zone for zone in order.zones if zone.name == seen.zone), order.zones[0])


def latest_checkpoint(edge: Edge, order: Order) -> str | None:
    """The newest checkpoint that is complete; None where there is none yet."""
    try:
        body: bytes = edge(calls.get_object(order, f"{order.prefix}/{LATEST_OBJECT}"))["Body"]
    except ApiRefused as refused:
        if refused.code in ("NoSuchKey", "404"):
            return None
        raise
    latest = Latest.of(body)
    return None if latest is None else latest.checkpoint
