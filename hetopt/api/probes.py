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
"""Not counted: memory is allocated, caches fill, and prefetching begins."""

PERIOD_STEPS = 5

BOOT_S = 180.0
"""From the request of a rented machine to its first step, where nothing was measured yet."""


@dataclass(frozen=True, kw_only=True)
class ProbeRun:
    """A short run, and the machines and local batch size whose step time it measures."""

    configuration: Configuration
    spec: RunSpec


def probe_usd(usd_per_hour: float, startup_s: float, step_time_s: float | None) -> float:
    """Return the USD that a probe's machines cost while they start and train; ``step_time_s`` None: trains in no time.

    Args:
        usd_per_hour: of all its machines.
        startup_s: from the request to the first step.
        step_time_s: predicted seconds of a step.
    """
    return usd_per_hour * (startup_s + PROBE_STEPS * (step_time_s or 0.0)) / SECONDS_PER_HOUR


def counts(most: int) -> tuple[int, ...]:
    """Return the numbers of workers to probe, ascending: 1, 2, 3, 4, 6, 8, 12 and so on up to ``most``, and that."""
    sizes = {part * 2**power // 2 for power in range(most.bit_length() + 1) for part in (2, 3)}
    return tuple(sorted({most, *(size for size in sizes if size <= most)}))


def local_probes(profile: Profile, workers: int) -> tuple[ProbeRun, ...]:
    """Return probe runs of 1, 2, 3, 4, 6 and so on to ``workers`` processes of this machine."""
    return tuple(
        probe(profile, (Node(type=LOCAL, workers=count),), threads=max(1, profile.host.logical_cpus // count))
        for count in counts(workers)
    )


def own_probes(profile: Profile, hosts: Sequence[Host]) -> tuple[ProbeRun, ...]:
    """Return probe runs of each host alone, then of the first 2, 3, 4, 6 and so on together, under the hosts' names."""
    nodes = [Node(type=host.name, workers=len(host.devices)) for host in hosts]
    layouts = [(node,) for node in nodes] + [tuple(nodes[:count]) for count in counts(len(nodes)) if count > 1]
    return tuple(probe(profile, layout) for layout in layouts)


MOST_MACHINES = 2
"""Of a layout: one tells how fast a type computes, two how it exchanges."""


def rented_probes(
    profile: Profile, types: Sequence[InstanceType], kind: Callable[[InstanceType], str]
) -> tuple[ProbeRun, ...]:
    """Return probe runs on one and two machines of each type, and on each pair of types with the same boot image.

    Args:
        profile: of the job.
        types: that may be probed, each once.
        kind: of the image that a type boots.
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
    """Return the median seconds of a step, and of synchronizing in it, from a finished probe's events after warm-up.

    Raises:
        RunFailed: it logged no step after its warm-up.
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
    """Return a probe run on ``nodes``, each worker with its share of the job's batch, at least a sample.

    Args:
        profile: of the job.
        nodes: the machines.
        names: of the machines as hosts of the run; None: they are called as their types.
        threads: of a worker; None: as many as it takes.
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
