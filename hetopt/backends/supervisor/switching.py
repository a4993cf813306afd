"""What training would cost on the same machines in another zone: whether a pool that has become dear is left."""

from __future__ import annotations

from hetopt.backends.backend import Pools
from hetopt.backends.supervisor.decide import Alternative
from hetopt.backends.supervisor.progress import PredictedGain, RunProgress

_HOUR_S = 3600.0


def in_other_zones(
    standing: RunProgress, promise: PredictedGain, pools: Pools, *, boot_s: float, until_there_s: float
) -> list[Alternative]:
    """An alternative for each zone where the same machines cost less an hour; a step takes what it takes here.

    The machines are rented first and boot for ``b`` seconds, while those here go on; then all pause for ``s`` seconds,
    and nothing is lost. With ``n`` steps of ``t`` left, at ``p`` USD a second here and ``q`` there, the rest costs

        b (p + q) + s (p + q) + (n t - b) q  =  (s + n t) q + (b + s) p

    where the second term is what is paid for machines that are given back. A pause is not known beforehand: as it is
    for machines that boot first, it is taken for no longer than their start.

    A run whose deadline will soon call for machines on demand stays: it would pay for two changes.

    Args:
        standing: of the run.
        promise: of its plan.
        pools: what its machines cost here and there.
        boot_s: from asking for machines to their first step.
        until_there_s: until others train, were all lost at once.
    """
    step_s, here_usd_per_hour = standing.step_time_s, sum(pools.usd_per_hour.values())
    if step_s is None:
        return []
    found = [
        Alternative(
            action="switch",
            name=zone,
            step_time_s=step_s,
            usd_per_hour=usd_per_hour,
            changeover_s=boot_s,
            overlap_usd=2 * boot_s / _HOUR_S * here_usd_per_hour,
        )
        for zone, usd_per_hour in pools.elsewhere_usd_per_hour.items()
        if usd_per_hour < here_usd_per_hour
    ]
    left, deadline_s = max(0.0, promise.steps - standing.step), promise.deadline_s
    if deadline_s is None:
        return found
    return [one for one in found if standing.now_s + one.total_s(left) + 2 * until_there_s <= deadline_s]
