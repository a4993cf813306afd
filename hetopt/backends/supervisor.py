"""Supervises a rented run: looks at it now and then, does what it decides, and writes what is expected of that.

A machine that has become slow is given back, and another takes its place; all are had on demand when only that still
keeps the deadline. Where nothing is rented the person is told, and decides. What the trainer does by itself (shares,
compression, a lost worker) is not decided here.

Decisions are pure, and slow to change: an action must have been called for at several looks in a row, save a part of
the time that is left, and leave time since the last one. A deadline that only machines on demand still keep waits for
nobody. The budget has a guard of its own, who is asked before anything is
rented (`ec2.renter.reconcile`).

A worker of share ``b_j`` computes for ``t_j``, so it does ``v_j = b_j / t_j`` samples a second. Workers that share a
batch ``B`` by their speeds compute for ``B / sum v_j``, and exchange after that for as long as now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hetopt.backends.backend import Renting, RunHandle
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused
from hetopt.core.events.fold import RunFold, WorkerTotals
from hetopt.core.events.log import write_decision
from hetopt.core.events.records import LogEvent, RunStarted, StepsLogged, WorkersChanged
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.plan import Range

ACTED = "supervisor_acted"

ENDING_S = 180.0
"""So long before its deadline a rented run is told to save its last checkpoint and to end."""

SLOW = 0.5
"""Of what its type has done; shares are small for slow workers, and what is fixed in a step weighs more in them."""

ON_DEMAND = "the same machines on demand"


LOOKS = 3
"""In a row that must call for the same action."""
REST_S = 300.0
"""Between two actions."""
MARGIN = 0.05
"""Of the time left that an action must save beyond its cost."""
RESERVE_S = 60.0
"""How far ahead a deadline is looked at: the time between looks, and to stop."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of a run's machines, predicted with what was measured of the run, or advice to a person.

    Attributes:
        action: ``replan`` is for a person to do.
        name: the host that it is about, or all of them, for people.
        step_time_s: of the cluster then.
        changeover_s: until it trains, work that is lost included.
        reason: half a sentence.
        expected_saving_s: of what is left, compared later with what came of it.
    """

    action: Literal["replan", "replace", "on-demand"]
    name: str = ""
    step_time_s: float = 0.0
    changeover_s: float = 0.0
    reason: str = ""
    expected_saving_s: float = 0.0

    def total_s(self, steps_left: float) -> float:
        """Return the seconds until the end, the change included."""
        return self.changeover_s + steps_left * self.step_time_s


@dataclass(kw_only=True)
class Supervision:
    """The supervisor of one run, with the power to act.

    Attributes:
        run_dir: of the run.
        step_time_s: predicted for the place where it was launched, with its 90 % interval.
        steps: that the run takes.
        usd_per_hour: of the cluster.
        deadline_s: by when training must end, seconds since the epoch; None: at any time.
        renting: where its machines can be changed; None: nowhere.
        until_there_s: from an order to end a machine to the first step of the one that is asked for instead.
        standing: of the run, by what its log has told so far.
        may_move: machines on demand can be had: not once they were, or the budget did not pay for them.
        replaced: hosts that were; a second machine would have no better luck.
        said: why nothing could be done, for which nobody needs to be told again.
        called_for: what the last looks called for, and how many in a row did.
        looked_at: how many steps had been seen then.
        acted_s: when something was last done, seconds since the epoch.
    """

    run_dir: Path
    step_time_s: Range
    steps: float
    usd_per_hour: float
    deadline_s: float | None = None
    renting: Renting | None = None
    until_there_s: float = 0.0
    standing: RunProgress = field(default_factory=lambda: RunProgress())
    may_move: bool = True
    replaced: set[str] = field(default_factory=set)
    said: str | None = None
    called_for: tuple[str, int] = ("", 0)
    looked_at: int = -1
    acted_s: float | None = None

    @classmethod
    def of(cls, record: Launch, run_dir: Path, renting: Renting | None = None) -> Supervision:
        """Return the supervision of a launch.

        Args:
            record: of the launch.
            run_dir: of the run.
            renting: where its machines are rented; None: they are not.
        """
        predicted, wished_s = record.prediction, record.plan.goal.deadline_s
        return cls(
            run_dir=run_dir,
            step_time_s=predicted.step_time_s,
            steps=predicted.steps.value,
            usd_per_hour=record.hourly_usd,
            # Elsewhere than on what was planned to be rented a deadline says nothing.
            deadline_s=None if wished_s is None or record.on != "ec2" else record.started_s + wished_s - ENDING_S,
            # Any change of machines costs a run that saves nothing all that it has done.
            renting=renting if record.spec.resumes else None,
            # A machine that is lost takes the work since the last checkpoint with it: half of what is between two.
            until_there_s=predicted.startup_s + record.spec.checkpoint_every_s / 2,
            standing=RunProgress(run=RunFold.launched(record.starts)),
        )

    @property
    def steps_left(self) -> float:
        """Number of steps to the end of the run."""
        return max(0.0, self.steps - self.standing.run.planned_step) / self.standing.run.worth

    def look(self) -> str | None:
        """Look once, and do what is to be done; return the news for a person, if any."""
        decision = self.decide(self.replacements(), self.on_demand())
        if decision is None:
            return None
        if self.renting is not None and decision.action != "replan":
            return self._act(self.renting, decision)
        self._rest()
        return f"{decision.reason}; `hetopt report` shows by what"

    def decide(self, others: Sequence[Decision], on_demand: Decision | None) -> Decision | None:
        """Return the decision after one look; None: nothing is to be done.

        Args:
            others: machines that could be had in the place of hosts.
            on_demand: machines that nobody takes back, in the place of all; None: they cannot be had.
        """
        standing = self.standing
        urgent = None if on_demand is None else self._urgent(on_demand)
        # While a run pauses, looks in a row would see one measurement.
        if urgent is not None or standing.run.logged_steps == self.looked_at:
            return urgent
        wanted = self._wanted(others)
        key = "" if wanted is None else f"{wanted.action} {wanted.name}"
        in_a_row = self.called_for[1] + 1 if self.called_for[0] == key else 1
        self.called_for, self.looked_at = (key, in_a_row), standing.run.logged_steps
        rests = self.acted_s is not None and standing.now_s - self.acted_s < REST_S
        return None if in_a_row < LOOKS or rests else wanted

    def _urgent(self, on_demand: Decision) -> Decision | None:
        if self.deadline_s is None:
            return None
        slack_s = self.deadline_s - self.standing.now_s - on_demand.total_s(self.steps_left)
        # One more changeover must fit: the present machines may be lost at once. Where even these machines would be
        # late, nothing is paid for them.
        if not 0 <= slack_s < on_demand.changeover_s + RESERVE_S:
            return None
        reason = f"only {slack_s:.0f} s are left beyond what {on_demand.name} need until the deadline"
        return replace(on_demand, reason=reason)

    def _wanted(self, others: Sequence[Decision]) -> Decision | None:
        now_s, steps_left = self.standing.step_time_s, self.steps_left
        if now_s is None:
            return None
        quickest = min(others, key=lambda other: other.total_s(steps_left), default=None)
        if quickest is not None and quickest.total_s(steps_left) <= (1 - MARGIN) * steps_left * now_s:
            saving_s = steps_left * now_s - quickest.total_s(steps_left)
            reason = (
                f"another machine in the place of {quickest.name} saves {saving_s:.0f} s and "
                f"${self._usd(saving_s):.2f} of what is left"
            )
            return replace(quickest, reason=reason, expected_saving_s=saving_s)
        worth = self.standing.run.worth  # a larger batch may take as much longer
        low_s, high_s = self.step_time_s.low, self.step_time_s.high * worth
        if others or low_s <= now_s <= high_s:
            return None
        slower = "slower" if now_s > high_s else "quicker"
        reason = f"a step takes {now_s:.3g} s, {slower} than the {low_s:.3g} to {high_s:.3g} s that were predicted"
        return Decision(action="replan", reason=reason)

    def _usd(self, time_s: float) -> float:
        return time_s / SECONDS_PER_HOUR * self.usd_per_hour

    def _act(self, renting: Renting, decision: Decision) -> str | None:
        """Change the machines, and record it; return the news for a person."""
        handle, replaces = RunHandle(run_dir=self.run_dir), decision.action == "replace"
        try:
            if replaces:
                renting.replace(handle, decision.name)
            else:
                renting.move(handle, self.until_there_s + self.steps_left * decision.step_time_s)
        except BadInput:
            return None  # the host is gone already, or the run is over
        except BudgetStop as refused:
            self.may_move = False  # the budget will pay for it even less later
            return refused.message
        except CloudRefused as refused:
            before = self.said
            self.said = f"{refused.message} {decision.name if replaces else 'everything'} stays for now."
            return self.said if self.said != before else None
        self._rest()
        self.replaced.add(decision.name)
        self.may_move = self.may_move and replaces
        write_decision(
            self.run_dir,
            ACTED,
            {
                "step": self.standing.run.step,
                "action": decision.action,
                "host": decision.name,
                "reason": decision.reason,
                "step_time_expected_s": decision.step_time_s,
                "expected_saving_s": round(decision.expected_saving_s, 3),
                "expected_saving_usd": round(self._usd(decision.expected_saving_s), 6),
            },
        )
        return f"{'replaces' if replaces else 'moves to'} {decision.name}: {decision.reason}"

    def _rest(self) -> None:
        self.called_for, self.acted_s = ("", 0), self.standing.now_s

    def replacements(self) -> list[Decision]:
        """Return a replacement of each host that has become slow; none while the run is as it was predicted.

        Only for a machine that does less than half of what machines of its type have done in this run: a type that is
        slower than predicted is slow in every copy, and the batch is shared out accordingly already.

        While the new machine boots, the others do a step in ``t_w``, and in ``t_n`` once it is there. With ``n`` steps
        left and ``s`` seconds until then, the rest takes

            s + (n - s / t_w) t_n  =  s (1 - t_n / t_w) + n t_n

        so that the first term is what the change costs.
        """
        standing = self.standing
        now_s, speeds, batch = standing.step_time_s, standing.speeds, sum(standing.shares)
        if self.renting is None or now_s is None or now_s <= self.step_time_s.high * standing.run.worth or not speeds:
            return []
        by_host: dict[str, list[tuple[float, float]]] = {}
        for worker, speed in zip(standing.workers, speeds, strict=True):
            sound = max(speed, standing.quickest.get(worker.type, 0.0))
            by_host.setdefault(worker.host, []).append((speed, sound))
        found = []
        for host, workers in by_host.items():
            slow, sound = map(sum, zip(*workers, strict=True))
            if slow > SLOW * sound or host in self.replaced:
                continue
            others = sum(speeds) - slow
            then_s = batch / (others + sound) + standing.sync_s
            without_s = batch / others + standing.sync_s if others > 0 else float("inf")
            changeover_s = self.until_there_s * max(0.0, 1 - then_s / without_s)
            found.append(Decision(action="replace", name=host, step_time_s=then_s, changeover_s=changeover_s))
        return found

    def on_demand(self) -> Decision | None:
        """Return the move of all to machines on demand; None where they cannot be had or no deadline asks for them.

        A step takes what it took when all workers were last there, or what was promised where that was never measured:
        with some of them away it takes longer, and those come back with the move.
        """
        begun = self.standing.run.training_started_s is not None
        if self.renting is None or not self.may_move or self.deadline_s is None or not begun:
            return None
        step_s = self.standing.whole_step_time_s or self.step_time_s.value
        return Decision(action="on-demand", name=ON_DEMAND, step_time_s=step_s, changeover_s=self.until_there_s)


_WEIGHT = 0.3
"""Of the newest control period in the running mean; four of them make up most of it."""
_SETTLED = 4
"""Control periods of the same workers, after which their running means are no longer those of the first steps."""


@dataclass(kw_only=True)
class RunProgress:
    """The speed of a run, by its log so far.

    Attributes:
        run: the log, folded.
        step_time_s: running mean over control periods; None: no period yet.
        compute_s: of each worker, likewise.
        sync_s: of the exchange itself, likewise.
        shares: of each worker in the last control period, samples.
        quickest: samples a second that one worker on a machine of a type has done in this run, at best, by type.
        periods: control periods of the workers that train now.
        whole: how many workers there were when most were.
        whole_step_time_s: the running mean when so many were there last; None: not measured yet.
    """

    run: RunFold = field(default_factory=RunFold)
    step_time_s: float | None = None
    compute_s: tuple[float, ...] = ()
    sync_s: float = 0.0
    shares: tuple[int, ...] = ()
    quickest: dict[str, float] = field(default_factory=dict)
    periods: int = 0
    whole: int = 0
    whole_step_time_s: float | None = None

    @property
    def now_s(self) -> float:
        """The time of the newest event, seconds since the epoch."""
        return self.run.last_event_s or 0.0

    @property
    def workers(self) -> list[WorkerTotals]:
        """The workers that train, by rank."""
        return [self.run.roster.workers[place] for place in self.run.roster.present]

    @property
    def speeds(self) -> tuple[float, ...]:
        """The samples a second of each worker while it computes; empty where not all of them are known."""
        known = len(self.run.roster.present) == len(self.shares) == len(self.compute_s)
        if not known or not min(self.compute_s, default=0.0) > 0:
            return ()
        return tuple(share / time_s for share, time_s in zip(self.shares, self.compute_s, strict=True))

    def take(self, event: LogEvent) -> None:
        """Take in the next event of the log; most kinds change no running mean."""
        self.run.take(event)
        if isinstance(event, RunStarted | WorkersChanged):
            self.periods = 0
        if isinstance(event, RunStarted):
            # Other workers, other times: what was measured before says nothing of them.
            self.shares, self.step_time_s, self.compute_s, self.sync_s = (), None, (), 0.0
        if isinstance(event, StepsLogged):
            # Of the worker that waited least: the others' contains their waiting for it.
            self.sync_s = _mean(self.sync_s if self.step_time_s is not None else None, min(event.sync_s))
            self.step_time_s = _mean(self.step_time_s, event.step_time_s)
            same_workers = len(self.compute_s) == len(event.compute_s)
            self.compute_s = tuple(map(_mean, self.compute_s if same_workers else event.compute_s, event.compute_s))
            self.shares, self.periods = event.local_batch_sizes, self.periods + 1
            if self.periods >= _SETTLED:
                self._settle()

    def _settle(self) -> None:
        workers = self.workers
        for worker, speed in zip(workers, self.speeds, strict=False):  # no speeds: not all of them are known
            self.quickest[worker.type] = max(speed, self.quickest.get(worker.type, 0.0))
        if len(workers) >= self.whole:
            self.whole, self.whole_step_time_s = len(workers), self.step_time_s


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
