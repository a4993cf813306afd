"""What the conductor of a rehearsal needs to know of the run's event log, folded as the log grows."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetopt.profiler.measurement import FINISHED as PROBE_FINISHED
from hetopt.profiler.measurement import STARTED as PROBE_STARTED
from hetopt.trainer.events import Event
from hetopt.trainer.launch.schedule import Moment


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
    turns: list[Event] = field(default_factory=list)
    is_done: bool = False

    def add(self, event: Event) -> None:
        """Take in one more event."""
        name = event["event"]
        if name in ("training_started", PROBE_STARTED) and self.training_since_s is None:
            self.training_since_s = event["time_s"]
        if name in ("training_started", "step"):
            self.step = max(self.step, int(event.get("step", 0)))
        if name in ("run_started", "run_failed"):
            self.turns.append(event)
        if name in ("training_finished", PROBE_FINISHED):
            self.is_done = True

    def moment(self, now_s: float) -> Moment:
        """How far training has come."""
        since_s = self.training_since_s
        return Moment(training_s=None if since_s is None else now_s - since_s, step=self.step)
