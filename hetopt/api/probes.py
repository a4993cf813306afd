"""Short runs that measure whole steps of a layout: of this machine's processes, of the user's own or rented hosts.

Each layout is probed once, at the share of the task's batch that its workers would have.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import RunFailed
from hetopt.core.events.records import LogEvent, StepsLogged
from hetopt.core.hosts import Host
from hetopt.core.profile import LOCAL, Profile
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.step_time.prediction import PROBE_STEPS

WARM_UP_STEPS = 10
"""First steps of a probe that are not counted: memory is allocated, caches fill, and prefetching begins."""

PERIOD_STEPS = 5
"""Steps between two logged measurements of a probe."""

BOOT_S = 180.0
"""Seconds from the request of a rented machine to its first step, where nothing was measured yet."""


@dataclass(frozen=True, kw_only=True)
class ProbeRun:
    """A short run, and the configuration whose step time it measures.

    Attributes:
        configuration: machines, and the local batch size of each worker.
        spec: run specification that trains on these machines for a few steps.
    """

    configuration: Configuration
    spec: RunSpec


def probe_usd(usd_per_hour: float, startup_s: float, step_time_s: float | None) -> float:
    """Return the USD that a probe's machines cost while they start and train.

    Args:
        usd_per_hour: hourly price of all machines of the probe, USD.
        startup_s: seconds from the request to the first step.
        step_time_s: predicted seconds of a step; None: not known, so that steps count as no time.
    """
    return usd_per_hour * (startup_s + PROBE_STEPS * (step_time_s or 0.0)) / SECONDS_PER_HOUR


def counts(most: int) -> tuple[int, ...]:
    """Return the numbers of workers to probe, ascending: 1, 2, 3, 4, 6, 8, 12 and so on, ending with ``most``."""
    sizes = {part * 2**power // 2 for power in range(most.bit_length() + 1) for part in (2, 3)}
    return tuple(sorted({most, *(size for size in sizes if size <= most)}))


def local_probes(profile: Profile, workers: int) -> tuple[ProbeRun, ...]:
    """Return probe runs of 1, 2, 3, 4, 6 and so on to ``workers`` processes here, which share the CPUs equally."""
    return tuple(
        probe(profile, (Node(type=LOCAL, workers=count),), threads=max(1, profile.host.logical_cpus // count))
        for count in counts(workers)
    )


def own_probes(profile: Profile, hosts: Sequence[Host]) -> tuple[ProbeRun, ...]:
    """Return probe runs of each host alone, then of the first 2, 3, 4, 6 and so on and all together.

    Hosts' names stand for machine types; a host has one worker for each of its devices.

    Args:
        profile: profile of the job.
        hosts: the user's hosts, in order.
    """
    nodes = [Node(type=host.name, workers=len(host.devices)) for host in hosts]
    layouts = [(node,) for node in nodes] + [tuple(nodes[:count]) for count in counts(len(nodes)) if count > 1]
    return tuple(probe(profile, layout) for layout in layouts)


MOST_MACHINES = 2
"""Most machines of a type in a rented layout: one tells how fast a type computes, two how it exchanges."""


def rented_probes(
    profile: Profile, types: Sequence[InstanceType], kind: Callable[[InstanceType], str]
) -> tuple[ProbeRun, ...]:
    """Return probe runs on one and two machines of each type, and on each pair of types with the same boot image.

    Args:
        profile: profile of the job.
        types: types that may be probed, each once.
        kind: returns the kind of boot image of a type.
    """
    layouts = [(each,) * machines for each in types for machines in range(1, MOST_MACHINES + 1)]
    layouts += [
        (first, other)
        for place, first in enumerate(types)
        for other in types[place + 1 :]
        if kind(first) == kind(other)
    ]
    return tuple(
        probe(
            profile,
            tuple(Node(type=each.name, workers=each.cuda_devices or 1) for each in layout),
            names=[f"{each.name}-{place}" for place, each in enumerate(layout)],
        )
        for layout in layouts
    )


def read_sample(run: ProbeRun, events: Iterable[LogEvent]) -> StepSample:
    """Return the step sample of a finished probe: median seconds of a step, and of synchronizing in it, after warm-up.

    Args:
        run: the probe.
        events: events of the probe's event log.

    Raises:
        RunFailed: no step after the warm-up was logged.
    """
    periods = [event for event in events if isinstance(event, StepsLogged) and event.step > WARM_UP_STEPS]
    if not any(event.step_time_s for event in periods):
        raise RunFailed("a probe ended before it had measured a step.", hint="try again, or explore fewer hosts")
    step_s = statistics.median(event.step_time_s for event in periods)
    after_s = statistics.median(event.step_time_s - max(event.compute_s) for event in periods)
    return StepSample(
        nodes=run.configuration.nodes,
        local_batch_size=run.configuration.local_batch_size,
        step_time_s=step_s,
        sync_time_s=min(step_s, max(0.0, after_s)),
    )


def probe(
    profile: Profile,
    nodes: tuple[Node, ...],
    *,
    names: Sequence[str] | None = None,
    threads: int | None = None,
) -> ProbeRun:
    """Return a probe run on ``nodes``; each worker has an equal share of the job's batch, at least 1 sample.

    Args:
        profile: profile of the job.
        nodes: machines with their workers, in the order of ranks.
        names: names of the machines as hosts of the run; None: their types.
        threads: CPU threads of a worker; None: what torch chooses.
    """
    count = sum(node.workers for node in nodes)
    size = max(1, min(profile.job.batch_size // count, profile.job.dataset_size // count))
    workers = tuple(
        WorkerSpec(host=name, type=node.type, local_batch_size=size, threads=threads)
        for name, node in zip(names or [node.type for node in nodes], nodes, strict=True)
        for _ in range(node.workers)
    )
    # Long enough to measure a step of these workers, and no longer.
    spec = RunSpec(
        task=profile.job.task,
        data_dir=profile.data_dir,
        seed=profile.seed,
        workers=workers,
        batch_policy="static",
        stop=StopRule(max_steps=PROBE_STEPS),
        evaluate_every_epochs=1e6,
        control_period_steps=PERIOD_STEPS,
        checkpoint_every_s=86_400.0,
    )
    return ProbeRun(configuration=Configuration(nodes=nodes, local_batch_size=size), spec=spec)
