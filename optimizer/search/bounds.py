"""What no cluster of a box undercuts: bounds on time and cost, expected and where limits have to be kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.optimizer.cost.bill import beside_usd_per_hour
from hetopt.optimizer.search.cluster_rows import Boxes, Columns, least_table, most_compute_s
from hetopt.optimizer.search.forecast import ClusterTable, JobModel, distance, forecast, steps_of
from hetopt.optimizer.search.objective import Limits, least_expected, sure_quantile
from hetopt.optimizer.search.rental_bound import NEVER_USD, RentalBound

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a mix has to beat: a score, within the limits. ``rental`` is what renting alone says of it."""

    columns: Columns
    job: JobModel
    limits: Limits
    score: float
    rental: RentalBound

    @classmethod
    def of(cls, columns: Columns, job: JobModel, limits: Limits, score: float) -> Bar:
        """At a score; infinite where only the limits are to be kept."""
        rental = RentalBound.of(columns, job, limits, score)
        return cls(columns=columns, job=job, limits=limits, score=score, rental=rental)


def could_beat(boxes: Boxes, bar: Bar) -> tuple[Mask, Array]:
    """Which boxes may hold a cluster that surely keeps the limits, with a lower score; and their bound.

    Time and cost grow with every column of a table, so the forecast of the least columns is a bound. Their spread does
    not: it is that of a mixture of computing and exchanging, and its least over all mixtures that a box allows is
    taken, where the medians leave a box in. With the upper ends that follow, what doubt adds to the score is bounded
    as well.
    """
    columns, job, limits, score = bar.columns, bar.job, bar.limits, bar.score
    bound = np.full(len(boxes), np.inf)
    more_usd, more_high_usd = bar.rental.more_usd(boxes)
    rows = np.flatnonzero(limits.ratio(sure_quantile(more_usd, more_high_usd), np.zeros(len(boxes))) <= 1)
    rows = rows[more_usd[rows] < NEVER_USD]

    boxes, more_usd, more_high_usd = boxes.take(rows), more_usd[rows], more_high_usd[rows]
    table = least_table(columns, boxes)
    least = forecast(table, job)
    cost_usd = least.cost_usd + more_usd
    bound[rows] = limits.score(least.total_s, cost_usd)
    sure_usd = sure_quantile(cost_usd, least.cost_usd + more_high_usd)
    some = np.flatnonzero((bound[rows] < score) & (limits.ratio(sure_usd, least.total_s) <= 1))

    boxes, table, least, rows = boxes.take(some), table.take(some), least.take(some), rows[some]
    log_sd = np.hypot(_least_step_log_sd(columns, boxes, table, job), least.steps_log_sd)
    late_s = np.hypot(
        distance(least.work_s + least.interruption_s, log_sd, 1), distance(table.startup_s, job.startup_log_sd, 1)
    )
    hourly = table.usd_per_hour + table.machines * beside_usd_per_hour(job.billing, table.disk_gb)
    dearer = np.hypot(hourly * late_s / SECONDS_PER_HOUR, distance(least.cost_usd, table.price_log_sd, 1))
    cost_usd, high_usd = cost_usd[some], least.cost_usd + dearer + more_high_usd[some]
    high_s = least.total_s + late_s
    sure = limits.ratio(sure_quantile(cost_usd, high_usd), sure_quantile(least.total_s, high_s))
    possible = np.zeros(len(bound), dtype=np.bool_)
    bound[rows] = limits.score(least_expected(least.total_s, high_s), least_expected(cost_usd, high_usd))
    possible[rows] = (sure <= 1) & (bound[rows] < score)
    return possible, bound


def _least_step_log_sd(columns: Columns, boxes: Boxes, table: ClusterTable, job: JobModel) -> Array:
    """The least spread of a step: of device and network in the mixture, inside the box, where they cancel most.

    With the share s of what depends on the device, the spread is at least ``hypot(s c, (1 - s) m)``: convex in s, least
    at ``m^2 / (c^2 + m^2)``.
    """
    rows = boxes.least
    most_workers = np.minimum((boxes.most * columns.workers[rows.option]).sum(axis=1), columns.messages.shape[1] - 1)
    # As many times as much as with the fewest workers; two exchange something, or nobody does.
    latency, traffic, compress = (
        np.divide(most[rows.exchange, most_workers], least, out=np.ones_like(least), where=least > 0)
        for most, least in zip(
            columns.largest,
            (values[rows.exchange, table.workers.astype(np.intp)] for values in columns.fewest),
            strict=True,
        )
    )
    worst = replace(
        table,
        workers=most_workers.astype(np.float64),
        latency_s=table.latency_s * latency,
        traffic_s=table.traffic_s * traffic,
    )
    slowest = replace(
        table, compute_s=most_compute_s(columns, boxes), compress_s=np.maximum(table.compress_s * compress, 1e-12)
    )
    low, high = steps_of(worst, job.shape).device_share, steps_of(slowest, job.shape).device_share
    device, network = table.compute_log_sd, table.network_log_sd
    steadiest = np.clip(network**2 / np.maximum(device**2 + network**2, 1e-300), low, high)
    return np.asarray(np.hypot(steadiest * device, (1 - steadiest) * network))
