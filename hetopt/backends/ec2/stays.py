"""What machines cost: each machine's time on the bill, piece by piece at the price that it had then."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hetopt.backends.ec2 import facts
from hetopt.core.budget_law import SECONDS_PER_HOUR


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
