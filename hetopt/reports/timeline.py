"""A run over time, as charts draw it: stretches with each worker's share, computing and waiting, and what all of them
exchanged; and what happened on the way, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core import formatting
from hetopt.core.artifact import Record, Told
from hetopt.core.events.decisions import gain_in_words
from hetopt.core.events.fold import PlacedSteps, RunHistory, matrix
from hetopt.core.events.records import (
    AuditDiffers,
    CheckpointFailed,
    CheckpointSkipped,
    ClockJumped,
    ConditionChanged,
    EmulationSlowed,
    ExchangeChanged,
    LogEvent,
    MemoryBoundLearned,
    PairedTrialEnded,
    SharesChanged,
    StepsLogged,
    SupervisorActed,
    SupervisorMeasured,
    SyncSettled,
    TrainingStarted,
    WorkerLost,
    WorkersChanged,
)

MOST_MOMENTS = 400
"""More than a chart of any width shows; longer runs are kept in coarser steps of time."""


class Exchanged(Record):
    """The exchanges of gradients in a stretch of the run: means of one exchange, where not said otherwise."""

    way: Told = Field(description="compressor, ratio and collective; the last, where they changed")
    ratio: float = Field(gt=0, le=1, description="fraction of the elements that was sent")
    gain: NonNegativeFloat = Field(description="gradient energy that this retained")
    sent_bytes: NonNegativeFloat = Field(description="contributed by one worker")
    dense_bytes: PositiveFloat = Field(description="what it contributes where everything is sent in fp32")
    compress_s: NonNegativeFloat = Field(description="of the slowest worker")
    sync_s: NonNegativeFloat = Field(description="of the worker that waited least")

    @property
    def time_s(self) -> float:
        """Seconds of communication in a step: compression and the collective."""
        return self.compress_s + self.sync_s

    @property
    def sent_share(self) -> float:
        """Bytes sent, as a share of those of the dense fp32 gradient."""
        return self.sent_bytes / self.dense_bytes


_FIGURE_NAMES = tuple(name for name in Exchanged.model_fields if name != "way")
_FIGURES = attrgetter(*_FIGURE_NAMES)


class Moment(Record):
    """A stretch of the run over one set of shares (in long runs: over a few).

    Lists have one figure for each worker that ever trained, in the order of the report's workers; none for those that
    took no part in it.
    """

    step: NonNegativeInt = Field(description="the last step of it")
    steps: PositiveInt
    begin_s: float = Field(description="seconds since training began, without those in which nothing of the run ran")
    end_s: float
    local_batch_sizes: tuple[NonNegativeInt | None, ...] = Field(
        description="samples of a step; the last, where they changed"
    )
    compute_s: tuple[NonNegativeFloat | None, ...] = Field(description="mean of a step")
    wait_s: tuple[NonNegativeFloat | None, ...] = Field(description="for the slowest worker, mean of a step")
    exchange: Exchanged | None = Field(default=None, description="absent for a single worker, and in old logs")


AT_ONCE_S = 0.5
"""Changes of conditions that follow each other so closely were asked for together."""

Kind = Literal[
    "condition_changed",
    "miniature_slowed",
    "shares_changed",
    "exchange_changed",
    "audit_differs",
    "twins_tried",
    "sync_settled",
    "memory_bound_learned",
    "worker_lost",
    "workers_changed",
    "checkpoint_failed",
    "checkpoint_skipped",
    "resumed",
    "clock_jumped",
    "supervisor_acted",
    "supervisor_measured",
]
ROUTINE: tuple[Kind, ...] = ("shares_changed", "exchange_changed")
"""What happens as a matter of course, and often."""


_DONE = {
    "drop": "dropped",
    "replace": "another machine takes its place",
    "on-demand": "moving to on-demand machines",
    "add": "more machines like it",
    "switch": "leaving for another zone",
}


class Happening(Record):
    """Something that explains a bend in the curves."""

    kind: Kind
    time_s: float = Field(description="seconds since training began")
    step: NonNegativeInt | None
    hosts: tuple[Told, ...] = Field(default=(), description="where; none for what concerns all")
    text: Told

    @property
    def sentence(self) -> str:
        """What happened as one sentence, with the hosts that it concerns."""
        return f"{', '.join(self.hosts)}: {self.text}" if self.hosts else self.text

    @property
    def is_routine(self) -> bool:
        """Whether it is no news to a person who watches."""
        return self.kind in ROUTINE


class Timeline(Record):
    """All of a run so far."""

    moments: tuple[Moment, ...] = ()
    happenings: tuple[Happening, ...] = ()


def timeline(history: RunHistory, *, time_factor: float = 1.0, most: int = MOST_MOMENTS) -> Timeline:
    """The timeline of one run. Time in which nothing of it ran, between its sessions, is left out.

    Args:
        history: of the run.
        time_factor: of its miniature, so that link rates are told as those of the rehearsed cluster.
        most: moments to keep.
    """
    roster, steps = history.run.roster, history.steps
    happenings: list[Happening] = []
    for one in history.others:
        step, at_s = steps.events[one.row - 1].step if one.row else 0, one.at_s or 0.0
        if one.paused_s is not None and isinstance(one.event, TrainingStarted):
            happenings.append(_went_on(one.event, at_s, paused_s=one.paused_s, step=step))
            continue
        host = partial(roster.host, present=one.present)
        found = happening(one.event, host, at_s=at_s, time_factor=time_factor)
        if found is not None:
            happenings.append(found if found.step is not None else found.model_copy(update={"step": step}))
    moments = _coarser(steps, most, len(roster.workers))
    return Timeline(moments=tuple(moments), happenings=tuple(_joined(happenings)))


def _went_on(event: TrainingStarted, at_s: float, *, paused_s: float, step: int) -> Happening:
    """Another session began to train."""
    again = f"; {formatting.counted(step - event.step, 'step')} to do again" if step > event.step else ""
    text = (
        f"went on from step {formatting.count(event.step)}, {formatting.duration(paused_s)} after it had ended{again}"
    )
    return Happening(kind="resumed", time_s=round(at_s, 3), step=event.step, text=text)


def happening(
    event: LogEvent, host: Callable[[int], str], *, at_s: float = 0.0, time_factor: float = 1.0
) -> Happening | None:
    """What an event of the log tells a person who watches the run; absent for the events of every day.

    Args:
        event: any event.
        host: of the worker of a rank.
        at_s: when it happened, seconds since training began.
        time_factor: see `timeline`.
    """
    kind: Kind
    where: tuple[str, ...] = ()
    step: int | None = None
    match event:
        case ConditionChanged():
            kind, where, step = "condition_changed", (event.host,), event.step
            text = _conditions(event, time_factor)
        case EmulationSlowed():
            kind, text, step = "miniature_slowed", event.reason, event.step
        case MemoryBoundLearned():
            kind, where, step = "memory_bound_learned", (host(event.rank),), event.step
            text = f"holds no more than {formatting.counted(event.samples, 'sample')} at a time"
        case WorkerLost():
            kind, where, text = "worker_lost", (event.host,), event.reason
        case WorkersChanged():
            kind, text, step = "workers_changed", _who_trains(event), event.step
        case CheckpointFailed():
            kind, step = "checkpoint_failed", event.step
            text = f"no checkpoint: {event.reason}"
        case CheckpointSkipped():
            kind, text, step = "checkpoint_skipped", f"passed over a checkpoint: {event.reason}", event.step
        case ClockJumped():
            kind = "clock_jumped"
            text = f"the clock went {'forward' if event.by_s > 0 else 'back'} by {formatting.duration(abs(event.by_s))}"
        case SupervisorActed():
            done, all_of_it = _DONE[event.action], event.action in ("on-demand", "switch")
            where = () if all_of_it else (event.host,)
            kind, text, step = "supervisor_acted", f"{done}: {event.reason}", event.step
        case SupervisorMeasured():
            kind, step = "supervisor_measured", event.step
            text = gain_in_words(
                asdict(event), "a step takes {measured} {how}; {expected} was expected, {before} before"
            )
        case SharesChanged():
            after = ", ".join(map(str, event.after))
            kind, text, step = "shares_changed", f"local batch sizes {after} ({event.reason})", event.step
        case PairedTrialEnded():
            kind, text, step = "twins_tried", _tried(event), event.step
        case SyncSettled():
            averages = f"averaged every {formatting.counted(event.every_steps, 'step')}, in {event.compressor}"
            if event.fragments > 1:
                averages += f", a fragment of {event.fragments} at a time"
            kind, step = "sync_settled", event.step
            text = f"from now on parameters are {averages} ({event.reason})"
        case AuditDiffers():
            kind, text, step = "audit_differs", event.reason, event.step
        case ExchangeChanged():
            # Who weighs whole ways names them in the reason; who decides on a ratio does not.
            way, reason = event.after, event.reason
            kind, step = "exchange_changed", event.step
            text = reason if way in reason else f"now {way} ({reason})"
        case _:
            return None
    return Happening(kind=kind, time_s=round(at_s, 3), step=step, hosts=where, text=text)


def _who_trains(event: WorkersChanged) -> str:
    """What is told of another generation of workers."""
    took = f" after {event.recovery_s:.1f} s" if event.recovery_s is not None else ""
    parts = [
        *([f"without worker {', '.join(map(str, event.lost))}"] if event.lost else []),
        *([f"with worker {', '.join(map(str, event.new))} anew"] if event.new else []),
    ]
    return f"goes on from {event.source}{took}{', ' if parts else ''}{' and '.join(parts)}"


def _tried(event: PairedTrialEnded) -> str:
    """What a paired trial has shown, as a phrase."""
    shown = {
        "harmless": "learns as fast as the dense one: sent where that saves time",
        "harmful": "falls behind: nearly all of its energy is sent",
    }
    found = shown.get(event.says, "cannot be compared yet, as the loss hardly changes: tried again later")
    took, part = formatting.duration(event.took_s), formatting.share(event.ratio)
    return f"paired trial of {took}: {part} of the gradient {found}"


def _conditions(event: ConditionChanged, time_factor: float) -> str:
    if event.dies:
        return event.reason or "dead"
    if event.returns:
        return "there again"
    if event.notice:
        return "has notice"
    if event.cut:
        return "cut off"
    if event.heals:
        return "reached again"
    speed, rate = event.speed, event.rate_bits_per_s
    parts = [
        *([f"speed {speed:g}"] if speed is not None else []),
        *([f"link {formatting.bit_rate(rate * time_factor)}"] if rate is not None else []),
    ]
    return ", ".join(parts)


def _joined(happenings: Iterable[Happening]) -> list[Happening]:
    """What happened to several hosts at once is one thing."""
    joined: list[Happening] = []
    for one in happenings:
        last = joined[-1] if joined else None
        if (
            last is not None
            and one.kind == last.kind == "condition_changed"
            and one.text == last.text
            and one.time_s - last.time_s < AT_ONCE_S
        ):
            joined[-1] = last.model_copy(update={"hosts": last.hosts + one.hosts})
        else:
            joined.append(one)
    return joined


def _coarser(steps: PlacedSteps, most: int, workers: int) -> list[Moment]:
    """No more than ``most`` moments: as many ``step`` events as that takes become one."""
    count = len(steps.events)
    together = -(-count // most)
    return [_moment(_part(steps, start, start + together), workers) for start in range(0, count, max(1, together))]


def _part(steps: PlacedSteps, start: int, end: int) -> PlacedSteps:
    """The steps from index ``start`` to before ``end``."""
    return PlacedSteps(events=steps.events[start:end], end_s=steps.end_s[start:end], places=steps.places[start:end])


def _alike(steps: PlacedSteps) -> Iterator[tuple[tuple[int, ...], list[StepsLogged]]]:
    """Successive steps of the same workers together."""
    if steps.places.count(steps.places[0]) == len(steps.places):
        yield steps.places[0], steps.events
        return
    for places, group in groupby(zip(steps.places, steps.events, strict=True), key=lambda pair: pair[0]):
        yield places, [event for _, event in group]


def _moment(steps: PlacedSteps, workers: int) -> Moment:
    """Several steps together: of each worker, means over those in which it took part."""
    first, last = steps.events[0], steps.events[-1]
    shares: list[int | None] = [None] * workers
    compute_s: list[float | None] = [None] * workers
    wait_s: list[float | None] = [None] * workers
    totals = [0.0] * workers
    for places, events in _alike(steps):
        counts = np.array([event.steps for event in events], dtype=np.float64)
        total = float(counts.sum())
        for told, rows in (
            (compute_s, [event.compute_s for event in events]),
            (wait_s, [event.wait_s for event in events]),
        ):
            means = rows[0] if len(rows) == 1 else (counts @ matrix(rows) / total).tolist()
            for place, mean in zip(places, means, strict=True):
                before = told[place]
                weighted = mean if before is None else (before * totals[place] + mean * total) / (totals[place] + total)
                told[place] = round(weighted, 7)
        for place, share in zip(places, events[-1].local_batch_sizes, strict=True):
            shares[place] = share
            totals[place] += total
    end_s = round(steps.end_s[-1], 3)
    begin_s = steps.end_s[0] - first.steps * first.step_time_s
    return Moment(
        step=last.step,
        steps=sum(event.steps for event in steps.events),
        begin_s=min(round(max(0.0, begin_s), 3), end_s),
        end_s=end_s,
        local_batch_sizes=tuple(shares),
        compute_s=tuple(compute_s),
        wait_s=tuple(wait_s),
        exchange=_one_exchange(steps.events),
    )


def _one_exchange(events: Sequence[StepsLogged]) -> Exchanged | None:
    """The exchanges of several ``step`` events: means over their steps, the last way."""
    known = [(event.steps, event.exchange) for event in events if event.exchange is not None]
    if not known:
        return None
    last = known[-1][1]
    if len(known) == 1:
        return Exchanged(**{name: getattr(last, name) for name in Exchanged.model_fields})
    counts = np.array([count for count, _ in known], dtype=np.float64)
    rows = matrix([_FIGURES(one) for _, one in known])
    means = dict(zip(_FIGURE_NAMES, (counts @ rows / counts.sum()).tolist(), strict=True))
    return Exchanged(way=last.way, **{**means, "ratio": min(1.0, means["ratio"])})
