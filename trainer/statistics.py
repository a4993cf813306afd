"""What the steps of a control period were like: measured by each worker, gathered in one control vector, read by all.

Every rank reads the same matrix, so whatever is decided from it is decided alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from hetopt.trainer.events import Event
from hetopt.trainer.step import StepTrace
from hetopt.trainer.stopwatch import Stopwatch


@dataclass(frozen=True, kw_only=True)
class ControlRow:
    """One worker's entry in the control vector.

    Attributes:
        steps: steps of the period.
        period_s: their time on the worker's clock.
        compute_s: mean time from the first sample fetched to the last gradient ready.
        compute_median_s: median of the same over all steps since the shares were last judged: what they are judged by,
            for one hiccup must not move them.
        exchange_s: mean time from there to the summed gradient, the wait for slower workers included.
        loss_sum: sum of the losses over the worker's samples.
        stop_wished: 1 when somebody asked this worker to stop.
        since_checkpoint_s: on the worker's clock; the leader's counts.
    """

    steps: float
    period_s: float
    compute_s: float
    compute_median_s: float
    exchange_s: float
    loss_sum: float
    stop_wished: float
    since_checkpoint_s: float

    def to_list(self) -> list[float]:
        """The numbers, in the order of the fields."""
        return list(astuple(self))

    @classmethod
    def from_list(cls, row: Sequence[float]) -> ControlRow:
        """The row that `to_list` gave."""
        return cls(**dict(zip((field.name for field in fields(cls)), row, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Period:
    """The control rows of all workers, in rank order, for one period of steps over one set of shares."""

    rows: tuple[ControlRow, ...]
    local_batch_sizes: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Steps of the period."""
        return int(self.rows[0].steps)

    @property
    def step_time_s(self) -> float:
        """Mean time of a step, on the leader's clock."""
        return self.rows[0].period_s / self.steps

    @property
    def loss(self) -> float:
        """Mean loss over the samples of the period; NaN or infinite if any worker's was."""
        return sum(row.loss_sum for row in self.rows) / (sum(self.local_batch_sizes) * self.steps)

    @property
    def diverged(self) -> bool:
        """Whether some worker met a loss that is NaN or infinite."""
        return not math.isfinite(self.loss)

    @property
    def stop_wished(self) -> bool:
        """Whether any worker was asked to stop."""
        return any(row.stop_wished for row in self.rows)

    @property
    def compute_median_s(self) -> tuple[float, ...]:
        """Compute time of a step of each worker."""
        return tuple(row.compute_median_s for row in self.rows)

    def event(self, *, step: int, epoch: float, samples_seen: int) -> Event:
        """The fields of the ``step`` event.

        The worker that waits least is the one the others wait for, so the least exchange time of the cluster is that of
        the exchange itself (``sync_s``, the same for all) and what a worker spends beyond it is its wait.
        """
        sync_s = min(row.exchange_s for row in self.rows)
        return {
            "step": step,
            "epoch": round(epoch, 4),
            "samples_seen": samples_seen,
            "local_batch_sizes": list(self.local_batch_sizes),
            "step_time_s": _seconds(self.step_time_s),
            "compute_s": [_seconds(row.compute_s) for row in self.rows],
            "sync_s": [_seconds(sync_s) for _ in self.rows],
            "wait_s": [_seconds(row.exchange_s - sync_s) for row in self.rows],
            "loss": self.loss,
            "steps": self.steps,
        }


class PeriodLog:
    """Collects the traces of a period's steps; marks are read only when the period is over."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._traces: list[StepTrace] = []
        self._unjudged_s: list[float] = []

    def add(self, trace: StepTrace) -> None:
        """One more step."""
        self._traces.append(trace)

    def close(self, *, period_s: float, stop_wished: bool, since_checkpoint_s: float) -> ControlRow:
        """The row for the steps since the last call; waits until the device has done them."""
        traces, self._traces = self._traces, []
        compute = [self._stopwatch.seconds(trace.begun, trace.computed) for trace in traces]
        self._unjudged_s += compute
        exchange = [self._stopwatch.seconds(trace.computed, trace.summed) for trace in traces]
        return ControlRow(
            steps=len(traces),
            period_s=period_s,
            compute_s=statistics.fmean(compute),
            compute_median_s=statistics.median(self._unjudged_s),
            exchange_s=statistics.fmean(exchange),
            loss_sum=sum(float(trace.loss_sum) for trace in traces),
            stop_wished=float(stop_wished),
            since_checkpoint_s=since_checkpoint_s,
        )

    def judged(self) -> None:
        """Begin a new median of compute times."""
        self._unjudged_s = []


def _seconds(value: float) -> float:
    return round(value, 7)
