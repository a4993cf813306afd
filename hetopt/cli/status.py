"""`hetopt status`: how a run is, from any terminal; `--watch` draws it again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from hetopt.cli import render
from hetopt.cli.options import NewestRun
from hetopt.reports.live_run import LiveRun
from hetopt.reports.report import worker_reports
from hetopt.reports.status_document import going

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hetopt.api.run import Run
    from hetopt.core.events.fold import RunFold
    from hetopt.core.run_status import RunStatus
    from hetopt.optimizer.launch_record import Launch
    from hetopt.reports.timeline import Happening


def status(
    run: NewestRun = None,
    all_: bool = typer.Option(False, "--all", "-a", help="A line for every run."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Go on showing it, until it is over or Ctrl-C."),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show how a run is: state, steps, metric, each worker's share and waiting, and what it costs so far.

    \b
      hetopt status
      hetopt status --watch
    """
    from hetopt.api.run import Run
    from hetopt.cli import render
    from hetopt.reports import status_document

    if watch:
        from hetopt.cli.status import watch as watch_run
        from hetopt.core.errors import BadInput

        if all_ or json_:
            raise BadInput("--watch shows one run to a person.", hint="leave --all and --json out")
        watch_run(Run.find(run))
        return
    if all_:
        # A list of runs is read from their folders: it needs no login, and answers at once.
        listed = [_facts_or_why(one) for one in Run.all()]
        if json_:
            render.print_json(listed)
        else:
            render.show(status_document.runs(listed))
            for fact in listed:
                if note := fact["reason"] if fact["state"] == status_document.UNREADABLE else fact["unread"]:
                    render.note(f"{fact['run']}: {note}")
        return
    told = _facts(Run.find(run), ask=True)
    if json_:
        render.print_json(told)
    else:
        render.show(status_document.status(told))
        for note in status_document.notes(told):
            render.note(note)


def _facts_or_why(run: Run) -> dict[str, Any]:
    """The facts of a run; of one that cannot be read, why: it must not hide the others."""
    from hetopt.core.errors import HetoptError
    from hetopt.reports.status_document import UNREADABLE

    try:
        return _facts(run, ask=False)
    except HetoptError as error:
        return {"run": run.name, "folder": str(run.folder), "state": UNREADABLE, "reason": error.message}
    except OSError as error:
        reason = f"{error.filename or run.folder} cannot be read: {error.strerror}"
        return {"run": run.name, "folder": str(run.folder), "state": UNREADABLE, "reason": reason}


def _facts(run: Run, *, ask: bool) -> dict[str, Any]:
    started = run.launch
    if started is not None and started.on == "ec2":
        from hetopt.api.account import look

        state, rental = look(run, ask=ask)
    else:
        state, rental = run.status(), None
    record = run.record()
    told = {"unread_lines": record.unread.lines, "unread": record.unread.sentence}
    return facts(run.folder, state, record.launch, record.progress, record.happenings) | {"rental": rental, **told}


def facts(
    folder: Path, state: RunStatus, launch: Launch | None, progress: RunFold, happened: Iterable[Happening]
) -> dict[str, Any]:
    """Return the status of a run."""
    from hetopt.core.run_folder import ConditionsReader
    from hetopt.core.run_status import end_reason
    from hetopt.reports.report import worker_reports
    from hetopt.reports.timeline import pause

    speeds = launch.speeds if launch else {}
    hourly = launch.running_usd_per_hour if launch else None
    elapsed_s = progress.elapsed_s
    return {
        "run": folder.name,
        "folder": str(folder),
        "state": state.state.value,
        "reason": state.reason or end_reason(state.state, progress),
        "on": launch.on if launch else None,
        "resume": resume_command(folder, state, launch.on if launch else None),
        "task": progress.task or (launch.spec.task if launch else None),
        "step": progress.step,
        "predicted_steps": launch.prediction.steps.value if launch else None,
        "epoch": progress.epoch,
        "loss": progress.loss,
        "metrics": dict(progress.metrics),
        "step_time_s": progress.step_time_s,
        "predicted_step_time_s": launch.prediction.step_time_s.value if launch else None,
        "elapsed_s": elapsed_s,
        "usd_per_hour": hourly,
        "usd": hourly * elapsed_s / 3600 if hourly is not None and elapsed_s is not None else None,
        "budget_usd": launch.plan.goal.budget_usd if launch else None,
        "rental": None,
        "restarts": progress.restarts,
        "sessions": progress.sessions,
        "lost_steps": progress.lost_steps,
        "exchange": _exchange(progress),
        "audits": _audits(progress),
        "workers": [worker.model_dump() for worker in worker_reports(progress, speeds)],
        "conditions": ConditionsReader(folder).now().model_dump() if speeds else None,
        "pausing": pause(progress, time.time()) if not state.state.is_over else None,
        "happenings": [happening.model_dump() for happening in happened],
    }


def _audits(progress: RunFold) -> dict[str, Any] | None:
    from hetopt.reports.timeline import audited

    return None if progress.audits is None else asdict(progress.audits) | {"text": audited(progress)}


def resume_command(folder: Path, state: RunStatus, on: str | None) -> str | None:
    """Return the command that goes on with a run which ended before its end; of rented machines where it has a
    checkpoint here."""
    from hetopt.core.run_folder import latest_checkpoint
    from hetopt.core.run_status import RunState

    ended = state.state in (RunState.FAILED, RunState.STOPPED)
    there = ended and on is not None and (on != "ec2" or latest_checkpoint(folder) is not None)
    return f"hetopt launch --on {on} --resume {folder.name}" if there else None


def _exchange(progress: RunFold) -> dict[str, Any] | None:
    """How gradients travel now, and how much of them did so far; nothing for a single worker."""
    traffic = progress.traffic
    if traffic is None:
        return None
    return {
        "way": traffic.way,
        "sent_bytes": traffic.sent_bytes,
        "dense_bytes": traffic.dense_bytes,
        "changes": progress.exchange_changes,
    }


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
