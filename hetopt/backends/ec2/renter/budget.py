"""The money that a run may spend, as time: worst-case prices bound the lifetime, and the end comes before the budget.

Spot prices move, but never above the on-demand price, which is what EC2 takes as the highest bid where none is given.
So a cluster whose machines all cost their on-demand price spends the fastest that it ever can, and

    lifetime <= (budget - spent - fixed) / worst-case USD per second

can be promised whatever happens to this machine, less what it takes to shut down machines that their own timers end
(`SHUTDOWN_S`): they are paid for until they are off. While somebody follows the run, what was really spent replaces the
worst case, and the same inequality grants more time; see `Guard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hetopt.backends.ec2 import facts
from hetopt.core.errors import BadInput, BudgetStop
from hetopt.optimizer.cost.bill import SECONDS_PER_HOUR
from hetopt.optimizer.cost.least_budget import LEAST_LIFETIME_S, least_budget_usd

SHUTDOWN_S = 120.0
"""From the order to shut down until EC2 has stopped the clock: services get 90 s to end, by systemd's default."""

MOVE_S = 1500.0
"""Where all machines are relieved, both clusters are paid at most so long: what was not placed by then ends by itself
(`PLACE_WITHIN_S` of the agent, and ten minutes in which it boots)."""


@dataclass(frozen=True, kw_only=True)
class Stay:
    """One machine's time on the bill.

    Attributes:
        since_s: when it began, seconds since the epoch.
        until_s: when it ended; None while it runs.
        usd_per_hour: all that is paid for it, volume and address included.
        minimum_s: paid for at least.
        paid_usd: until its price last changed.
        priced_s: when that was; None: it never has.
    """

    since_s: float
    until_s: float | None
    usd_per_hour: float
    minimum_s: float = facts.MINIMUM_BILLED_S.value
    paid_usd: float = 0.0
    priced_s: float | None = None

    def usd(self, now_s: float) -> float:
        """USD that this machine has cost until ``now_s`` (Unix time, seconds)."""
        end_s = max(now_s if self.until_s is None else self.until_s, self.since_s + self.minimum_s)
        from_s = self.since_s if self.priced_s is None else self.priced_s
        return self.paid_usd + self.usd_per_hour * max(end_s - from_s, 0.0) / SECONDS_PER_HOUR

    def repriced(self, usd_per_hour: float, now_s: float) -> Stay:
        """From now on at another price: what it has cost stays what it was, and so does the least that is paid."""
        from_s = max(now_s, self.since_s + self.minimum_s, self.priced_s or 0.0)
        return replace(self, usd_per_hour=usd_per_hour, paid_usd=self.usd(now_s), priced_s=from_s)


def spent_usd(stays: Iterable[Stay], now_s: float) -> float:
    """What the machines of a run have cost so far."""
    return math.fsum(stay.usd(now_s) for stay in stays)


def lifetime_s(budget_usd: float, *, fixed_usd: float, worst_usd_per_hour: float) -> float:
    """When a cluster is shut down at the latest, from the moment it is asked for, whatever prices do.

    Raises:
        BudgetStop: hardly long enough to boot.
    """
    left_s = (budget_usd - fixed_usd) / worst_usd_per_hour * SECONDS_PER_HOUR
    # By a hair, as a budget may be the least of all: see `least_budget`.
    if left_s < LEAST_LIFETIME_S * (1 - 1e-9):
        least_usd = least_budget_usd(worst_usd_per_hour, fixed_usd)
        raise BudgetStop(
            f"${budget_usd:.2f} pays for only {max(left_s, 0) / 60:.0f} minutes of this cluster at its on-demand price "
            f"of ${worst_usd_per_hour:.2f} an hour, which spot prices can rise to.",
            hint=f"raise the budget to `budget_usd={math.ceil(least_usd * 100) / 100:.2f}`, or plan a smaller cluster",
        )
    return left_s - SHUTDOWN_S


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Says how long a run may go on.

    Attributes:
        checkpoint_s: to write and upload the last checkpoint.
        heartbeat_s: how often somebody looks, at most; what is decided now must hold until then.
    """

    budget_usd: float
    fixed_usd: float
    worst_usd_per_hour: float
    checkpoint_s: float
    heartbeat_s: float

    def __post_init__(self) -> None:
        """Refuse what guards nothing."""
        if not 0 < self.budget_usd < math.inf or not 0 < self.worst_usd_per_hour < math.inf:
            raise BadInput("a run needs a budget and prices above 0.", hint="give `budget_usd`")

    def end_s(self, spent: float, now_s: float) -> float:
        """When machines are shut down, so that the budget pays until they are off, were all prices at their worst."""
        left = self.budget_usd - self.fixed_usd - spent
        return now_s + left / self.worst_usd_per_hour * SECONDS_PER_HOUR - SHUTDOWN_S

    def stop_training_s(self, end_s: float) -> float:
        """When training must end, so that the last checkpoint is safe before the end."""
        return end_s - self.checkpoint_s

    def decide(self, spent: float, now_s: float) -> Literal["go on", "stop"]:
        """Whether the run may go on until somebody looks again."""
        return "go on" if now_s + self.heartbeat_s < self.stop_training_s(self.end_s(spent, now_s)) else "stop"
