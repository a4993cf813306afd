"""Where a run is, read from its events: a pure fold over the log that `status`, `launch` and `report` share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from hetopt.core.events.parts import StartedWorker
from hetopt.core.events.records import (
    CheckpointSaved,
    Evaluated,
    ExchangeChanged,
    LogEvent,
    RunStarted,
    SharesChanged,
    StepsLogged,
    TrainingFinished,
    TrainingStarted,
)
from hetopt.reports.columns import matrix
from hetopt.reports.sessions import Roster, RunClock


@dataclass(frozen=True, kw_only=True)
class WorkerProgress:
    """One worker's totals over the steps that it took part in and that were logged.

    ``local_batch_size`` is that of its last step; ``is_present`` says whether it was there at the end.
    """

    host: str
    type: str
    slowdown: float
    local_batch_size: int
    compute_s: float = 0.0
    wait_s: float = 0.0
    sync_s: float = 0.0
    steps: int = 0
    is_present: bool = True

    @property
    def mean_compute_s(self) -> float:
        """Mean compute time of a step, in seconds; 0 before the first."""
        return self.compute_s / max(1, self.steps)

    @property
    def mean_wait_s(self) -> float:
        """Mean straggler wait of a step, in seconds; 0 before the first."""
        return self.wait_s / max(1, self.steps)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one worker (the mean of all) contributed to the exchanges of gradients so far.

    Attributes:
        way: of the newest steps: compressor, ratio and collective.
        steps: in each way, in the order of first use.
        sent_bytes: altogether.
        dense_bytes: what everything in fp32 would have come to.
    """

    way: str
    steps: Mapping[str, int]
    sent_bytes: float
    dense_bytes: float


