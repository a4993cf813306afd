"""A run's event log, folded once: all that `status`, `launch`, `report`, the metrics and the supervisor read of it.

`RunFold` takes one event after the other and is what the run has come to: sessions, workers, totals and the newest
figures, in memory that does not grow with the log. `RunHistory` also keeps every event with its place in the run. Views
of either are pure functions elsewhere.

A run's own time leaves out what passed while nothing of it ran; each worker that ever trained keeps one place in every
table, whoever else is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from hetopt.core.events.records import (
    Audited,
    CheckpointSaved,
    ClockJumped,
    ConditionChanged,
    Evaluated,
    ExchangeChanged,
    LogEvent,
    ProbeEvent,
    Remarked,
    RunFailure,
    RunStarted,
    SharesChanged,
    StepsLogged,
    TrainingFinished,
    TrainingStarted,
)


@dataclass(kw_only=True)
class RunClock:
    """The clock of a run in seconds since its launch, without the time in which nothing of it ran.

    Attributes:
        starts: times of the launch and of each resumption, in order, seconds since the epoch; empty: not known.
        now_s: time of the newest event, in the run's own time.
        sessions: number of sessions begun so far.
        idle_s: seconds between sessions, which are no part of ``now_s``.
    """

    starts: tuple[float, ...] = ()
    now_s: float = 0.0
    sessions: int = 0
    idle_s: float = 0.0
    _left_out_s: float = 0.0
    _newest_s: float = 0.0
    _next: int = 0
    _is_over: bool = False

    def take(self, event: LogEvent) -> bool:
        """Advance the clock to an event's time, never backwards; return whether the event begins a session.

        The time from a session's last event to the next start stands in ``idle_s`` and not in ``now_s``; nor do jumps
        of the machine's clock.
        """
        began_s = self._begun(event)
        if began_s is not None:
            gap_s = max(0.0, began_s - self._newest_s)
            self._left_out_s += gap_s
            self.idle_s += gap_s if self.sessions else 0.0
            self.sessions += 1
            self._is_over = False
        if isinstance(event, ClockJumped):
            self._left_out_s += event.by_s
            self._newest_s += event.by_s
        elif isinstance(event, TrainingFinished):
            self._is_over = True
        self._newest_s = max(self._newest_s, event.time_s)
        self.now_s = max(self.now_s, event.time_s - self._left_out_s)
        return began_s is not None

    @property
    def awaits(self) -> bool:
        """True where the run was launched or resumed, and no event of that session has come yet."""
        return self._next < len(self.starts)

    def _begun(self, event: LogEvent) -> float | None:
        """Return the start (epoch s) of the session whose first event this is; None: it is not the first.

        Starts that left no event are passed over. Without a start on record, the first event of all begins a session,
        and so does a `RunStarted` after the end of training.
        """
        began_s: float | None = None
        # A session's last event may be as late as the next one's start; its first event is later.
        latest_s = event.time_s if self.sessions else math.nextafter(event.time_s, math.inf)
        while self._next < len(self.starts) and self.starts[self._next] < latest_s:
            start_s, self._next = self.starts[self._next], self._next + 1
            # A start that left no event is followed by the one that did.
            if not self.sessions or start_s >= self._newest_s:
                began_s = start_s
        # Of runs of older versions, only the last start is known.
        if began_s is None and (not self.sessions or (self._is_over and isinstance(event, RunStarted))):
            return event.time_s
        return began_s


@dataclass(kw_only=True)
class WorkerTotals:
    """A worker's host, type and slowdown, and its summed seconds over the logged steps that it took part in.

    Attributes:
        host: name of the host; ``worker N`` where the log never told.
        type: device type that the worker was planned as; empty: not told.
        slowdown: factor by which its compute is slowed down on purpose; 1: not.
        local_batch_size: samples of its last step, or as last announced.
        compute_s: seconds of computing.
        processor_s: processor seconds of computing; 0: not measured.
        wait_s: seconds of waiting for slower workers.
        sync_s: seconds of exchanging, waiting left out.
        steps: number of logged steps that it took part in.
    """

    host: str
    type: str = ""
    slowdown: float = 1.0
    local_batch_size: int = 0
    compute_s: float = 0.0
    processor_s: float = 0.0
    wait_s: float = 0.0
    sync_s: float = 0.0
    steps: int = 0


@dataclass(kw_only=True)
class Roster:
    """All workers that ever trained in a run, in the order in which they came, and which of them train now.

    Attributes:
        workers: totals of all workers that ever trained, in the order in which they came.
        present: indices in ``workers`` of the workers that train now, in rank order.
    """

    workers: list[WorkerTotals] = field(default_factory=list)
    present: tuple[int, ...] = ()

    def take(self, event: RunStarted) -> None:
        """Replace the present workers by those of an event; the nth on a host keeps the totals of its nth.

        Workers that are gone keep their rows, so that indices in ``workers`` stay.
        """
        places: list[int] = []
        for worker in event.workers:
            alike = (p for p, known in enumerate(self.workers) if p not in places and known.host == worker.host)
            place = next(alike, len(self.workers))
            if place == len(self.workers):
                self.workers.append(WorkerTotals(host=worker.host))
            row = self.workers[place]
            row.type, row.slowdown, row.local_batch_size = worker.type, worker.slowdown, worker.local_batch_size
            places.append(place)
        self.present = tuple(places)

    def places(self, count: int) -> tuple[int, ...]:
        """Return the indices in ``workers`` of a step's ``count`` workers, in rank order.

        Where ``count`` is not the number of present workers, these are the first ``count`` of all, and workers that
        were never announced are added.
        """
        if count == len(self.present):
            return self.present
        while len(self.workers) < count:
            self.workers.append(WorkerTotals(host=f"worker {len(self.workers)}"))
        return tuple(range(count))

    def host(self, rank: int) -> str:
        """Return the host name of a rank among the present workers; ``worker N`` where no such rank is present."""
        return self.workers[self.present[rank]].host if rank < len(self.present) else f"worker {rank}"


@dataclass(kw_only=True)
class RunFold:
    """The progress of a run folded from its event log, all of its sessions together; times in seconds.

    Attributes:
        clock: the run's own clock.
        roster: who the run's workers are, and which of them train now.
        task: name of the task or script.
        global_batch_size: samples of a step, as last announced; 0: not yet.
        training_started_s: when training, or a probe's measuring, first began, seconds since the epoch; None: not yet.
        last_event_s: time of the newest event, seconds since the epoch; None: there is none.
        first_step: step of the checkpoint that the log's first workers resumed from; 0: they began anew.
        step: optimizer steps done; after a loss it goes back to the checkpoint's.
        furthest_step: the highest ``step`` so far.
        epoch: passes over the data set so far.
        latest: the newest logged steps; None: no step was logged.
        latest_places: places in the roster of their workers; empty again once other workers have started.
        metrics: metrics of the newest evaluation, by name; empty: none yet.
        logged_steps: number of logged steps, those that were repeated included.
        stepping_s: seconds of the logged steps; evaluations and checkpoints are no part of it.
        share_changes: how often local batch sizes changed.
        exchange_changes: how often compressor, ratio or collective changed.
        ways: steps by name of the exchange (compressor, ratio and collective), in the order of first use.
        sent_bytes: bytes that one worker (the mean of all) contributed to these exchanges.
        dense_bytes: what everything in fp32 would have come to.
        stream_wait_s: seconds of waiting for samples to arrive, of the worker that waited longest.
        audits: number of audited steps.
        audit_distance: largest relative distance of the shares' gradient from one machine's in an audit; 0: no audit.
        audit_tolerance: distance that the run accepts.
        audit_reason: the run's own sentence, where shares compute something else than one machine; else empty.
        startup_s: seconds from each launch to its first step, all sessions together; None: no step began yet.
        recovery_s: seconds from the last step before workers were lost to the first one after, all losses together.
        lost_steps: steps that were done again, from a checkpoint.
        restarts: how often workers started again within a session.
        finish_reason: why training ended, such as ``target``, ``epochs`` or ``stopped``; None: training goes on.
        training_s: seconds from each session's first step to its end, recoveries left out; None: training goes on.
        has_ended: whether the workers have said that training or measuring ended.
        failure: why the latest attempt failed: the first reason since workers last started; None: it did not.
        failure_hint: what would help; None: whoever failed did not know.
        pausing: event for which no step is done now: a host went, came or is not heard, or workers start; None: steps
            go on.
    """

    clock: RunClock = field(default_factory=RunClock)
    roster: Roster = field(default_factory=Roster)
    task: str = ""
    global_batch_size: int = 0
    training_started_s: float | None = None
    last_event_s: float | None = None
    first_step: int = 0
    step: int = 0
    furthest_step: int = 0
    epoch: float = 0.0
    latest: StepsLogged | None = None
    latest_places: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged_steps: int = 0
    stepping_s: float = 0.0
    share_changes: int = 0
    exchange_changes: int = 0
    ways: dict[str, int] = field(default_factory=dict)
    sent_bytes: float = 0.0
    dense_bytes: float = 0.0
    stream_wait_s: float = 0.0
    audits: int = 0
    audit_distance: float = 0.0
    audit_tolerance: float = 0.0
    audit_reason: str = ""
    startup_s: float | None = None
    recovery_s: float = 0.0
    lost_steps: int = 0
    restarts: int = 0
    finish_reason: str | None = None
    training_s: float | None = None
    has_ended: bool = False
    failure: str | None = None
    failure_hint: str | None = None
    pausing: ConditionChanged | RunStarted | None = None
    _session_began_s: float = 0.0
    _training_since_s: float | None = None
    _worked_s: float = 0.0
    _first_trained_s: float | None = None
    _trained_before_s: float = 0.0

    @classmethod
    def launched(cls, starts: Iterable[float]) -> Self:
        """Return an empty fold of a run.

        Args:
            starts: times of launch and resumptions in seconds since the epoch, in any order; empty: not known.
        """
        return cls(clock=RunClock(starts=tuple(sorted(starts))))

    @classmethod
    def of(cls, events: Iterable[LogEvent], starts: Iterable[float] = ()) -> Self:
        """Return the fold of a log's events; ``starts`` as of `launched`."""
        run = cls.launched(starts)
        for event in events:
            run.take(event)
        return run

    def take(self, event: LogEvent) -> None:
        """Fold the log's next event in, in place; most kinds change nothing but the time.

        An event that begins a session first closes the training time of the session before. The first failure counts
        until workers start again, training finishes or a probe does.
        """
        before_s = self.clock.now_s
        if self.clock.take(event):  # a session begins with it, so the one before is over
            if self._training_since_s is not None:
                self._trained_before_s += before_s - self._training_since_s
            self._session_began_s, self._training_since_s = before_s, None
        self.last_event_s = event.time_s
        self._pause(event)
        match event:
            case StepsLogged():
                self._step(event)
            case RunStarted():
                self._workers_start(event)
            case TrainingStarted():
                self._training_starts(event)
            case SharesChanged():
                self._change_shares(event)
            case ExchangeChanged():
                self.exchange_changes += 1
            case Audited():
                self.audits += 1
                self.audit_distance = max(self.audit_distance, event.distance)
                self.audit_tolerance = event.tolerance
            case Remarked(event="audit_differs"):
                self.audit_reason = event.reason
            case Evaluated():
                self.metrics, self.epoch, self.step = event.metrics, event.epoch, event.step
                self._worked_s = self.clock.now_s
            case CheckpointSaved():
                self._worked_s = self.clock.now_s
            case TrainingFinished():
                self._finish(event)
            case RunFailure() if self.failure is None:
                self.failure, self.failure_hint = event.reason, event.hint
            case ProbeEvent(event="probe_started") if self.training_started_s is None:
                self.training_started_s = event.time_s
            case ProbeEvent(event="probe_finished"):
                self.has_ended, self.failure, self.failure_hint = True, None, None

    def _pause(self, event: LogEvent) -> None:
        """Keep in ``pausing`` an event that training waits for, such as a host's death, until it goes on or ends."""
        match event:
            case ConditionChanged(heals=True) | TrainingStarted() | StepsLogged() | TrainingFinished() | RunFailure():
                self.pausing = None
            case ConditionChanged() if event.dies or event.returns or event.notice or event.cut:
                self.pausing = event
            case RunStarted():
                self.pausing = event

    @property
    def loss(self) -> float | None:
        """Mean training loss of the newest logged steps; None: no step was logged."""
        return None if self.latest is None else self.latest.loss

    @property
    def step_time_s(self) -> float | None:
        """Mean time of a step over everything logged, in seconds; None: no step was logged."""
        return self.stepping_s / self.logged_steps if self.logged_steps else None

    @property
    def planned_step(self) -> float:
        """Number of steps of the planned batch that the steps so far are worth; their own number of a fixed batch."""
        return self.step if self.latest is None or self.latest.planned_step is None else self.latest.planned_step

    @property
    def worth(self) -> float:
        """Number of steps of the planned batch that one of the newest steps is worth, at least 1."""
        return 1.0 if self.latest is None else max(1.0, self.latest.worth)

    @property
    def contention(self) -> float | None:
        """Wall over processor time of computing, over all workers that were not slowed down on purpose, at least 1.

        None: no such worker measured its processor time.
        """
        free = [worker for worker in self.roster.workers if worker.slowdown == 1 and worker.processor_s > 0]
        processor_s = math.fsum(worker.processor_s for worker in free)
        return max(1.0, math.fsum(worker.compute_s for worker in free) / processor_s) if free else None

    @property
    def elapsed_s(self) -> float | None:
        """Seconds in which something of the run ran, from its launch to its newest event; None without events."""
        return self.clock.now_s if self.last_event_s is not None else None

    @property
    def trained_for_s(self) -> float | None:
        """The time of the newest event, counted from when training first began, without the time between sessions;
        None: it has not begun."""
        return None if self._first_trained_s is None else self.clock.now_s - self._first_trained_s

    def _step(self, event: StepsLogged) -> None:
        """Add logged steps to the totals of run and workers; begin training if the log lost its start."""
        if self._training_since_s is None:  # the log lost the line that says so
            self._begin_training(event.time_s, before_s=event.steps * event.step_time_s)
        places = self.roster.places(len(event.compute_s))
        for rank, place in enumerate(places):
            row = self.roster.workers[place]
            row.local_batch_size = event.local_batch_sizes[rank]
            row.compute_s += event.steps * event.compute_s[rank]
            row.processor_s += event.steps * event.processor_s[rank] if event.processor_s else 0.0
            row.wait_s += event.steps * event.wait_s[rank]
            row.sync_s += event.steps * event.sync_s[rank]
            row.steps += event.steps
        self.latest, self.latest_places = event, places
        self.step, self.epoch, self._worked_s = event.step, event.epoch, self.clock.now_s
        self.furthest_step = max(event.step, self.furthest_step)
        self.logged_steps += event.steps
        self.stepping_s += event.steps * event.step_time_s
        if (exchange := event.exchange) is not None:
            self.ways[exchange.way] = self.ways.get(exchange.way, 0) + event.steps
            self.sent_bytes += event.steps * exchange.sent_bytes
            self.dense_bytes += event.steps * exchange.dense_bytes
        if event.stream is not None:
            self.stream_wait_s += max(event.stream.wait_s, default=0.0)

    def _workers_start(self, event: RunStarted) -> None:
        """Take an event's workers as present and forget an earlier end; count a restart if the session had trained."""
        was_there = bool(self.roster.workers)
        self.roster.take(event)
        self.task, self.global_batch_size, self.latest_places = event.task, event.global_batch_size, ()
        self.restarts += was_there and self._training_since_s is not None
        if not was_there:
            self.first_step = event.resumed_step or 0
        self.finish_reason = self.training_s = self.failure = self.failure_hint = None
        self.has_ended = False

    def _training_starts(self, event: TrainingStarted) -> None:
        """Begin training at an event's step; count the steps since the checkpoint as lost.

        In a session that trained before, the seconds since work was last recorded are recovery.
        """
        self.lost_steps += max(0, self.step - event.step)
        if self._training_since_s is not None:
            self.recovery_s += self.clock.now_s - self._worked_s
        self._begin_training(event.time_s)
        self.step, self.furthest_step = event.step, max(event.step, self.furthest_step)

    def _begin_training(self, time_s: float, *, before_s: float = 0.0) -> None:
        """Begin the training time of a session at an event, or ``before_s`` earlier; do nothing where it has begun."""
        self._worked_s = now_s = self.clock.now_s
        if self._training_since_s is not None:
            return
        began_s = max(self._session_began_s, now_s - before_s)
        if self.training_started_s is None:
            self.training_started_s = time_s - before_s
        if self._first_trained_s is None:
            self._first_trained_s = began_s
        self.startup_s = (self.startup_s or 0.0) + began_s - self._session_began_s
        self._training_since_s = began_s

    def _change_shares(self, event: SharesChanged) -> None:
        """Set the present workers' local batch sizes and count the change; ignore other numbers of workers."""
        if len(event.after) != len(self.roster.present):
            return
        for place, share in zip(self.roster.present, event.after, strict=True):
            self.roster.workers[place].local_batch_size = share
        self.share_changes += 1

    def _finish(self, event: TrainingFinished) -> None:
        """Record the end of training: reason, metrics and training time.

        The time is the event's own in a run of one session without restarts, else the sessions' together without
        recovery.
        """
        alone = self.clock.sessions <= 1 and not self.restarts
        since_s = self._training_since_s
        now_s = 0.0 if since_s is None else self.clock.now_s - since_s
        added_up_s = max(0.0, self._trained_before_s + now_s - self.recovery_s)
        self.training_s = event.training_s if alone and event.training_s is not None else added_up_s
        self.step, self.epoch, self.finish_reason = event.step, event.epoch, event.reason
        self.metrics = event.metrics or self.metrics
        self.has_ended, self.failure, self.failure_hint, self._worked_s = True, None, None, self.clock.now_s


