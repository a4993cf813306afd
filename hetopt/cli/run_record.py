"""What a command needs to know of a run that was started earlier: its record, how far it got, and who can stop it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetopt.backends.backend import Launcher
    from hetopt.core.events.reader import Unread
    from hetopt.core.events.records import LogEvent
    from hetopt.optimizer.launch_record import Launch, Place
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


def read_launch(folder: Path) -> Launch | None:
    """The launch record of a run, if it was written.

    Raises:
        BadInput: it cannot be read.
    """
    from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch

    return Launch.load(folder / LAUNCH_FILE) if (folder / LAUNCH_FILE).exists() else None


def launcher_of(launch: Launch | None, folder: Path) -> Launcher:
    """Who can look after a run: the launcher of the place where it was started. Rented probes have no record."""
    from hetopt.backends.ec2.renter.order import ORDER_FILE

    unrecorded: Place = "ec2" if (folder / ORDER_FILE).exists() else "local"
    return launcher_for(unrecorded if launch is None else launch.on)


def launcher_for(place: Place) -> Launcher:
    """The launcher of a place."""
    match place:
        case "local":
            from hetopt.backends.local import LocalLauncher

            return LocalLauncher()
        case "rehearsal":
            from hetopt.backends.emulation.backend import RehearsalLauncher

            return RehearsalLauncher()
        case "ec2":
            from hetopt.backends.ec2.renter.launcher import Ec2Launcher
            from hetopt.backends.runs import runs_home
            from hetopt.cli import render

            return Ec2Launcher(home=runs_home().parent, tell=render.note)
