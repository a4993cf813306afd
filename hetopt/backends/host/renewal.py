"""Until when a machine may live that nobody looks after: by the lease, and by what its budget still pays for.

A lease is what the budget pays for at on-demand prices from the moment at which it was written. While spot costs less,
more is left than was feared; whoever follows the run writes that into the next lease. Where nobody does, each machine
asks EC2 what the pools of all machines have cost since, and reckons by itself:

    spent(t)   all machines of the lease, since it was written, at the prices of their pools           [USD]
    end(t)     t + (left - spent(t)) / worst - shutdown                  (`hetopt.core.budget_law`)     [s]

Machines that were lost since are reckoned as if they were there, and none comes that the lease does not tell of: the
renter writes a lease that nobody extends before it asks for any. So spent(t) is never less than what was spent. However
different the moments are at which machines reckon, or how many of them get no answer and stay with the end that they
had: together they stay within the budget. A machine grants time to nobody else, and needs no right but to see prices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import Field, NonNegativeFloat

from hetopt.backends.host.protocol import Lease, PaidMachine, Renewal
from hetopt.core import budget_law
from hetopt.core.artifact import Record
from hetopt.core.budget_law import SECONDS_PER_HOUR


class Stay(Record):
    """One machine's time on the bill."""

    since_s: NonNegativeFloat = Field(description="when it began, seconds since the epoch")
    until_s: NonNegativeFloat | None = Field(default=None, description="when it ended; absent while it runs")
    usd_per_hour: NonNegativeFloat = Field(
        description="all that is paid for it now, volume and address included; of one that has ended, at last"
    )
    minimum_s: NonNegativeFloat = Field(default=0.0, description="paid for at least")
    paid_usd: NonNegativeFloat = Field(default=0.0, description="what it had cost when its price last changed")
    priced_s: NonNegativeFloat | None = Field(default=None, description="from when on it costs what it does now")

    def usd(self, now_s: float) -> float:
        """USD that this machine has cost until ``now_s`` (Unix time, seconds)."""
        end_s = max(now_s if self.until_s is None else self.until_s, self.since_s + self.minimum_s)
        from_s = self.since_s if self.priced_s is None else self.priced_s
        return self.paid_usd + self.usd_per_hour * max(end_s - from_s, 0.0) / SECONDS_PER_HOUR

    def repriced(self, usd_per_hour: float, now_s: float) -> Self:
        """From then on at another price: what it had cost stays what it was, and so does the least that is paid."""
        from_s = max(now_s, self.since_s + self.minimum_s, self.priced_s or 0.0)
        paid_usd = self.model_copy(update={"until_s": None}).usd(now_s)
        return self.model_copy(update={"usd_per_hour": usd_per_hour, "paid_usd": paid_usd, "priced_s": from_s})


def spent_usd(stays: Iterable[Stay], now_s: float) -> float:
    """What the machines of a run have cost so far."""
    return math.fsum(stay.usd(now_s) for stay in stays)


PRICES_EVERY_S = 600.0
"""Prices move over hours, and a machine is billed by the second: a look costs nothing, and tells little more often."""


@dataclass(frozen=True, kw_only=True)
class PriceChange:
    """From a moment on (seconds since the epoch) a pool costs so much, in USD an hour, without volume and address."""

    zone: str
    instance_type: str
    at_s: float
    usd_per_hour: float


AskPrices = Callable[[Sequence[str], float], Sequence[PriceChange] | None]
"""What types have cost on spot in every zone from a moment on, in order; None where nobody answers."""


def renewed_end_s(renewal: Renewal, changes: Sequence[PriceChange], now_s: float) -> float:
    """When machines are shut down that nobody has looked after since a lease was written (seconds since the epoch).

    Args:
        renewal: what the lease says of the budget.
        changes: of prices, from `Renewal.since_s` on, with those that held then.
        now_s: seconds since the epoch.
    """
    stays = [_stay(renewal, machine, changes, now_s) for machine in renewal.machines]
    left_usd = renewal.left_usd - spent_usd(stays, max(now_s, renewal.since_s))
    return budget_law.end_s(max(now_s, renewal.since_s), left_usd, renewal.worst_usd_per_hour)


def _stay(renewal: Renewal, machine: PaidMachine, changes: Sequence[PriceChange], now_s: float) -> Stay:
    """A machine since the lease was written, as if it were still there."""
    if machine.on_demand:
        return Stay(since_s=renewal.since_s, usd_per_hour=machine.usd_per_hour)
    mine = [
        (one.at_s, min(one.usd_per_hour + machine.extras_usd_per_hour, machine.worst_usd_per_hour))
        for one in changes
        if (one.zone, one.instance_type) == (machine.zone, machine.instance_type)
    ]
    before = [usd for at_s, usd in mine if at_s <= renewal.since_s]
    # A pool of which nobody tells what it cost at first cost the most that it can.
    first_usd = max(before[-1], machine.usd_per_hour) if before else machine.worst_usd_per_hour
    stay = Stay(since_s=renewal.since_s, usd_per_hour=first_usd)
    for at_s, usd in mine:
        if renewal.since_s < at_s < now_s:
            stay = stay.repriced(usd, at_s)
    return stay


@dataclass(kw_only=True)
class Allowance:
    """What one machine may do, by what it last heard.

    Attributes:
        latest_end_s: what nothing extends its life beyond, whoever wrote the lease.
        ask_prices: of EC2.
        end_s: when it is shut down; before the first lease, as it was told when it booted.
        stop_training_s: when training must end for that.
    """

    latest_end_s: float
    ask_prices: AskPrices
    end_s: float
    stop_training_s: float = math.inf
    _renewal: Renewal | None = None
    _renewed_s: float = 0.0
    _asked_s: float = -math.inf

    def hear(self, lease: Lease, now_s: float) -> None:
        """A lease as it is now. One that nobody has written anew for a while is extended, if it says by what."""
        if lease.renewal != self._renewal:
            self._renewal, self._renewed_s = lease.renewal, 0.0
        self._extend(lease, now_s)
        # Later while less is spent than was feared; sooner once there are more machines.
        self.end_s, self.stop_training_s = min(lease.end_s, self.latest_end_s), lease.stop_training_s
        if lease.renewal is None or lease.wishes_end:
            return
        renewed_s = min(self._renewed_s, self.latest_end_s, lease.renewal.latest_end_s)
        if renewed_s > self.end_s:
            self.end_s, self.stop_training_s = renewed_s, renewed_s - lease.renewal.checkpoint_s

    def _extend(self, lease: Lease, now_s: float) -> None:
        """Reckon anew when prices may have moved, or half of the time is over in which that is of use."""
        if lease.renewal is None:
            return
        last_s = max(lease.renewal.since_s, self._asked_s)
        ends_s = max(lease.stop_training_s, self._renewed_s - lease.renewal.checkpoint_s)
        if now_s >= last_s + min(PRICES_EVERY_S, (ends_s - last_s) / 2):
            self._asked_s = now_s
            self._renewed_s = max(self._renewed_s, self._reckoned_s(lease.renewal, now_s))

    def _reckoned_s(self, renewal: Renewal, now_s: float) -> float:
        """By the prices of now; 0 where nobody tells them."""
        types = list(dict.fromkeys(one.instance_type for one in renewal.machines if not one.on_demand))
        changes = self.ask_prices(types, renewal.since_s) if types else []
        return 0.0 if changes is None else renewed_end_s(renewal, changes, now_s)
