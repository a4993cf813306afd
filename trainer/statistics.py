"""What the steps of a control period were like: measured by each worker, gathered in one control vector, read by all.

Every rank reads the same matrix, so whatever is decided from it is decided alike. A worker's row tells of its steps
(`ControlRow`), then of its exchanges (`Traffic`). What has to be the same on all workers has a short mark here, equal
where it is, bit for bit, on whatever device it lies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hetopt.core.events.log import Event
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.data.replay import Flow
from hetopt.trainer.policies.policy import BatchObservation
from hetopt.trainer.policies.ratio.policy import GainCurve, gain_of
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One worker's exchanges of a period, those in the way that is in use now.

    Attributes:
        exchanges: how many; the means and medians are over them.
        step_s: median time of the whole step, with what comes between and behind the parts below; 0: nobody timed it.
        compute_s: median time of the computation before them.
        compress_s: median of the worker's own work, and of what it does together with others of its host.
        sync_s: median of the operations between hosts, with the wait for slower workers; under backward, of all that
            the step had to wait for.
        sent_bytes: mean of what the worker contributed.
        energy, kept_energy: means, of gradient and residual; 0 where nothing is held back.
        gradient_energy: mean, of the gradient alone; 0 where nobody asks.
        candidate_gain, floor_gain: means, where steps chose between a candidate and its floor; 0: they did not.
        look_energy: of gradient and residual when gains were looked at; 0: they were not.
        look_energies: what the largest elements would have kept, one for each ratio that runs look at.
    """

    exchanges: float = 0.0
    step_s: float = 0.0
    compute_s: float = 0.0
    compress_s: float = 0.0
    sync_s: float = 0.0
    sent_bytes: float = 0.0
    energy: float = 0.0
    kept_energy: float = 0.0
    gradient_energy: float = 0.0
    candidate_gain: float = 0.0
    floor_gain: float = 0.0
    look_energy: float = 0.0
    look_energies: tuple[float, ...] = ()

    def to_list(self) -> list[float]:
        """The numbers, in the order of the fields."""
        *single, looked = (getattr(self, field.name) for field in fields(self))
        return [*single, *looked]

    @classmethod
    def from_list(cls, row: Sequence[float]) -> Traffic:
        """The traffic that `to_list` gave."""
        single = len(fields(cls)) - 1
        named = {field.name: number for field, number in zip(fields(cls), row[:single], strict=False)}
        return replace(cls(look_energies=tuple(row[single:])), **named)  # type: ignore[arg-type]  # all but the last


