"""When workers that share a machine's processors finish: alone, and paced to finish in time."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
