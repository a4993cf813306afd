"""What has to be rented at least for a run to be done in time: a bound on cost that bounds on the counts cannot see.

A run that ends by T has steps of at most ``tau = (T - startup) / steps``, in which a worker takes no more than
``q = (tau - fixed) / per_sample`` samples. So the machines n of a cluster hold the batch, ``sum n w q >= B``, and each
sample costs at least ``rho = min price / (w q)`` an hour. As T falls, q falls by more than in proportion, so
``T rho(T)`` is least at the latest end that is allowed: a quicker run is not cheaper by renting less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.aims import Limits
from hetopt.optimizer.bill import SECONDS_PER_HOUR
from hetopt.optimizer.cluster_rows import Boxes, Columns
from hetopt.optimizer.forecast import JobModel
from hetopt.optimizer.steps_law import Z90

Array = NDArray[np.float64]

NEVER_USD = 1e12
"""More than anything costs; finite, so that arithmetic stays so."""


@dataclass(frozen=True, kw_only=True)
class RentalBound:
    """For runs that end by a given time; (options, batches, exchanges).

    Attributes:
        samples: that a machine takes of a step at most; 0 where not even one for each of its workers.
        usd_per_sample: its price for the whole run over that, USD.
        batch: global batch sizes.
        late_factor: cost at the upper end of the interval over the expected cost, at least; (batches, exchanges).
    """

    samples: Array
    usd_per_sample: Array
    batch: Array
    late_factor: Array

    @classmethod
    def of(cls, columns: Columns, job: JobModel, limits: Limits, score: float) -> RentalBound | None:
        """For plans with a score below ``score``; absent where nothing says when they end at the latest."""
        latest_s = limits.deadline_s or math.inf
        if limits.weight == 1:
            latest_s = min(latest_s, score)
        if not math.isfinite(latest_s) or latest_s <= job.startup_s:
            return None
        batch, gain = columns.batches.astype(np.float64)[:, None], columns.gain[None, :]
        step_s = (latest_s - job.startup_s) / job.steps.steps(batch, gain)
        # Two machines at least, with the links of the option itself, where computing does not hide them.
        exchange_s = (
            columns.fewest[0][:, 2] * columns.link_latency_s[columns.collective].T
            + columns.fewest[1][:, 2]
            * columns.link_s_per_byte[columns.collective].T
            / np.maximum(columns.relief, 1.0)[:, None]
        ) * (1 - columns.under_backward)
        compress_s = columns.compress_factor[:, None] * columns.fewest[2][:, 2]
        alone = columns.lines
        left_s = step_s[None] - (exchange_s + compress_s)[:, None, :]
        samples = np.minimum(
            (left_s - alone.fixed_s[:, None, None]) / alone.per_sample_s[:, None, None], alone.most[:, None, None]
        )
        samples = np.where((samples >= 1) & (left_s >= alone.floor_s[:, None, None]), samples, 0.0)
        samples = samples * columns.workers[:, None, None]
        run_usd = (columns.usd_per_hour + job.rates.per_machine_hour) * latest_s / SECONDS_PER_HOUR
        device = float(columns.log_sd.min())
        cancelling = device * job.network_log_sd / max(math.hypot(device, job.network_log_sd), 1e-300)
        log_sd = np.hypot(cancelling, job.steps.log_sd(batch, gain))
        late_s = job.startup_s + (latest_s - job.startup_s) * np.exp(Z90 * log_sd)
        with np.errstate(divide="ignore"):
            usd_per_sample = np.where(samples > 0, run_usd[:, None, None] / samples, np.inf)
        return cls(
            samples=samples, usd_per_sample=usd_per_sample, batch=columns.batches.astype(np.float64),
            late_factor=late_s / latest_s,
        )  # fmt: skip

    def alone_usd(self) -> tuple[Array, Array]:
        """What a run costs at least where this is the cheapest option of its cluster; (options, batches, exchanges).

        Expected, and at the upper end of the interval.
        """
        alone = self.usd_per_sample * self.batch[None, :, None]
        return alone, alone * self.late_factor[None]

    def more_usd(self, boxes: Boxes) -> tuple[Array, Array]:
        """What the machines beside the fewest of each box cost at least: expected, and at the upper end.

        `NEVER_USD` where a group of the box is too slow to be in any such cluster.
        """
        rows = boxes.least
        batch, exchange = rows.batch[:, None], rows.exchange[:, None]
        present = boxes.most > 0
        samples = self.samples[rows.option, batch, exchange]
        price = np.where(present, self.usd_per_sample[rows.option, batch, exchange], np.inf)
        missing = np.maximum(self.batch[rows.batch] - (rows.count * samples).sum(axis=1), 0.0)
        too_slow = (present & (samples <= 0)).any(axis=1)
        least = np.where(too_slow, 0.0, price.min(axis=1))
        more = np.where(too_slow, NEVER_USD, missing * np.where(np.isfinite(least), least, 0.0))
        return more, more * self.late_factor[rows.batch, rows.exchange]
