"""Measurements of a control period's steps: made by each worker, gathered in one control vector, read by all.

Every rank reads the same matrix, so whatever is decided from it is decided alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

from hetopt.core.events.log import Event
from hetopt.core.training_laws import Moments, pooled_noise
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.policies.policy import BatchObservation
from hetopt.trainer.policies.ratio.policy import GainCurve
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch


@dataclass(frozen=True)
class ControlRow:
    """One worker's measurements of a control period, sent to all workers as a row of numbers.

    A mean is over the steps of the period unless it says otherwise.

    Those behind ``exchanges`` are of the steps that exchanged in the way that is in use now.

    Attributes:
        steps: steps of the period.
        step_time_s: mean time of a step on the worker's clock, control left out.
        compute_s: mean time from before the first sample is fetched until the last gradient is ready, less the wait for
            other workers meanwhile, over the steps with the present shares.
        processor_s: mean processor time of the computing thread meanwhile; on a GPU all of it.
        exchange_s: mean time from there to the summed gradient, the wait for slower workers included; likewise.
        judged_steps: steps with the present shares since these were last judged.
        compute_median_s: median compute time over those: what shares are judged by, for one hiccup must not move them.
        compute_spread_s: robust standard deviation of one step's compute time over those.
        loss_sum: sum over the steps of the losses of the worker's samples, each over the samples of all workers.
        pace_use: real over declared compute time (see `Slowdown.use`); 0: not known.
        memory_bound: samples of the largest micro-batch that fits, as this worker learned; 0: it learned of no bound.
        stop_wished: 1: somebody asked this worker to stop; 0: nobody has.
        since_checkpoint_s: seconds since the last checkpoint began, on the worker's clock; the leader's counts.
        checkpoint_part: how far this worker's part of the checkpoint under way is, see `CheckpointSaver.progress`.
        stream_buffered: most samples of the worker's stream that waited, see `StreamCursor.flow`.
        stream_wait_s: seconds that the worker waited for its stream.
        stream_dropped: samples of the worker's stream that were dropped.
        model_mark: checksum of the parameters' bits; 0 also where workers' models differ between averages.
        drawn_epoch: epoch of the next batch that this worker has not drawn, where a script asks for batches.
        drawn_batch: number of that batch in its epoch.
        exchanges: number of exchanges in the way that is in use now; the means and medians below are over them.
        way_step_s: median time of the whole step, with what comes between and behind the parts below.
        way_compute_s: median time of the computation before them.
        compress_s: median of the worker's own work in an exchange.
        sync_s: median of the collective operations, with the wait for slower workers; under backward, of all that the
            step had to wait for.
        sent_bytes: mean of the bytes that the worker contributed to an exchange.
        energy, kept_energy: means of the squared norm of gradient and residual, and of what was sent of it; 0 where
            nothing is held back.
        gradient_energy: mean, of the gradient alone; 0 where nobody asks.
        own_norm: squared norm of the worker's weighted gradient, the mean over all steps that tell it; 0: none does.
        sum_norm: squared norm of the sum over all workers, the mean over the same steps.
        norm_samples: samples of the worker in these steps, the mean.
        norm_groups: number of groups of samples whose norms ``own_norm`` is made of (see `GradientNorms.take`).
        candidate_gain, floor_gain: means, where steps chose between a candidate and its floor; 0: they did not.
        look_energy: squared norm of gradient and residual when gains were last looked at; 0: they were not.
        look_energies: what the largest elements would have kept, one for each ratio that runs look at.
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
    pace_use: float = 0.0
    memory_bound: float = 0.0
    stop_wished: float = 0.0
    since_checkpoint_s: float = 0.0
    checkpoint_part: float = 0.0
    stream_buffered: float = 0.0
    stream_wait_s: float = 0.0
    stream_dropped: float = 0.0
    model_mark: float = 0.0
    drawn_epoch: float = 0.0
    drawn_batch: float = 0.0
    exchanges: float = 0.0
    way_step_s: float = 0.0
    way_compute_s: float = 0.0
    compress_s: float = 0.0
    sync_s: float = 0.0
    sent_bytes: float = 0.0
    energy: float = 0.0
    kept_energy: float = 0.0
    gradient_energy: float = 0.0
    own_norm: float = 0.0
    sum_norm: float = 0.0
    norm_samples: float = 0.0
    norm_groups: float = 0.0
    candidate_gain: float = 0.0
    floor_gain: float = 0.0
    look_energy: float = 0.0
    look_energies: tuple[float, ...] = field(default=(), kw_only=True)


