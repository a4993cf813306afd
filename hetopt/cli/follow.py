"""Starts a launched run, follows it to its end, and says how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetopt.backends.backend import Launcher, RunHandle
    from hetopt.cli.render import Live
    from hetopt.core.errors import HetoptError
    from hetopt.optimizer.launch_record import Launch

POLL_S = 0.2
LOOK_S = 10.0
"""Between looks of the supervisor."""


def run(launcher: Launcher, record: Launch, folder: Path) -> None:
    """Start the run and follow it to its end. Whatever interrupts the following also ends the run."""
    import os

    from hetopt.cli import render
    from hetopt.core.interruption import stopping

    handle: RunHandle | None = None
    with render.progress("training") as live:
        live("starting the workers", 0.0)
        try:
            handle = launcher.start(record.spec, folder, dict(os.environ))
            keep_up(launcher, handle, record, live)
        except BaseException:
            if handle is not None:
                with stopping(f"run {folder.name}", f"hetopt stop {folder.name}", lambda told: live(told, None)):
                    launcher.stop(handle)
            raise


def keep_up(launcher: Launcher, handle: RunHandle, record: Launch, live: Live) -> None:
    """Follow a run that was started to its end."""
    import time
    from functools import partial

    from hetopt.backends.backend import Renting
    from hetopt.backends.supervisor.acting import Supervision
    from hetopt.core import formatting
    from hetopt.core.events.log import EVENTS_FILE
    from hetopt.core.events.reader import EventReader
    from hetopt.reports.progress import advance, begin
    from hetopt.reports.timeline import happening

    progress, reader = begin(record.starts), EventReader(path=handle.run_dir / EVENTS_FILE)
    unread = reader.unread
    expected = max(record.prediction.steps.value, 1.0)
    replace = partial(launcher.replace, handle) if isinstance(launcher, Renting) else None
    move = partial(launcher.move, handle) if isinstance(launcher, Renting) else None
    add = partial(launcher.add, handle) if isinstance(launcher, Renting) else None
    switch = partial(launcher.switch, handle) if isinstance(launcher, Renting) else None
    pools = partial(launcher.pools, handle) if isinstance(launcher, Renting) else None
    supervision = Supervision.of(
        record, handle.run_dir, replace=replace, move=move, add=add, switch=switch, pools=pools
    )
    looked_s = time.monotonic()
    while True:
        over = launcher.poll(handle).state.is_over
        for event in reader.read():
            progress = advance(progress, event)
            supervision.take_in(event)
            if event.time_s < record.starts[-1]:
                continue  # of an earlier session, in which it was told
            passed = happening(event, progress.roster.host, time_factor=record.time_factor)
            # The report draws what is routine.
            if passed is not None and not passed.is_routine:
                live.note(f"step {formatting.count(progress.step)}: {passed.sentence}")
        if reader.unread.lines != unread.lines:
            unread = reader.unread
            live.note(f"{unread.sentence}")
        if progress.logged_steps:
            metrics = " ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
            loss = f", loss {progress.loss:.4g}" if progress.loss is not None else ""
            live(
                f"epoch {progress.epoch:.1f}, step {formatting.count(progress.step)}{loss} {metrics}",
                min(progress.step / expected, 1.0),
            )
        if over:
            return
        if time.monotonic() - looked_s >= LOOK_S:
            looked_s = time.monotonic()
            told = supervision.look()
            if told is not None:
                live.note(f"step {formatting.count(progress.step)}: {told}")
        time.sleep(POLL_S)


def finish(launcher: Launcher, folder: Path, *, as_json: bool, ended_by: HetoptError | None = None) -> None:
    """Say how it ended, with the exit code that goes with it.

    Args:
        launcher: of the run.
        folder: its own.
        as_json: for programs.
        ended_by: why it was stopped, where that is known; absent: somebody else stopped it.

    Raises:
        RunFailed: it failed.
        RunStopped: it was stopped before its planned end; or what ``ended_by`` is.
    """

    from hetopt.backends.backend import RunHandle
    from hetopt.cli import render, terminal
    from hetopt.cli.run_record import read_run
    from hetopt.core import formatting
    from hetopt.core.errors import RunFailed, RunStopped
    from hetopt.core.run_folder import UNFINISHED_MODEL_FILE
    from hetopt.core.run_status import RunState
    from hetopt.reports.report import make_report

    status = launcher.poll(RunHandle(run_dir=folder))
    if status.state is RunState.FAILED:
        raise RunFailed(status.reason or "the run failed without saying why.", hint=f"read `hetopt logs {folder.name}`")
    record = read_run(folder)
    progress = record.progress
    done = f"{formatting.count(progress.step)} steps"
    if status.state is RunState.STOPPED and record.launch is not None:
        done = f"{formatting.count(progress.step)} of {_planned(record.launch)} steps"
    if record.unread.sentence is not None:
        render.note(record.unread.sentence)
    if as_json and record.launch is not None:
        made = make_report(
            record.launch, progress, record.timeline, state=status.state.value, unread_lines=record.unread.lines
        )
        terminal.write(made.to_json())
    else:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
        took = f" in {formatting.duration(progress.training_s)}" if progress.training_s is not None else ""
        render.line(f"{status.state.value} after {done}{took}: {metrics}", style="bold")
        render.note(f"model and log are in {folder}; compare with the prediction by `hetopt report`")
    if ended_by is not None:
        raise ended_by
    if status.state is RunState.STOPPED:
        on = record.launch.on if record.launch is not None else "local"
        raise RunStopped(
            f"the run was stopped after {done}; the model of so far is {folder / UNFINISHED_MODEL_FILE}.",
            hint=f"go on with `hetopt launch --on {on} --resume {folder.name}`",
        )


def _planned(launch: Launch) -> str:
    """The steps that the run was to do; where a target or a number of epochs ends it, as they were predicted."""
    from hetopt.core import formatting

    most = launch.spec.stop.max_steps
    predicted = formatting.count(max(1, round(launch.prediction.steps.value)))
    return formatting.count(most) if most is not None else f"about {predicted}"
