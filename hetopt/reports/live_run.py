"""A run as it goes on: what its log has gained is read and folded, and its facts, as screens, pages and JSON have them.

`hetopt status` reads runs by this: nobody reads a line twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetopt.core import formatting
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import DECISIONS_FILE, EVENTS_FILE, EventReader, Unread
from hetopt.core.events.records import (
    Evaluated,
    LogEvent,
    RunFailure,
    RunStarted,
    StepsLogged,
    TrainingFinished,
)
from hetopt.core.run_folder import conditions_in, latest_checkpoint
from hetopt.core.run_status import RunState, RunStatus
from hetopt.optimizer.launch_record import Launch
from hetopt.reports.report import worker_reports
from hetopt.reports.timeline import NotableEvent, RecentSteps, audited, figures, happening, left_s, pause

LATEST_HAPPENINGS = 5

LEAST_BETWEEN_S = 5.0
BETWEEN_SHARE = 0.03
"""Share of the run's time after which steps are told again; of a short run, `LEAST_BETWEEN_S` seconds."""

UNREADABLE = "unreadable"
"""State of a run whose folder holds what nobody can read."""


@dataclass(kw_only=True)
class LiveRun:
    """The state of a run as read from its log so far.

    Attributes:
        launch: record of what was started and predicted; None: there is none.
        progress: figures folded from all events so far.
        recent: newest steps.
        happenings: newest noteworthy events, at most five; of routine ones the last of a kind.
        log: reader of the run's log, at the place where reading goes on.
        decisions: reader of what the supervisor did, at the place where reading goes on.
    """

    launch: Launch | None
    progress: RunFold
    log: EventReader
    decisions: EventReader
    recent: RecentSteps = field(default_factory=RecentSteps)
    happenings: list[NotableEvent] = field(default_factory=list)
    _said_s: float = 0.0

    @classmethod
    def of(cls, folder: Path, launch: Launch | None) -> LiveRun:
        """Return the live state of the run in ``folder``, before any of its log is read.

        Args:
            folder: folder of the run.
            launch: record of what was started; None: there is none.
        """
        return cls(
            launch=launch,
            progress=RunFold.launched(launch.starts if launch is not None else ()),
            log=EventReader(path=folder / EVENTS_FILE),
            decisions=EventReader(path=folder / DECISIONS_FILE),
        )

    def read(self) -> None:
        """Read and fold the events that the log has gained since the last call.

        Raises:
            BadInput: a file cannot be read.
        """
        for reader in (self.log, self.decisions):
            for event in reader.events():
                self.take(event)

    def take(self, event: LogEvent) -> NotableEvent | None:
        """Fold an event of the run in, and return it in words; None: it is an everyday one, such as logged steps."""
        self.progress.take(event)
        if isinstance(event, StepsLogged):
            self.recent.take(event)
            return None
        at_s, factor = self.progress.trained_for_s or 0.0, 1.0 if self.launch is None else self.launch.time_factor
        news = happening(event, at_s=at_s, time_factor=factor)
        if news is not None:
            before = [happened for happened in self.happenings if not (news.is_routine and happened.kind == news.kind)]
            self.happenings = [*before, news][-LATEST_HAPPENINGS:]
        return news

    def said(self, event: LogEvent) -> str | None:
        """Fold an event in, and return a line for a person who watches; None: it is not worth a line.

        Steps are told now and then (see `BETWEEN_SHARE`).
        """
        happened, progress = self.take(event), self.progress
        at_s = progress.trained_for_s or 0.0
        match event:
            case RunStarted():
                batches = ", ".join(formatting.count(worker.local_batch_size) for worker in event.workers)
                workers = formatting.counted(len(event.workers), "worker")
                text = f"{event.task} starts on {workers}, local batch sizes {batches}"
            case StepsLogged():
                if progress.step > event.steps and at_s - self._said_s < max(LEAST_BETWEEN_S, BETWEEN_SHARE * at_s):
                    return None
                self._said_s = at_s
                step_s = self.recent.step_time_s
                now = figures(progress, self.launch, step_time_s=step_s, now_s=event.time_s, money=False)
                text = ", ".join(now[:4])
            case Evaluated():
                text = f"step {formatting.count(event.step)}: {formatting.reached(event.metrics, None)}"
            case TrainingFinished():
                text = f"over after {formatting.counted(progress.step, 'step')}{formatting.ending(event.reason)}"
            case RunFailure():
                text = f"failed: {progress.failure}"
            case _ if happened is None:
                return None
            case _:
                text = happened.sentence
        return f"{formatting.duration(at_s)}: {text}"

    @property
    def unread(self) -> Unread:
        """Lines of the log, and of what the supervisor did, that were no events."""
        return self.log.unread + self.decisions.unread

    def facts(
        self, folder: Path, status: RunStatus, *, now_s: float, rental: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the facts of the run: by its newest steps while it goes on, afterwards by all of them.

        Facts that are not known are None. Nothing is read here: `read` does that.

        Args:
            folder: folder of the run.
            status: state of the run, and why.
            now_s: present time, in seconds since the epoch.
            rental: facts of its rented machines, as of `hetopt.api.account.look`; None: nothing is rented, or nobody
                asked.
        """
        launch, progress, is_over = self.launch, self.progress, status.state.is_over
        prediction = None if launch is None else launch.prediction
        hourly = None if launch is None else launch.running_usd_per_hour
        elapsed_s, ended = progress.elapsed_s, progress.finish_reason
        if elapsed_s is not None and progress.last_event_s is not None and not is_over:
            elapsed_s += max(0.0, now_s - progress.last_event_s)
        steps = None if prediction is None else prediction.steps.value
        speeds = {} if launch is None else launch.speeds
        workers = worker_reports(progress, speeds, newest=not is_over)
        exchange = progress.latest and progress.latest.exchange
        return {
            "run": folder.name,
            "folder": str(folder),
            "state": status.state.value,
            "reason": status.reason or progress.failure or (ended if is_over and ended != status.state else None),
            "on": launch and launch.on,
            "resume": resume_command(folder, status, launch),
            "task": progress.task or (launch and launch.spec.task),
            "step": progress.step,
            "predicted_steps": steps,
            "epoch": progress.epoch,
            "loss": progress.loss,
            "metrics": dict(progress.metrics),
            "step_time_s": progress.step_time_s if is_over else self.recent.step_time_s,
            "predicted_step_time_s": prediction and prediction.step_time_s.value,
            "elapsed_s": elapsed_s,
            "left_s": None if is_over else left_s(progress, steps, self.recent.step_time_s),
            "predicted_s": prediction and prediction.total_s.model_dump(),
            "usd_per_hour": hourly,
            "usd": None if hourly is None or elapsed_s is None else hourly * elapsed_s / SECONDS_PER_HOUR,
            "budget_usd": launch and launch.plan.goal.budget_usd,
            "rental": rental,
            "restarts": progress.restarts,
            "sessions": progress.clock.sessions,
            "lost_steps": progress.lost_steps,
            "exchange": exchange
            and {
                "way": exchange.way,
                "sent_bytes": progress.sent_bytes,
                "dense_bytes": progress.dense_bytes,
                "changes": progress.exchange_changes,
            },
            "audits": {
                "count": progress.audits,
                "distance": progress.audit_distance,
                "tolerance": progress.audit_tolerance,
                "reason": progress.audit_reason,
                "text": audited(progress),
            }
            if progress.audits
            else None,
            "workers": [worker.model_dump() for worker in workers if is_over or worker.is_present],
            "conditions": conditions_in(folder)().model_dump() if speeds else None,
            "pausing": None if is_over else pause(progress, now_s),
            "happenings": [happened.model_dump() for happened in self.happenings],
            "unread_lines": self.unread.lines,
            "unread": self.unread.sentence,
        }


def resume_command(folder: Path, status: RunStatus, launch: Launch | None) -> str | None:
    """Return the shell command that resumes a failed or stopped run; None: the run cannot be resumed.

    None also of a run in another state, without a launch, or on rented machines without a checkpoint here.
    """
    if launch is None or status.state not in (RunState.FAILED, RunState.STOPPED):
        return None
    there = launch.on != "ec2" or latest_checkpoint(folder) is not None
    return f"hetopt launch --on {launch.on} --resume {folder.name}" if there else None
