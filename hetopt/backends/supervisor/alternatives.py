"""What training would be like on other machines: what the supervisor weighs against leaving a run alone.

Each function names what could be had for one action, predicted with what was measured of the run; an empty list means
that nothing calls for that action. A worker of share ``b_j`` computes for ``t_j``, so it does ``v_j = b_j / t_j``
samples a second. Workers that share a batch ``B`` by their speeds compute for ``B / sum v_j``, and exchange after that
for as long as now. This takes what is fixed in ``t_j`` for work, so that fewer workers are a little quicker than
predicted.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetopt.backends.backend import Pools
from hetopt.backends.supervisor.decide import Alternative
from hetopt.backends.supervisor.progress import PredictedGain, RunProgress
from hetopt.core.budget_law import SECONDS_PER_HOUR

CHANGEOVER_S = 5.0
"""Until the others train again: measured from one to two seconds on a busy machine, and the step that is lost."""
LONGER = 1.1
"""A step may take so much longer without the host than with all in balance: it is dropped for what it costs, not to
shrink the cluster."""


def without_each_host(
    standing: RunProgress, promise: PredictedGain, usd_per_hour: Mapping[str, float]
) -> list[Alternative]:
    """An alternative for each host that the others could do without; none while the run is as it was predicted."""
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


SLOW = 0.5
"""Of what its type has done; shares are small for slow workers, and what is fixed in a step weighs more in them."""


def with_another_for_each_host(
    standing: RunProgress, promise: PredictedGain, *, until_there_s: float
) -> list[Alternative]:
    """An alternative for each host that has become slow; none while the run is as it was predicted.

    Only for a machine that does less than half of what machines of its type have done in this run: a type that is
    slower than predicted is slow in every copy, and the batch is shared out accordingly already.

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


AT_MOST = 1.0
"""So many machines more, over those that there are: beyond that what the exchange takes is not known from this run."""


def with_more_of_each_type(
    standing: RunProgress, promise: PredictedGain, usd_per_hour: Mapping[str, float], *, until_there_s: float
) -> list[Alternative]:
    """For each type the fewest more machines with which the run would be in time; none while it is.

    With ``k`` more of speed ``v`` a step takes ``B / (sum v_j + k v)``, and the exchange after that. While the new
    machines boot, the others train: the change costs ``s (1 - t_n / t_w)``, as in `with_another_for_each_host`.
    """
    deadline_s, now_s, speeds = promise.deadline_s, standing.step_time_s, standing.speeds
    if deadline_s is None or now_s is None or not speeds:
        return []
    left = standing.steps_left(promise)
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


ON_DEMAND = "the same machines on demand"


def on_demand_for_all(standing: RunProgress, promise: PredictedGain, *, until_there_s: float) -> list[Alternative]:
    """The alternative that nobody takes back; none without a deadline, or before training has begun.

    A step takes what it took when all workers were last there, or what was promised where that was never measured: with
    some of them away it takes longer, and those come back with the move.

    Args:
        standing: of the run.
        promise: of its plan.
        until_there_s: until the new machines train, were all others lost at once.
    """
    if promise.deadline_s is None or standing.began_s is None:
        return []
    return [
        Alternative(
            action="on-demand",
            name=ON_DEMAND,
            step_time_s=standing.whole_step_time_s or promise.step_time_s,
            # Never taken for what it costs: nobody moves to save money.
            usd_per_hour=float("inf"),
            changeover_s=until_there_s,
            holds=True,
        )
    ]


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
            overlap_usd=2 * boot_s / SECONDS_PER_HOUR * here_usd_per_hour,
        )
        for zone, usd_per_hour in pools.elsewhere_usd_per_hour.items()
        if usd_per_hour < here_usd_per_hour
    ]
    left, deadline_s = standing.steps_left(promise), promise.deadline_s
    if deadline_s is None:
        return found
    return [one for one in found if standing.now_s + one.total_s(left) + 2 * until_there_s <= deadline_s]
