"""How fast the machine that was profiled computes in earnest: what runs on it found, against what was foreseen of them.

A profile is some minutes of a machine. Runs of the very job tell its level directly: their mean ``r`` (a log) is
followed as far as a James-Stein estimate would, ``1 - s^2 / r^2`` of it, with the scatter ``s`` of runs, and of the
machine while it was measured, over the root of their number. Runs of other jobs tell a part of it, by the law of
`earlier_runs`.
"""

from __future__ import annotations

import math
import statistics

from hetopt.core.profile import Host, Profile
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.plan import Earlier
from hetopt.optimizer.step_time.earlier_runs import EarlierRuns, job_named

RUN_TO_RUN_LOG_SD = 0.08
"""Computing in earnest, the same job on the same machine some minutes later: nine runs of the demo on a
shared 2-core virtual machine (2026-11-20) lay 10 % from their predictions in the median, on both sides."""


def host_named(host: Host) -> str:
    """A machine by what computes in it, as its runs are kept: files of several machines are merged."""
    return f"{host.accelerator or host.cpu_model}, {host.logical_cpus} processors"


def followed(difference: float, log_sd: float) -> float:
    """What part of a difference of logs is not scatter: none at all below it, almost all far above."""
    return 0.0 if abs(difference) <= log_sd else difference * (1 - (log_sd / difference) ** 2)


def contention_reach(profile: Profile) -> float:
    """Return how many times its processor time computing may take on the profiled machine: the 95th percentile of the
    contention that was seen there, at least 1.

    Contention is other people's business and changes by the minute: it widens intervals, and no centre follows it.
    """
    if profile.contention is None:
        return 1.0
    return profile.contention * math.exp(Z90 * (profile.contention_log_sd or 0.0))


def told_of_host(runs: EarlierRuns | None, profile: Profile) -> Earlier | None:
    """What runs on the machine of a profile say of how long its job computes there; None: nothing."""
    name, scatter = host_named(profile.host), math.hypot(RUN_TO_RUN_LOG_SD, profile.yardstick_log_sd or 0.0)
    here = [one for one in (() if runs is None else runs.adding(()).runs) if one.instance_type == name]
    own = [one for one in here if one.job == job_named(profile.job)]
    if runs is None or not own:
        return None if runs is None else runs.told(name, scatter)
    scatter /= math.sqrt(len(own))
    return Earlier(
        runs=len(own),
        jobs=1,
        log_factor=followed(statistics.fmean(one.log_factor or 0.0 for one in own), scatter),
        log_sd=scatter,
        until=max(one.day for one in own),
    )