def traffic_of(
    traces: Sequence[StepTrace],
    stopwatch: Stopwatch,
    *,
    way: str,
    dense_bytes: int,
    looks: int = 0,
    spans: Sequence[tuple[Mark, Mark]] = (),
) -> Traffic:
    """The traffic of some steps.

    Args:
        traces: of the steps.
        stopwatch: that read their marks.
        way: only steps that exchanged in this way count.
        dense_bytes: what a worker contributed where everything was summed under backward.
        looks: ratios at which runs look at gains.
        spans: beginning and end of each step.
    """
    places = [place for place, trace in enumerate(traces) if trace.way == way]
    own = [traces[place] for place in places]
    looked = next((t.exchange for t in reversed(traces) if t.exchange is not None and t.exchange.look_energies), None)
    found = Traffic(look_energies=(0.0,) * looks)
    if looked is not None and looked.energy is not None:
        found = replace(found, look_energy=looked.energy, look_energies=looked.look_energies)
    if not own:
        return found
    seconds = stopwatch.seconds
    dense = ExchangeStats(sent_bytes=dense_bytes, compress_s=0.0, sync_s=0.0)

    def waited_for(trace: StepTrace) -> ExchangeStats:
        """What of an exchange adds to a step: all of it, or what backward did not hide."""
        stats = dense if trace.exchange is None else trace.exchange
        if trace.exchange is not None and not trace.under_backward:
            return stats
        return replace(stats, compress_s=0.0, sync_s=seconds(trace.backward_end, trace.reduce_end))

    stats = [waited_for(trace) for trace in own]
    gains = [one.level_gains for one in stats if one.level_gains is not None]
    return replace(
        found,
        exchanges=len(own),
        step_s=statistics.median(seconds(*spans[place]) for place in places) if spans else 0.0,
        compute_s=statistics.median(seconds(trace.start, trace.backward_end) for trace in own),
        compress_s=statistics.median(one.compress_s for one in stats),
        sync_s=statistics.median(one.sync_s for one in stats),
        sent_bytes=statistics.fmean(one.sent_bytes for one in stats),
        energy=statistics.fmean(one.energy or 0.0 for one in stats),
        kept_energy=statistics.fmean(one.kept_energy or 0.0 for one in stats),
        gradient_energy=statistics.fmean(trace.gradient_energy or 0.0 for trace in own),
        candidate_gain=statistics.fmean(gain for gain, _ in gains) if gains else 0.0,
        floor_gain=statistics.fmean(gain for _, gain in gains) if gains else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """The traffic of all workers, in rank order."""

    rows: tuple[Traffic, ...]

    @property
    def exchanges(self) -> int:
        """Exchanges that the figures are over; the same on all workers."""
        return int(self.rows[0].exchanges)

    @property
    def step_s(self) -> float:
        """Seconds of the whole step, which is as long on all workers; where nobody timed it, all of its parts."""
        whole_s = statistics.median(row.step_s for row in self.rows) or self.compress_s + self.sync_s + self.compute_s
        return max(whole_s, self.compute_s)

    @property
    def compute_s(self) -> float:
        """Compute time of the slowest worker, in seconds."""
        return max(row.compute_s for row in self.rows)

    @property
    def compress_s(self) -> float:
        """Time for compression on the slowest worker, in seconds."""
        return max(row.compress_s for row in self.rows)

    @property
    def sync_s(self) -> float:
        """Seconds in the collective of the worker that waited least, so that only the network is in it."""
        return min(row.sync_s for row in self._senders)

    @property
    def sent_bytes(self) -> int:
        """Mean over the workers that send to others."""
        return round(statistics.fmean(row.sent_bytes for row in self._senders))

    @property
    def _senders(self) -> tuple[Traffic, ...]:
        return tuple(row for row in self.rows if row.sent_bytes > 0) or self.rows

    @property
    def energy(self) -> tuple[float, ...]:
        """Energy (squared norm) of each worker's gradient."""
        return tuple(row.energy for row in self.rows)

    @property
    def kept_energy(self) -> tuple[float, ...]:
        """Retained energy of each worker's gradient."""
        return tuple(row.kept_energy for row in self.rows)

    @property
    def gain(self) -> float:
        """Kept energy over energy, of all workers, in [0, 1]; 1 where nothing is held back."""
        return gain_of(sum(self.kept_energy), sum(self.energy))

    @property
    def gradient_norm(self) -> float:
        """Root of the mean square over workers and steps; 0 where nobody asks."""
        return math.sqrt(statistics.fmean(row.gradient_energy for row in self.rows))

    @property
    def level_gains(self) -> tuple[float, float] | None:
        """Of the candidate and of the floor, where steps chose between them; None: they did not."""
        row = max(self.rows, key=lambda row: row.floor_gain)  # workers whose host sends for them tell nothing
        return (row.candidate_gain, row.floor_gain) if row.floor_gain > 0 else None

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return all(math.isfinite(number) for row in self.rows for number in row.to_list())

    def gain_curve(self, ratios: Sequence[float]) -> GainCurve | None:
        """At the ratios that runs look at; None: nobody looked."""
        looked = [row for row in self.rows if row.look_energy]
        if not ratios or not looked:
            return None
        return GainCurve(
            ratios=tuple(ratios),
            kept=tuple(row.look_energies for row in looked),
            energy=tuple(row.look_energy for row in looked),
        )


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
        micro_batches: mean number that the worker's samples were computed in.
        memory_bound: samples of the largest micro-batch that fits, as this worker learned; 0: it learned of no bound.
        stop_wished: 1 when somebody asked this worker to stop.
        since_checkpoint_s: on the worker's clock; the leader's counts.
        checkpoint_part: how far this worker's part of the checkpoint under way is, see `CheckpointSaver.progress`.
        stream_rate_per_s: of `Flow`, as the rest is: what the worker's stream was like in the period.
        stream_buffered: likewise.
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
    micro_batches: float
    memory_bound: float
    stop_wished: float
    since_checkpoint_s: float
    checkpoint_part: float = 0.0
    stream_rate_per_s: float = -1.0
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
DRAWN = slice(_ROW.index("drawn_epoch"), _ROW.index("drawn_batch") + 1)
"""Where a row tells of the next batch, which is known last."""

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
            rates_per_s=tuple(row.stream_rate_per_s for row in self.rows),
        )

    def stream_event(self) -> Event:
        """The field of a ``step`` event that tells about the workers' streams, each in rank order."""
        return {
            "stream": {
                "rate_per_s": [round(row.stream_rate_per_s, 4) for row in self.rows],
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
            micro_batches=statistics.fmean(trace.micro_batches for trace in traces),
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
