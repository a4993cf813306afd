"""A launch as a person reads it before saying yes: where each worker runs, what is rented, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hetopt.cli import render, terminal
from hetopt.core import formatting
from hetopt.core.comm.compression_text import spell_options
from hetopt.core.run_folder import checkpoint_step
from hetopt.core.run_spec import (
    Compression,
    EmulatedHost,
    RunSpec,
    ScaledEmulation,
    WorkerSpec,
    spell_partition,
    spell_policy,
    spell_sync,
)
from hetopt.reports.document import Block, Facts, Heading, Line, Remarks, Table, columns

if TYPE_CHECKING:
    from hetopt.backends.backend import Prepared
    from hetopt.backends.ec2.renter.backend import Rental
    from hetopt.backends.ec2.renter.order import Order
    from hetopt.backends.ec2.renter.request import Request
    from hetopt.optimizer.launch_record import Launch


def show(prepared: Prepared) -> None:
    """Print what a launch will run, where and for how much, on stdout.

    Of a resumed rental also what it has cost, on stderr.
    """
    if prepared.launch.on != "ec2":
        render.show(_run_summary(prepared))
        return
    from hetopt.api.account import rental_of

    rental = rental_of(prepared)
    render.show(_order(rental))
    if rental.folder is not None:
        render.note(
            f"{rental.folder.name} has cost ${rental.spent_usd:.4f} so far; it goes on from its last checkpoint"
        )


def show_dry(prepared: Prepared, *, as_json: bool) -> None:
    """Print a launch without starting it: on rented machines every API call, with its cost.

    Args:
        prepared: launch that is ready to start.
        as_json: whether to print JSON.
    """
    from hetopt.api.account import rental_of

    rental = rental_of(prepared) if prepared.launch.on == "ec2" else None
    requests = () if rental is None or rental.bundle is None else rental.requests()
    if not as_json:
        show(prepared)
        render.show(calls(requests))
    elif rental is None:
        terminal.write(prepared.launch.to_json())
    else:
        render.print_json(_facts(rental.order, requests))


def _order(rental: Rental) -> Iterator[Block]:
    """Yield the rental order: cluster, prices, budget and zones."""
    from hetopt.api.account import hourly_usd, last_end, unfollowed
    from hetopt.reports.plan_document import stand_ins

    plan, order = rental.wanted, rental.order
    zone, names = order.zones[0], [candidate.name for candidate in order.zones]
    cluster = formatting.cluster((role.machines, role.instance_types[0]) for role in order.roles)
    yield Line(f"{plan.run.task} on {cluster} in {zone.name} ({zone.zone_id})", "strong")
    planned = {group.instance_type: group.price_usd_per_hour for group in plan.chosen.groups}
    yield Table(
        name="machines",
        columns=columns("machines, market, #planned $/h, #now $/h, #at most $/h"),
        rows=[
            [
                f"{role.machines} × {role.instance_types[0]}",
                role.market,
                formatting.usd(planned[role.instance_types[0]]),
                formatting.usd(order.machine_usd_per_hour(role.instance_types[0])),
                formatting.usd(zone.rates[zone.types(role)[0]].worst_usd_per_hour - order.extras_usd_per_hour),
            ]
            for role in order.roles
        ],
        caption="prices are of one machine; its disk, its address and requests add "
        f"{formatting.usd(order.extras_usd_per_hour)} an hour",
    )
    risk = [] if plan.risk is None else [f"RISK: {plan.risk}; else it is stopped unfinished"]
    dearer = [
        f"{group.instance_type} has become more expensive since {group.price_date}: "
        f"{formatting.usd(group.price_usd_per_hour)} was planned, "
        f"{formatting.usd(order.machine_usd_per_hour(group.instance_type))} an hour it is"
        for group in order.dearer(plan)
    ]
    yield Remarks([*rental.launch.notes, *risk, *dearer, *stand_ins(plan)])
    value, high = order.expected_usd(plan)
    hourly, worst = hourly_usd(order)
    move = _DEADLINE.format(formatting.usd(order.move_usd)) if order.move_usd else None
    facts = {
        "cluster": f"{formatting.usd(hourly)} an hour now, {formatting.usd(worst)} at most",
        "expected": f"{formatting.usd(value)} for {formatting.duration(plan.chosen.prediction.total_s.value)}, "
        f"and up to {formatting.usd(high)} where it takes longer",
        "budget": f"{formatting.usd(order.budget_usd)}, a hard stop: the machines end by themselves after "
        f"{formatting.duration(order.lifetime_s)}{_LONGER if order.has_spot else ''}",
        "deadline": move,
        "unfollowed": unfollowed(rental),
        "last end": last_end(order),
        "bucket": order.bucket,
        "zones": f"tried one after another until one has all machines: {', '.join(names)}",
    }
    yield Facts({name: fact for name, fact in facts.items() if fact})


_LONGER = "; `hetopt status` gives them longer where less was spent by then"

_DEADLINE = "a run that you follow moves to on-demand machines when only they still keep it; {} is kept for that"


def calls(requests: Sequence[Request]) -> Iterator[Block]:
    """Yield a table of the API calls of a launch; equal calls in a row are one line with their number."""
    rows = (
        (
            request.api_name,
            request.purpose,
            formatting.usd(request.usd_per_hour) if request.usd_per_hour else "",
            formatting.usd(request.worst_usd_per_hour) if request.worst_usd_per_hour else "",
        )
        for request in requests
    )
    counted = ((row, len(list(equal))) for row, equal in groupby(rows))
    yield Heading("calls that would be made")
    if requests:
        yield Table(
            name="calls",
            columns=columns("#, !call, for, #$/h now, #at most"),
            rows=[[f"{count} ×" if count > 1 else "", *row] for row, count in counted],
            caption="nothing was made; --json prints every parameter, `hetopt doctor PLAN` finds what would stop a "
            "launch",
        )


def _facts(order: Order, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the order and its calls, for JSON."""
    from hetopt.api.account import hourly_usd

    return {
        "order": order.model_dump(mode="json"),
        **dict(zip(("usd_per_hour", "worst_usd_per_hour"), hourly_usd(order), strict=True)),
        "calls": [
            {
                "step": request.step,
                "call": request.api_name,
                "purpose": request.purpose,
                "parameters": request.shown(),
                "usd_per_hour": request.usd_per_hour,
                "worst_usd_per_hour": request.worst_usd_per_hour,
            }
            for request in requests
        ],
    }


