"""The canary: one machine of each type of a plan for some minutes, before the rest is rented.

It is a probe like those of `hetopt profile --explore` (`renter.probing`), of the plan's own types: it boots, exchanges
gradients, leaves a checkpoint in the bucket and ends. What it measured goes into the plan. With the same model, the
plan's step before and after that measurement, t and t', stretch what was foretold:

    step' = step * t'/t        training' = training * t'/t        startup' = as measured, where it was longer
    total' = total + (training' - training) + (startup' - startup)        cost' = cost + the same at the plan's prices
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetopt.backends.ec2.protocol import Latest
from hetopt.backends.ec2.renter.calls import get_object
from hetopt.backends.ec2.renter.errors import if_there
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.probe_runs import ProbeRun, probe
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.records import LogEvent, StepsLogged
from hetopt.core.formatting import duration, usd
from hetopt.core.run_folder import LATEST_OBJECT
from hetopt.core.run_spec import WorkerSpec
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Group, Plan, Prediction, Range
from hetopt.optimizer.search.asked_steps import AskedSteps

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
