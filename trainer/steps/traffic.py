"""What the exchanges of a control period were like: measured by each worker, gathered with the control vector."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hetopt.trainer.comm.exchange import ExchangeStats
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
