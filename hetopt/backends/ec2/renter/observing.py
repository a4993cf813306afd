"""What a run has seen of its spot pools, once it is over: hours of its machines, and those that EC2 took back."""

from __future__ import annotations

import datetime
from collections import defaultdict
from pathlib import Path

from hetopt.backends.ec2.renter.cluster_state import ClusterState, MachineState
from hetopt.backends.ec2.renter.order import Order
from hetopt.optimizer.cost.observed_preemptions import ObservedPool, keep, observed_file

TOGETHER_S = 300.0
"""Machines of a pool that go within so long of each other go together."""


def seen_pools(seen: ClusterState, order: Order) -> tuple[ObservedPool, ...]:
    """The spot pools of this life of a run; what it had before it was resumed was counted then."""
    spot = {host for role in order.roles if role.market == "spot" for host in role.hosts}
    pools: dict[tuple[str, str], list[MachineState]] = defaultdict(list)
    for machine in seen.machines:
        if (
            machine.host in spot
            and not machine.on_demand
            and machine.since_s >= order.created_s
            and machine.until_s is not None
        ):
            pools[machine.instance_type, machine.zone or seen.zone].append(machine)
    return tuple(
        ObservedPool(
            instance_type=name,
            region=order.region,
            zone=zone or None,
            instance_hours=sum((one.until_s or one.since_s) - one.since_s for one in machines) / 3600,
            losses=len(lost := sorted(one.until_s or 0.0 for one in machines if one.ending == "interrupted")),
            events=_events(lost),
        )
        for (name, zone), machines in sorted(pools.items())
        if any((one.until_s or one.since_s) > one.since_s for one in machines)
    )


def remember(seen: ClusterState, order: Order, run_dir: Path) -> None:
    """Add what a run that is over has seen to what launches keep, for the next plan; once for each life of a run.

    Raises:
        BadInput: the file cannot be read or written, or holds something else.
    """
    pools = seen_pools(seen, order)
    try:
        (run_dir / f".observed.{order.life}").touch(exist_ok=False)
    except FileExistsError:
        return  # Another terminal saw it end, too.
    if pools:
        until = datetime.datetime.fromtimestamp(seen.time_s, datetime.UTC).isoformat(timespec="seconds")
        keep(observed_file(), pools, until=until)


def _events(lost_s: list[float]) -> int:
    """How often machines were taken, given when each was, in order."""
    return sum(place == 0 or lost_s[place] - lost_s[place - 1] > TOGETHER_S for place in range(len(lost_s)))
