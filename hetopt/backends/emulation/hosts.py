"""The hosts of a rehearsal as they are wanted, before anything is scaled: a plan's machines, or described hosts.

Times and link rates here are the cluster's; what they become on this machine is `rehearsal`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetopt.backends.emulation.description import DescribedHost
from hetopt.backends.emulation.namespaces import check_size
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.errors import BadInput
from hetopt.core.profile import LOCAL
from hetopt.core.scaled_emulation import EmulatedHost
from hetopt.optimizer.plan import Plan

SPEED_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class WantedHost:
    """One host of the cluster that is rehearsed.

    Attributes:
        host: its name, workers, relative speed and link.
        type: what its workers stand for: a catalogue name, or 'local'.
        time: computation of one of its workers in a step.
        noise: relative standard deviation of a step's time.
    """

    host: EmulatedHost
    type: str
    time: WorkerTime
    noise: float = 0.0

    @property
    def is_paced(self) -> bool:
        """Whether its workers declare their time; otherwise a CPU quota makes them as slow as they are."""
        return self.host.cpu_cores is None


def planned_hosts(plan: Plan) -> tuple[WantedHost, ...]:
    """The machines of a plan, group by group: as fast, and as well connected, as the planner took them to be.

    Speeds are relative to the fastest host, for steps of as many samples as each would have if all had as many.

    Raises:
        BadInput: the plan does not say how fast its machines were taken to be, or has more of them than there are
            addresses.
    """
    known = [(group, group.assumed) for group in plan.chosen.groups if group.assumed is not None]
    if len(known) < len(plan.chosen.groups):
        raise BadInput(
            "The plan does not say how fast its machines were taken to be: an older hetopt made it.",
            hint="make it again with `hetopt recommend`, or describe the hosts in `hosts`",
        )
    check_size(sum(group.machines for group, _ in known))
    workers = sum(len(group.local_batch_sizes) for group, _ in known)
    samples = max(1, plan.chosen.global_batch_size // workers)
    fastest_s = min(assumed.time_s(samples) for _, assumed in known)
    several = sum(group.machines for group, _ in known) > 1
    machines = [pair for pair in known for _ in range(pair[0].machines)]
    return tuple(
        WantedHost(
            host=EmulatedHost(
                name=f"h{number}",
                workers=group.workers_per_machine,
                speed=float(f"{fastest_s / assumed.time_s(samples):.{SPEED_DIGITS}g}"),
                rate_bits_per_s=8 * assumed.link_bytes_per_s if several else None,
            ),
            type=group.instance_type,
            time=assumed.time,
        )
        for number, (group, assumed) in enumerate(machines)
    )


def described_hosts(described: Sequence[DescribedHost], alone: WorkerTime, processors: int) -> tuple[WantedHost, ...]:
    """Hosts as they were described. At speed 1 a worker is as fast as one of this machine, alone on a processor.

    A host with a CPU quota is as slow as the quota makes it: its workers share so many cores.

    Args:
        described: the hosts, in order.
        alone: computation of one worker of this machine with a processor to itself.
        processors: of this machine.

    Raises:
        BadInput: some hosts have a quota and some do not, one has a speed or noise as well, or the quotas exceed the
            processors.
    """
    quotas = [one.host.cpu_cores for one in described if one.host.cpu_cores is not None]
    if quotas and len(quotas) < len(described):
        raise BadInput(
            "Some hosts have a CPU quota and others a speed, which cannot be compared.",
            hint="give every host a cpu=, or every host a speed=",
        )
    for one in described:
        if one.host.cpu_cores is not None and (one.host.speed != 1 or one.noise):
            raise BadInput(
                f"{one.host.name} has a CPU quota, which makes its speed and leaves no noise to add.",
                hint="describe it with cpu= alone, or with speed= and noise=",
            )
    if sum(quotas) > processors:
        raise BadInput(
            f"The hosts would have {sum(quotas):g} cores together, but this machine has {processors}.",
            hint="give them less cpu=, or speed= instead, which needs no core of its own",
        )
    return tuple(
        WantedHost(
            host=one.host,
            type=LOCAL,
            time=_times(
                alone,
                1 / one.host.speed if one.host.cpu_cores is None else max(1.0, one.host.workers / one.host.cpu_cores),
            ),
            noise=one.noise,
        )
        for one in described
    )


def _times(alone: WorkerTime, factor: float) -> WorkerTime:
    return replace(alone, fixed_s=factor * alone.fixed_s, per_sample_s=factor * alone.per_sample_s)


def best_shares(hosts: Sequence[WantedHost], batch: int) -> tuple[int, ...]:
    """Samples of each worker with which the slowest ends earliest, host by host.

    Raises:
        BadInput: fewer samples than workers, or a host so slow that its best share is none.
    """
    workers = [host for host in hosts for _ in range(host.host.workers)]
    check_batch(batch, len(workers))
    # Allowed to take nothing, a worker that is too slow for the others does just that.
    shares = solve_shares([replace(host.time, min_samples=0) for host in workers], batch).local_batch_sizes
    for host, samples in zip(workers, shares, strict=True):
        if samples < 1:
            raise BadInput(
                f"the local batch size of {host.host.name}, at speed {host.host.speed:g}, would be less than one "
                f"sample of a global batch of {batch}.",
                hint="leave it out, make it faster, or plan with a larger `batch_size`",
            )
    return shares


def check_batch(batch: int, workers: int) -> None:
    """Refuse a batch that does not give every worker a sample.

    Raises:
        BadInput: so it is.
    """
    if batch < workers:
        raise BadInput(
            f"the global batch size must be at least {workers}, one sample a worker, got {batch}.",
            hint="use fewer workers, or plan with a larger `batch_size`",
        )
