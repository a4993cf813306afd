"""A run's noteworthy events and present figures, in words."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, cast

from pydantic import Field, NonNegativeInt

from hetopt.core import formatting
from hetopt.core.artifact import CleanText, Record
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.events.fold import RunFold, RunHistory
from hetopt.core.events.records import (
    ClockJumped,
    ConditionChanged,
    ExchangeChanged,
    LogEvent,
    MemoryBoundLearned,
    PairedTrialEnded,
    Remarked,
    RunStarted,
    SharesChanged,
    StepsLogged,
    SupervisorActed,
    TrainingStarted,
    WorkerLost,
    WorkersChanged,
)
from hetopt.optimizer.launch_record import Launch

Kind = Literal[
    "condition_changed",
    "miniature_slowed",
    "shares_changed",
    "exchange_changed",
    "audit_differs",
    "loss_diverged",
    "twins_tried",
    "memory_bound_learned",
    "worker_lost",
    "workers_changed",
    "checkpoint_failed",
    "checkpoint_skipped",
    "resumed",
    "clock_jumped",
    "supervisor_acted",
]
ROUTINE: tuple[Kind, ...] = ("shares_changed", "exchange_changed")
"""Kinds of events that happen as a matter of course, and often."""


_WHAT = {"checkpoint_failed": "no checkpoint: ", "checkpoint_skipped": "passed over a checkpoint: "}
_FATES = {"returns": "there again", "notice": "has notice", "cut": "cut off", "heals": "reached again"}
_DONE = {"replace": "another machine takes its place", "on-demand": "moving to on-demand machines"}


class NotableEvent(Record):
    """A noteworthy event of a run, such as a lost worker, with its time, step and hosts."""

    kind: Kind
    time_s: float = Field(description="seconds since training began")
    step: NonNegativeInt | None
    hosts: tuple[CleanText, ...] = Field(default=(), description="where; none for what concerns all")
    text: CleanText

    @property
    def sentence(self) -> str:
        """Words on what happened, as one sentence, with the hosts that it concerns."""
        return f"{', '.join(self.hosts)}: {self.text}" if self.hosts else self.text

    @property
    def is_routine(self) -> bool:
        """True where the event is no news to a person who watches."""
        return self.kind in ROUTINE


def happenings(history: RunHistory, *, time_factor: float = 1.0) -> tuple[NotableEvent, ...]:
    """Return a run's noteworthy events in words, in order; time between its sessions is left out.

    Args:
        history: events of the run.
        time_factor: factor by which its miniature slows time, so that link rates are those of the rehearsed cluster; 1:
            none.
    """
    steps = history.steps
    happened: list[NotableEvent] = []
    for placed in history.others:
        step, at_s = steps[placed.row - 1].step if placed.row else 0, placed.at_s or 0.0
        if placed.paused_s is not None and isinstance(placed.event, TrainingStarted):
            happened.append(_went_on(placed.event, at_s, paused_s=placed.paused_s, step=step))
            continue
        news = happening(placed.event, at_s=at_s, time_factor=time_factor)
        if news is not None:
            happened.append(news if news.step is not None else news.model_copy(update={"step": step}))
    return tuple(happened)


def _went_on(event: TrainingStarted, at_s: float, *, paused_s: float, step: int) -> NotableEvent:
    """Return the happening that a later session began to train, ``paused_s`` after the one before had ended.

    ``step``: the last of the session before; those after the event's are to do again.
    """
    again = f"; {formatting.counted(step - event.step, 'step')} to do again" if step > event.step else ""
    text = (
        f"went on from step {formatting.count(event.step)}, {formatting.duration(paused_s)} after it had ended{again}"
    )
    return NotableEvent(kind="resumed", time_s=round(at_s, 3), step=event.step, text=text)


def happening(event: LogEvent, *, at_s: float = 0.0, time_factor: float = 1.0) -> NotableEvent | None:
    """Return a log's event in words if it is noteworthy; None: it is an everyday one, such as logged steps.

    Args:
        event: event of a log.
        at_s: moment of the event, in seconds since training began.
        time_factor: factor by which its miniature slows time, see `happenings`; 1: none.
    """
    text = _text(event, time_factor)
    if text is None:
        return None
    hosts: tuple[str, ...] = ()
    match event:
        case ConditionChanged() | WorkerLost() | SupervisorActed(action="replace"):
            hosts = (event.host,)
    kind, step = cast("Kind", event.event), getattr(event, "step", None)
    return NotableEvent(kind=kind, time_s=round(at_s, 3), step=step, hosts=hosts, text=text)


def _text(event: LogEvent, time_factor: float) -> str | None:
    """Return the words for an event, without the hosts that it concerns; None: it needs none."""
    match event:
        case ConditionChanged():
            return _conditions(event, time_factor)
        case Remarked() | WorkerLost():
            return f"{_WHAT.get(event.event, '')}{event.reason}"
        case MemoryBoundLearned():
            return f"worker {event.rank} holds no more than {formatting.counted(event.samples, 'sample')} at a time"
        case WorkersChanged():
            return _who_trains(event)
        case ClockJumped():
            return f"the clock went {'forward' if event.by_s > 0 else 'back'} by {formatting.duration(abs(event.by_s))}"
        case SupervisorActed():
            return f"{_DONE[event.action]}: {event.reason}"
        case SharesChanged():
            return f"local batch sizes {', '.join(map(str, event.after))} ({event.reason})"
        case PairedTrialEnded():
            return _tried(event)
        case ExchangeChanged():
            # Who weighs whole ways names them in the reason; who decides on a ratio does not.
            return event.reason if event.after in event.reason else f"now {event.after} ({event.reason})"
    return None


def _who_trains(event: WorkersChanged) -> str:
    """Return the words for another generation of workers: which are lost and new, and from where they go on."""
    took = f" after {event.recovery_s:.1f} s" if event.recovery_s is not None else ""
    parts = [
        *([f"without worker {', '.join(map(str, event.lost))}"] if event.lost else []),
        *([f"with worker {', '.join(map(str, event.new))} anew"] if event.new else []),
    ]
    return f"goes on from {event.source}{took}{', ' if parts else ''}{' and '.join(parts)}"


def _tried(event: PairedTrialEnded) -> str:
    """Return the result of a paired trial, as a phrase."""
    shown = {
        "harmless": "learns as fast as the dense one: sent where that saves time",
        "harmful": "falls behind: nearly all of its energy is sent",
    }
    outcome = shown.get(event.says, "cannot be compared yet, as the loss hardly changes: tried again later")
    took, part = formatting.duration(event.took_s), formatting.share(event.ratio)
    return f"paired trial of {took}: {part} of the gradient {outcome}"


def _conditions(event: ConditionChanged, time_factor: float) -> str:
    """Return what became of a host in words: its end, its fate, or its new speed and the cluster's link rate."""
    if event.dies:
        return event.reason or "dead"
    for fate, words in _FATES.items():
        if getattr(event, fate):
            return words
    speed, rate = event.speed, event.rate_bits_per_s
    parts = [
        *([f"speed {speed:g}"] if speed is not None else []),
        *([f"link {formatting.bit_rate(rate * time_factor)}"] if rate is not None else []),
    ]
    return ", ".join(parts)


