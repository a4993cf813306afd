"""The money that a run may spend, as time: worst-case prices bound the lifetime, and the end comes before the budget.

The law is `hetopt.core.budget_law`. While somebody follows the run, what was really spent replaces the worst case, and
the same inequality grants more time; see `Guard`. While nobody does, machines reckon by it themselves, from what the
lease says of their budget; see `hetopt.backends.ec2.renewal`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hetopt.backends.ec2 import facts
from hetopt.core import budget_law
from hetopt.core.errors import BadInput, BudgetStop
from hetopt.core.formatting import usd
from hetopt.optimizer.cost.least_budget import LEAST_LIFETIME_S, least_budget_usd

UNPLACED_S = 1500.0
"""A machine that has no place by then ends: it boots for ten minutes at most, and its agent waits for `PLACE_WITHIN_S`.
The account ends one that cannot do so itself; where all machines are relieved, both clusters are paid for so long."""

OVERRUN = 0.25
"""Of the budget, what machines that hang may cost beyond it at most: so much later than the lease the account ends
them."""


def lifetime_s(budget_usd: float, *, fixed_usd: float, worst_usd_per_hour: float) -> float:
    """When a cluster is shut down at the latest, from the moment it is asked for, whatever prices do.

    Raises:
        BudgetStop: hardly long enough to boot.
    """
    left_s = budget_law.lasts_s(budget_usd - fixed_usd, worst_usd_per_hour)
    # By a hair, as a budget may be the least of all: see `least_budget`.
    if left_s < LEAST_LIFETIME_S * (1 - 1e-9):
        least_usd = least_budget_usd(worst_usd_per_hour, fixed_usd)
        raise BudgetStop(
            f"{usd(budget_usd)} pays for only {max(left_s, 0) / 60:.0f} minutes of this cluster at its on-demand price "
            f"of {usd(worst_usd_per_hour)} an hour, which spot prices can rise to.",
            hint=f"raise the budget to `budget_usd={math.ceil(least_usd * 100) / 100:.2f}`, or plan a smaller cluster",
        )
    return left_s - budget_law.SHUTDOWN_S


def outside_end_s(lease_end_s: float, budget_usd: float, worst_usd_per_hour: float) -> float:
    """When the account ends machines that nothing else has ended, in seconds since the epoch.

    The budget B pays until the lease's end and the shutdown after it, at the worst price w. Machines that all hang from
    the moment at which the lease was written cost w until then, so that B (1 + overrun) pays until

        outside = lease end + shutdown + overrun B / w - late          late: of the scheduler itself         [s]

    Args:
        lease_end_s: when machines are shut down, by the budget (`Guard.end_s`).
        budget_usd: of the run.
        worst_usd_per_hour: of all machines that the budget was reckoned for.
    """
    late_s = budget_law.lasts_s(OVERRUN * budget_usd, worst_usd_per_hour) - facts.SCHEDULE_LATE_S.value
    return lease_end_s + budget_law.SHUTDOWN_S + late_s


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

    def left_usd(self, spent: float) -> float:
        """What of the budget may be spent on machines yet, where so much of it was."""
        return self.budget_usd - self.fixed_usd - spent

    def end_s(self, spent: float, now_s: float) -> float:
        """When machines are shut down, so that the budget pays until they are off, were all prices at their worst."""
        return budget_law.end_s(now_s, self.left_usd(spent), self.worst_usd_per_hour)

    def stop_training_s(self, end_s: float) -> float:
        """When training must end, so that the last checkpoint is safe before the end."""
        return end_s - self.checkpoint_s

    def decide(self, spent: float, now_s: float) -> Literal["go on", "stop"]:
        """Whether the run may go on until somebody looks again."""
        return "go on" if now_s + self.heartbeat_s < self.stop_training_s(self.end_s(spent, now_s)) else "stop"
