"""A launch as a person reads it before saying yes: where each worker runs, how it was slowed, how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetopt.cli import ec2_view, render, terminal
from hetopt.core import formatting
from hetopt.core.comm.compression_text import spell_options
from hetopt.core.policy_settings import spell_policy
from hetopt.core.run_folder import checkpoint_step
from hetopt.core.run_spec import Compression, RunSpec, WorkerSpec
from hetopt.core.scaled_emulation import EmulatedHost, ScaledEmulation
from hetopt.core.synchronization_text import spell_partition

if TYPE_CHECKING:
    from hetopt.backends.backend import Prepared
    from hetopt.optimizer.launch_record import Launch
    from hetopt.optimizer.plan import Plan


def show(prepared: Prepared) -> None:
    """Print the launch on stdout."""
    if prepared.launch.on != "ec2":
        _show_here(prepared)
        return
    from hetopt.api.rental import rental_of

    rental = rental_of(prepared)
    ec2_view.show(rental)
    if rental.folder is not None:
        render.note(
            f"{rental.folder.name} has cost ${rental.spent_usd:.4f} so far; it goes on from its last checkpoint"
        )


def show_dry(prepared: Prepared, *, as_json: bool) -> None:
    """What would be done: on rented machines every call, with its cost."""
    if prepared.launch.on != "ec2":
        if as_json:
            terminal.write(prepared.launch.to_json())
        else:
            _show_here(prepared)
        return
    from hetopt.api.rental import rental_of

    rental = rental_of(prepared)
    requests = () if rental.bundle is None else rental.requests()
    if as_json:
        render.print_json(ec2_view.as_json(rental.order, requests))
        return
    show(rental)
    if requests:
        ec2_view.show_calls(requests)


def wanted(prepared: Prepared) -> Plan:
    """The plan as it is to be run."""
    from hetopt.api.rental import rental_of

    return rental_of(prepared).wanted


def _show_here(prepared: Prepared) -> None:
    record = prepared.launch
    resumed = None if prepared.folder is None else checkpoint_step(prepared.folder)
    spec, said = record.spec, record.prediction
    own = record.on == "ssh"
    where = "on your hosts" if own else "on this machine"
    where = where if spec.miniature is None else f"on {_hosts(len(spec.miniature.hosts))}, rehearsed here"
    render.line(
        f"{spec.task}, {_end(record)}, {where}: {len(spec.workers)} worker{'s' if len(spec.workers) > 1 else ''}, "
        f"global batch {formatting.count(spec.global_batch_size)}, {_exchange(spec)}{_computing(spec)}, "
        f"batch policy {spell_policy(spec.batch_policy, spec.batch_settings)}"
        f"{_data(spec)}",
        style="bold",
    )
    if spec.miniature is None:
        _local_table(spec)
    else:
        _rehearsal_table(spec, spec.miniature)
    if record.plan.risk is not None:
        render.bullet(f"As it would be rented, {record.plan.risk}.")
    for note in (*record.notes, *prepared.connects_to):
        render.bullet(note)
    if resumed is not None:
        _show_rest(record, resumed)
        return
    render.line(
        f"  predicted {'there' if own else 'here'}: {formatting.with_startup(said.total_s.value, said.startup_s)} "
        f"({formatting.duration(said.total_s.low)} – {formatting.duration(said.total_s.high)}), "
        f"{formatting.counted(said.steps.value, 'step')} of {formatting.duration(said.step_time_s.value)}. "
        f"Nothing is rented: total {formatting.usd(said.cost_usd.value) if own and said.cost_usd.value else '$0'}."
    )


def _show_rest(record: Launch, step: int) -> None:
    """What is left for a run that goes on from this step: its start-up again, and the rest of its training."""
    said = record.prediction
    steps = max(said.steps.value, 1.0)
    left_s = said.training_s.value * max(0.0, 1.0 - step / steps)
    render.line(
        f"  goes on from step {formatting.count(step)} of about {formatting.count(round(steps))}; the rest is "
        f"predicted to take {formatting.with_startup(said.startup_s + left_s, said.startup_s)}."
    )


def _exchange(spec: RunSpec) -> str:
    """What is sent, who decides how much, and how it travels."""
    asked = spec.compression
    if spec.is_local:
        return f"sync {formatting.exchange(asked, spec.sync)}"
    told = ", ".join([formatting.compression(asked.name, asked.ratio), *spell_options(asked)])
    if spec.ratio_policy == "auto":
        told = "auto" if asked == Compression() else f"auto, from {told}"
    elif spec.ratio_policy != "fixed":
        told += f", ratio policy {spell_policy(spec.ratio_policy, spec.ratio_settings)}"
    if spec.collective_policy == "cheapest":
        told += ", the cheapest collective"
    return f"compression {told}"


def _computing(spec: RunSpec) -> str:
    return "" if spec.precision == "fp32" else f", computing in {spec.precision}"


def _data(spec: RunSpec) -> str:
    """What of the data each worker sees, where that is not all of it."""
    partition = "" if spec.partition.name == "global" else f", partition {spell_partition(spec.partition)}"
    if spec.injection is None:
        return partition
    givers, samples = formatting.share(spec.injection.workers), formatting.share(spec.injection.samples)
    return f"{partition}, {givers} of the workers hand on {samples} of their samples"


def _hosts(number: int) -> str:
    return "1 host" if number == 1 else f"{number} hosts"


def _end(record: Launch) -> str:
    stop, goal = record.spec.stop, record.plan.goal
    if stop.target:
        return f"until {goal.target_metric} {goal.target_value:g}"
    return (
        formatting.counted(stop.max_epochs, "epoch")
        if stop.max_epochs
        else formatting.counted(stop.max_steps or 0, "step")
    )


def _local_table(spec: RunSpec) -> None:
    render.table(
        ["worker", "planned as", "slowdown", "batch"],
        [[w.host, w.type, f"{w.slowdown:g}", formatting.count(w.local_batch_size)] for w in spec.workers],
        numbers={"slowdown", "batch"},
    )


def _rehearsal_table(spec: RunSpec, miniature: ScaledEmulation) -> None:
    hosts = {host.name: host for host in miniature.hosts}
    render.table(
        ["worker", "host", "planned as", "speed", "computes", "link", "batch"],
        [_row(rank, worker, hosts[worker.host]) for rank, worker in enumerate(spec.workers)],
        numbers={"worker", "speed", "computes", "link", "batch"},
        caption="computes: as declared, for its local batch · link: as it is here, both ways · batch: local batch size",
    )
    if miniature.changes:
        number = len(miniature.changes)
        render.line(f"  {number} change{'s are' if number > 1 else ' is'} scheduled on the way.")


def _row(rank: int, worker: WorkerSpec, host: EmulatedHost) -> list[str]:
    declared = worker.declared
    return [
        str(rank),
        host.name,
        worker.type,
        f"{host.speed:g}" if host.cpu_cores is None else formatting.counted(host.cpu_cores, "core"),
        formatting.duration(declared.fixed_s + declared.per_sample_s * worker.local_batch_size) if declared else "",
        formatting.bit_rate(host.rate_bits_per_s) if host.rate_bits_per_s is not None else "",
        formatting.count(worker.local_batch_size),
    ]