@dataclass(frozen=True, kw_only=True)
class Together:
    """How often workers that train for themselves were brought together so far.

    Attributes:
        policy: by which.
        synchronised, local: steps that averaged parameters, and that did not.
        sent_bytes: by one worker.
        divergence: sum over the averages of how far apart workers were, relative to the norm of the parameters.
        told: averages that told how far.
    """

    policy: str
    synchronised: int = 0
    local: int = 0
    sent_bytes: float = 0.0
    divergence: float = 0.0
    told: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run so far, all of its sessions together. Times in seconds; ``stepping_s`` leaves evaluations and checkpoints
    out.

    Attributes:
        workers: all that ever trained, in the order of the roster.
        roster: who they are, and which of them train now.
        clock: of the run.
        training_started_s: when training first began, seconds since the epoch.
        last_event_s: likewise.
        startup_s: from each launch to its first step, all sessions together; None: no step began yet.
        recovery_s: from the last step before workers were lost to the first one after it, altogether.
        lost_steps: that were done again, from a checkpoint.
        restarts: of the workers within a session.
        training_s: from each session's first step to its end, recoveries left out; None: training goes on.
    """

    task: str = ""
    workers: tuple[WorkerProgress, ...] = ()
    roster: Roster = field(default_factory=Roster)
    clock: RunClock = field(default_factory=RunClock)
    global_batch_size: int = 0
    training_started_s: float | None = None
    last_event_s: float | None = None
    first_step: int = 0
    step: int = 0
    epoch: float = 0.0
    samples_seen: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged_steps: int = 0
    stepping_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    share_changes: int = 0
    exchange_changes: int = 0
    traffic: Traffic | None = None
    together: Together | None = None
    startup_s: float | None = None
    recovery_s: float = 0.0
    lost_steps: int = 0
    restarts: int = 0
    finish_reason: str | None = None
    training_s: float | None = None
    _session_began_s: float = 0.0
    _training_since_s: float | None = None
    _worked_s: float = 0.0
    _first_trained_s: float | None = None
    _trained_before_s: float = 0.0

    @property
    def step_time_s(self) -> float | None:
        """Mean time of a step over everything logged."""
        return self.stepping_s / self.logged_steps if self.logged_steps else None

    @property
    def elapsed_s(self) -> float | None:
        """Time in which something of the run ran, from its launch to its newest event; None: there is none."""
        return self.clock.now_s if self.last_event_s is not None else None

    @property
    def trained_for_s(self) -> float:
        """The time of the newest event, counted from when training first began, without the time between sessions."""
        return 0.0 if self._first_trained_s is None else self.clock.now_s - self._first_trained_s

    @property
    def sessions(self) -> int:
        """How often it was launched, the times that it went on included."""
        return self.clock.sessions

    @property
    def steps_done(self) -> int:
        """Steps that count of those in this log, without those of a checkpoint that its first session resumed from."""
        return max(0, self.step - self.first_step)


def follow(events: Iterable[LogEvent], starts: Sequence[float] = ()) -> Progress:
    """Fold the events of one run. ``starts`` are when it was launched and went on, where that is known."""
    progress = begin(starts)
    # Those of as many workers: others may come and go.
    for workers, together in groupby(events, key=_workers_of_step):
        if workers:
            progress = _stepped(progress, list(together))  # type: ignore[arg-type]  # that is what they are grouped by
        else:
            for event in together:
                progress = advance(progress, event)
    return progress


def begin(starts: Sequence[float] = ()) -> Progress:
    """Before the first event of a run that was launched, and went on, at these seconds since the epoch."""
    return Progress(clock=RunClock(starts=tuple(sorted(starts))))


def _workers_of_step(event: LogEvent) -> int:
    """0 for events that are no steps."""
    return len(event.compute_s) if isinstance(event, StepsLogged) else 0


def advance(progress: Progress, event: LogEvent) -> Progress:
    """The progress once ``event`` has happened; events of most kinds change nothing but the time."""
    if isinstance(event, StepsLogged):
        return _stepped(progress, [event])
    progress = _timed(progress, event)
    now_s = progress.clock.now_s
    match event:
        case RunStarted():
            was_there = bool(progress.workers)
            roster = Roster(workers=list(progress.roster.workers), present=progress.roster.present)
            roster.take(event)
            return replace(
                progress,
                task=event.task,
                roster=roster,
                workers=_workers(progress.workers, roster, dict(zip(roster.present, event.workers, strict=True))),
                global_batch_size=event.global_batch_size,
                restarts=progress.restarts + (was_there and progress._training_since_s is not None),
                first_step=progress.first_step if was_there else event.resumed_step or 0,
                finish_reason=None,
                training_s=None,
            )
        case TrainingStarted():
            lost_steps = progress.lost_steps + max(0, progress.step - event.step)
            again = replace(_training_began(progress, event.time_s), step=event.step, lost_steps=lost_steps)
            if progress._training_since_s is None:
                return again
            return replace(again, recovery_s=progress.recovery_s + now_s - progress._worked_s)
        case SharesChanged():
            if len(event.after) != len(progress.roster.present):
                return progress
            shares = dict(zip(progress.roster.present, event.after, strict=True))
            workers = tuple(
                replace(worker, local_batch_size=shares.get(place, worker.local_batch_size))
                for place, worker in enumerate(progress.workers)
            )
            return replace(progress, workers=workers, share_changes=progress.share_changes + 1)
        case ExchangeChanged():
            return replace(progress, exchange_changes=progress.exchange_changes + 1)
        case Evaluated():
            return replace(
                progress,
                metrics=event.metrics,
                epoch=event.epoch,
                step=event.step,
                evaluation_s=progress.evaluation_s + event.evaluation_s,
                _worked_s=now_s,
            )
        case CheckpointSaved():
            return replace(progress, checkpoint_s=progress.checkpoint_s + event.save_s, _worked_s=now_s)
        case TrainingFinished():
            alone = progress.sessions <= 1 and not progress.restarts
            return replace(
                progress,
                step=event.step,
                epoch=event.epoch,
                finish_reason=event.reason,
                training_s=event.training_s if alone and event.training_s is not None else _trained_s(progress),
                metrics=event.metrics or progress.metrics,
                _worked_s=now_s,
            )
    return progress


def _timed(progress: Progress, event: LogEvent) -> Progress:
    """The progress at the time of an event; where a session begins with it, the one before is over."""
    clock = copy(progress.clock)
    before_s = clock.now_s
    if not clock.take(event):
        return replace(progress, clock=clock, last_event_s=event.time_s)
    since_s = progress._training_since_s
    return replace(
        progress,
        clock=clock,
        last_event_s=event.time_s,
        _session_began_s=before_s,
        _training_since_s=None,
        _trained_before_s=progress._trained_before_s + (0.0 if since_s is None else before_s - since_s),
    )


def _training_began(progress: Progress, time_s: float, *, before_s: float = 0.0) -> Progress:
    """Training began with an event of this time, or some seconds before; in a session that had begun it goes on."""
    since_s, now_s = progress._training_since_s, progress.clock.now_s
    if since_s is not None:
        return replace(progress, _worked_s=now_s)
    began_s = max(progress._session_began_s, now_s - before_s)
    return replace(
        progress,
        training_started_s=time_s - before_s if progress.training_started_s is None else progress.training_started_s,
        startup_s=(progress.startup_s or 0.0) + began_s - progress._session_began_s,
        _training_since_s=began_s,
        _first_trained_s=began_s if progress._first_trained_s is None else progress._first_trained_s,
        _worked_s=now_s,
    )


def _trained_s(progress: Progress) -> float:
    since_s = progress._training_since_s
    now_s = 0.0 if since_s is None else progress.clock.now_s - since_s
    return max(0.0, progress._trained_before_s + now_s - progress.recovery_s)


def _workers(
    before: Sequence[WorkerProgress], roster: Roster, announced: Mapping[int, StartedWorker]
) -> tuple[WorkerProgress, ...]:
    """A row for each of the roster, with what is known of it so far."""
    found = []
    for place, known in enumerate(roster.workers):
        row = before[place] if place < len(before) else None
        if row is None:
            row = WorkerProgress(
                host=known.host, type=known.type, slowdown=known.slowdown, local_batch_size=known.local_batch_size
            )
        told = announced.get(place)
        if told is not None:
            row = replace(
                row, host=told.host, type=told.type, slowdown=told.slowdown, local_batch_size=told.local_batch_size
            )
        found.append(replace(row, is_present=place in roster.present))
    return tuple(found)


def _stepped(progress: Progress, events: Sequence[StepsLogged]) -> Progress:
    """The progress after successive steps of as many workers: long logs hold little else, so their sums are taken at
    once."""
    progress, first, last = _timed(progress, events[0]), events[0], events[-1]
    if progress._training_since_s is None:  # the log lost the line that says so
        progress = _training_began(progress, first.time_s, before_s=first.steps * first.step_time_s)
    for event in events[1:]:
        progress.clock.take(event)  # its own copy
    roster = Roster(workers=list(progress.roster.workers), present=progress.roster.present)
    places = roster.places(len(last.compute_s))
    count = sum(event.steps for event in events)
    steps = np.array([event.steps for event in events], dtype=np.float64)
    compute_s, wait_s, sync_s = (
        (steps @ matrix(rows)).tolist()
        for rows in (
            [event.compute_s for event in events],
            [event.wait_s for event in events],
            [event.sync_s for event in events],
        )
    )
    workers = list(_workers(progress.workers, roster, {}))
    for rank, place in enumerate(places):
        workers[place] = replace(
            workers[place],
            local_batch_size=last.local_batch_sizes[rank],
            compute_s=workers[place].compute_s + compute_s[rank],
            wait_s=workers[place].wait_s + wait_s[rank],
            sync_s=workers[place].sync_s + sync_s[rank],
            steps=workers[place].steps + count,
        )
    return replace(
        progress,
        workers=tuple(workers),
        roster=roster,
        last_event_s=last.time_s,
        step=last.step,
        epoch=last.epoch,
        samples_seen=last.samples_seen,
        loss=last.loss,
        logged_steps=progress.logged_steps + count,
        stepping_s=progress.stepping_s + math.fsum(event.steps * event.step_time_s for event in events),
        traffic=_exchanged(progress.traffic, events),
        together=_brought_together(progress.together, events),
        _worked_s=progress.clock.now_s,
    )


def _brought_together(before: Together | None, events: Sequence[StepsLogged]) -> Together | None:
    """The same after steps; None: gradients are exchanged in every step."""
    found = before
    for told in (event.sync for event in events if event.sync is not None):
        found = found if found is not None else Together(policy=told.policy)
        apart = told.divergence
        found = replace(
            found,
            synchronised=found.synchronised + told.synchronised,
            local=found.local + told.local,
            sent_bytes=found.sent_bytes + told.sent_bytes,
            divergence=found.divergence + (0.0 if apart is None else apart * told.synchronised),
            told=found.told + (0 if apart is None else told.synchronised),
        )
    return found


def _exchanged(before: Traffic | None, events: Sequence[StepsLogged]) -> Traffic | None:
    """The traffic after steps; a single worker has none, nor have the logs of older versions."""
    ways = dict(before.steps) if before is not None else {}
    sent_bytes = before.sent_bytes if before is not None else 0.0
    dense_bytes = before.dense_bytes if before is not None else 0.0
    last = None
    for event in events:
        exchange = event.exchange
        if exchange is None:
            continue
        last, steps = exchange.way, event.steps
        ways[last] = ways.get(last, 0) + steps
        sent_bytes += steps * exchange.sent_bytes
        dense_bytes += steps * exchange.dense_bytes
    if last is None:
        return before
    return Traffic(way=last, steps=ways, sent_bytes=sent_bytes, dense_bytes=dense_bytes)
