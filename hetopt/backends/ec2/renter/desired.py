"""What a run's machines should be, and how that may change within its budget. Pure; `reconcile` makes them so.

What is wanted is kept in the run's folder beside what was seen (`ClusterState`), so that a process which dies is
followed by one that wants the same:

    recover, replace    the same slots: one whose machine was lost or given back has none now
    enlarge             more slots (`enlarged`)
    move                slots on demand: no machine on spot fits them (`moved`)
    switch              slots in another zone: no machine of this one fits them (`switched`)
    end                 no slots for machines that are not placed yet
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hetopt.backends.ec2.protocol import PaidMachine, Renewal
from hetopt.backends.ec2.renter.budget import UNPLACED_S, Guard
from hetopt.backends.ec2.renter.cluster_state import ClusterState, MachineState
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.spot_pools import billed_from_s, may_leave, pair, rests
from hetopt.core.bucket_traffic import HEARTBEAT_S
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import BadInput, BudgetStop
from hetopt.core.formatting import usd
from hetopt.core.nodes import host_names
from hetopt.core.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A host that the run should have, and what its machine must be like.

    Attributes:
        zone: where, by its name.
        on_demand: a machine on spot does not do.
    """

    host: str
    zone: str
    on_demand: bool

    def fits(self, machine: MachineState) -> bool:
        """Whether a machine can be in it, now or once it has its place."""
        here = machine.alive and machine.duty != "relieved" and machine.host == self.host
        return here and machine.zone in (self.zone, "") and (machine.on_demand or not self.on_demand)


def slots_of(order: Order, state: ClusterState, spec: RunSpec) -> tuple[Slot, ...]:
    """The slots of a run: of the hosts that train, and of those that are to come or to come back.

    Args:
        order: what was rented.
        state: what was seen, and what is wanted.
        spec: the run as it was told to its machines.
    """
    hosts = dict.fromkeys((*host_names(spec), *(worker.host for worker in state.absent)))
    zone = order.zone(state.zone if state.zone_wanted is None else state.zone_wanted).name
    return tuple(Slot(host=host, zone=zone, on_demand=state.on_demand) for host in hosts if host not in state.given_up)


def guard_of(order: Order, state: ClusterState, now_s: float) -> Guard:
    """Of the budget, without what a move that may still come will cost, nor what is paid while a run changes zones."""
    leaves, waiting_usd = state.zone_wanted is not None, state.spent_waiting_usd(now_s)
    move_usd = 0.0 if state.has_moved else max(0.0, order.move_usd - (0.0 if leaves else waiting_usd))
    both_usd = order.worst_usd_per_hour() * UNPLACED_S / SECONDS_PER_HOUR if leaves else 0.0
    return Guard(
        budget_usd=order.budget_usd,
        fixed_usd=order.fixed_usd + move_usd + max(0.0, both_usd - waiting_usd),
        worst_usd_per_hour=order.worst_usd_per_hour(),
        checkpoint_s=order.checkpoint_s,
        heartbeat_s=HEARTBEAT_S,
    )


