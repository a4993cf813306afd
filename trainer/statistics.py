"""What the steps of a control period were like: measured by each worker, gathered in one control vector, read by all.

Every rank reads the same matrix, so whatever is decided from it is decided alike. A worker's row tells of its steps
(`ControlRow`), then of its exchanges (`Traffic`). What has to be the same on all workers has a short mark here, equal
where it is, bit for bit, on whatever device it lies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hetopt.core.events.log import Event
from hetopt.trainer.data.cursor import Flow
from hetopt.trainer.policies.policy import BatchObservation
from hetopt.trainer.steps.adaptive_controller import GroupTraffic, Traffic, traffic_of
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch


@dataclass(frozen=True, kw_only=True)
class ControlRow:
    """One worker's entry in the control vector. A mean is over the steps of the period unless it says otherwise.

    Attributes:
        steps: steps of the period.
        step_time_s: mean time of a step on the worker's clock, control left out.
        compute_s: mean time from the first sample fetched to the last gradient ready, over the steps with the present
            shares.
        processor_s: mean processor time of the computing thread meanwhile; on a GPU all of it.
        exchange_s: mean time from there to the summed gradient, the wait for slower workers included; likewise.
        judged_steps: steps with the present shares since these were last judged.
        compute_median_s: median compute time over those: what shares are judged by, for one hiccup must not move them.
        compute_spread_s: robust standard deviation of one step's compute time over those.
        loss_sum: sum of the losses over the worker's samples.
        pace_use: real over declared compute time (see `Pace.use`); 0: not known.
        memory_bound: samples of the largest micro-batch that fits, as this worker learned; 0: it learned of no bound.
        stop_wished: 1 when somebody asked this worker to stop.
        since_checkpoint_s: on the worker's clock; the leader's counts.
        checkpoint_part: how far this worker's part of the checkpoint under way is, see `CheckpointSaver.progress`.
        stream_buffered: of `Flow`, as the rest is: what the worker's stream was like in the period.
        stream_wait_s: likewise.
        stream_dropped: likewise.
        model_mark: of the parameters' bits; 0 also where workers' models differ between averages.
        drawn_epoch: of the next batch that this worker has not drawn, where a script asks for batches.
        drawn_batch: number of that batch in its epoch.
    """

    steps: float
    step_time_s: float
    compute_s: float
    processor_s: float
    exchange_s: float
    judged_steps: float
    compute_median_s: float
    compute_spread_s: float
    loss_sum: float
    pace_use: float
    memory_bound: float
    stop_wished: float
    since_checkpoint_s: float
    checkpoint_part: float = 0.0
    stream_buffered: float = 0.0
    stream_wait_s: float = 0.0
    stream_dropped: float = 0.0
    model_mark: float = 0.0
    drawn_epoch: float = 0.0
    drawn_batch: float = 0.0

    def to_list(self) -> list[float]:
        """The numbers, in the order of the fields."""
        return [getattr(self, name) for name in _ROW]

    @classmethod
    def from_list(cls, row: Sequence[float]) -> ControlRow:
        """The row that `to_list` gave."""
        return cls(**dict(zip(_ROW, row, strict=True)))


_ROW = tuple(field.name for field in fields(ControlRow))
NO_TRAFFIC = GroupTraffic(rows=(Traffic(),))
"""Of a worker that is alone."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """The control rows of all workers, in rank order, for one period of steps, and the traffic between them.

    ``local_batch_sizes`` are the shares at its end. Where the period's first step was the last with other shares, its
    times are left out; its loss counts.
    """

    rows: tuple[ControlRow, ...]
    local_batch_sizes: tuple[int, ...]
    traffic: GroupTraffic = NO_TRAFFIC

    @classmethod
    def of(cls, gathered: Sequence[Sequence[float]], *, local_batch_sizes: tuple[int, ...]) -> Period:
        """The period that the workers sent rows of (a `ControlRow`, then a `Traffic`)."""
        width = len(_ROW)
        return cls(
            rows=tuple(ControlRow.from_list(numbers[:width]) for numbers in gathered),
            local_batch_sizes=local_batch_sizes,
            traffic=GroupTraffic(rows=tuple(Traffic.from_list(numbers[width:]) for numbers in gathered)),
        )

    @property
    def steps(self) -> int:
        """Number of steps of the control period."""
        return int(self.rows[0].steps)

    @property
    def step_time_s(self) -> float:
        """Mean time of a step, on the leader's clock."""
        return self.rows[0].step_time_s

    @property
    def loss(self) -> float:
        """Mean loss over the samples of the period; NaN or infinite if any worker's was."""
        return sum(row.loss_sum for row in self.rows) / (sum(self.local_batch_sizes) * self.steps)

    @property
    def diverged(self) -> bool:
        """Whether some worker met a loss that is NaN or infinite."""
        return not math.isfinite(self.loss)

    @property
    def drifted(self) -> tuple[int, ...]:
        """Ranks whose parameters differ from those of most workers."""
        marks = [row.model_mark for row in self.rows]
        usual = max(marks, key=marks.count)
        return tuple(rank for rank, mark in enumerate(marks) if mark != usual)

    @property
    def stop_wished(self) -> bool:
        """Whether any worker was asked to stop."""
        return any(row.stop_wished for row in self.rows)

    @property
    def memory_bounds(self) -> tuple[int, ...]:
        """The largest micro-batch that fits each worker; 0 where no bound is known."""
        return tuple(int(row.memory_bound) for row in self.rows)

    @property
    def pace_use(self) -> list[float] | None:
        """Real over declared compute time of each worker, 0 where it is not known; None: it is known of none."""
        uses = [round(row.pace_use, 4) for row in self.rows]
        return uses if any(uses) else None

    def observation(self, epoch: int) -> BatchObservation:
        """What shares are judged by, when so many epochs are completed."""
        return BatchObservation(
            local_batch_sizes=self.local_batch_sizes,
            compute_s=tuple(row.compute_median_s for row in self.rows),
            spread_s=tuple(row.compute_spread_s for row in self.rows),
            steps=int(self.rows[0].judged_steps),
            epoch=epoch,
        )

    def stream_event(self, rates: Sequence[float]) -> Event:
        """Return the field of a ``step`` event that tells about the workers' streams, each in rank order.

        Args:
            rates: of the streams, samples a second.
        """
        return {
            "stream": {
                "rate_per_s": [round(rate, 4) for rate in rates],
                "buffered": [int(row.stream_buffered) for row in self.rows],
                "wait_s": [_seconds(row.stream_wait_s) for row in self.rows],
                "dropped": [int(row.stream_dropped) for row in self.rows],
            }
        }

    def event(self, *, step: int, epoch: float, samples_seen: int) -> Event:
        """The fields of the ``step`` event that the workers measured.

        The worker that waits least is the one the others wait for, so the least exchange time of the cluster is that of
        the exchange itself (``sync_s``, the same for all) and what a worker spends beyond it is its wait.
        """
        sync_s = min(row.exchange_s for row in self.rows)
        event: Event = {
            "step": step,
            "epoch": round(epoch, 4),
            "samples_seen": samples_seen,
            "local_batch_sizes": list(self.local_batch_sizes),
            "step_time_s": _seconds(self.step_time_s),
            "compute_s": [_seconds(row.compute_s) for row in self.rows],
            "processor_s": [_seconds(row.processor_s) for row in self.rows],
            "sync_s": [_seconds(sync_s) for _ in self.rows],
            "wait_s": [_seconds(row.exchange_s - sync_s) for row in self.rows],
            "loss": self.loss,
            "steps": self.steps,
        }
        if self.pace_use is not None:
            event["pace_use"] = self.pace_use
        return event


