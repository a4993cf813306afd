"""What may be changed about a run's machines within its budget: on demand, more of them, or in another zone. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hetopt.backends.ec2.renter.budget import MOVE_S, SECONDS_PER_HOUR, Guard
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.pools import may_leave, pair, rests
from hetopt.core.bucket_traffic import HEARTBEAT_S
from hetopt.core.errors import BadInput, BudgetStop
from hetopt.core.run_spec import RunSpec


def guard_of(order: Order, seen: ClusterState, now_s: float) -> Guard:
    """Of the budget, without what a move that may still come will cost, nor what is paid while a run changes zones."""
    leaves, waiting_usd = seen.zone_wanted is not None, seen.spent_waiting_usd(now_s)
    move_usd = 0.0 if seen.has_moved else max(0.0, order.move_usd - (0.0 if leaves else waiting_usd))
    both_usd = order.worst_usd_per_hour() * MOVE_S / SECONDS_PER_HOUR if leaves else 0.0
    return Guard(
        budget_usd=order.budget_usd,
        fixed_usd=order.fixed_usd + move_usd + max(0.0, both_usd - waiting_usd),
        worst_usd_per_hour=order.worst_usd_per_hour(),
        checkpoint_s=order.checkpoint_s,
        heartbeat_s=HEARTBEAT_S,
    )


def moved(order: Order, seen: ClusterState, needed_s: float, now_s: float) -> ClusterState:
    """The run from the moment on in which on-demand machines are asked for beside all that are on spot.

    Args:
        order: of the run.
        seen: its last look.
        needed_s: from now to its end.
        now_s: seconds since the epoch.

    Raises:
        BadInput: it is moving already, or it is over.
        BudgetStop: the budget does not pay for that.
    """
    if seen.on_demand or not seen.alive or seen.stop_wished_s is not None or not order.has_spot:
        raise BadInput(
            f"{order.run_id} cannot move: it is over, moving already, or not on spot.",
            hint="look at it with `hetopt status`",
        )
    why_not = f"on-demand machines until the end of {order.run_id}, so that it stays on spot; its deadline may pass."
    if not order.move_usd:
        raise _unpaid(order, why_not)
    _paid(order, seen, needed_s, now_s, why_not)
    return seen.model_copy(update={"on_demand": True, "asked_s": None})


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A run that is to have other machines.

    Attributes:
        order: with them.
        seen: they are asked for from now on.
        end_s: when everything must be gone, were all prices at their worst: sooner than before.
        stop_training_s: when training must end for that.
    """

    order: Order
    seen: ClusterState
    end_s: float
    stop_training_s: float


def enlarged(
    order: Order, seen: ClusterState, spec: RunSpec, host: str, machines: int, needed_s: float, now_s: float
) -> Changed:
    """The run with more machines, whose workers get as much of the batch as those that they are like.

    Args:
        order: of the run.
        seen: its last look.
        spec: of those that train.
        host: whose machine and workers they are like.
        machines: how many.
        needed_s: from now to its end.
        now_s: seconds since the epoch.

    Raises:
        BadInput: it has no such host, or it is over.
        BudgetStop: the budget does not pay for that.
    """
    like = [worker for worker in spec.workers if worker.host == host]
    if not like or not seen.alive or seen.stop_wished_s is not None:
        raise BadInput(f"no machine of {order.run_id} is {host} now.", hint="look at it with `hetopt status`")
    names = order.new_hosts(machines)
    larger = order.with_hosts(names, like=host)
    new = [worker.model_copy(update={"host": name}) for name in names for worker in like]
    asked = seen.model_copy(update={"absent": (*seen.absent, *new), "asked_s": None})
    why_not = (
        f"{machines} more machines like {host} until the end of {order.run_id}, so that it goes on as it is; "
        "its deadline may pass."
    )
    return _paid(larger, asked, needed_s, now_s, why_not)


def switched(
    order: Order, seen: ClusterState, hosts: Collection[str], zone: str, needed_s: float, now_s: float
) -> Changed:
    """The run from the moment on in which all of its machines are wanted in another zone.

    Args:
        order: of the run.
        seen: its last look.
        hosts: of those that train.
        zone: where they are wanted, by its name.
        needed_s: from now to the run's end.
        now_s: seconds since the epoch.

    Raises:
        BadInput: there is no such zone, it has just come from there, machines come or go, or some are on demand.
        BudgetStop: the budget does not pay for both clusters meanwhile.
    """
    others = {one.name for one in order.zones} - {seen.zone}
    if zone not in others or not may_leave(seen, hosts) or rests(seen, zone, now_s):
        raise BadInput(f"{order.run_id} cannot leave for {zone} now.", hint="look at it with `hetopt status`")
    switches = {**seen.switches, pair(seen.zone, zone): now_s}
    leaving = seen.model_copy(update={"zone_wanted": zone, "asked_s": None, "switches": switches})
    why_not = (
        f"the machines of {order.run_id} in {seen.zone} and in {zone} meanwhile and until its end, "
        f"so that it stays in {seen.zone}."
    )
    return _paid(order, leaving, needed_s, now_s, why_not)


def _paid(order: Order, seen: ClusterState, needed_s: float, now_s: float, why_not: str) -> Changed:
    """The run with what it is to have, if its budget pays for that until its end.

    Raises:
        BudgetStop: it does not pay for ``why_not``.
    """
    guard = guard_of(order, seen, now_s)
    end_s = min(guard.end_s(seen.spent_usd(now_s), now_s), order.latest_end_s)
    if end_s < now_s + needed_s:
        raise _unpaid(order, why_not)
    return Changed(order=order, seen=seen, end_s=end_s, stop_training_s=guard.stop_training_s(end_s))


def _unpaid(order: Order, what: str) -> BudgetStop:
    return BudgetStop(
        f"the budget of ${order.budget_usd:.2f} does not pay for {what}", hint="resume it with a higher `budget_usd`"
    )
