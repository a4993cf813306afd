"""`hetopt status --watch`: a run as it goes on, drawn every other second from what its log has gained since."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetopt.cli import render
from hetopt.cli.status import facts
from hetopt.reports.live_run import LiveRun
from hetopt.reports.report import worker_reports
from hetopt.reports.status_document import going

if TYPE_CHECKING:
    from pathlib import Path

    from hetopt.api.run import Run
    from hetopt.core.run_status import RunStatus

EVERY_S = 2.0
"""Drawing sixteen workers takes some ten milliseconds: less than a hundredth of a core."""


def watch(run: Run, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it is over."""
    watched = LiveRun.of(run.folder, run.launch)
    with render.live_view() as show:
        while True:
            status = run.status()
            watched.read()
            show(picture(run.folder, status, watched, now_s=time.time()))
            if status.state.is_over:
                return
            sleep(EVERY_S)


def picture(folder: Path, status: RunStatus, watched: LiveRun, *, now_s: float) -> list[str]:
    """Return how the run is now, in lines."""
    launch, progress = watched.launch, watched.progress
    told = facts(folder, status, launch, progress, watched.happenings)
    elapsed_s = watched.elapsed_s(now_s, is_running=not status.state.is_over)
    told |= {
        "step_time_s": watched.step_time_s,
        "elapsed_s": elapsed_s,
        "usd": None if elapsed_s is None else watched.usd(elapsed_s),
        "workers": [
            worker.model_dump()
            for worker in worker_reports(progress, launch.speeds if launch else {}, newest=True)
            if worker.is_present
        ],
    }
    unread = watched.unread.sentence
    return [*render.plain(going(watched, told, now_s=now_s)), *([unread] if unread else [])]