class PeriodLog:
    """Collects the traces of steps until they are gathered; marks are read only then."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._resumed = stopwatch.mark()
        self._traces: list[StepTrace] = []
        self._spans: list[tuple[Mark, Mark]] = []
        self._judged_s: list[float] = []
        self._with_other_shares = 0

    @property
    def unread(self) -> int:
        """Steps that no row tells about yet."""
        return len(self._traces)

    def resume(self) -> None:
        """The next step begins now: what happened since the last one is no part of it."""
        self._resumed = self._stopwatch.mark()

    def add(self, trace: StepTrace) -> None:
        """One more step is over."""
        now = self._stopwatch.mark()
        self._traces.append(trace)
        self._spans.append((self._resumed, now))
        self._resumed = now

    def traffic(self, *, way: str, dense_bytes: int, looks: int = 0) -> Traffic:
        """What the unread steps exchanged (see `traffic_of`); waits until the device has done them."""
        return traffic_of(
            self._traces,
            self._stopwatch,
            way=way,
            dense_bytes=dense_bytes,
            looks=looks,
            spans=self._spans,
        )

    def close(
        self,
        *,
        pace_use: float = 0.0,
        memory_bound: int = 0,
        stop_wished: bool = False,
        since_checkpoint_s: float = 0.0,
        checkpoint_part: float = 0.0,
        flow: Flow | None = None,
        model_mark: int = 0,
        drawn: tuple[int, int] = (0, 0),
    ) -> ControlRow:
        """The row for the steps since the last call, at least one; waits until the device has done them."""
        seconds = self._stopwatch.seconds
        traces, self._traces = self._traces, []
        spans, self._spans = self._spans, []
        # A period that holds nothing but steps with other shares ends a run: nobody judges it.
        fresh = traces[self._with_other_shares :] or traces
        self._with_other_shares = 0
        compute = [max(0.0, seconds(trace.start, trace.backward_end) - trace.waited_s) for trace in fresh]
        self._judged_s += compute
        median_s = statistics.median(self._judged_s)
        return ControlRow(
            steps=len(traces),
            step_time_s=statistics.fmean(seconds(*span) for span in spans),
            compute_s=statistics.fmean(compute),
            processor_s=statistics.fmean(
                self._stopwatch.processor_s(trace.start, trace.backward_end) for trace in fresh
            ),
            exchange_s=statistics.fmean(seconds(trace.backward_end, trace.reduce_end) for trace in fresh),
            judged_steps=len(self._judged_s),
            compute_median_s=median_s,
            # The factor makes the median absolute deviation of normal noise its standard deviation.
            compute_spread_s=1.4826 * statistics.median(abs(time_s - median_s) for time_s in self._judged_s),
            loss_sum=sum(float(trace.loss_sum) for trace in traces),
            pace_use=pace_use,
            memory_bound=memory_bound,
            stop_wished=float(stop_wished),
            since_checkpoint_s=since_checkpoint_s,
            checkpoint_part=checkpoint_part,
            model_mark=float(model_mark),
            drawn_epoch=drawn[0],
            drawn_batch=drawn[1],
            **({} if flow is None else {f"stream_{name}": float(value) for name, value in vars(flow).items()}),
        )

    def judged(self, *, changed: bool) -> None:
        """Shares were judged, and perhaps changed: the steps that count next time are those from now on."""
        self._judged_s = []
        if changed:
            self._with_other_shares = len(self._traces)


def _seconds(value: float) -> float:
    return round(value, 7)


LARGEST = 2**52
"""Whole numbers below it travel as they are."""

CLOSE = 1e-9
"""Relative distance of numbers that count as equal."""

_WORD = {4: torch.int32, 8: torch.int64}


class Groups(Protocol):
    """An optimizer, or several: parameters in groups with options."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As of ``torch.optim.Optimizer``."""


def tensors_mark(tensors: Iterable[Tensor]) -> int:
    """A checksum of some tensors in their order, for comparison between workers."""
    total: Tensor | None = None
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            words = flat.view(_WORD.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64) * (2 * index + 1)
            total = words if total is None else total + words.to(total.device)
    return 0 if total is None else int(total) % LARGEST


def is_option(value: object) -> bool:
    """Whether a value of a parameter group is a number, a text or a few of them."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (tuple, list)):
        return all(isinstance(one, (bool, int, float)) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))


def options_of(optimizer: Groups) -> list[tuple[str, float]]:
    """The optimizer's numbers by name: learning rates, momenta and so on of every group."""
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for key in sorted(group):
            value = group[key]
            if key == "params" or not is_option(value) or value is None or isinstance(value, str):
                continue
            for one in value if isinstance(value, (tuple, list)) else (value,):
                found.append((f"{key} of parameter group {index}", float(one)))
    return found


def parameters_of(optimizer: Groups) -> list[nn.Parameter]:
    """All that it has, in the order of its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]
