"""What the conductor of a rehearsal needs to know of the run's event log, folded as the log grows."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetopt.backends.emulation.schedule import Moment
from hetopt.core.events.probe_records import FINISHED as PROBE_FINISHED
from hetopt.core.events.probe_records import STARTED as PROBE_STARTED
from hetopt.core.events.records import (
    LogEvent,
    ProbeEvent,
    RunFailure,
    RunStarted,
    StepsLogged,
    TrainingFinished,
    TrainingStarted,
)


@dataclass(kw_only=True)
class Progress:
    """How far the run has come.

    Attributes:
        step: the latest that the log has told of.
        training_since_s: when training, or measuring, began; seconds since the epoch.
        turns: the events that say whether the latest attempt failed.
        is_done: the run has ended by itself: what happens to its hosts from then on is no part of it.
    """

    step: int = 0
    training_since_s: float | None = None
    turns: list[LogEvent] = field(default_factory=list)
    is_done: bool = False

    def add(self, event: LogEvent) -> None:
        """Take in one more event."""
        match event:
            case TrainingStarted():
                self._begin(event.time_s)
                self.step = max(self.step, event.step)
            case StepsLogged():
                self.step = max(self.step, event.step)
            case RunStarted() | RunFailure():
                self.turns.append(event)
            case TrainingFinished():
                self.is_done = True
            case ProbeEvent():
                if event.event == PROBE_STARTED:
                    self._begin(event.time_s)
                self.is_done = self.is_done or event.event == PROBE_FINISHED

    def _begin(self, time_s: float) -> None:
        if self.training_since_s is None:
            self.training_since_s = time_s

    def moment(self, now_s: float) -> Moment:
        """Seconds of training and steps done so far."""
        since_s = self.training_since_s
        return Moment(training_s=None if since_s is None else now_s - since_s, step=self.step)
