"""A run as it goes on: what its log has gained is read and folded, and the few figures that a person watches.

`hetopt status --watch`, the metrics and the dashboard all read runs by this: nobody reads a line twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from hetopt.core.artifact import Record, Told
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import DECISIONS_FILE, EVENTS_FILE, EventReader, Unread
from hetopt.core.events.records import LogEvent, StepsLogged
from hetopt.core.run_status import end_reason
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.plan import Range
from hetopt.reports.timeline import Happening, RecentSteps, happening, left_s, wait_share

LATEST_HAPPENINGS = 5

MOST_POINTS = 120
"""Of a curve; when there are more, every second one goes."""


class RunSummary(Record):
    """A run in a few figures, for lists and comparisons. Seconds, and US dollars."""

    run: str
    state: str
    reason: Told | None = None
    on: Told | None = None
    task: Told = ""
    machines: Told = ""
    workers: NonNegativeInt = 0
    started_s: float | None = None
    latest_s: float | None = None
    elapsed_s: NonNegativeFloat | None = None
    left_s: NonNegativeFloat | None = None
    predicted_s: Range | None = None
    step: NonNegativeInt = 0
    expected_steps: NonNegativeFloat | None = None
    step_time_s: NonNegativeFloat | None = None
    predicted_step_time_s: NonNegativeFloat | None = None
    wait_share: NonNegativeFloat | None = None
    loss: float | None = None
    metrics: dict[Told, float] = Field(default_factory=dict)
    usd: NonNegativeFloat | None = None
    usd_is_estimate: bool = False
    usd_per_hour: NonNegativeFloat | None = None
    is_rented: bool = False
    budget_usd: NonNegativeFloat | None = None
    predicted_usd: Range | None = None
    rented_s: NonNegativeFloat | None = None
    rented_usd: NonNegativeFloat | None = None
    sessions: NonNegativeInt = 0
    restarts: NonNegativeInt = 0
    unread: NonNegativeInt = 0
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def progress(self) -> float | None:
        """Steps done as a part of those that are expected."""
        return min(1.0, self.step / self.expected_steps) if self.expected_steps else None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left running."""
        return self.state in ("finished", "stopped", "failed")

    @property
    def outlook_s(self) -> float | None:
        """What the whole run took, or will take."""
        if self.elapsed_s is None:
            return None
        return self.elapsed_s if self.is_over else None if self.left_s is None else self.elapsed_s + self.left_s


