"""Measures whole steps on rented machines: probes of layouts, and the canary of a plan.

Each layout is rented once, at the share of the task's batch that its workers would have. A probe is a run like any
other: it has a ledger, a lease and a hard stop, which is what is left of the budget of all probes.

The canary is one machine of each type of a plan for some minutes, before the rest is rented: it boots, exchanges
gradients, leaves a checkpoint in the bucket and ends. What it measured goes into the plan. With the same model, the
plan's step before and after that measurement, t and t', stretch what was foretold:

    step' = step * t'/t        training' = training * t'/t        startup' = as measured, where it was longer
    total' = total + (training' - training) + (startup' - startup)        cost' = cost + the same at the plan's prices
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.ec2.protocol import Latest
from hetopt.backends.ec2.renter import ordering
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.calls import get_object
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order, Role
from hetopt.backends.ec2.renter.ordering import image_kind
from hetopt.backends.ec2.renter.request import Edge, if_there
from hetopt.backends.probe_runs import ProbeRun, probe, read_sample
from hetopt.core.errors import BadInput, BudgetStop, RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_log
from hetopt.core.events.records import LogEvent, StepsLogged
from hetopt.core.formatting import duration, usd
from hetopt.core.interruption import stopping
from hetopt.core.profile import Profile
from hetopt.core.run_folder import LATEST_OBJECT
from hetopt.core.run_spec import WorkerSpec
from hetopt.core.run_status import RunState
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.cost.cost import checkpoint_bytes
from hetopt.optimizer.cost.provisioning import Payload, disk_gb
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Group, Plan, Prediction, Range
from hetopt.optimizer.search.asked_steps import AskedSteps
from hetopt.optimizer.step_time.probes import PROBE_STEPS

CANARY_USD = 1.0
"""What it may cost at most, at on-demand prices. A plan of dearer machines is a probe of its own, by its own budget."""

TRAINS_S = 300.0
"""What it lives at most beside what its machines take to boot."""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """What was measured.

    Attributes:
        sample: a step of its layout.
        startup_s: from the order to the first step.
        checkpoint: the last that it left in the bucket.
        usd: what it has cost.
    """

    sample: StepSample
    startup_s: float
    checkpoint: str
    usd: float


def canary_probe(plan: Plan) -> ProbeRun:
    """One machine of each of the plan's types; two, where it has several of one type alone, so that they exchange.

    Raises:
        BadInput: the plan is of a script, or was edited.
    """
    if plan.run.script:
        raise BadInput(
            "a canary runs some steps of a task, and a script ends by its own loop.",
            hint="rent a smaller plan first: `hetopt recommend PROFILE --max-workers 2`",
        )
    if plan.profile is None:
        raise BadInput(
            "the plan holds no profile, so nothing can be put into it.", hint=f"make it with `{Plan.MADE_BY}`"
        )
    by_type: dict[str, Group] = {}
    for group in plan.chosen.groups:
        by_type.setdefault(group.instance_type, group)
    groups = list(by_type.values())
    if len(groups) == 1 and sum(group.machines for group in plan.chosen.groups) > 1:
        groups *= 2
    nodes = tuple(Node(type=group.instance_type, workers=group.workers_per_machine) for group in groups)
    shares = tuple(size for group in groups for size in group.local_batch_sizes[: group.workers_per_machine])
    hosts = [f"canary-{place}" for place, group in enumerate(groups) for _ in range(group.workers_per_machine)]
    types = [node.type for node in nodes for _ in range(node.workers)]
    workers = tuple(
        WorkerSpec(host=host, type=name, local_batch_size=size)
        for host, name, size in zip(hosts, types, shares, strict=True)
    )
    return probe(plan.profile, nodes, shares, workers)


def first_step_s(order: Order, events: Iterable[LogEvent]) -> float:
    """Seconds from the order to the first steps that were logged.

    Raises:
        RunFailed: there are none.
    """
    first = next((event for event in events if isinstance(event, StepsLogged)), None)
    if first is None:
        raise RunFailed(
            "the canary ended before its first step.",
            hint=f"read what its machines printed: `hetopt logs {order.run_id}`",
        )
    return max(0.0, first.time_s - order.created_s)


def left_checkpoint(edge: Edge, order: Order) -> str:
    """The checkpoint that a run has left in its bucket.

    Raises:
        RunFailed: it has left none.
    """
    answer = if_there(edge, get_object(order, f"{order.prefix}/{LATEST_OBJECT}"))
    latest = None if answer is None else Latest.of(bytes(answer["Body"]))
    if latest is None:
        raise RunFailed(
            "the canary has left no checkpoint in the bucket, so a preemption would lose the run.",
            hint="`hetopt doctor PLAN` looks at the machines' role; they printed what `hetopt logs "
            f"{order.run_id}` shows",
        )
    return latest.checkpoint


def folded(plan: Plan, canary: Canary, catalog: Catalog) -> Plan:
    """The plan with what the canary measured: in its profile, and in what it foretells."""
    assert plan.profile is not None
    profile = plan.profile.model_copy(update={"samples": (*plan.profile.samples, canary.sample)})
    asked = _configuration(plan)
    before, after = AskedSteps.of(plan.profile, catalog), AskedSteps.of(profile, catalog)
    known = before.answers(asked) and after.answers(asked)
    stretch = after.step(asked).step_time_s / before.step(asked).step_time_s if known else 1.0
    chosen = plan.chosen.model_copy(update={"prediction": _stretched(plan, stretch, canary.startup_s)})
    return plan.model_copy(update={"profile": profile, "chosen": chosen})


def told(plan: Plan, after: Plan, canary: Canary) -> str:
    """What a person is told of it."""
    was, now = plan.chosen.prediction, after.chosen.prediction
    return (
        f"canary: {canary.checkpoint} is in the bucket; first step after {duration(canary.startup_s)} "
        f"({duration(was.startup_s)} foretold), a step of {duration(canary.sample.step_time_s)}, for "
        f"{usd(canary.usd)}. The plan's step is now {duration(now.step_time_s.value)} "
        f"({duration(was.step_time_s.value)} before), its cost {usd(now.cost_usd.value)} ({usd(was.cost_usd.value)})"
    )


def _configuration(plan: Plan) -> Configuration:
    """The plan's cluster, as it is asked for."""
    nodes = tuple(
        Node(type=group.instance_type, workers=group.workers_per_machine)
        for group in plan.chosen.groups
        for _ in range(group.machines)
    )
    shares = tuple(size for group in plan.chosen.groups for size in group.local_batch_sizes)
    return Configuration(nodes=nodes, local_batch_size=shares)