def _run_summary(prepared: Prepared) -> Iterator[Block]:
    """Yield the lines of a run that is not rented by hetopt itself: what it does, its workers, predicted time and cost.

    Of a resumed run the time that is left, in their place.
    """
    record = prepared.launch
    spec, prediction, is_own, rented = record.spec, record.prediction, bool(prepared.connects_to), prepared.spends_usd
    where = "on this machine" if not is_own else "on your hosts" if rented is None else "on rented machines"
    if spec.miniature is not None:
        where = f"on {formatting.counted(len(spec.miniature.hosts), 'host')}, rehearsed here"
    computing = "" if spec.precision == "fp32" else f", computing in {spec.precision}"
    yield Line(
        f"{spec.task}, {_end(record)}, {where}: {formatting.counted(len(spec.workers), 'worker')}, "
        f"global batch {formatting.count(spec.global_batch_size)}, {_exchange(spec)}{computing}, "
        f"batch policy {spell_policy(spec.batch_policy, spec.batch_settings)}{_data(spec)}",
        "strong",
    )
    yield from _workers(spec) if spec.miniature is None else _rehearsed(spec, spec.miniature)
    risk = [] if record.plan.risk is None else [f"As it would be rented, {record.plan.risk}."]
    yield Remarks([*risk, *record.notes, *prepared.connects_to])
    step = None if prepared.folder is None else checkpoint_step(prepared.folder)
    if step is not None:
        steps = max(prediction.steps.value, 1.0)
        left_s = prediction.startup_s + prediction.training_s.value * max(0.0, 1.0 - step / steps)
        yield Line(
            f"  goes on from step {formatting.count(step)} of about {formatting.count(round(steps))}; the rest is "
            f"predicted to take {formatting.with_startup(left_s, prediction.startup_s)}."
        )
        return
    if prepared.folder is not None:
        own_checkpoints = ", from checkpoints of its own if it has any" if spec.script else ""
        yield Line(f"  begins anew{own_checkpoints}: hetopt has saved none of this run yet.")
    usd = formatting.usd(prediction.cost_usd.value) if is_own and prediction.cost_usd.value else "$0"
    yield Line(
        f"  predicted {'there' if is_own else 'here'}: "
        f"{formatting.with_startup(prediction.total_s.value, prediction.startup_s)} "
        f"({formatting.duration(prediction.total_s.low)} – {formatting.duration(prediction.total_s.high)}), "
        f"{formatting.counted(prediction.steps.value, 'step')} of {formatting.duration(prediction.step_time_s.value)}. "
        f"{'Nothing is rented' if rented is None else 'Rented'}: total {usd}."
    )


