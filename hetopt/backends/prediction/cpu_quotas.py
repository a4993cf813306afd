"""A step of workers that CPU quotas hold back, and how much of it the quotas do.

A quota is processor time in a period (100 ms, CFS bandwidth control). A worker that waits for the network uses none of
it, and computes at full speed afterwards: where exchanges take long, quotas do not show at all. So a step takes the
longer of two times:

    free      = finish_times(w) + c n / P + T     as fast as the processors and the network are
    throttled = max_i (w_i + c) / q_i             as little as each worker may compute

``w`` is processor time of a share, ``c`` of a worker's own part of the exchange, ``T`` what the exchange takes besides,
``q`` the quota in processors. Where both are alike, steps end unevenly over the periods, and take longer than either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetopt.backends.prediction.processor_sharing import finish_times_s
from hetopt.optimizer.step_time.step_time import Breakdown

UNEVENNESS = 6.0
"""Power of the mean that the longer of both is taken by: free 60 ms and throttled 53 took 64.6, 47 and 60 took 61.1 (a
small network on three hosts with 0.8, 0.5 and 0.3 of two processors, links of 400 Mbit/s)."""


def under_quotas(
    work_s: Sequence[float], quotas: Sequence[float], *, processors: int, exchange_s: float, compress_s: float
) -> Breakdown:
    """The step, and where its time goes: computing is what it would take without an exchange.

    Args:
        work_s: processor time of each worker's share.
        quotas: processors that each may use, in the mean.
        processors: that they share.
        exchange_s: of the whole exchange, when nobody has to be waited for.
        compress_s: processor time of a worker's own part of it.
    """
    pairs = list(zip(work_s, quotas, strict=True))
    computed_s = max(finish_times_s(work_s, processors))
    compute_s = _longer(computed_s, max(work / quota for work, quota in pairs))
    crowded = max(1.0, len(work_s) / processors)
    step_s = _longer(
        computed_s + crowded * compress_s + exchange_s, max((work + compress_s) / quota for work, quota in pairs)
    )
    return Breakdown(
        compute_s=compute_s,
        waiting_s=max(0.0, compute_s - sum(work / quota for work, quota in pairs) / len(pairs)),
        communication_s=step_s - compute_s,
    )


def _longer(one_s: float, other_s: float) -> float:
    """The longer of both, and more where they are alike."""
    longer, shorter = max(one_s, other_s), min(one_s, other_s)
    return longer * math.pow(1 + math.pow(shorter / longer, UNEVENNESS), 1 / UNEVENNESS)
