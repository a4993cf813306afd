"""Tells the machines of a run that goes on: the next generation begins, from the newest checkpoint; or all pause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetopt.backends.ec2.protocol import LATEST_OBJECT, Latest
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.placement import Seat, placement_json, seated_spec
from hetopt.backends.ec2.renter.renting import Renter, Tell
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.ec2.renter.watch import Watcher
from hetopt.core.nodes import host_names
from hetopt.core.run_folder import read_spec, write_spec
from hetopt.core.run_spec import RunSpec

PAUSE_PATIENCE_S = 300.0
"""Machines that have not saved their checkpoint by then are told their new places all the same."""


@dataclass(frozen=True, kw_only=True)
class Placer:
    """Places the machines that serve.

    Attributes:
        clock: seconds since the epoch.
        stopped_s: when the run last stopped with a checkpoint, by its events; absent: it goes on.
    """

    edge: Edge
    sleep: Callable[[float], None]
    tell: Tell
    clock: Callable[[], float]
    stopped_s: float | None

    def pause(self, order: Order, watcher: Watcher, seen: ClusterState) -> ClusterState:
        """Tell those that train to save a checkpoint and to wait for the next generation."""
        spec, seats = self._seated(order, seen, read_spec(watcher.run_dir))
        body = placement_json(spec, seats, seen.generation, seen.resume_from, pauses=True)
        self.edge(calls.placement_call(order, body))
        after = seen.model_copy(update={"paused_s": self.clock()})
        watcher.save(after)
        return after

    def has_paused(self, seen: ClusterState) -> bool:
        """Whether all have saved their checkpoint, or nobody waits for that any longer."""
        saved = self.stopped_s is not None and self.stopped_s >= seen.placed_s
        return saved or (seen.paused_s is not None and self.clock() > seen.paused_s + PAUSE_PATIENCE_S)

    def place(self, order: Order, watcher: Watcher, seen: ClusterState, spec: RunSpec) -> ClusterState:
        """Begin the next generation of a run, from the newest checkpoint."""
        after = seen.model_copy(
            update={
                "generation": seen.generation + 1,
                "placed_s": self.clock(),
                "paused_s": None,
                "resume_from": latest_checkpoint(self.edge, order),
            }
        )
        placed, seats = self._seated(order, after, spec)
        self.edge(calls.placement_call(order, placement_json(placed, seats, after.generation, after.resume_from)))
        write_spec(watcher.run_dir, placed)
        watcher.save(after)
        return after

    def _seated(self, order: Order, seen: ClusterState, spec: RunSpec) -> tuple[RunSpec, list[Seat]]:
        ids = {machine.host: machine.id for machine in seen.serving}
        hosts = host_names(spec)
        renter = Renter(edge=self.edge, sleep=self.sleep, tell=self.tell)
        (found,) = renter.machines(order, order.zone(seen.zone), [[ids[host] for host in hosts]])
        by_id = {machine.id: machine for machine in found}
        seats = [Seat(host=host, machine=by_id[ids[host]]) for host in hosts]
        return seated_spec(spec, seats), seats


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