def renewal_of(order: Order, state: ClusterState, now_s: float) -> Renewal | None:
    """By what a run's machines extend their lease; None while any come or are relieved, and where none is on spot.

    It begins where prices were last seen: what they have been since is not known here.
    """
    since_s = min(now_s, billed_from_s(order, state))
    guard, spent_usd = guard_of(order, state, now_s), state.spent_usd(since_s)
    changing = state.zone_wanted is not None or state.paused_s is not None or len(state.serving) < len(state.alive)
    on_spot = any(not machine.on_demand for machine in state.alive)
    if changing or not on_spot or state.stop_wished_s is not None or guard.left_usd(spent_usd) <= 0:
        return None
    return Renewal(
        since_s=since_s,
        left_usd=guard.left_usd(spent_usd),
        worst_usd_per_hour=guard.worst_usd_per_hour,
        checkpoint_s=order.checkpoint_s,
        machines=tuple(
            PaidMachine(
                zone=machine.zone or state.zone,
                instance_type=machine.instance_type,
                on_demand=machine.on_demand,
                usd_per_hour=machine.usd_per_hour,
                worst_usd_per_hour=order.zone(machine.zone).rates[machine.instance_type].worst_usd_per_hour,
                extras_usd_per_hour=machine.extras_usd_per_hour,
            )
            for machine in state.alive
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """A run that is to have other machines.

    Attributes:
        order: with them.
        state: with what is wanted from now on.
        end_s: when everything must be gone, were all prices at their worst: sooner than before.
        stop_training_s: when training must end for that.
    """

    order: Order
    state: ClusterState
    end_s: float
    stop_training_s: float


def moved(order: Order, state: ClusterState, needed_s: float, now_s: float) -> Change:
    """The run from the moment on in which all of its slots are on demand.

    Args:
        order: of the run.
        state: its last look.
        needed_s: from now to its end.
        now_s: seconds since the epoch.

    Raises:
        BadInput: it is moving already, or it is over.
        BudgetStop: the budget does not pay for that.
    """
    if state.on_demand or not state.alive or state.stop_wished_s is not None or not order.has_spot:
        raise BadInput(
            f"{order.run_id} cannot move: it is over, moving already, or not on spot.",
            hint="look at it with `hetopt status`",
        )
    why_not = f"on-demand machines until the end of {order.run_id}, so that it stays on spot; its deadline may pass."
    if not order.move_usd:
        raise _unpaid(order, why_not)
    change = _paid(order, state, needed_s, now_s, why_not)
    on_demand = state.model_copy(update={"on_demand": True, "asked_s": None})
    return Change(order=order, state=on_demand, end_s=change.end_s, stop_training_s=change.stop_training_s)


def enlarged(
    order: Order, state: ClusterState, spec: RunSpec, host: str, machines: int, needed_s: float, now_s: float
) -> Change:
    """The run with slots for more machines like that of a host, whose workers get as much of the batch as that one's.

    Raises:
        BadInput: it has no such host, or it is over.
        BudgetStop: the budget does not pay for that.
    """
    like = [worker for worker in spec.workers if worker.host == host]
    if not like or not state.alive or state.stop_wished_s is not None:
        raise BadInput(f"no machine of {order.run_id} is {host} now.", hint="look at it with `hetopt status`")
    names = order.new_hosts(machines)
    larger = order.with_hosts(names, like=host)
    new = [worker.model_copy(update={"host": name}) for name in names for worker in like]
    wanted = state.model_copy(update={"absent": (*state.absent, *new), "asked_s": None})
    why_not = (
        f"{machines} more machines like {host} until the end of {order.run_id}, so that it goes on as it is; "
        "its deadline may pass."
    )
    return _paid(larger, wanted, needed_s, now_s, why_not)


def switched(
    order: Order, state: ClusterState, hosts: Collection[str], zone: str, needed_s: float, now_s: float
) -> Change:
    """The run from the moment on in which the slots of all hosts that train are in another zone, given by its name.

    Raises:
        BadInput: there is no such zone, it has just come from there, machines come or go, or some are on demand.
        BudgetStop: the budget does not pay for both clusters meanwhile.
    """
    others = {one.name for one in order.zones} - {state.zone}
    if zone not in others or not may_leave(state, hosts) or rests(state, zone, now_s):
        raise BadInput(f"{order.run_id} cannot leave for {zone} now.", hint="look at it with `hetopt status`")
    switches = {**state.switches, pair(state.zone, zone): now_s}
    wanted = state.model_copy(update={"zone_wanted": zone, "asked_s": None, "switches": switches})
    why_not = (
        f"the machines of {order.run_id} in {state.zone} and in {zone} meanwhile and until its end, "
        f"so that it stays in {state.zone}."
    )
    return _paid(order, wanted, needed_s, now_s, why_not)


def _paid(order: Order, state: ClusterState, needed_s: float, now_s: float, why_not: str) -> Change:
    """The run with what it is to have, if its budget pays for that until its end.

    Raises:
        BudgetStop: it does not pay for ``why_not``.
    """
    guard = guard_of(order, state, now_s)
    end_s = min(guard.end_s(state.spent_usd(now_s), now_s), order.latest_end_s)
    if end_s < now_s + needed_s:
        raise _unpaid(order, why_not)
    return Change(order=order, state=state, end_s=end_s, stop_training_s=guard.stop_training_s(end_s))


def _unpaid(order: Order, what: str) -> BudgetStop:
    return BudgetStop(
        f"the budget of {usd(order.budget_usd)} does not pay for {what}", hint="resume it with a higher `budget_usd`"
    )
