"""Measures whole steps on rented machines.

Each layout is rented once, at the share of the task's batch that its workers would have. A probe is a run like any
other: it has a ledger, a lease and a hard stop, which is what is left of the budget of all probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.ec2.renter import ordering
from hetopt.backends.ec2.renter.cluster_state import last_seen
from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, Role
from hetopt.backends.ec2.renter.ordering import image_kind
from hetopt.backends.host.bundle import Bundle
from hetopt.backends.probe_runs import ProbeRun, probe, read_sample
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_log
from hetopt.core.interruption import stopping
from hetopt.core.profile import Profile
from hetopt.core.run_spec import WorkerSpec
from hetopt.core.run_status import RunState
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.cost.cost import checkpoint_bytes
from hetopt.optimizer.cost.provisioning import Payload, disk_gb
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.step_time.probes import PROBE_STEPS

BOOT_S = 180.0
"""From the request of a machine to its first step, where nothing was measured yet."""

MOST_MACHINES = 2
"""Of a layout: one tells how fast a type computes, two how it exchanges."""


def rented_probes(profile: Profile, catalog: Catalog, types: Iterable[str]) -> tuple[ProbeRun, ...]:
    """One and two machines of each type, and one of each of two types that boot the same image.

    Raises:
        BadInput: no type was named, or there is none of that name.
    """
    names = list(dict.fromkeys(types))
    if not names:
        raise BadInput("no machine type was named to probe.", hint='for example `types="c7i.large,g5.xlarge"`')
    layouts = [(name,) * machines for name in names for machines in range(1, MOST_MACHINES + 1)]
    kinds = {name: image_kind(catalog.instance_type(name)) for name in names}
    layouts += [
        (one, other) for place, one in enumerate(names) for other in names[place + 1 :] if kinds[one] == kinds[other]
    ]
    return tuple(_probe(profile, catalog, layout) for layout in layouts)


def _probe(profile: Profile, catalog: Catalog, layout: tuple[str, ...]) -> ProbeRun:
    nodes = tuple(Node(type=name, workers=_workers_on(catalog, name)) for name in layout)
    workers = sum(node.workers for node in nodes)
    size = max(1, min(profile.job.batch_size // workers, profile.job.dataset_size // workers))
    specs = tuple(
        WorkerSpec(host=f"{node.type}-{place}", type=node.type, local_batch_size=size)
        for place, node in enumerate(nodes)
        for _ in range(node.workers)
    )
    return probe(profile, nodes, size, specs)


def _workers_on(catalog: Catalog, name: str) -> int:
    return catalog.instance_type(name).cuda_devices or 1


def probe_price_usd(usd_per_hour: Mapping[str, float], asked: Configuration, step_time_s: float | None) -> float:
    """What a probe costs: its machines while they boot, and while they train.

    Args:
        usd_per_hour: by type.
        asked: its layout.
        step_time_s: as far as it is known.
    """
    hourly = sum(usd_per_hour[node.type] for node in asked.nodes)
    return hourly * (BOOT_S + PROBE_STEPS * (step_time_s or 0.0)) / 3600


def roles_for(probe: ProbeRun, catalog: Catalog) -> tuple[Role, ...]:
    """The machines of a probe, of the spot market, a role for each type."""
    by_type: dict[str, list[str]] = {}
    for host, name in dict.fromkeys((worker.host, worker.type) for worker in probe.spec.workers):
        by_type.setdefault(name, []).append(host)
    return tuple(
        Role(
            name=f"{number}-{name.replace('.', '-')}",
            instance_types=(name,),
            hosts=tuple(hosts),
            workers_per_machine=_workers_on(catalog, name),
            market="spot",
            image_kind=image_kind(catalog.instance_type(name)),
        )
        for number, (name, hosts) in enumerate(by_type.items())
    )


@dataclass(frozen=True, kw_only=True)
class Prober(ordering.Orders):
    """Rents for probes, by orders of its own.

    Attributes:
        launcher: rents, watches and gives back.
        bundle: the code, with the task's own file where it has one.
        data: where its data is, in S3.
        clock: seconds since the epoch.
        sleep: waits.
    """

    launcher: Ec2Launcher
    bundle: Bundle
    data: str | None
    gradient_bytes: int
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def measure(self, probe: ProbeRun, folder: Path, budget_usd: float) -> tuple[StepSample, float]:
        """Rent what a probe needs, run it, and give everything back: its step, and what that has cost.

        Args:
            probe: what to measure.
            folder: the run's, empty.
            budget_usd: what it may cost at most.

        Raises:
            CloudRefused: the machines cannot be had. Nothing is left.
            BudgetStop: the budget does not last until they have booted.
            RunFailed: it brought no step.
        """
        order = self.of_job(
            ordering.Job(
                roles=roles_for(probe, self.catalog),
                budget_usd=budget_usd,
                gradient_bytes=self.gradient_bytes,
                disk_gb=self._disk_gb(probe),
            ),
            run_id=folder.name,
            bundle_sha256=self.bundle.sha256,
            now_s=self.clock(),
        )
        order.save(folder / ORDER_FILE)
        (folder / BUNDLE_FILE).write_bytes(self.bundle.data)
        spec = probe.spec.model_copy(update={"task": self.bundle.task, "data_dir": self.data})
        handle = self.launcher.start(spec, folder, {})
        try:
            while not (status := self.launcher.poll(handle)).state.is_over:
                self.sleep(1.0)
        except BaseException:
            with stopping(f"the rented machines of {folder.name}", f"hetopt gc --on ec2 --run {folder.name} --remove"):
                self.launcher.stop(handle)
            raise
        if status.state is not RunState.FINISHED:
            raise RunFailed(
                f"a probe failed: {status.reason or 'it was stopped from outside'}",
                hint=status.next_step(f"read what its machines printed in {folder}"),
            )
        seen = last_seen(folder)
        sample = read_sample(probe, read_log(folder / EVENTS_FILE).events)
        return sample, order.fixed_usd + seen.spent_usd(seen.time_s)

    def _disk_gb(self, probe: ProbeRun) -> int:
        """Of each machine: the largest need of any, as in a plan."""
        payload = Payload(checkpoint_bytes=checkpoint_bytes(self.gradient_bytes))
        types = {node.type for node in probe.configuration.nodes}
        return max(disk_gb(self.catalog.instance_type(name), payload) for name in types)