def _stretched(plan: Plan, stretch: float, startup_s: float) -> Prediction:
    said = plan.chosen.prediction
    longer_startup_s = max(0.0, startup_s - said.startup_s)
    hourly = sum(group.machines * group.price_usd_per_hour for group in plan.chosen.groups)

    def later(found: Range, of: Range, worth: float) -> Range:
        """An end of the interval moves by what the same end of training has become."""
        ends = {
            end: max(0.0, getattr(found, end) + worth * ((stretch - 1) * getattr(of, end) + longer_startup_s))
            for end in ("low", "value", "high")
        }
        return Range(**ends)

    def times(found: Range) -> Range:
        return Range(low=found.low * stretch, value=found.value * stretch, high=found.high * stretch)

    return said.model_copy(
        update={
            "step_time_s": times(said.step_time_s),
            "compute_s": said.compute_s * stretch,
            "communication_s": said.communication_s * stretch,
            "waiting_s": said.waiting_s * stretch,
            "training_s": times(said.training_s),
            "startup_s": said.startup_s + longer_startup_s,
            "total_s": later(said.total_s, said.training_s, 1.0),
            "cost_usd": later(said.cost_usd, said.training_s, hourly / 3600),
        }
    )


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
        return self._rented(probe, folder, roles_for(probe, self.catalog), budget_usd, None)[1:]

    def canary(self, plan: Plan, folder: Path, budget_usd: float) -> Canary:
        """The same with one machine of each type of a plan, rented as the plan rents it.

        Args:
            plan: that one.
            folder: the run's, empty.
            budget_usd: what it may cost at most.

        Raises:
            CloudRefused, BudgetStop, RunFailed: as in `measure`; or it has left no checkpoint.
        """
        probe = canary_probe(plan)
        markets = {group.instance_type: group.market for group in plan.chosen.groups}
        roles = [
            role.model_copy(update={"market": markets[role.instance_types[0]]})
            for role in roles_for(probe, self.catalog)
        ]
        lives_s = plan.chosen.prediction.startup_s + TRAINS_S
        try:
            order, sample, spent_usd = self._rented(probe, folder, roles, budget_usd, lives_s)
        except BudgetStop as refused:
            raise BudgetStop(
                f"a canary has {usd(budget_usd)}: {refused.message}",
                hint="leave `canary` out, or measure a step of one of the types by a budget of your own: `hetopt "
                "profile TASK --explore --on ec2 --types TYPE --probe-budget USD`",
            ) from None
        return Canary(
            sample=sample,
            startup_s=first_step_s(order, read_log(folder / EVENTS_FILE).events),
            checkpoint=left_checkpoint(self.edge, order),
            usd=spent_usd,
        )

    def _rented(
        self, probe: ProbeRun, folder: Path, roles: Sequence[Role], budget_usd: float, lives_s: float | None
    ) -> tuple[Order, StepSample, float]:
        order = self.of_job(
            ordering.Job(
                roles=tuple(roles),
                budget_usd=budget_usd,
                gradient_bytes=self.gradient_bytes,
                disk_gb=self._disk_gb(probe),
                deadline_s=lives_s,
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
        seen = ClusterState.load(folder / SEEN_FILE)
        sample = read_sample(probe, read_log(folder / EVENTS_FILE).events)
        return order, sample, order.fixed_usd + seen.spent_usd(seen.time_s)

    def _disk_gb(self, probe: ProbeRun) -> int:
        """Of each machine: the largest need of any, as in a plan."""
        payload = Payload(checkpoint_bytes=checkpoint_bytes(self.gradient_bytes))
        types = {node.type for node in probe.configuration.nodes}
        return max(disk_gb(self.catalog.instance_type(name), payload) for name in types)
