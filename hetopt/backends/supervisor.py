"""Moves a rented run to machines on demand at the last moment at which only they still keep its deadline.

What the trainer does by itself (shares, compression, a lost worker) is not decided here, nor what the budget allows
(`ec2.renter.reconcile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.backend import Renting, RunHandle
from hetopt.core.errors import BadInput, BudgetStop
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import write_decision
from hetopt.core.events.records import LogEvent, StepsLogged
from hetopt.optimizer.launch_record import Launch

ACTED = "supervisor_acted"

ENDING_S = 180.0
"""Seconds before its deadline at which a rented run is told to save its last checkpoint and to end."""

ON_DEMAND = "the same machines on demand"

RESERVE_S = 60.0
"""Seconds by which a deadline is looked at ahead: the time between looks, and to stop."""

_WEIGHT = 0.3
"""Of the newest control period in the running mean; four of them make up most of it."""


@dataclass(kw_only=True)
class Supervision:
    """The watch over a rented run's deadline, which moves the run to on-demand machines at the last moment.

    Attributes:
        run_dir: the run's folder.
        run: its log, folded by the process that follows it.
        steps: number of steps that the run takes, as predicted.
        step_time_s: running mean over control periods with all workers, from the prediction on: with some of them away
            a step takes longer, and those come back with the move.
        until_there_s: seconds from the wish to move to the first step on the new machines.
        deadline_s: time by which training must end, seconds since the epoch; None: at any time.
        renting: launcher by which the run can move; None: it cannot, or has moved.
        workers: largest number of workers so far.
    """

    run_dir: Path
    run: RunFold
    steps: float
    step_time_s: float
    until_there_s: float
    deadline_s: float | None = None
    renting: Renting | None = None
    workers: int = 0

    @classmethod
    def of(cls, record: Launch, run_dir: Path, run: RunFold, renting: Renting | None = None) -> Supervision:
        """Return the supervision of a launched run, whose log the caller folds into ``run``.

        Args:
            record: record of the launch.
            run_dir: the run's folder.
            run: its log, folded as it is read.
            renting: launcher of its machines; None: they are not rented, so that nothing moves.
        """
        predicted, wished_s = record.prediction, record.plan.goal.deadline_s
        return cls(
            run_dir=run_dir,
            run=run,
            steps=predicted.steps.value,
            step_time_s=predicted.step_time_s.value,
            # A machine that is lost takes the work since the last checkpoint with it: half of what is between two.
            until_there_s=predicted.startup_s + record.spec.checkpoint_every_s / 2,
            deadline_s=None if wished_s is None else record.started_s + wished_s - ENDING_S,
            # Any change of machines costs a run that saves nothing all that it has done.
            renting=renting if record.spec.resumes else None,
        )

    @property
    def steps_left(self) -> float:
        """Number of steps to the end of the run, by the prediction; 0 beyond it."""
        return max(0.0, self.steps - self.run.planned_step) / self.run.worth

    def take(self, event: LogEvent) -> None:
        """Update the running mean of step seconds by the log's next event; only logged steps with all workers count."""
        if isinstance(event, StepsLogged) and len(event.compute_s) >= self.workers:
            self.workers = len(event.compute_s)
            self.step_time_s += _WEIGHT * (event.step_time_s - self.step_time_s)

    def look(self) -> str | None:
        """Move the run, once, if only on-demand machines still keep its deadline; return a sentence on it or None.

        A budget that does not pay for the move gives a sentence, too, and no later try. Without a deadline, before
        training, or after the deadline can be kept no more, nothing happens.
        """
        renting = self.renting
        if renting is None or self.deadline_s is None or self.run.training_started_s is None:
            return None
        needed_s = self.until_there_s + self.steps_left * self.step_time_s
        slack_s = self.deadline_s - (self.run.last_event_s or 0.0) - needed_s
        # One more changeover must fit: the present machines may be lost at once. Where even these machines would be
        # late, nothing is paid for them.
        if not 0 <= slack_s < self.until_there_s + RESERVE_S:
            return None
        self.renting = None  # once: the budget pays for it even less later
        try:
            renting.move(RunHandle(run_dir=self.run_dir), needed_s)
        except BadInput:
            return None  # it is on demand already, or over
        except BudgetStop as refused:
            return refused.message
        reason = f"only {slack_s:.0f} s are left beyond what {ON_DEMAND} need until the deadline"
        acted = {"step": self.run.step, "action": "on-demand", "host": ON_DEMAND, "reason": reason}
        write_decision(self.run_dir, ACTED, acted)
        return f"moves to {ON_DEMAND}: {reason}"