_SINGLE = len(fields(ControlRow)) - 1
_OF_EXCHANGES = [column.name for column in fields(ControlRow)].index("exchanges")


@dataclass(frozen=True, kw_only=True)
class Period:
    """Measurements of all workers over one control period, in rank order.

    Where the period's first step was the last with other shares, its times are left out; its loss counts.

    Attributes:
        rows: measurements of each worker.
        local_batch_sizes: samples of each worker in a batch at the period's end.
        samples: samples of each worker in a full step then, several batches with accumulation; empty: one batch.
        devices: number of devices that share a model, neighbours in rank order.
    """

    rows: tuple[ControlRow, ...]
    local_batch_sizes: tuple[int, ...]
    samples: tuple[int, ...] = ()
    devices: int = 1

    @classmethod
    def of(
        cls,
        gathered: Sequence[Sequence[float]],
        *,
        local_batch_sizes: tuple[int, ...],
        samples: tuple[int, ...] = (),
        devices: int = 1,
    ) -> Period:
        """Return the period of all workers' rows of numbers, in rank order.

        Args:
            gathered: rows, each the numbers of a `ControlRow` with its ``look_energies`` last.
            local_batch_sizes: samples of each worker in a batch at the period's end.
            samples: samples of each worker in a full step; empty: a step is one batch.
            devices: number of devices that share a model.
        """
        rows = (ControlRow(*numbers[:_SINGLE], look_energies=tuple(numbers[_SINGLE:])) for numbers in gathered)
        return cls(rows=tuple(rows), local_batch_sizes=local_batch_sizes, samples=samples, devices=devices)

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
        """Mean loss of the period's steps; NaN or infinite if any worker's was."""
        return sum(row.loss_sum for row in self.rows) / self.steps

    @property
    def diverged(self) -> bool:
        """True where some worker met a loss that is NaN or infinite."""
        return not math.isfinite(self.loss)

    @property
    def noise(self) -> Moments | None:
        """The moments of the gradient in one step; None where its norms were not measured."""
        rows, groups = self.rows, round(sum(row.norm_groups for row in self.rows))
        if groups < 2 or min(row.norm_samples for row in rows) < 1:
            return None
        batch = int(sum(row.norm_samples for row in rows))
        # What a worker adds to the sum is b / B of its mean gradient.
        weighted = sum(batch**2 * row.own_norm / row.norm_samples for row in rows)
        return pooled_noise(groups, batch, weighted, rows[0].sum_norm)

    @property
    def drifted(self) -> tuple[int, ...]:
        """Ranks whose parameters differ from those of most workers with the same part of the model; empty: none do."""
        marks = [row.model_mark for row in self.rows]
        alike = [marks[rank % self.devices :: self.devices] for rank in range(len(marks))]
        return tuple(rank for rank, mark in enumerate(marks) if mark != max(alike[rank], key=alike[rank].count))

    @property
    def stop_wished(self) -> bool:
        """True where any worker was asked to stop."""
        return any(row.stop_wished for row in self.rows)

    @property
    def memory_bounds(self) -> tuple[int, ...]:
        """The largest micro-batch that fits each worker; 0 where no bound is known."""
        return tuple(int(row.memory_bound) for row in self.rows)

    @property
    def exchanges(self) -> int:
        """Number of exchanges that the figures are over; the same on all workers."""
        return int(self.rows[0].exchanges)

    @property
    def is_finite(self) -> bool:
        """True where no number of the exchanges is NaN or infinite."""
        return all(
            math.isfinite(number)
            for *single, looked in (vars(row).values() for row in self.rows)
            for number in (*single[_OF_EXCHANGES:], *looked)
        )

    def gain_curve(self, ratios: Sequence[float]) -> GainCurve | None:
        """Return the energy that each of ``ratios`` would have kept, as last measured; None: no step measured it."""
        looked = [row for row in self.rows if row.look_energy]
        if not looked:
            return None
        return GainCurve(
            ratios=tuple(ratios),
            kept=tuple(row.look_energies for row in looked),
            energy=tuple(row.look_energy for row in looked),
        )

    def observation(self, epoch: int, samples_seen: int) -> BatchObservation:
        """Return the period's measurements as batch policies take them; ``epoch``: epochs completed at its end.

        Args:
            epoch: number of epochs completed at the period's end.
            samples_seen: samples of all workers since the run began.
        """
        return BatchObservation(
            local_batch_sizes=self.local_batch_sizes,
            compute_s=tuple(row.compute_median_s for row in self.rows),
            spread_s=tuple(row.compute_spread_s for row in self.rows),
            steps=int(self.rows[0].judged_steps),
            epoch=epoch,
            step_time_s=self.step_time_s,
            noise=self.noise,
            samples_seen=samples_seen,
        )

    def stream_event(self, rates: Sequence[float]) -> Event:
        """Return the ``stream`` field of a ``step`` event: rates, samples waiting, seconds waited, dropped, by rank.

        Args:
            rates: rates of the streams, samples a second.
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
        """Return the measured fields of a ``step`` event: loss, mean seconds of a step and of its parts on each worker.

        The worker that waits least is the one the others wait for, so the least exchange time of the cluster is that of
        the exchange itself (``sync_s``, the same for all) and what a worker spends beyond it is its wait.

        Args:
            step: number of steps done at the period's end.
            epoch: passes over the data completed, with fractions.
            samples_seen: samples of all workers since the run began.
        """
        sync_s = min(row.exchange_s for row in self.rows)
        event: Event = {
            "step": step,
            "epoch": round(epoch, 4),
            "samples_seen": samples_seen,
            "local_batch_sizes": list(self.samples or self.local_batch_sizes),
            "step_time_s": _seconds(self.step_time_s),
            "compute_s": [_seconds(row.compute_s) for row in self.rows],
            "processor_s": [_seconds(row.processor_s) for row in self.rows],
            "sync_s": [_seconds(sync_s) for _ in self.rows],
            "wait_s": [_seconds(row.exchange_s - sync_s) for row in self.rows],
            "loss": self.loss,
            "steps": self.steps,
        }
        uses = [round(row.pace_use, 4) for row in self.rows]  # 0 where it is not known
        if any(uses):
            event["pace_use"] = uses
        return event


class PeriodLog:
    """Traces of this worker's steps since the last control row; time marks are read only when a row is made.

    Attributes:
        stopwatch: clock of the device.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._resumed = stopwatch.mark()
        self._steps: list[tuple[StepTrace, tuple[Mark, Mark]]] = []
        self._judged_s: list[float] = []
        self._with_other_shares = 0

    @property
    def unread(self) -> int:
        """The number of steps that no row tells about yet."""
        return len(self._steps)

    def resume(self) -> None:
        """Start timing the next step now, so that the time since the last one is no part of it."""
        self._resumed = self.stopwatch.mark()

    def add(self, trace: StepTrace) -> None:
        """Add the trace of a step, which ends now."""
        now = self.stopwatch.mark()
        self._steps.append((trace, (self._resumed, now)))
        self._resumed = now

    def close(
        self, *, way: str = "", averages: bool = False, dense_bytes: int = 0, looks: int = 0, **reported: float
    ) -> ControlRow:
        """Return the row of the steps since the last call, at least one, and forget these; waits for the device.

        Args:
            way: name of the exchange whose steps the exchange's figures are over; without such a step these are 0.
            averages: whether that way averages parameters: their time is told by itself, of the averages that were
                made.
            dense_bytes: bytes that a worker contributes where everything is summed under backward.
            looks: number of ratios at which the run looks at gains.
            **reported: further fields of the worker's row.

        Raises:
            StatisticsError: there was no step since the last call.
        """
        seconds = self.stopwatch.seconds
        steps, self._steps = self._steps, []
        traces = [trace for trace, _ in steps]
        # A period that holds nothing but steps with other shares ends a run: nobody judges it.
        fresh = traces[self._with_other_shares :] or traces
        self._with_other_shares = 0
        compute = [max(0.0, seconds(trace.start, trace.backward_end) - trace.waited_s) for trace in fresh]
        self._judged_s += compute
        median_s = statistics.median(self._judged_s)
        alike = [(trace, span) for trace, span in steps if trace.way == way]
        stats = [self._waited_for(trace, dense_bytes) for trace, _ in alike]
        averaging_s = [exchange.compress_s + exchange.sync_s if averages else 0.0 for exchange in stats]
        if averages:
            stats = [exchange for exchange in stats if exchange.sync_s]
        gains = [exchange.level_gains for exchange in stats if exchange.level_gains is not None]
        norms = [trace.norms for trace in traces if trace.norms is not None]
        looked = next(
            (t.exchange for t in reversed(traces) if t.exchange is not None and t.exchange.look_energies), None
        )
        return ControlRow(
            steps=len(traces),
            step_time_s=statistics.fmean(seconds(*span) for _, span in steps),
            compute_s=statistics.fmean(compute),
            processor_s=statistics.fmean(
                self.stopwatch.processor_s(trace.start, trace.backward_end) for trace in fresh
            ),
            exchange_s=statistics.fmean(seconds(trace.backward_end, trace.reduce_end) for trace in fresh),
            judged_steps=len(self._judged_s),
            compute_median_s=median_s,
            # The factor makes the median absolute deviation of normal noise its standard deviation.
            compute_spread_s=1.4826 * statistics.median(abs(time_s - median_s) for time_s in self._judged_s),
            loss_sum=sum(float(trace.loss_sum) for trace in traces),
            exchanges=len(alike),
            way_step_s=statistics.median(
                _or_zero(seconds(*span) - extra_s for (_, span), extra_s in zip(alike, averaging_s, strict=True))
            ),
            way_compute_s=statistics.median(_or_zero(seconds(trace.start, trace.backward_end) for trace, _ in alike)),
            compress_s=statistics.median(_or_zero(exchange.compress_s for exchange in stats)),
            sync_s=statistics.median(_or_zero(exchange.sync_s for exchange in stats)),
            sent_bytes=statistics.fmean(_or_zero(exchange.sent_bytes for exchange in stats)),
            energy=statistics.fmean(_or_zero(exchange.energy or 0.0 for exchange in stats)),
            kept_energy=statistics.fmean(_or_zero(exchange.kept_energy or 0.0 for exchange in stats)),
            gradient_energy=statistics.fmean(_or_zero(trace.gradient_energy or 0.0 for trace, _ in alike)),
            own_norm=statistics.fmean(_or_zero(norm for norm, _, _, _ in norms)),
            sum_norm=statistics.fmean(_or_zero(norm for _, norm, _, _ in norms)),
            norm_samples=statistics.fmean(_or_zero(samples for _, _, samples, _ in norms)),
            norm_groups=statistics.fmean(_or_zero(groups for _, _, _, groups in norms)),
            candidate_gain=statistics.fmean(_or_zero(gain for gain, _ in gains)),
            floor_gain=statistics.fmean(_or_zero(gain for _, gain in gains)),
            look_energy=0.0 if looked is None else looked.energy or 0.0,
            look_energies=(0.0,) * looks if looked is None else looked.look_energies,
            **reported,
        )

    def _waited_for(self, trace: StepTrace, dense_bytes: int) -> ExchangeStats:
        """Return the part of an exchange that adds to a step: all of it, or what backward did not hide."""
        if trace.exchange is not None and not trace.under_backward:
            return trace.exchange
        stats = trace.exchange or ExchangeStats(sent_bytes=dense_bytes)
        return replace(stats, compress_s=0.0, sync_s=self.stopwatch.seconds(trace.backward_end, trace.reduce_end))

    def judged(self, *, changed: bool) -> None:
        """Forget compute times, so that only later steps judge local batch sizes; ``changed``: these have changed."""
        self._judged_s = []
        if changed:
            self._with_other_shares = len(self._steps)


def _seconds(value: float) -> float:
    return round(value, 7)


def _or_zero(values: Iterable[float]) -> list[float]:
    """Return numbers; a zero where there are none."""
    return list(values) or [0.0]
