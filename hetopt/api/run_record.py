"""What the folder of a run says: what was launched, how far it got, and what happened."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetopt.core.events.fold import RunFold, RunHistory
    from hetopt.core.events.reader import Unread
    from hetopt.optimizer.launch_record import Launch
    from hetopt.reports.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as its folder tells it. Without a launch record nothing was predicted for it."""

    launch: Launch | None
    history: RunHistory
    unread: Unread

    @property
    def progress(self) -> RunFold:
        """What the run has come to."""
        return self.history.run

    @cached_property
    def timeline(self) -> Timeline:
        """The run over time, and what happened on the way."""
        from hetopt.reports.timeline import timeline

        return timeline(self.history, time_factor=self.launch.time_factor if self.launch is not None else 1.0)


def read_run(folder: Path) -> RunRecord:
    """What was launched (if that was written down) and how far it got.

    Raises:
        BadInput: the launch record or the log cannot be read.
    """
    from hetopt.api.backends import read_launch
    from hetopt.core.events.decisions import read_with_decisions
    from hetopt.core.events.fold import RunHistory

    launch = read_launch(folder)
    log = read_with_decisions(folder)
    history = RunHistory.of(log.events, launch.starts if launch is not None else ())
    return RunRecord(launch=launch, history=history, unread=log.unread)
