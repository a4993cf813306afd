"""What training would be like with more machines: what still keeps a deadline when a step takes longer than planned."""

from __future__ import annotations

from collections.abc import Mapping

from hetopt.backends.supervisor.decide import Alternative
from hetopt.backends.supervisor.progress import PredictedGain, RunProgress

AT_MOST = 1.0
"""Machines more, over those that there are: beyond that what the exchange takes is not known from this run."""


def with_more_of_each_type(
    standing: RunProgress, promise: PredictedGain, usd_per_hour: Mapping[str, float], *, until_there_s: float
) -> list[Alternative]:
    """For each type the fewest more machines with which the run would be in time; none while it is.

    Workers that do ``v_j`` samples a second share a batch ``B`` by their speeds: with ``k`` more of speed ``v`` a step
    takes ``B / (sum v_j + k v)``, and the exchange after that, which is taken to last as long as now. While the new
    machines boot for ``s`` seconds the others do a step in ``t_w``, and all in ``t_n`` then, so that the change costs
    ``s (1 - t_n / t_w)`` (see `hetopt.backends.supervisor.replacing`).

    Args:
        standing: of the run.
        promise: of its plan.
        usd_per_hour: of each host.
        until_there_s: from asking for a machine until it trains.
    """
    deadline_s, now_s, speeds = promise.deadline_s, standing.step_time_s, standing.speeds
    if deadline_s is None or now_s is None or not speeds:
        return []
    left = max(0.0, promise.steps - standing.step)
    if standing.now_s + left * now_s <= deadline_s:
        return []
    hosts = list(dict.fromkeys(standing.hosts))
    found, batch = [], sum(standing.shares)
    for kind in dict.fromkeys(standing.types):
        like = next(where for where, its in zip(standing.hosts, standing.types, strict=True) if its == kind)
        own = sum(speed for speed, where in zip(speeds, standing.hosts, strict=True) if where == like)
        for more in range(1, int(AT_MOST * len(hosts)) + 1):
            then_s = batch / (sum(speeds) + more * own) + standing.sync_s
            one = Alternative(
                action="add",
                name=like,
                machines=more,
                step_time_s=then_s,
                usd_per_hour=promise.usd_per_hour + more * usd_per_hour.get(like, 0.0),
                changeover_s=until_there_s * max(0.0, 1 - then_s / now_s),
            )
            if standing.now_s + one.total_s(left) <= deadline_s:
                found.append(one)
                break
    return found
