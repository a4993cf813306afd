"""How long a budget lasts at the highest prices, on which planner, follower and machines all rely.

Spot prices move, but EC2 bills none above the highest price that a machine was asked for with: it takes the machine
back instead. So machines that all cost their highest price (on demand: their price) spend as fast as they can, and

    lifetime  <=  left / worst                                        [h], left in USD, worst in USD an hour
    end(t)     =  t + (left - spent(t)) / worst - shutdown            what is left at a moment t pays until then

spent(t) grows by at most the worst price, so end(t) never goes back: who reckons later, by what was really spent, takes
nothing back that was granted before, and of several ends the latest is paid for: what is spent after its moment t is
at most (end(t) + shutdown - t) worst = left - spent(t).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Usd = TypeVar("Usd", float, "NDArray[np.float64]")

SECONDS_PER_HOUR = 3600.0

SHUTDOWN_S = 120.0
"""Seconds from the order to shut down until EC2 has stopped the clock: services get 90 s to end, by systemd's default.
Machines are paid for until they are off."""


def worst_usd(worst_usd_per_hour: Usd, lasts_s: float) -> Usd:
    """Return the most that machines cost over ``lasts_s`` seconds, in USD, at their highest price."""
    return worst_usd_per_hour * (lasts_s / SECONDS_PER_HOUR)


def lasts_s(left_usd: float, worst_usd_per_hour: float) -> float:
    """Return the seconds for which ``left_usd`` pays at the highest price (above 0); the inverse of `worst_usd`."""
    return left_usd / worst_usd_per_hour * SECONDS_PER_HOUR


def end_s(now_s: float, left_usd: float, worst_usd_per_hour: float) -> float:
    """Return when (epoch s) to order shutdown, so that ``left_usd`` pays the highest price until machines are off.

    Args:
        now_s: seconds since the epoch.
        left_usd: what is left of the budget now.
        worst_usd_per_hour: highest price of all machines together, above 0.
    """
    return now_s + lasts_s(left_usd, worst_usd_per_hour) - SHUTDOWN_S


PLACEMENT_OBJECT = "placement.json"
"""Name of the object in a run's bucket that says which machine is which host."""
LEASE_OBJECT = "lease.json"
"""Name of the object in a run's bucket that says until when machines may live."""

READ_OFTEN = (LEASE_OBJECT, PLACEMENT_OBJECT)
"""Names of the objects that a machine reads again and again."""
READ_EVERY_S = 5.0
"""Seconds between a machine's looks for news, and whether it is about to be taken back: check every 5 seconds (EC2 user
guide, 'Spot Instance interruption notices', read 2026-11-26)."""

HEARTBEAT_S = 15.0
"""Seconds between a machine's reports that it lives."""