@dataclass(kw_only=True)
class LiveRun:
    """What was read of a run so far.

    Attributes:
        launch: what was predicted; None: nothing was.
        progress: folded from all events.
        recent: its newest steps.
        happenings: the newest.
        curve: (seconds since training began, loss), thinned.
        log, decisions: where reading goes on, in the log and in what the supervisor did.
    """

    launch: Launch | None
    progress: RunFold
    log: EventReader
    decisions: EventReader
    recent: RecentSteps = field(default_factory=RecentSteps)
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=LATEST_HAPPENINGS))
    curve: list[tuple[float, float]] = field(default_factory=list)
    _every: int = 1
    _skipped: int = 0

    @classmethod
    def of(cls, folder: Path, launch: Launch | None) -> LiveRun:
        """Nothing was read of a run yet."""
        return cls(
            launch=launch,
            progress=RunFold.launched(launch.starts if launch is not None else ()),
            log=EventReader(path=folder / EVENTS_FILE),
            decisions=EventReader(path=folder / DECISIONS_FILE),
        )

    def read(self) -> None:
        """Go on with all that the log has gained.

        Raises:
            BadInput: it cannot be read.
        """
        while self.read_some():
            pass

    def read_some(self) -> bool:
        """Go on with at most a MiB of what the log has gained; False: there was none.

        Raises:
            BadInput: it cannot be read.
        """
        for reader in (self.log, self.decisions):
            for events in reader.parts():
                for event in events:
                    self._take(event)
                return True
        return False

    def _take(self, event: LogEvent) -> None:
        self.progress.take(event)
        at_s = self.progress.trained_for_s or 0.0
        if isinstance(event, StepsLogged):
            self.recent.take(event)
            self._draw(at_s, event.loss)
            return
        factor = self.launch.time_factor if self.launch is not None else 1.0
        found = happening(event, self.progress.roster.host, at_s=at_s, time_factor=factor)
        if found is not None:
            self.happenings.append(found)

    def _draw(self, at_s: float, loss: float) -> None:
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self.curve.append((round(at_s, 3), loss))
        if len(self.curve) > MOST_POINTS:
            del self.curve[::2]
            self._every *= 2

    @property
    def unread(self) -> Unread:
        """Lines that were no events."""
        return self.log.unread + self.decisions.unread

    @property
    def step_time_s(self) -> float | None:
        """Mean time of the steps of the recent past, in seconds; None before the first step."""
        return self.recent.step_time_s

    @property
    def expected_steps(self) -> float | None:
        """Steps of the whole run as they were predicted; None: nothing was."""
        return self.launch.prediction.steps.value if self.launch is not None else None

    def elapsed_s(self, now_s: float, *, is_running: bool) -> float | None:
        """Time in which something of the run ran, up to now where it still does; None: no event yet."""
        if self.progress.elapsed_s is None or self.progress.last_event_s is None:
            return None
        since_s = now_s - self.progress.last_event_s if is_running else 0.0
        return self.progress.elapsed_s + max(0.0, since_s)

    def usd(self, elapsed_s: float) -> float | None:
        """What the run costs in that time; None: no plan."""
        return self.launch.running_usd_per_hour * elapsed_s / SECONDS_PER_HOUR if self.launch is not None else None

    def summary(
        self, name: str, state: str, *, now_s: float, reason: str | None = None, rented_usd: float | None = None
    ) -> RunSummary:
        """The run in a few figures.

        Args:
            name: of the run.
            state: of it.
            now_s: seconds since the epoch.
            reason: why it ended so.
            rented_usd: what its rented machines have cost; absent: nothing was rented.
        """
        launch, progress = self.launch, self.progress
        elapsed_s = self.elapsed_s(now_s, is_running=state in ("starting", "running"))
        usd = rented_usd if rented_usd is not None else None if elapsed_s is None else self.usd(elapsed_s)
        planned: dict[str, object] = {}
        if launch is not None:
            said, rate = launch.prediction, launch.running_usd_per_hour / SECONDS_PER_HOUR
            paid = Range(value=rate * said.total_s.value, low=rate * said.total_s.low, high=rate * said.total_s.high)
            planned = {
                "on": launch.on,
                "machines": launch.plan.chosen.in_words,
                "started_s": launch.started_s,
                "predicted_s": said.total_s,
                "predicted_step_time_s": said.step_time_s.value,
                "usd_per_hour": launch.running_usd_per_hour,
                "budget_usd": launch.plan.goal.budget_usd,
                "predicted_usd": paid,
                "rented_s": launch.plan.chosen.prediction.total_s.value,
                "rented_usd": launch.plan.chosen.prediction.cost_usd.value,
            }
        return RunSummary(
            run=name,
            state=state,
            reason=reason or progress.failure or end_reason(state, progress),
            task=progress.task or (launch.spec.task if launch is not None else ""),
            workers=len(progress.roster.present) or (len(launch.spec.workers) if launch is not None else 0),
            latest_s=progress.last_event_s,
            elapsed_s=elapsed_s,
            left_s=left_s(progress, self.expected_steps, self.step_time_s),
            step=progress.step,
            expected_steps=self.expected_steps,
            step_time_s=progress.step_time_s,
            wait_share=wait_share(progress),
            loss=progress.loss,
            metrics=dict(progress.metrics),
            usd=usd,
            is_rented=rented_usd is not None,
            sessions=progress.sessions,
            restarts=progress.restarts,
            unread=self.unread.lines,
            curve=tuple(self.curve),
            **planned,
        )
