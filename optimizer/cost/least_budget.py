"""The least budget that a cluster is rented with: ten minutes of it at its on-demand price, whatever the plan expects.

Spot prices can rise to the on-demand price, and a cluster must have booted before its budget may end it. Planner and
launcher hold plans against one inequality, so that what was planned for a budget can be rented with it:

    budget >= fixed + worst-case USD an hour * 10 min                 (`hetopt.core.budget_law`)
"""

from __future__ import annotations

from hetopt.core.budget_law import HEARTBEAT_S, READ_EVERY_S, READ_OFTEN, SECONDS_PER_HOUR, Usd, worst_usd
from hetopt.optimizer.cost.bill import BYTES_PER_GB, CHECKPOINTS_KEPT, beside_usd_per_hour
from hetopt.optimizer.cost.billing import Billing

LEAST_LIFETIME_S = 600.0
"""A cluster that must end before this has hardly booted."""


def least_budget_usd(worst_usd_per_hour: Usd, fixed_usd: float) -> Usd:
    """Return the least budget of clusters with this hourly on-demand cost, all extras included, USD."""
    return fixed_usd + worst_usd(worst_usd_per_hour, LEAST_LIFETIME_S)


def extras_usd_per_hour(billing: Billing, disk_gb: Usd) -> Usd:
    """Return the hourly cost of a machine's volume, public address, heartbeats and looking for news, USD."""
    puts = SECONDS_PER_HOUR / HEARTBEAT_S * billing.s3_usd_per_1000_puts.value / 1000
    gets = len(READ_OFTEN) * SECONDS_PER_HOUR / READ_EVERY_S * billing.s3_usd_per_1000_gets.value / 1000
    return beside_usd_per_hour(billing, disk_gb) + (puts + gets)


def fixed_usd(checkpoint_bytes: float, billing: Billing) -> float:
    """Return the price of keeping the last checkpoints in the bucket for a month, USD."""
    return CHECKPOINTS_KEPT * checkpoint_bytes / BYTES_PER_GB * billing.s3_usd_per_gb_month.value
