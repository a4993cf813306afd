"""A `Profile` as the step model reads it: computation without exchange on one host, and timed collectives."""

from __future__ import annotations

import numpy as np

from hetopt.optimizer.step_model.observed import Observed
from hetopt.optimizer.step_model.rows import make_rows
from hetopt.profiler.profile import Profile
from hetopt.profiler.step_samples import Configuration, Node


def observe_profile(profile: Profile) -> Observed:
    """Everything a profile says about steps.

    Workers of a sweep compute at the same time without talking, so a step time is the computation of as many workers on
    one node. A link's line is read at the gradient's size: inside a host as it is, between hosts with one worker each.
    """
    configurations: list[Configuration] = []
    computing: list[float] = []
    exchanging: list[float] = []
    for device in profile.devices:
        for point in device.step_times:
            configurations.append(
                Configuration(
                    nodes=(Node(type=device.type, workers=device.workers_per_host),),
                    local_batch_size=point.local_batch_size,
                )
            )
            computing.append(float(np.log(point.step_time_s)))
            exchanging.append(np.nan)
    first = profile.devices[0]
    for link in profile.links:
        if link.collective == "all_reduce":
            inside = link.scope == "host"
            nodes = (Node(type=first.type, workers=link.workers),) if inside else (Node(type=first.type, workers=1),)
            configurations.append(
                Configuration(
                    nodes=nodes * (1 if inside else link.workers),
                    local_batch_size=first.step_times[0].local_batch_size,
                )
            )
            computing.append(np.nan)
            exchanging.append(float(np.log(link.latency_s + profile.job.gradient_bytes / link.bytes_per_s)))
    return Observed(
        rows=make_rows(configurations),
        log_step=np.full(len(configurations), np.nan),
        log_compute=np.array(computing),
        log_exchange=np.array(exchanging),
    )
