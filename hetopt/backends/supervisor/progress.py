"""How a run stands against its plan: what was measured lately, what was predicted, and what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from hetopt.core.events.fold import RunFold
from hetopt.core.events.records import LogEvent, RunStarted, StepsLogged, WorkerLost, WorkersChanged

_WEIGHT = 0.3
"""Of the newest control period in the running mean; four of them make up most of it."""
_SETTLED = 4
"""Control periods of the same workers, after which their running means are no longer those of the first steps."""


@dataclass(frozen=True, kw_only=True)
class PredictedGain:
    """What the plan says of the run.

    Attributes:
        step_time_s: predicted.
        step_time_low_s, step_time_high_s: its 90 % interval.
        steps: that the run takes.
        deadline_s: by when training must end, seconds since the epoch; None: at any time.
        usd_per_hour: of the cluster.
    """

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    steps: float
    usd_per_hour: float
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """What the log of a run has told so far.

    Attributes:
        step: steps done.
        steps_seen: of them by this log.
        step_time_s: running mean over control periods; None: no period yet.
        compute_s: of each worker, likewise.
        sync_s: of the exchange itself, likewise.
        began_s: when training first began, seconds since the epoch.
        now_s: of the newest event.
        workers: that train.
        hosts: of each of them.
        types: of each of them: its machine.
        shares: of each of them in the last control period, samples.
        quickest: samples a second that one worker on a machine of a type has done in this run, at best, by type.
        losses: workers lost so far.
        changes: of the set of workers so far, the first one included.
        changed_at: ``steps_seen`` at the last of them.
        periods: since then.
        whole: how many workers there were when most were.
        whole_step_time_s: the running mean when so many were there last; None: not measured yet.
    """

    step: int = 0
    steps_seen: int = 0
    step_time_s: float | None = None
    compute_s: tuple[float, ...] = ()
    sync_s: float = 0.0
    began_s: float | None = None
    now_s: float = 0.0
    workers: int = 0
    hosts: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    quickest: Mapping[str, float] = field(default_factory=dict)
    losses: int = 0
    changes: int = 0
    changed_at: int = 0
    periods: int = 0
    whole: int = 0
    whole_step_time_s: float | None = None

    @property
    def speeds(self) -> tuple[float, ...]:
        """Samples a second of each worker while it computes; empty where not all of them are known."""
        known = len(self.hosts) == len(self.shares) == len(self.compute_s)
        if not known or not min(self.compute_s, default=0.0) > 0:
            return ()
        return tuple(share / time_s for share, time_s in zip(self.shares, self.compute_s, strict=True))

    def steps_left(self, promise: PredictedGain) -> float:
        """Number of steps to the end of the run."""
        return max(0.0, promise.steps - self.step)

    def after(self, event: LogEvent, run: RunFold) -> Self:
        """Once an event has happened, which the fold of the log has taken; most kinds change no running mean."""
        there = [run.roster.workers[place] for place in run.roster.present]
        one = replace(
            self,
            step=run.step,
            steps_seen=run.logged_steps,
            began_s=run.training_started_s,
            now_s=event.time_s,
            workers=len(there),
            hosts=tuple(worker.host for worker in there),
            types=tuple(worker.type for worker in there),
        )
        match event:
            case RunStarted():
                # Other workers, other times: what was measured before says nothing of them.
                return replace(one._changed(), shares=(), step_time_s=None, compute_s=(), sync_s=0.0)
            case WorkerLost():
                return replace(one, losses=one.losses + 1)
            case WorkersChanged():
                return replace(one._changed(), losses=one.losses + len(event.lost))
            case StepsLogged():
                stepped = replace(
                    one,
                    periods=one.periods + 1,
                    shares=event.local_batch_sizes,
                    step_time_s=_mean(one.step_time_s, event.step_time_s),
                    compute_s=_means(one.compute_s, event.compute_s),
                    # Of the worker that waited least: the others' contains their waiting for it.
                    sync_s=_mean(one.sync_s if one.step_time_s is not None else None, min(event.sync_s)),
                )
                return stepped._settled() if stepped.periods >= _SETTLED else stepped
        return one

    def _changed(self) -> Self:
        return replace(self, changes=self.changes + 1, changed_at=self.steps_seen, periods=0)

    def _settled(self) -> Self:
        quickest = dict(self.quickest)
        for kind, speed in zip(self.types, self.speeds, strict=False):  # no speeds: not all of them are known
            quickest[kind] = max(speed, quickest.get(kind, 0.0))
        if self.workers < self.whole:
            return replace(self, quickest=quickest)
        return replace(self, quickest=quickest, whole=self.workers, whole_step_time_s=self.step_time_s)

    @classmethod
    def of(cls, events: Iterable[LogEvent]) -> Self:
        """The progress of a run after all of these events."""
        standing, run = cls(), RunFold()
        for event in events:
            run.take(event)
            standing = standing.after(event, run)
        return standing


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)


def _means(before: tuple[float, ...], now: Iterable[float]) -> tuple[float, ...]:
    values = tuple(now)
    return values if len(before) != len(values) else tuple(map(_mean, before, values))