@dataclass(frozen=True, kw_only=True)
class PlacedEvent:
    """An event other than logged steps, with its time in the run and its place among them.

    Attributes:
        event: the event.
        at_s: its time in seconds since training began; None: training had not begun.
        row: number of lines of steps in the log before it.
        paused_s: of the ``training_started`` of a later session: seconds in which nothing had run; None: any other
            event.
    """

    event: LogEvent
    at_s: float | None
    row: int
    paused_s: float | None = None


@dataclass(kw_only=True)
class RunHistory:
    """All events of a run's log, each with its time in the run, and their fold.

    Attributes:
        run: the fold of all events.
        steps: events of logged steps, in order.
        end_s: end of each of these, in seconds since training began.
        places: places in the roster of the workers of each.
        others: all other events, in order.
    """

    run: RunFold = field(default_factory=RunFold)
    steps: list[StepsLogged] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    places: list[tuple[int, ...]] = field(default_factory=list)
    others: list[PlacedEvent] = field(default_factory=list)
    _session: int = 0
    _idle_s: float = 0.0

    @classmethod
    def of(cls, events: Iterable[LogEvent], starts: Iterable[float] = ()) -> Self:
        """Return the history of a log's events.

        Args:
            events: in the order of the log.
            starts: times of launch and resumptions in seconds since the epoch; empty: not known.
        """
        history = cls(run=RunFold.launched(starts))
        for event in events:
            history.take(event)
        return history

    def take(self, event: LogEvent) -> None:
        """Fold the log's next event in, in place, and keep it with its time in the run.

        Steps of training that has begun go to ``steps``, all other events to ``others``; where training starts in a
        session that continues the run, the event has the seconds between sessions as ``paused_s``.
        """
        run = self.run
        run.take(event)
        at_s = run.trained_for_s
        if isinstance(event, StepsLogged) and at_s is not None:
            self.steps.append(event)
            self.end_s.append(at_s)
            self.places.append(run.latest_places)
            return
        paused_s = None
        if isinstance(event, TrainingStarted):
            if (self.steps or self._session) and run.clock.sessions > self._session:
                paused_s = run.clock.idle_s - self._idle_s
            self._session, self._idle_s = run.clock.sessions, run.clock.idle_s
        self.others.append(PlacedEvent(event=event, at_s=at_s, row=len(self.steps), paused_s=paused_s))
