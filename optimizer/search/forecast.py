"""Predicted time and cost of clusters, many at a time: the one model that every part of the search goes through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetopt.optimizer.convergence.convergence import StepsModel
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.cost.bill import (
    Billing,
    beside_usd_per_hour,
    billed_hours,
    checkpoints_usd,
    extras_usd_per_hour,
    fixed_usd,
    least_budget_usd,
)
from hetopt.optimizer.cost.cost import DETECTION_S, interruptions, planned_usage, unavailable_s
from hetopt.optimizer.plan import CostTerm
from hetopt.optimizer.search.group_shares import Array, Table
from hetopt.optimizer.search.open_hours import DAY_S, elapsed_s
from hetopt.optimizer.step_time.posterior import Shape
from hetopt.optimizer.step_time.step_time import NO_OVERLAP, expected_maximum, growth, overlapped


@dataclass(frozen=True, kw_only=True)
class JobModel:
    """Inputs of a forecast that do not depend on the cluster: a job's steps, evaluations, checkpoints and billing.

    Attributes:
        steps: law of the steps that the goal needs, by batch size and retained energy.
        evaluate_every_samples: samples between evaluations.
        shape: what steps have in common on whatever machines.
        startup_log_sd: standard deviation of the log of the time from the request to the first step.
        checkpoint_s: seconds that training pauses for a checkpoint.
        billing: prices and terms beside the machines' own.
        written_s: seconds from a checkpoint's pause until it is stored (see `cost.interruptions`).
        checkpoint_bytes: size of one checkpoint in the bucket; 0: no bucket is used.
        transfer: cost of moving the data set to the region, before the launch; None: the data set is there.
        resumes: whether the run goes on from checkpoints; else a lost machine costs all work so far.
        slots_s: lengths in seconds of the slots of the day in which machines may be used or not (see `open_hours`).
    """

    steps: StepsModel
    evaluate_every_samples: float
    shape: Shape
    startup_log_sd: float
    checkpoint_s: float
    billing: Billing
    written_s: float = 0.0
    checkpoint_bytes: float = 0.0
    transfer: CostTerm | None = None
    resumes: bool = True
    slots_s: tuple[float, ...] = (DAY_S,)

    @property
    def before_usd(self) -> float:
        """The cost before any cluster is rented, USD: that of moving the data set; 0: the data set is there."""
        return 0.0 if self.transfer is None else self.transfer.usd


@dataclass(frozen=True, kw_only=True)
class ClusterTable(Table):
    """Inputs of a forecast that depend on the cluster: an array per figure, an entry per cluster; units end names.

    ``compute_s`` is the slowest worker's computing in a step, ``latency_s`` and ``traffic_s`` the seconds of an
    exchange's messages and bytes, ``traffic_bytes`` over one link; ``stretch`` is steps over those of summing gradients
    in every step, ``share_log_sd`` the deviation of the log of the share of steps that communicate; ``under_backward``
    is 1 where the exchange runs under backward, and 0 where it waits for the whole gradient; ``calm_per_hour`` and
    ``scarce_per_hour`` are stops in pools that are calm and, with ``scarce_chance``, scarce; ``startup_s`` is from the
    request to the first step, ``missing`` the expected hours without a machine for each hour with one, and ``disk_gb``
    of each machine. ``open_parts`` is the part of the speed that may be used in each slot of the day, (rows, slots).
    """

    machines: Array
    workers: Array
    batch: Array
    gain: Array
    stretch: Array
    stretch_log_sd: Array
    share_log_sd: Array
    compute_s: Array
    mean_compute_s: Array
    compress_s: Array
    compress_log_sd: Array
    latency_s: Array
    traffic_s: Array
    traffic_bytes: Array
    under_backward: Array
    evaluation_s: Array
    compute_log_sd: Array
    network_log_sd: Array
    usd_per_hour: Array
    worst_usd_per_hour: Array
    price_log_sd: Array
    calm_per_hour: Array
    scarce_per_hour: Array
    scarce_chance: Array
    startup_s: Array
    missing: Array
    disk_gb: Array
    open_parts: Array


@dataclass(frozen=True, kw_only=True)
class Forecast(Table):
    """Predicted step time, steps, total time and cost of clusters, [clusters]: medians and 90 % intervals.

    ``*_low`` and ``*_high`` are the ends of the intervals, ``*_log_sd`` standard deviations of a log. ``compute_s`` is
    the slowest worker's computing in a step, ``waiting_s`` the workers' mean wait for it, and ``communication_s`` the
    rest of a step. ``work_s`` is training without interruptions, evaluations included; ``interruption_s`` is added by
    losses of machines, and ``interval_s`` the work between checkpoints. Of the total, ``unavailable_s`` is waiting for
    spot machines, and ``closed_s`` lies outside the hours in which machines may be used. ``least_budget_usd`` is the
    least budget that a cluster is rented with, and ``open_parts`` is as in `ClusterTable`.
    """

    compute_s: Array
    waiting_s: Array
    communication_s: Array
    step_time_s: Array
    step_time_log_sd: Array
    steps: Array
    steps_log_sd: Array
    work_s: Array
    work_log_sd: Array
    startup_s: Array
    disk_gb: Array
    interruption_s: Array
    stops_per_hour: Array
    interval_s: Array
    unavailable_s: Array
    closed_s: Array
    total_s: Array
    total_low_s: Array
    total_high_s: Array
    cost_usd: Array
    cost_low_usd: Array
    cost_high_usd: Array
    least_budget_usd: Array
    open_parts: Array


def forecast(table: ClusterTable, job: JobModel) -> Forecast:
    """Return predicted time and cost, with 90 % intervals, of each cluster (row) of ``table``; pure.

    Relative errors of step time, steps and interruptions are independent, so their log variances add.
    """
    step = steps_of(table, job.shape)
    steps = job.steps.steps(table.batch, table.gain) * table.stretch
    steps_log_sd = np.hypot(job.steps.log_sd(table.batch, table.gain), table.stretch_log_sd)
    work = steps * step.time_s + evaluations(steps, table.batch, job.evaluate_every_samples) * table.evaluation_s
    work_log_sd = np.hypot(step.log_sd, steps_log_sd)

    lost = interruptions(
        work,
        calm_per_hour=table.calm_per_hour,
        scarce_per_hour=table.scarce_per_hour,
        scarce_chance=table.scarce_chance,
        checkpoint_s=job.checkpoint_s,
        written_s=job.written_s,
        restart_s=table.startup_s + DETECTION_S,
        interval_s=None if job.resumes else np.inf,
    )
    training = work * lost.expected_factor
    training_log_sd = np.hypot(work_log_sd, lost.log_sd)
    total = table.startup_s + training
    low, high = (
        total
        + sign
        * np.hypot(half_width(training, training_log_sd, sign), half_width(table.startup_s, job.startup_log_sd, sign))
        for sign in (-1, 1)
    )
    hourly = table.usd_per_hour + table.machines * beside_usd_per_hour(job.billing, table.disk_gb)
    stops = (1 - table.scarce_chance) * table.calm_per_hour + table.scarce_chance * table.scarce_per_hour
    usage = planned_usage(
        start_up_s=table.startup_s,
        work_s=work,
        interruption_s=training - work,
        machines=table.machines,
        stops_per_hour=stops,
        interval_s=lost.interval_s,
        checkpoint_bytes=job.checkpoint_bytes,
    )
    extras = checkpoints_usd(usage, job.billing) + job.before_usd
    cost, cost_low, cost_high = (billed_hours(seconds, job.billing) * hourly + extras for seconds in (total, low, high))
    for sign, bound in ((-1, cost_low), (1, cost_high)):
        reach = np.hypot(np.abs(bound - cost), half_width(cost, table.price_log_sd, sign))
        bound[:] = cost + sign * reach
    at_work_s = total
    # Machines that are not to be had are not paid: the others train on.
    unavailable, longest = unavailable_s(training, table.missing, table.scarce_chance)
    total, high = total + unavailable, high + longest
    worked_s = total
    if len(job.slots_s) > 1:  # who may not be used meanwhile draws nothing: the bill is for the time at work
        total, low, high = (elapsed_s(worked, table.open_parts, job.slots_s) for worked in (total, low, high))
    return Forecast(
        compute_s=step.compute_s,
        waiting_s=np.maximum(0.0, step.compute_s - table.mean_compute_s),
        communication_s=np.maximum(0.0, (1 - 1e-12) * step.time_s - step.compute_s),  # rounding is no exchange
        step_time_s=step.time_s,
        step_time_log_sd=step.log_sd,
        steps=steps,
        steps_log_sd=steps_log_sd,
        work_s=work,
        work_log_sd=work_log_sd,
        startup_s=table.startup_s,
        disk_gb=table.disk_gb,
        interruption_s=training - work,
        stops_per_hour=stops,
        interval_s=lost.interval_s,
        unavailable_s=worked_s - at_work_s,
        closed_s=total - worked_s,
        total_s=total,
        total_low_s=np.maximum(low, 0.0),
        total_high_s=high,
        cost_usd=cost,
        cost_low_usd=np.maximum(cost_low, 0.0),
        cost_high_usd=cost_high,
        least_budget_usd=least_budget_usd(
            table.worst_usd_per_hour + table.machines * extras_usd_per_hour(job.billing, table.disk_gb),
            fixed_usd(job.checkpoint_bytes, job.billing) + job.before_usd,
        ),
        open_parts=table.open_parts,
    )


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """Predicted step of each cluster, [clusters].

    Attributes:
        compute_s: computing of the slowest worker, seconds.
        time_s: the whole step, seconds.
        log_sd: standard deviation of the log of ``time_s``.
        device_share: part of the step that depends on devices, 0 to 1; the rest depends on the network.
    """

    compute_s: Array
    time_s: Array
    log_sd: Array
    device_share: Array


def steps_of(table: ClusterTable, shape: Shape) -> StepColumns:
    """Return each cluster's step time with its spread; ``shape``: parameters that steps share on all machines.

    Machines of one cluster share their error (all are scaled from one reference), so it does not average out over them.
    """
    lateness = straggler_factor(table.workers, shape)
    compute = table.compute_s * lateness
    alone = table.machines == 1
    more = network_factor(table.workers, alone, shape)
    exchange = table.latency_s + table.traffic_s * more
    overlap = shape.overlap("identity")
    beside = table.under_backward > 0
    forward = np.where(beside, overlap.forward, NO_OVERLAP.forward)
    last = np.where(beside, overlap.last, NO_OVERLAP.last)
    both = overlapped(compute, exchange, forward=forward, power=overlap.power, last=last)
    step = both.time_s + table.compress_s

    network_log_sd = np.hypot(table.network_log_sd, table.share_log_sd)
    # A link that is hidden has no derivative, and would still show if it were much slower than it is taken to be.
    slow = overlapped(compute, exchange * np.exp(Z90 * network_log_sd), forward=forward, power=overlap.power, last=last)
    shown = np.log((slow.time_s + table.compress_s) / step) / Z90
    # Compression runs on the workers and shares their error.
    device_share = (both.by_compute + table.compress_s) / step
    growing = table.traffic_s * (more - 1) / np.maximum(exchange, 1e-300)
    log_sds = {  # independent, by what is not known
        "compute": device_share * table.compute_log_sd,
        "compression": table.compress_s / step * table.compress_log_sd,
        "straggling": both.by_compute / step * (1 - 1 / lateness) * shape.straggling.sd,
        "network": np.maximum(both.by_exchange / step * network_log_sd, shown),
        "network_growth": both.by_exchange / step * growing * shape.network_growth.sd,
        "host_sharing": both.by_exchange
        / step
        * alone
        * np.log(np.maximum(table.workers / 2, 1))
        * shape.host_sharing.sd,
        "forward": both.by_forward / step * shape.forward.sd,
        "overlap": both.by_power / step * shape.power.sd,
    }
    return StepColumns(
        compute_s=compute,
        time_s=step,
        log_sd=np.sqrt(sum(np.square(log_sd) for log_sd in log_sds.values())),
        device_share=device_share,
    )


def straggler_factor(workers: ArrayLike, shape: Shape) -> Array:
    """Return the expected compute time of the slowest of equal ``workers`` over their mean; 1 for one worker.

    ``shape.straggling`` has the relative deviation of a worker's single steps.
    """
    counts, which = np.unique(np.asarray(workers, dtype=np.intp), return_inverse=True)
    return 1 + shape.straggling.value * np.array([expected_maximum(count) for count in counts.tolist()])[which]


def network_factor(workers: ArrayLike, alone: ArrayLike, shape: Shape) -> Array:
    """Return a byte's time in an exchange among ``workers`` over its time among two; 1 where ``alone``: one machine.

    ``shape.network_growth`` has what each doubling of workers adds.
    """
    return growth(workers, np.where(alone, 0.0, shape.network_growth.value))


def evaluations(steps: ArrayLike, global_batch_size: ArrayLike, every_samples: float) -> Array:
    """Return how many evaluations a run of ``steps`` makes: one every ``every_samples`` samples, and one at its end.

    Arrays broadcast against each other; the result is a whole number as float, at least 1 for a step or more.
    """
    before_the_last = (np.asarray(steps) - 1) * np.asarray(global_batch_size)
    return np.asarray(np.floor(before_the_last / every_samples) + 1, dtype=np.float64)


def half_width(value: Array | float, log_sd: Array | float, sign: int) -> Array:
    """Return the distance from a log-normal median to an end of its 90 % interval, never negative.

    Args:
        value: the median, in any unit, which is the result's.
        log_sd: standard deviation of the log.
        sign: 1: the upper end; -1: the lower end.
    """
    return np.asarray(np.abs(value * np.expm1(sign * Z90 * np.asarray(log_sd))), dtype=np.float64)
