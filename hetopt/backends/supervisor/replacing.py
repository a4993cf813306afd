"""What training would be like with another machine in the place of one that has become slow.

Only for a machine that does less than half of what machines of its type have done in this run: a type that is slower
than predicted is slow in every copy, and the batch is shared out accordingly already.
"""

from __future__ import annotations

from hetopt.backends.supervisor.decide import Alternative
from hetopt.backends.supervisor.progress import PredictedGain, RunProgress

SLOW = 0.5
"""Of what its type has done; shares are small for slow workers, and what is fixed in a step weighs more in them."""


def with_another_for_each_host(
    standing: RunProgress, promise: PredictedGain, *, until_there_s: float
) -> list[Alternative]:
    """An alternative for each host that has become slow; none while the run is as it was predicted.

    While the new machine boots, the others do a step in ``t_w``, and in ``t_n`` once it is there. With ``n`` steps left
    and ``s`` seconds until then, the rest takes

        s + (n - s / t_w) t_n  =  s (1 - t_n / t_w) + n t_n

    so that the first term is what the change costs.

    Args:
        standing: of the run.
        promise: of its plan.
        until_there_s: from the order to end a machine until another one trains in its place.
    """
    now_s, speeds, hosts = standing.step_time_s, standing.speeds, standing.hosts
    if now_s is None or now_s <= promise.step_time_high_s or not speeds:
        return []
    batch, found = sum(standing.shares), []
    for host in dict.fromkeys(hosts):
        mine = [place for place, where in enumerate(hosts) if where == host]
        slow = sum(speeds[place] for place in mine)
        sound = sum(max(speeds[place], standing.quickest.get(standing.types[place], 0.0)) for place in mine)
        if slow > SLOW * sound:
            continue
        others = sum(speeds) - slow
        then_s = batch / (others + sound) + standing.sync_s
        without_s = batch / others + standing.sync_s if others > 0 else float("inf")
        found.append(
            Alternative(
                action="replace",
                name=host,
                step_time_s=then_s,
                usd_per_hour=promise.usd_per_hour,
                changeover_s=until_there_s * max(0.0, 1 - then_s / without_s),
            )
        )
    return found
