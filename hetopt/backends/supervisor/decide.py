"""Decides, from how a run stands, whether to leave it alone: pure, and slow to change its mind.

What the trainer does by itself (shares, compression, a lost worker) is not decided here; this is about machines. An
action must have been called for at several looks in a row, promise more than it costs by a margin or keep a deadline
that would be missed, and leave time since the last one. A deadline that only machines on demand still keep waits for
nobody. The budget has a guard of its own, who is asked before anything is rented (`ec2.renter.reconcile`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.events.fold import RunFold
from hetopt.core.events.records import LogEvent, RunStarted, StepsLogged, WorkerLost, WorkersChanged

Action = Literal["keep", "replan", "add", "drop", "replace", "switch", "on-demand"]

_TELLING_STEPS = 50
"""Control periods must have passed, and the running mean must have forgotten what was before."""


@dataclass(frozen=True, kw_only=True)
class Hysteresis:
    """How slowly minds are changed.

    Attributes:
        looks: in a row that must call for the same action.
        rest_s: between two actions.
        margin: of the time left that an action must save beyond its cost.
        reserve_s: how far ahead a deadline is looked at: the time between looks, and to stop.
    """

    looks: int = 3
    rest_s: float = 300.0
    margin: float = 0.05
    reserve_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What could be had instead of the present cluster, as the planner sees it now.

    Attributes:
        action: that leads there.
        name: the host or the zone that it is about, or for people.
        machines: how many.
        step_time_s: predicted with what was measured of this run.
        usd_per_hour: of the cluster then.
        changeover_s: until it trains, work that is lost included.
        overlap_usd: paid meanwhile for machines that are given back after the change.
        holds: whether nobody can take it away.
    """

    action: Action
    name: str
    step_time_s: float
    usd_per_hour: float
    changeover_s: float
    overlap_usd: float = 0.0
    holds: bool = False
    machines: int = 1

    def total_s(self, steps_left: float) -> float:
        """Until the end, the change included."""
        return self.changeover_s + steps_left * self.step_time_s

    def cost_usd(self, steps_left: float) -> float:
        """USD from now to the end of the run, with ``steps_left`` steps to go."""
        return self.total_s(steps_left) / SECONDS_PER_HOUR * self.usd_per_hour + self.overlap_usd


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, why, and what should come of it: compared later with what did."""

    action: Action
    reason: str
    name: str = ""
    expected_step_time_s: float | None = None
    expected_saving_s: float = 0.0
    expected_saving_usd: float = 0.0
    usd_per_hour: float | None = None
    machines: int = 1

    @property
    def acts(self) -> bool:
        """Whether the decision changes the cluster; ``keep`` does not."""
        return self.action != "keep"


@dataclass(frozen=True, kw_only=True)
class Acted:
    """What was done, and how the run stood then: its gain is not measured yet."""

    decision: Decision
    step_time_s: float
    standing: RunProgress

    def shows(self, standing: RunProgress) -> bool:
        """Whether enough steps have been done since to tell what came of it."""
        if self.decision.action in ("replace", "switch", "on-demand", "add"):
            # Gone is not enough: another one must have come.
            more = 1 if self.decision.action == "add" else 0
            there = standing.changes > self.standing.changes and standing.workers >= self.standing.workers + more
            return there and standing.steps_seen - standing.changed_at >= _TELLING_STEPS
        return standing.steps_seen - self.standing.steps_seen >= _TELLING_STEPS


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """What is remembered between looks.

    Attributes:
        promise: of the plan.
        hysteresis: how slowly minds are changed.
        called_for: what the last looks called for, and how many in a row did.
        looked_at: how many steps had been seen then.
        acted_s: when something was last done, seconds since the epoch.
        last: what, if its gain was not measured yet.
    """

    promise: PredictedGain
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    called_for: tuple[str, int] = ("", 0)
    looked_at: int = -1
    acted_s: float | None = None
    last: Acted | None = None

    def look(self, standing: RunProgress, alternatives: Sequence[Alternative] = ()) -> tuple[Supervisor, Decision]:
        """Decide after one look; the supervisor to look with next time comes first.

        Args:
            standing: of the run.
            alternatives: to the present cluster, predicted anew where the run has left its interval.
        """
        urgent = self._urgent(standing, alternatives)
        if urgent is not None:
            return self._done(urgent, standing), urgent
        if standing.steps_seen == self.looked_at:
            # While a run pauses, looks in a row would see one measurement.
            return self, Decision(action="keep", reason="nothing was measured since the last look")
        wanted = self._wanted(standing, alternatives)
        key = f"{wanted.action} {wanted.name}"
        in_a_row = self.called_for[1] + 1 if self.called_for[0] == key else 1
        seen = replace(self, called_for=(key, in_a_row), looked_at=standing.steps_seen)
        if not wanted.acts:
            return seen, wanted
        if in_a_row < self.hysteresis.looks:
            return seen, Decision(action="keep", reason=f"{wanted.reason}; seen {in_a_row} times")
        if self.acted_s is not None and standing.now_s - self.acted_s < self.hysteresis.rest_s:
            return seen, Decision(action="keep", reason=f"{wanted.reason}; but something was changed just now")
        return seen._done(wanted, standing), wanted

    def measured(self, standing: RunProgress) -> tuple[Supervisor, Mapping[str, Any] | None]:
        """What came of the last action, once enough control periods have told: its expected and its measured gain."""
        if self.last is None or standing.step_time_s is None or not self.last.shows(standing):
            return self, None
        decision = self.last.decision
        told = {
            "action": decision.action,
            "name": decision.name,
            "step_time_before_s": round(self.last.step_time_s, 6),
            "step_time_expected_s": decision.expected_step_time_s,
            "step_time_measured_s": round(standing.step_time_s, 6),
        }
        return replace(self, last=None), told

    def _done(self, decision: Decision, standing: RunProgress) -> Supervisor:
        before_s = standing.step_time_s or self.promise.step_time_s
        tells = decision.expected_step_time_s is not None
        acted = Acted(decision=decision, step_time_s=before_s, standing=standing) if tells else self.last
        promise, then_s, usd_per_hour = self.promise, decision.expected_step_time_s, decision.usd_per_hour
        if decision.action in ("drop", "add") and then_s is not None and usd_per_hour is not None:
            # What is promised from now on is what these will do, as certainly as it was of the others.
            factor = then_s / promise.step_time_s
            promise = replace(
                promise,
                step_time_s=then_s,
                step_time_low_s=factor * promise.step_time_low_s,
                step_time_high_s=factor * promise.step_time_high_s,
                usd_per_hour=usd_per_hour,
            )
        return replace(self, promise=promise, called_for=("", 0), acted_s=standing.now_s, last=acted)

    def _urgent(self, standing: RunProgress, alternatives: Sequence[Alternative]) -> Decision | None:
        safe, steps_left = [one for one in alternatives if one.holds], standing.steps_left(self.promise)
        if self.promise.deadline_s is None or not safe:
            return None
        surest = min(safe, key=lambda one: one.total_s(steps_left))
        slack_s = self.promise.deadline_s - standing.now_s - surest.total_s(steps_left)
        # One more changeover must fit: the present machines may be lost at once. Where even these machines would be
        # late, nothing is paid for them.
        if not 0 <= slack_s < surest.changeover_s + self.hysteresis.reserve_s:
            return None
        return Decision(
            action="on-demand",
            name=surest.name,
            reason=f"only {slack_s:.0f} s are left beyond what {surest.name} need until the deadline",
            expected_step_time_s=surest.step_time_s,
        )

    def _wanted(self, standing: RunProgress, alternatives: Sequence[Alternative]) -> Decision:
        now_s = standing.step_time_s
        if now_s is None:
            return Decision(action="keep", reason="nothing was measured yet")
        promise, steps_left = self.promise, standing.steps_left(self.promise)
        left_s = steps_left * now_s
        left_usd = left_s / SECONDS_PER_HOUR * promise.usd_per_hour
        better = self._better(left_s, left_usd, steps_left, standing.now_s, alternatives)
        if better is not None:
            saving_s, saving_usd = left_s - better.total_s(steps_left), left_usd - better.cost_usd(steps_left)
            return Decision(
                action=better.action,
                name=better.name,
                reason=_reason(better, saving_s, saving_usd),
                expected_step_time_s=better.step_time_s,
                expected_saving_s=saving_s,
                expected_saving_usd=saving_usd,
                usd_per_hour=better.usd_per_hour,
                machines=better.machines,
            )
        if promise.step_time_low_s <= now_s <= promise.step_time_high_s:
            return Decision(action="keep", reason="as predicted")
        slower = "slower" if now_s > promise.step_time_high_s else "quicker"
        return Decision(
            action="keep" if any(not one.holds for one in alternatives) else "replan",
            reason=f"a step takes {now_s:.3g} s, {slower} than the {promise.step_time_low_s:.3g} to "
            f"{promise.step_time_high_s:.3g} s that were predicted",
        )

    def _better(
        self, left_s: float, left_usd: float, steps_left: float, now_s: float, alternatives: Sequence[Alternative]
    ) -> Alternative | None:
        """The cheapest alternative that saves money, or time at no more money, by the margin.

        Where there is none and the present machines would be late: the cheapest that is not. Of equally cheap ones the
        quickest.
        """
        deadline_s = math.inf if self.promise.deadline_s is None else self.promise.deadline_s
        in_time = [one for one in alternatives if now_s + one.total_s(steps_left) <= deadline_s]
        margin = 1 - self.hysteresis.margin
        found = [
            one
            for one in alternatives
            if (one.cost_usd(steps_left) <= margin * left_usd and one in in_time)
            or (one.total_s(steps_left) <= margin * left_s and one.cost_usd(steps_left) <= left_usd)
        ]
        if not found and now_s + left_s > deadline_s:
            found = [one for one in in_time if not one.holds]
        return min(found, key=lambda one: (one.cost_usd(steps_left), one.total_s(steps_left)), default=None)


_IN_WORDS = {
    "drop": "going on without {}",
    "replace": "another machine in the place of {}",
    "add": "{machines} more like {}",
    "switch": "the same machines in {}",
}


def _reason(better: Alternative, saving_s: float, saving_usd: float) -> str:
    name = _IN_WORDS.get(better.action, "{}").format(better.name, machines=better.machines)
    if saving_usd < 0:
        return f"{name} saves {saving_s:.0f} s and the deadline, for ${-saving_usd:.2f} more"
    if saving_s < 0:
        return f"{name} saves ${saving_usd:.2f} of what is left, and takes {-saving_s:.0f} s longer"
    return f"{name} saves {saving_s:.0f} s and ${saving_usd:.2f} of what is left"


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
