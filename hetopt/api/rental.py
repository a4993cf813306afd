"""The machines of a run that rents them: what is to be rented, and what is known of them then."""

from __future__ import annotations

import time
from typing import Any

from hetopt.api.run import Run
from hetopt.backends.backend import Prepared
from hetopt.backends.ec2.renter.backend import Rental
from hetopt.backends.ec2.renter.calls import END_ROLE
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState, judged
from hetopt.backends.ec2.renter.launcher import Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, OVERRUN, UNPLACED_S, Order
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.formatting import duration, usd
from hetopt.core.run_status import RunStatus


def rental_of(prepared: Prepared) -> Rental:
    """What a launch on EC2 is about to rent."""
    assert isinstance(prepared, Rental)
    return prepared


def unfollowed(rental: Rental) -> str:
    """What becomes of a run that nobody follows, because its launch was left or the machine that follows it sleeps."""
    lives_s, takes_s = rental.order.lifetime_s, rental.wanted.chosen.prediction.total_s.high
    cheaper = ", and later as long as spot machines cost less, whose prices they ask EC2 for"
    told = (
        "if nobody follows the run, or this machine sleeps, training goes on; machines that are lost are not replaced. "
        "When the budget is spent, all save a checkpoint and end: after "
        f"{duration(lives_s)} at on-demand prices{cheaper if rental.order.has_spot else ''}. "
        f"The run may take {duration(takes_s)}"
    )
    if takes_s <= lives_s:
        return told
    if not rental.order.has_spot:
        return f"{told}, which is longer: it would end unfinished, with a checkpoint"
    return f"{told}, which is longer: `hetopt status`, now and then, gives it more time as long as less was spent"


def last_end(order: Order) -> str:
    """What ends a machine that nothing of the run reaches, such as one that never boots."""
    if order.end_role is None:
        return (
            f"the machines' own timers alone, as the account has no role {END_ROLE}: `hetopt setup --print-policy` "
            "tells how it is made"
        )
    lives = duration(order.outside_end_s() - order.created_s)
    soon, most = duration(UNPLACED_S), usd((1 + OVERRUN) * order.budget_usd)
    return (
        f"the account's scheduler ends machines without a place after {soon}, and all after {lives} or, while somebody "
        f"follows the run, later with its lease: if all of them hang, they cost {most} at most"
    )


def look(run: Run, *, ask: bool) -> tuple[RunStatus, dict[str, Any]]:
    """How a rented run is. Without a way to ask, what was seen last is told, with its age.

    Args:
        run: that one.
        ask: whether to ask the cloud at all.
    """
    launcher, folder = run.backend, run.folder
    assert isinstance(launcher, Ec2Launcher)
    why_not: str | None = None
    if ask:
        try:
            launcher.look(run.handle)
        except (CloudRefused, BadInput) as error:
            why_not = f"{error.message} {error.hint or ''}".strip()
    path = folder / SEEN_FILE
    seen = ClusterState.load(path) if path.exists() else ClusterState(time_s=0.0)
    now_s = time.time()
    order = Order.load(folder / ORDER_FILE) if (folder / ORDER_FILE).exists() else None
    rental = {
        "seen_s_ago": now_s - seen.time_s if path.exists() else None,
        "not_asked": why_not,
        "spent_usd": seen.spent_usd(now_s),
        "spent_is_estimate": seen.is_estimate,
        "budget_usd": order.budget_usd if order else None,
        "usd_per_hour": sum(machine.usd_per_hour for machine in seen.alive),
        "ends_in_s": seen.lease_end_s - now_s if seen.lease_end_s is not None and seen.alive else None,
        "zone": seen.zone,
        "leaves_for_zone": seen.zone_wanted,
        "strange_objects": seen.strange_objects,
        "everything_is_removed": seen.cleared,
        "machines": [
            {
                "id": machine.id,
                "host": machine.host,
                "type": machine.instance_type,
                "market": "on-demand" if machine.on_demand else "spot",
                "duty": machine.duty,
                "state": machine.state,
                "ending": machine.ending,
                "reason": machine.reason,
                "up_s": (machine.until_s or now_s) - machine.since_s,
                "usd": machine.stay(minimum_s=seen.minimum_billed_s, free_within_s=seen.free_within_s).usd(now_s),
                "usd_is_estimate": machine.is_forgotten,
                "heartbeat_s_ago": now_s - machine.heartbeat_s if machine.heartbeat_s is not None else None,
            }
            for machine in seen.machines
        ],
    }
    return judged(folder, seen), rental


def spent(run: Run) -> tuple[float, bool, str | None]:
    """What a run has cost at the prices that were seen meanwhile, USD; whether that is an estimate, as the end of some
    machine was not seen; and why the run was ended, if it was."""
    seen = ClusterState.load(run.folder / SEEN_FILE)
    return seen.spent_usd(seen.time_s), seen.is_estimate, seen.stop_reason
