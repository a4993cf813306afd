"""When workers that share a machine's processors finish: alone, paced to finish in time, and held back by quotas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetopt.optimizer.step_time.step_time import Breakdown


def finish_times_s(work_s: Sequence[float], processors: int) -> list[float]:
    """When each worker has computed, if all begin together and the processors are shared out equally.

    Processor sharing: of ``n`` workers that still compute, each advances at ``min(1, processors / n)`` of the speed
    that it has alone. Between two ends that speed is constant, and the least work ends first, so

        f_k = f_(k-1) + (w_k - w_(k-1)) max(1, (n - k) / processors),    w ascending, k from 0

    Args:
        work_s: time of each worker with a processor to itself, seconds.
        processors: how many there are; a worker uses one at a time.
    """
    if processors < 1 or any(not 0 <= work < math.inf for work in work_s):
        raise ValueError(f"work must be finite and not negative on at least one processor, not {list(work_s)}")
    order = sorted(range(len(work_s)), key=lambda i: work_s[i])
    finish = [0.0] * len(work_s)
    now_s = before_s = 0.0
    for place, i in enumerate(order):
        now_s += (work_s[i] - before_s) * max(1.0, (len(order) - place) / processors)
        before_s = work_s[i]
        finish[i] = now_s
    return finish


def least_factor(wanted_s: Sequence[float], work_s: Sequence[float], processors: int, headroom: float) -> float:
    """The smallest factor of at least 1 by which ``wanted_s`` must be stretched for all work to fit into it.

    Each worker ends ``headroom`` times sooner than its stretched time. As nobody ends before its own work is done, and
    the processors are busy until the last one ends, this also leaves ``1 - 1 / headroom`` of all processors free.

    Args:
        wanted_s: how long each worker's computation shall take, before stretching.
        work_s: how long it takes alone on a processor.
        processors: that the workers share.
        headroom: at least 1.
    """
    finish = finish_times_s(work_s, processors)
    return max(1.0, max(headroom * end / wanted for end, wanted in zip(finish, wanted_s, strict=True)))


def rounded_up(factor: float) -> float:
    """The next number of two digits, so that what is printed is what is used."""
    unit = math.pow(10.0, math.floor(math.log10(factor)) - 1)
    return float(f"{math.ceil(factor / unit - 1e-9) * unit:.2g}")


UNEVENNESS = 6.0
"""Power of the mean that the longer of both is taken by: free 60 ms and throttled 53 took 64.6, 47 and 60 took 61.1 (a
small network on three hosts with 0.8, 0.5 and 0.3 of two processors, links of 400 Mbit/s)."""


def under_quotas(
    work_s: Sequence[float], quotas: Sequence[float], *, processors: int, exchange_s: float, compress_s: float
) -> Breakdown:
    """A step of workers that CPU quotas hold back: computing is what it would take without an exchange.

    A quota is processor time in a period (100 ms, CFS bandwidth control). A worker that waits for the network uses none
    of it, and computes at full speed afterwards: where exchanges take long, quotas do not show at all. So a step takes
    the longer of two times:

        free      = finish_times(w) + c n / P + T     as fast as the processors and the network are
        throttled = max_i (w_i + c) / q_i             as little as each worker may compute

    ``w`` is processor time of a share, ``c`` of a worker's own part of the exchange, ``T`` what the exchange takes
    besides, ``q`` the quota in processors. Where both are alike, steps end unevenly over the periods, and take longer
    than either.

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
