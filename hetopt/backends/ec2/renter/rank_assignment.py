"""Who of a run's machines is which of its hosts, and who is still to be: read off what was seen, and pure."""

from __future__ import annotations

from collections.abc import Collection

from hetopt.backends.ec2.renter.cluster_state import ClusterState, MachineState
from hetopt.core.nodes import host_names
from hetopt.core.run_spec import RunSpec

ASK_AGAIN_S = 300.0
"""A pool that had nothing is asked again so much later: outages last for minutes or for hours."""

GATHERED_WITHIN_S = 300.0
"""Machines that were asked for at the same time boot within so long, or the others do not wait for them."""


def lost_hosts(seen: ClusterState, spec: RunSpec) -> list[str]:
    """Hosts of the run that no living machine is."""
    there = {machine.host for machine in seen.serving}
    return [host for host in host_names(spec) if host not in there]


def needs_machines(seen: ClusterState, spec: RunSpec) -> bool:
    """Whether some, but not all, of the run's hosts are lost."""
    lost = lost_hosts(seen, spec)
    return bool(lost) and len(lost) < len(host_names(spec)) and seen.stop_wished_s is None


def unasked_hosts(seen: ClusterState, now_s: float) -> list[str]:
    """Hosts that no machine is, or none on demand of a run that moves there, and that may be asked for now."""
    if seen.stop_wished_s is not None or (seen.asked_s is not None and now_s < seen.asked_s + ASK_AGAIN_S):
        return []
    had = {
        machine.host
        for machine in seen.alive
        if machine.duty != "relieved" and (machine.on_demand or not seen.on_demand)
    }
    hosts = [*(machine.host for machine in seen.serving), *(worker.host for worker in seen.absent)]
    return [host for host in dict.fromkeys(hosts) if host not in had and host not in seen.given_up]


def joining(seen: ClusterState, now_s: float) -> list[MachineState]:
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


def with_places(seen: ClusterState, hosts: Collection[str]) -> ClusterState:
    """The machines that wait to be these hosts are them from now on, and who was it is relieved."""
    new = {machine.host for machine in seen.waiting if machine.host in hosts}

    def after(machine: MachineState) -> MachineState:
        if not machine.alive or machine.host not in new or machine.duty == "relieved":
            return machine
        return machine.model_copy(update={"duty": "serves" if machine.duty == "waits" else "relieved"})

    return seen.model_copy(update={"machines": tuple(after(machine) for machine in seen.machines)})


def without_waiting(seen: ClusterState) -> ClusterState:
    """Nobody gives those a place any more that wait for one; the run leaves for nowhere."""

    def after(machine: MachineState) -> MachineState:
        waits = machine.alive and machine.duty == "waits"
        return machine.model_copy(update={"duty": "relieved"}) if waits else machine

    machines = tuple(after(machine) for machine in seen.machines)
    return seen.model_copy(update={"machines": machines, "zone_wanted": None, "asked_s": None})
