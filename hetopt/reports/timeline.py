"""A run over time, read from its events: each worker's share, computing and waiting, what all of them exchanged, and
what happened on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import Field, NonNegativeInt

from hetopt.core import formatting
from hetopt.core.artifact import Record, Told
from hetopt.core.events.decisions import gain_in_words
from hetopt.core.events.records import (
    CheckpointFailed,
    CheckpointSkipped,
    ClockJumped,
    ConditionChanged,
    EmulationSlowed,
    ExchangeChanged,
    LogEvent,
    MemoryBoundLearned,
    PairedTrialEnded,
    RunStarted,
    SharesChanged,
    StepsLogged,
    SupervisorActed,
    SupervisorMeasured,
    SyncSettled,
    TrainingStarted,
    WorkerLost,
    WorkersChanged,
)
from hetopt.reports.moments import MOST_MOMENTS, Moment, PlacedSteps, coarser
from hetopt.reports.sessions import Roster, RunClock

AT_ONCE_S = 0.5
"""Changes of conditions that follow each other so closely were asked for together."""

Kind = Literal[
    "condition_changed",
    "miniature_slowed",
    "shares_changed",
    "exchange_changed",
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


def timeline(
    events: Iterable[LogEvent], *, starts: Sequence[float] = (), time_factor: float = 1.0, most: int = MOST_MOMENTS
) -> Timeline:
    """The timeline of one run. Time in which nothing of it ran, between its sessions, is left out.

    Args:
        events: its log.
        starts: when it was launched and went on, seconds since the epoch, where that is known.
        time_factor: of its miniature, so that link rates are told as those of the rehearsed cluster.
        most: moments to keep.
    """
    clock, roster = RunClock(starts=tuple(sorted(starts))), Roster()
    began_s: float | None = None
    session, idle_s, step = 0, 0.0, 0
    steps = PlacedSteps()
    happenings: list[Happening] = []
    for event in events:
        clock.take(event)
        match event:
            case StepsLogged():
                if began_s is None:  # the log lost the line that says so
                    began_s = max(0.0, clock.now_s - event.steps * event.step_time_s)
                steps.events.append(event)
                steps.end_s.append(clock.now_s - began_s)
                steps.places.append(roster.places(len(event.compute_s)))
                step = event.step
            case RunStarted():
                roster.take(event)
            case TrainingStarted():
                if began_s is None:
                    began_s = clock.now_s
                elif clock.sessions > session:
                    at_s = round(clock.now_s - began_s, 3)
                    happenings.append(_went_on(event, at_s, idle_s=clock.idle_s - idle_s, step=step))
                session, idle_s = clock.sessions, clock.idle_s
            case _:
                at_s = 0.0 if began_s is None else clock.now_s - began_s
                found = happening(event, roster.host, at_s=at_s, time_factor=time_factor)
                if found is not None:
                    happenings.append(found if found.step is not None else found.model_copy(update={"step": step}))
    moments = coarser(steps, most, len(roster.workers))
    return Timeline(moments=tuple(moments), happenings=tuple(_joined(happenings)))


def _went_on(event: TrainingStarted, at_s: float, *, idle_s: float, step: int) -> Happening:
    """Another session began to train."""
    again = f"; {formatting.count(step - event.step)} steps are done again" if step > event.step else ""
    text = f"went on from step {formatting.count(event.step)}, {formatting.duration(idle_s)} after it had ended{again}"
    return Happening(kind="resumed", time_s=at_s, step=event.step, text=text)


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
            text = f"holds no more than {event.samples} samples at a time"
        case WorkerLost():
            kind, where, text = "worker_lost", (event.host,), event.reason
        case WorkersChanged():
            kind, text, step = "workers_changed", _who_trains(event), event.step
        case CheckpointFailed():
            kind, step = "checkpoint_failed", event.step
            text = f"no checkpoint: {event.reason}; tried again when the next is due"
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
            kind, text, step = "shares_changed", f"now {after} ({event.reason})", event.step
        case PairedTrialEnded():
            kind, text, step = "twins_tried", _tried(event), event.step
        case SyncSettled():
            averages = f"averaged every {event.every_steps} steps, in {event.compressor}"
            if event.fragments > 1:
                averages += f", a fragment of {event.fragments} at a time"
            kind, step = "sync_settled", event.step
            text = f"from now on parameters are {averages} ({event.reason})"
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
        return "dead"
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