RECENT_S = 60.0
"""Seconds of newest steps whose mean time tells when the run will be over."""

DAY_S = 86_400.0


@dataclass(kw_only=True)
class RecentSteps:
    """The logged steps of the last minute: when, how many, and seconds a step.

    Attributes:
        rows: when each entry was logged (seconds since the epoch), its number of steps, and seconds of a step.
    """

    rows: deque[tuple[float, int, float]] = field(default_factory=deque)

    def take(self, event: StepsLogged) -> None:
        """Add logged steps, and forget those logged over a minute before them."""
        self.rows.append((event.time_s, event.steps, event.step_time_s))
        while event.time_s - self.rows[0][0] > RECENT_S:
            self.rows.popleft()

    @property
    def step_time_s(self) -> float | None:
        """Mean seconds of the recent steps; None: none was logged."""
        steps = sum(count for _, count, _ in self.rows)
        return sum(count * time_s for _, count, time_s in self.rows) / steps if steps else None


def left_s(progress: RunFold, expected_steps: float | None, step_time_s: float | None) -> float | None:
    """Return the seconds of training left until ``expected_steps``; None: not known, over, or about to begin anew.

    Args:
        progress: figures folded from the run's events.
        expected_steps: number of steps that the run is predicted to take; None: not known.
        step_time_s: mean seconds of a step now; None: not known.
    """
    if expected_steps is None or step_time_s is None or progress.finish_reason is not None or progress.clock.awaits:
        return None
    return max(0.0, expected_steps - progress.planned_step) / progress.worth * step_time_s


