"""After a loss: those that are left go on at once, only what was lost is rented again, and joins when it has booted.

Nothing waits for a machine that is not there yet. The survivors share the batch among themselves from the newest
checkpoint; once the new machines say that they live, all save a checkpoint at one step and go on together. Who goes on
from which checkpoint is named here, so that nobody resumes from another than the rest.

A run that moves to on-demand machines goes the same way: one is asked for beside every machine on spot, and only in the
pause in which it takes over nothing is trained. What is relieved ends after that. So does what a run leaves behind that
goes to another zone (`zone_switch`), but for the losses: those come first, and end the leaving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from hetopt.backends.ec2.renter.boots import BOOT_FOLDER, TRIES, failed, hopeless_hosts, hopeless_types, why_failed
from hetopt.backends.ec2.renter.cluster_state import ClusterState, MachineState
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.placement import shared, without
from hetopt.backends.ec2.renter.placing import Placer
from hetopt.backends.ec2.renter.rank_assignment import (
    ASK_AGAIN_S,
    joining,
    lost_hosts,
    needs_machines,
    unasked_hosts,
    with_places,
)
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.renting import Tell
from hetopt.backends.ec2.renter.replacement_requests import Asker, roles_for
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.ec2.renter.watch import Watcher
from hetopt.backends.ec2.renter.zone_switch import ZoneSwitch, send_away
from hetopt.core.errors import CloudRefused
from hetopt.core.run_folder import read_spec
from hetopt.core.run_spec import RunSpec, WorkerSpec


class CannotGoOn(CloudRefused):
    """A run whose machines cannot hold the batch, and for which no others are to be had. It is ended."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Brings a run back to all of its machines.

    Attributes:
        asker: rents what is missing.
        placer: tells machines their places.
        clock: seconds since the epoch.
    """

    asker: Asker
    placer: Placer
    clock: Callable[[], float]

    @classmethod
    def of(
        cls,
        edge: Edge,
        *,
        sleep: Callable[[float], None],
        tell: Tell,
        clock: Callable[[], float],
        stopped_s: float | None,
    ) -> Self:
        """By what it needs of the world.

        Args:
            edge: carries out calls.
            sleep: waits for so many seconds.
            tell: says what goes on.
            clock: seconds since the epoch.
            stopped_s: when the run last stopped with a checkpoint, by its events; absent: it goes on.
        """
        return cls(
            asker=Asker(edge=edge, sleep=sleep, tell=tell, clock=clock),
            placer=Placer(edge=edge, sleep=sleep, tell=tell, clock=clock, stopped_s=stopped_s),
            clock=clock,
        )

    def step(self, order: Order, watcher: Watcher, seen: ClusterState) -> ClusterState:
        """Do what is to be done next, if anything is.

        Raises:
            CannotGoOn: nothing will come any more that the run could go on with.
            CloudRefused: for another reason than capacity, or too little is left to go on.
        """
        self._end_relieved(seen)
        seen = self._give_up_hopeless(order, watcher, seen)
        if seen.zone_wanted is not None:
            seen = ZoneSwitch(asker=self.asker, placer=self.placer, clock=self.clock).step(order, watcher, seen)
            if seen.zone_wanted is not None:
                return seen
        if needs_machines(seen, read_spec(watcher.run_dir)):
            seen = self._go_on_without(order, watcher, seen)
        if seen.paused_s is not None and not seen.waiting and not lost_hosts(seen, read_spec(watcher.run_dir)):
            # Whom all have paused for is lost or sent away, or has a place that it was not told of.
            seen = self.placer.place(order, watcher, seen, read_spec(watcher.run_dir))
        asked = unasked_hosts(seen, self.clock())
        if asked:
            seen = self._ask(order, watcher, seen, asked)
        new = joining(seen, self.clock())
        if not new or seen.stop_wished_s is not None:
            return seen
        if not seen.serving:
            return self._take_over(order, watcher, seen, new)
        if seen.paused_s is None:
            return self.placer.pause(order, watcher, seen)
        return self._join(order, watcher, seen, new) if self.placer.has_paused(seen) else seen

    def end(self, watcher: Watcher, seen: ClusterState) -> ClusterState:
        """Of a run that is finished: nobody gives those a place any more that wait for one.

        Raises:
            CloudRefused: the cloud does not answer.
        """
        self._end_relieved(seen)
        return send_away(self.asker, watcher, seen) if seen.waiting or seen.zone_wanted is not None else seen

    def _end_relieved(self, seen: ClusterState) -> None:
        relieved = [machine.id for machine in seen.alive if machine.duty == "relieved"]
        if relieved:
            Remover(edge=self.asker.edge, sleep=self.asker.sleep).end_machines(relieved)

    def _give_up_hopeless(self, order: Order, watcher: Watcher, seen: ClusterState) -> ClusterState:
        """Ask no more for hosts whose machines fail to boot, and say once what these said last."""
        hosts = [host for role in order.roles for host in role.hosts if host not in seen.given_up]
        hopeless = hopeless_hosts(order, seen, hosts)
        if not hopeless:
            return seen
        machines = failed(seen.machines, order.life)
        mine = [machine for machine in machines if machine.host in hopeless] or machines
        self.asker.tell(
            f"{why_failed(watcher.run_dir, mine)}. That was tried {TRIES} times: "
            f"no machine is rented for {', '.join(hopeless)} again"
        )
        after = seen.model_copy(
            update={
                "given_up": (*seen.given_up, *hopeless),
                "absent": tuple(worker for worker in seen.absent if worker.host not in hopeless),
            }
        )
        watcher.save(after)
        return after

    def _take_over(
        self, order: Order, watcher: Watcher, seen: ClusterState, new: Iterable[MachineState]
    ) -> ClusterState:
        """All who trained were lost at once: those that were to join or to relieve them have nobody to wait for."""
        hosts, spec = {machine.host for machine in new}, read_spec(watcher.run_dir)
        everybody = (*spec.workers, *seen.absent)
        there = [worker for worker in everybody if worker.host in hosts]
        absent = tuple(worker for worker in everybody if worker.host not in hosts)
        self.asker.tell(f"all that trained are lost; {', '.join(sorted(hosts))} goes on")
        after = with_places(seen.model_copy(update={"absent": absent, "asked_s": None}), hosts)
        return self.placer.place(order, watcher, after, shared(spec, there, spec.global_batch_size))

    def _go_on_without(self, order: Order, watcher: Watcher, seen: ClusterState) -> ClusterState:
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
        absent = _scaled((*seen.absent, *(worker for worker in gone if worker.host not in seen.given_up)), growth)
        after = seen.model_copy(update={"absent": absent, "asked_s": None})
        self.asker.tell(f"lost {', '.join(lost)}; the others go on without")
        return self.placer.place(order, watcher, after, left)

    def _replace(
        self,
        order: Order,
        watcher: Watcher,
        seen: ClusterState,
        spec: RunSpec,
        lost: Sequence[str],
        refused: CloudRefused,
    ) -> ClusterState:
        """The others cannot hold the batch alone: they wait for what was lost, if it is to be had."""
        hopeless = [host for host in lost if host in seen.given_up]
        if hopeless:
            machines = [machine for machine in failed(seen.machines, order.life) if machine.host in hopeless]
            why = why_failed(watcher.run_dir, machines or failed(seen.machines, order.life))
            raise CannotGoOn(f"{refused.message} {why}.", hint=f"its log is in {watcher.run_dir / BOOT_FOLDER}")
        coming = {machine.host for machine in seen.waiting}
        missing = [host for host in lost if host not in coming]
        if missing:
            if seen.asked_s is not None and self.clock() < seen.asked_s + ASK_AGAIN_S:
                return seen
            seen = self._ask(order, watcher, seen, missing)
        seen = with_places(seen, lost)
        if lost_hosts(seen, spec):
            watcher.save(seen)
            raise refused
        return self.placer.place(order, watcher, seen.model_copy(update={"asked_s": None}), spec)

    def _ask(self, order: Order, watcher: Watcher, seen: ClusterState, hosts: Sequence[str]) -> ClusterState:
        """Rent what was lost or is to be relieved, in the same zone."""
        self.asker.tell(f"asking for {', '.join(hosts)} {'on demand' if seen.on_demand else 'again'}")
        types = hopeless_types(order, seen)
        roles = [
            role.model_copy(update={"instance_types": tuple(name for name in role.instance_types if name not in types)})
            for role in roles_for(order, hosts, on_demand=seen.on_demand)
            if not types.issuperset(role.instance_types)
        ]
        seen, missing = self.asker.ask(order, watcher, seen, roles, order.zone(seen.zone))
        if missing:
            again = f"it is asked for again in {ASK_AGAIN_S:.0f} s"
            self.asker.tell(f"there is no capacity for {', '.join(missing)}; {again}")
        return seen

    def _join(self, order: Order, watcher: Watcher, seen: ClusterState, new: Iterable[MachineState]) -> ClusterState:
        """Give the new machines their places, and let those go whose places they were."""
        hosts = {machine.host for machine in new}
        spec, back = read_spec(watcher.run_dir), [worker for worker in seen.absent if worker.host in hosts]
        self.asker.tell(f"{', '.join(sorted(hosts))} joins")
        batch = spec.global_batch_size
        shrinking = batch / (batch + sum(worker.local_batch_size for worker in back))
        absent = _scaled((worker for worker in seen.absent if worker.host not in hosts), shrinking)
        after = with_places(seen.model_copy(update={"absent": absent}), hosts)
        return self.placer.place(order, watcher, after, shared(spec, (*spec.workers, *back), batch))


def _scaled(workers: Iterable[WorkerSpec], factor: float) -> tuple[WorkerSpec, ...]:
    """Workers who are away, with shares that keep their proportion to those of who is there."""
    return tuple(
        worker.model_copy(update={"local_batch_size": max(1, round(worker.local_batch_size * factor))})
        for worker in workers
    )
