"""What training would be like without one of its hosts: whether one that has become slow still brings what it costs."""

from __future__ import annotations

from collections.abc import Mapping

from hetopt.backends.supervisor.decide import Alternative
from hetopt.backends.supervisor.progress import PredictedGain, RunProgress

CHANGEOVER_S = 5.0
"""Until the others train again: measured from one to two seconds on a busy machine, and the step that is lost."""
LONGER = 1.1
"""A step may take so much longer without the host than with all in balance: it is dropped for what it costs, not to
shrink the cluster."""


def without_each_host(
    standing: RunProgress, promise: PredictedGain, usd_per_hour: Mapping[str, float]
) -> list[Alternative]:
    """An alternative for each host that the others could do without; none while the run is as it was predicted.

    A worker of share ``b_j`` computes for ``t_j``, so it does ``v_j = b_j / t_j`` samples a second. Without some of
    them the others share the batch ``B`` by their speeds and take ``B / sum v_j``, and the exchange after that. This
    takes what is fixed in ``t_j`` for work, so that they are a little quicker than predicted.

    Args:
        standing: of the run.
        promise: of its plan.
        usd_per_hour: of each host.
    """
    now_s, hosts, speeds = standing.step_time_s, standing.hosts, standing.speeds
    if now_s is None or now_s <= promise.step_time_high_s or not speeds:
        return []
    # As quick as all of them would be in balance: what that brings is no merit of a host that is missing.
    balanced_s = min(now_s, sum(standing.shares) / sum(speeds) + standing.sync_s)
    found = []
    for host in dict.fromkeys(hosts):
        others = sum(speed for speed, where in zip(speeds, hosts, strict=True) if where != host)
        if not others:
            continue
        step_time_s = sum(standing.shares) / others + standing.sync_s
        if step_time_s <= LONGER * balanced_s:
            found.append(
                Alternative(
                    action="drop",
                    name=host,
                    step_time_s=step_time_s,
                    usd_per_hour=promise.usd_per_hour - usd_per_hour.get(host, 0.0),
                    changeover_s=CHANGEOVER_S,
                )
            )
    return found