def step_of(step: int, expected: float | None) -> str:
    """Return how far a run has come: 'step 12 of 281', or beyond the prediction 'step 300, 281 predicted'.

    Args:
        step: number of steps done.
        expected: number of steps predicted; None or 0: not known, and not said.
    """
    counted = f"step {formatting.count(step)}"
    if not expected:
        return counted
    most = max(1, round(expected))
    return (
        f"{counted} of {formatting.count(most)}" if step <= most else f"{counted}, {formatting.count(most)} predicted"
    )


def figures(
    progress: RunFold, launch: Launch | None, *, step_time_s: float | None, now_s: float, money: bool = True
) -> list[str]:
    """Return the figures that a person watches, as phrases, the most important first; unknown ones are left out.

    Args:
        progress: figures folded from the run's events.
        launch: record of what was predicted; None: there is none.
        step_time_s: mean seconds of recent steps; None: not known.
        now_s: present time, in seconds since the epoch.
        money: whether to say what the run has cost.
    """
    expected = launch.prediction.steps.value if launch is not None else None
    left, latest = left_s(progress, expected, step_time_s), progress.latest
    phrases = [step_of(progress.step, expected)]
    if progress.loss is not None:
        phrases.append(f"loss {progress.loss:.4g}")
    if latest is not None and step_time_s:
        phrases.append(f"{formatting.count(sum(latest.local_batch_sizes) / step_time_s)} samples/s")
    if latest is not None and len(latest.wait_s) > 1 and latest.step_time_s > 0:
        waiting_s = sum(latest.wait_s) / len(latest.wait_s)
        phrases.append(f"straggler wait {formatting.share(waiting_s / latest.step_time_s)}")
    if launch is not None and money and progress.elapsed_s is not None:
        phrases.append(formatting.usd(launch.running_usd_per_hour * progress.elapsed_s / SECONDS_PER_HOUR))
    if left is not None:
        form = "%H:%M" if left < DAY_S else "%a %H:%M"
        phrases.append(f"ends in {formatting.duration(left)}, at {time.strftime(form, time.localtime(now_s + left))}")
    metrics = formatting.reached(progress.metrics, None)
    return phrases + ([f"evaluated: {metrics}"] if metrics else [])


def pause(progress: RunFold, now_s: float) -> str | None:
    """Return why no step is done now, in words, and for how long; None: the run trains.

    Said are the host that left, came or is silent, and what follows.

    Args:
        progress: figures folded from the run's events.
        now_s: present time, in seconds since the epoch.
    """
    event = progress.pausing
    if event is None:
        return None
    took = formatting.duration(max(0.0, now_s - event.time_s))
    if isinstance(event, RunStarted):
        where = formatting.listed(list(dict.fromkeys(worker.host for worker in event.workers)))
        after = f" from step {formatting.count(event.resumed_step)}" if event.resumed_step else ""
        return f"workers start on {where}{after}, for {took} so far"
    alone = {progress.roster.workers[place].host for place in progress.roster.present} <= {event.host}
    if event.dies:
        follows = "the run waits for it" if alone else "the others go on without it"
        return f"{event.host} is gone for {took}: {follows}"
    if event.cut:
        follows = "the run waits for it" if alone else "unless it is heard again, the others go on without it"
        return f"{event.host} is not heard for {took}: {follows}"
    comes = "is there again" if event.returns else "has to leave"
    return f"{event.host} {comes}: workers meet anew, for {took} so far"


def audited(progress: RunFold) -> str:
    """Return how far gradients are from one machine's by audit steps, in a sentence; empty: no step was audited."""
    if not progress.audits:
        return ""
    times = "once" if progress.audits == 1 else formatting.counted(progress.audits, "time")
    what = progress.audit_reason or f"shares differ from one machine by {formatting.distance(progress.audit_distance)}"
    if not progress.audit_reason and progress.audit_distance > progress.audit_tolerance:
        what += ", no further than its own random numbers vary"
    return f"Audited {times}: {what}."
