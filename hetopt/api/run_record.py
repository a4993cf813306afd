"""What the folder of a run says: what was launched, how far it got, and what happened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetopt.core.events.reader import Unread
    from hetopt.core.events.records import LogEvent
    from hetopt.optimizer.launch_record import Launch
    from hetopt.reports.progress import Progress
    from hetopt.reports.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as its folder tells it. Without a launch record nothing was predicted for it."""

    launch: Launch | None
    progress: Progress
    timeline: Timeline
    events: Sequence[LogEvent]
    unread: Unread

    @property
    def starts(self) -> tuple[float, ...]:
        """When the run was launched and went on, where that was written down."""
        return self.launch.starts if self.launch is not None else ()


def read_run(folder: Path) -> RunRecord:
    """What was launched (if that was written down) and how far it got.

    Raises:
        BadInput: the launch record or the log cannot be read.
    """
    from hetopt.api.backends import read_launch
    from hetopt.core.events.decisions import read_with_decisions
    from hetopt.reports.progress import follow
    from hetopt.reports.timeline import timeline

    launch = read_launch(folder)
    log = read_with_decisions(folder)
    starts = launch.starts if launch is not None else ()
    return RunRecord(
        launch=launch,
        progress=follow(log.events, starts),
        timeline=timeline(log.events, starts=starts, time_factor=launch.time_factor if launch else 1.0),
        events=log.events,
        unread=log.unread,
    )
