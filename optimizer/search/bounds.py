"""Lower bounds on the time and cost of every cluster in a box of machine counts, for branch and bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.cost.bill import beside_usd_per_hour
from hetopt.optimizer.search.cluster_rows import Boxes, Columns, least_table, most_compute_s
from hetopt.optimizer.search.forecast import ClusterTable, JobModel, evaluations, forecast, half_width, steps_of
from hetopt.optimizer.search.group_shares import Array, Mask
from hetopt.optimizer.search.objective import Limits, least_expected, sure_quantile
from hetopt.optimizer.step_time.step_time import expected_maximum

NEVER_USD = 1e12
"""Dollars beyond what anything costs; finite, so that arithmetic stays so."""

FEWEST_MACHINES = 2
"""Least number of machines of a mix: one of each of two types."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Score and limits that a better mix of machine types has to keep, and the least price of a sample in such a mix.

    A run that ends by T has steps of at most ``tau = (T - startup) / steps``, in which a worker takes no more than
    ``q = (left(tau) - fixed) / per_sample`` samples, where ``left`` is what the exchange leaves of a step. So the
    machines n of a cluster hold the batch, ``sum n w q >= B``, and each sample costs at least
    ``rho = min price / (w q)`` an hour. As T falls, q falls by more than in proportion, so ``T rho(T)`` is least at the
    latest end that is allowed, or where the worker's memory is full: a quicker run is not cheaper by renting less.

    Every run has a latest end: the deadline, or when the rent of two machines of the cheapest kind exceeds the budget
    or the score to be beaten. Arrays are (options, batches, exchanges).

    Attributes:
        columns: arrays of the search space.
        job: inputs of a forecast that do not depend on the cluster.
        limits: budget and deadline to keep, and the weight of time.
        score: score to be beaten; infinite: only the limits are to be kept.
        samples: most samples of a step that a machine can compute in time; 0: not even one for each of its workers.
        usd_per_sample: least price of a machine for the whole run over ``samples``, USD.
        late_factor: least ratio of the cost at the upper end of the 90 % interval to the median cost.
    """

    columns: Columns
    job: JobModel
    limits: Limits
    score: float
    samples: Array
    usd_per_sample: Array
    late_factor: Array

    @classmethod
    def of(cls, columns: Columns, job: JobModel, limits: Limits, score: float) -> Bar:
        """Return the bar for mixes that score below ``score``; arguments are the attributes."""
        latest_s = _latest_s(columns, job, limits, score)[:, None, None]
        batch, gain = columns.batches.astype(np.float64)[:, None], columns.gain[None, :]
        steps = job.steps.steps(batch, gain)
        # The others of a cluster can only make it begin later.
        aside_s = columns.startup_s[:, None, None] + (
            evaluations(steps, batch, job.evaluate_every_samples) * _evaluation_s(columns)[:, :, None]
        )
        exchange_s, compress_s = (values[:, None, :] for values in _exchange_s(columns))
        overlap = job.shape.overlap("identity")
        hidden = columns.under_backward > 0
        forward, last = np.where(hidden, overlap.forward, 1.0), np.where(hidden, overlap.last, 1.0)
        # A step is never shorter than C + last T, nor than forward C + T (see `step_time.together`).
        room_s = np.maximum(latest_s - aside_s, 0.0) / steps - compress_s
        slowest = 1 + job.shape.straggling.value * expected_maximum(FEWEST_MACHINES)
        left_s = np.minimum(room_s - last * exchange_s, (room_s - exchange_s) / np.maximum(forward, 1e-9)) / slowest
        fixed_s, per_sample_s, floor_s, most = (
            values[:, None, None]
            for values in (columns.lines.fixed_s, columns.lines.per_sample_s, columns.lines.floor_s, columns.lines.most)
        )
        samples = np.minimum((left_s - fixed_s) / per_sample_s, most)
        samples = np.where((samples >= 1) & (left_s >= floor_s), samples, 0.0)
        # With its memory full a worker takes no more, however long the run; it is full in a run of this length.
        full_s = slowest * (fixed_s + per_sample_s * most)
        full_s = np.maximum(full_s + last * exchange_s, forward * full_s + exchange_s) + compress_s
        run_s = np.minimum(latest_s, aside_s + steps * full_s)
        samples = samples * columns.workers[:, None, None]
        hourly = (columns.usd_per_hour + beside_usd_per_hour(job.billing, columns.disk_gb))[:, None, None]
        with np.errstate(divide="ignore"):
            usd_per_sample = np.where(samples > 0, hourly * run_s / SECONDS_PER_HOUR / samples, np.inf)
        device, network = float(columns.log_sd.min()), float(columns.network_log_sd.min())
        cancelling = device * network / max(math.hypot(device, network), 1e-300)
        log_sd = np.hypot(cancelling, job.steps.log_sd(batch, gain))
        trained = np.maximum(0.0, 1 - columns.startup_s.max(initial=0.0) / run_s)
        return cls(
            columns=columns,
            job=job,
            limits=limits,
            score=score,
            samples=np.asarray(samples, np.float64),
            usd_per_sample=usd_per_sample,
            late_factor=1 + trained * np.expm1(Z90 * log_sd),
        )

    def alone_usd(self) -> tuple[Array, Array]:
        """Return the least USD of runs in which no option is cheaper than each, [options, batches, exchanges].

        Two arrays: the median cost, and the upper end of its 90 % interval.
        """
        alone = self.usd_per_sample * self.columns.batches[None, :, None]
        return alone, alone * self.late_factor

    def more_usd(self, boxes: Boxes) -> tuple[Array, Array]:
        """Return the least USD of machines beyond each box's fewest, [boxes]: at the median, and at its 90 % end.

        0 where the box's fewest machines hold the batch; `NEVER_USD` where a group of the box is too slow to be in any
        cluster that is better than the bar.
        """
        batch, exchange = boxes.batch[:, None], boxes.exchange[:, None]
        present = boxes.most > 0
        samples = self.samples[boxes.option, batch, exchange]
        price = np.where(present, self.usd_per_sample[boxes.option, batch, exchange], np.inf)
        late_price = price * self.late_factor[boxes.option, batch, exchange]
        missing = np.maximum(self.columns.batches[boxes.batch] - (boxes.count * samples).sum(axis=1), 0.0)
        too_slow = (present & (samples <= 0)).any(axis=1)

        def of(least: Array) -> Array:
            return np.where(too_slow, NEVER_USD, missing * np.where(np.isfinite(least), least, 0.0))

        return of(price.min(axis=1)), of(late_price.min(axis=1))


def could_beat(boxes: Boxes, bar: Bar) -> tuple[Mask, Array]:
    """Return the mask of boxes that may hold a cluster better than the bar, and bounds below scores (inf: none).

    Time and cost grow with every column of a table, so the forecast of the least columns bounds their medians. Their
    spread does not: its least over all mixtures of computing and exchanging that a box allows is taken, and bounds the
    upper ends and expectations.

    Returns:
        The mask, [boxes], and a lower bound on the score of each box, [boxes]; infinite where the price of its machines
        alone exceeds the limits.
    """
    columns, job, limits, score = bar.columns, bar.job, bar.limits, bar.score
    bound = np.full(len(boxes), np.inf)
    more_usd, more_high_usd = bar.more_usd(boxes)
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
        half_width(least.work_s + least.interruption_s, log_sd, 1), half_width(table.startup_s, job.startup_log_sd, 1)
    )
    hourly = table.usd_per_hour + table.machines * beside_usd_per_hour(job.billing, table.disk_gb)
    dearer = np.hypot(hourly * late_s / SECONDS_PER_HOUR, half_width(least.cost_usd, table.price_log_sd, 1))
    cost_usd, high_usd = cost_usd[some], least.cost_usd + dearer + more_high_usd[some]
    high_s = least.total_s + late_s
    sure = limits.ratio(sure_quantile(cost_usd, high_usd), sure_quantile(least.total_s, high_s))
    possible = np.zeros(len(bound), dtype=np.bool_)
    bound[rows] = limits.score(least_expected(least.total_s, high_s), least_expected(cost_usd, high_usd))
    possible[rows] = (sure <= 1) & (bound[rows] < score)
    return possible, bound


def _least_step_log_sd(columns: Columns, boxes: Boxes, table: ClusterTable, job: JobModel) -> Array:
    """Return the least standard deviation of the log of a step in each box, [boxes].

    With the share s of what depends on the device, the spread is at least ``hypot(s c, (1 - s) m)``: convex in s, least
    at ``m^2 / (c^2 + m^2)``.
    """
    most_workers = np.minimum((boxes.most * columns.workers[boxes.option]).sum(axis=1), columns.stretch.shape[1] - 1)
    # As many times as much as with the fewest workers; two exchange something, or nobody does.
    latency, traffic, compress = (
        np.divide(most[boxes.exchange, most_workers], least, out=np.ones_like(least), where=least > 0)
        for most, least in zip(
            columns.largest,
            (values[boxes.exchange, table.workers.astype(np.intp)] for values in columns.fewest),
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


def _latest_s(columns: Columns, job: JobModel, limits: Limits, score: float) -> Array:
    """Return the latest end, s, [options], by which a mix with that option keeps limits and beats ``score``."""
    per_machine = columns.usd_per_hour + beside_usd_per_hour(job.billing, columns.disk_gb)
    usd_per_s = (per_machine + (FEWEST_MACHINES - 1) * per_machine.min(initial=np.inf)) / SECONDS_PER_HOUR
    # score = time^w cost^(1 - w), and cost is at least the rent of that time.
    latest = score / usd_per_s ** (1 - limits.time_weight)
    if limits.deadline_s is not None:
        latest = np.minimum(latest, limits.deadline_s)
    if limits.budget_usd is not None:
        latest = np.minimum(latest, limits.budget_usd / usd_per_s)
    return np.asarray(latest)


def _evaluation_s(columns: Columns) -> Array:
    """Return the least seconds of one evaluation on a cluster with each option, (options, batches).

    A worker evaluates in proportion to its part of the batch: at least one sample, and of some worker an even part.
    """
    evenly = columns.evaluation_s.min(initial=np.inf) / columns.space.max_workers
    return np.asarray(np.maximum(columns.evaluation_s[:, None] / columns.batches[None, :], evenly))


def _exchange_s(columns: Columns) -> tuple[Array, Array]:
    """Return least seconds of exchange, and of compression, in a mix with each option, (options, exchanges) each."""
    messages, traffic_bytes, compress_s = (values[:, FEWEST_MACHINES] for values in columns.fewest)
    latency_s = columns.link_latency_s[columns.collective].T
    s_per_byte = columns.link_s_per_byte[columns.collective].T / np.maximum(columns.relief, 1.0)[:, None]
    return messages * latency_s + traffic_bytes * s_per_byte, columns.compress_factor[:, None] * compress_s