def _exchange(spec: RunSpec) -> str:
    """Return the gradient synchronization of a run as text: compression, who chooses its ratio, and the collective."""
    asked = spec.compression
    if spec.is_local:
        return f"sync {formatting.exchange(asked, spec.sync)}"
    spelled = ", ".join([formatting.compression(asked.name, asked.ratio), *spell_options(asked)])
    if spec.ratio_policy == "auto":
        spelled = "auto" if asked == Compression() else f"auto, from {spelled}"
        spelled += f", or {spell_sync(spec.sync)}" if spec.may_average else ""
    elif spec.ratio_policy != "fixed":
        spelled += f", ratio policy {spell_policy(spec.ratio_policy, spec.ratio_settings)}"
    if spec.collective_policy == "cheapest":
        spelled += ", the cheapest collective"
    return f"compression {spelled}"


def _data(spec: RunSpec) -> str:
    """Return the partition of the data among workers as text; empty where each worker sees all of it."""
    partition = "" if spec.partition.name == "global" else f", partition {spell_partition(spec.partition)}"
    if spec.injection is None:
        return partition
    givers, samples = formatting.share(spec.injection.workers), formatting.share(spec.injection.samples)
    return f"{partition}, {givers} of the workers hand on {samples} of their samples"


def _end(record: Launch) -> str:
    """Return what ends a run, as text: a target, epochs or steps."""
    stop, goal = record.spec.stop, record.plan.goal
    if stop.target:
        return f"until {goal.target_metric} {goal.target_value:g}"
    return (
        formatting.counted(stop.max_epochs, "epoch")
        if stop.max_epochs
        else formatting.counted(stop.max_steps or 0, "step")
    )


def _workers(spec: RunSpec) -> Iterator[Block]:
    yield Table(
        name="workers",
        columns=columns("worker, planned as, #slowdown, #batch"),
        rows=[
            [worker.host, worker.type, f"{worker.slowdown:g}", formatting.count(worker.local_batch_size)]
            for worker in spec.workers
        ],
    )


def _rehearsed(spec: RunSpec, miniature: ScaledEmulation) -> Iterator[Block]:
    """Yield the workers of a rehearsal with host, speed, link and batch, and how many changes are scheduled."""
    hosts = {host.name: host for host in miniature.hosts}
    yield Table(
        name="workers",
        columns=columns("#worker, host, planned as, #speed, #computes, #link, #batch"),
        rows=[_row(rank, worker, hosts[worker.host]) for rank, worker in enumerate(spec.workers)],
        caption="computes: as declared, for its local batch · link: as it is here, both ways · batch: local batch size",
    )
    if miniature.changes:
        number = len(miniature.changes)
        yield Line(f"  {number} change{'s are' if number > 1 else ' is'} scheduled on the way.")


def _row(rank: int, worker: WorkerSpec, host: EmulatedHost) -> list[str]:
    declared = worker.declared
    return [
        str(rank),
        host.name,
        worker.type,
        f"{host.speed:g}",
        formatting.duration(declared.fixed_s + declared.per_sample_s * worker.local_batch_size) if declared else "",
        formatting.bit_rate(host.rate_bits_per_s) if host.rate_bits_per_s is not None else "",
        formatting.count(worker.local_batch_size),
    ]
