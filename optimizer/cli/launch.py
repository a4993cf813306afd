"""`hetopt launch`: run a plan, follow it, and leave nothing behind when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from hetopt.optimizer.launch_record import Launch
    from hetopt.trainer.launch.base import Launcher, RunHandle

PLACES = ("local",)
POLL_S = 0.2


def launch(
    plan: Path | None = typer.Argument(None, help="Plan made by `hetopt recommend`. Left out with --resume."),
    on: str = typer.Option("ec2", "--on", help="Where to run: 'local' is this machine, with real processes."),
    pace: str | None = typer.Option(
        None, "--pace", help="local: one factor a worker, such as 1,1,2,4; each worker's compute is stretched by it."
    ),
    data: Path | None = typer.Option(None, "--data", help="Data folder, when it is not where the profile found it."),
    resume: str | None = typer.Option(None, "--resume", help="Go on with this run from its last checkpoint."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would run and stop there."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    json_: bool = typer.Option(False, "--json", help="Print the launch (with --dry-run) or the report as JSON."),
) -> None:
    """Run a plan.

    On 'local' the plan's machines become processes on this machine: as many as --pace has factors, or as the plan has
    workers. The global batch and the compression stay; the shares are solved again for these workers, and the
    prediction is made again for this machine, so that `hetopt report` compares like with like. Nothing is rented.
    """
    import datetime
    import sys
    import time

    from hetopt.optimizer.cli import render
    from hetopt.optimizer.cli.parse import paces
    from hetopt.optimizer.launch_record import LAUNCH_FILE
    from hetopt.profiler.errors import BadInput
    from hetopt.trainer.launch.local import LocalLauncher
    from hetopt.trainer.launch.runs import RunFolders, runs_home

    if on not in PLACES:
        raise BadInput(
            f"this version of hetopt cannot launch on {on!r}.", hint="rehearse the plan on this machine with --on local"
        )
    factors = paces(pace)
    folders = RunFolders(home=runs_home())
    launcher = LocalLauncher()
    if resume is not None:
        if plan is not None or factors is not None:
            raise BadInput(
                "--resume goes on with a run as it was: leave PLAN and --pace out.",
                hint="hetopt launch --on local --resume RUN",
            )
        folder, record = _to_resume(folders.find(resume), launcher)
    else:
        if plan is None:
            raise BadInput(
                "no plan was named.", hint="make one with `hetopt recommend PROFILE --budget USD -o plan.json`"
            )
        record = _prepare(plan, factors, data)
        folder = None
    if dry_run:
        if json_:
            sys.stdout.write(record.to_json())
        else:
            _show(record)
        return
    if not json_:
        _show(record)
    _need_torch()
    if not yes and sys.stdin.isatty() and sys.stderr.isatty() and not typer.confirm("Start?", default=True, err=True):
        raise typer.Exit(0)
    if folder is None:
        now = datetime.datetime.now(datetime.UTC)
        folder = folders.create(record.spec.task, now)
        record = record.model_copy(update={"run_id": folder.name, "created": now.isoformat(timespec="seconds")})
    record = record.model_copy(update={"started_s": time.time()})
    record.save(folder / LAUNCH_FILE)
    render.note(f"run {folder.name}; look at it from another terminal with `hetopt status`, end it with `hetopt stop`")
    _run(launcher, record, folder)
    _finish(launcher, folder, as_json=json_)


def _prepare(path: Path, factors: tuple[float, ...] | None, data: Path | None) -> Launch:
    from hetopt.optimizer.launch_record import Launch
    from hetopt.optimizer.local import predict_on_local
    from hetopt.optimizer.plan import Plan

    plan = Plan.load(path)
    spec, prediction = predict_on_local(plan, factors)
    if data is not None:
        spec = spec.model_copy(update={"data_dir": str(data.resolve())})
    return Launch(created="", started_s=0.0, run_id="", on="local", plan=plan, spec=spec, prediction=prediction)


def _to_resume(folder: Path, launcher: Launcher) -> tuple[Path, Launch]:
    from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
    from hetopt.profiler.errors import BadInput
    from hetopt.trainer.launch.base import RunHandle

    state = launcher.poll(RunHandle(run_dir=folder)).state
    if not state.is_over:
        raise BadInput(f"{folder.name} is still {state.value}.", hint=f"end it first with `hetopt stop {folder.name}`")
    if not (folder / "checkpoint" / "LATEST").exists():
        raise BadInput(f"{folder.name} has no checkpoint to go on from.", hint="start it anew from its plan")
    return folder, Launch.load(folder / LAUNCH_FILE)


def _need_torch() -> None:
    import importlib.util

    from hetopt.profiler.errors import BadInput

    if importlib.util.find_spec("torch") is None:
        raise BadInput("training needs torch, which is not installed.", hint="pip install 'hetopt[train]'")


def _show(record: Launch) -> None:
    from hetopt.optimizer import words
    from hetopt.optimizer.cli import render

    spec, said = record.spec, record.prediction
    ends = (
        f"until {record.plan.goal.target_metric} {record.plan.goal.target_value:g}"
        if spec.stop.target
        else f"{spec.stop.max_epochs:g} epochs"
        if spec.stop.max_epochs
        else f"{spec.stop.max_steps} steps"
    )
    render.line(
        f"{spec.task}, {ends}, on this machine: {len(spec.workers)} worker{'s' if len(spec.workers) > 1 else ''}, "
        f"global batch {words.count(spec.global_batch_size)}, "
        f"compression {words.compression(spec.compression.name, spec.compression.ratio)}",
        style="bold",
    )
    render.table(
        [
            render.Column(name="worker"),
            render.Column(name="planned as"),
            render.Column(name="pace", justify="right"),
            render.Column(name="share", justify="right"),
        ],
        [[w.host, w.type, f"{w.pace:g}", words.count(w.local_batch_size)] for w in spec.workers],
    )
    render.line(
        f"  predicted here: {words.duration(said.total_s.value)} "
        f"({words.duration(said.total_s.low)} – {words.duration(said.total_s.high)}), "
        f"{words.count(said.steps.value)} steps of {words.duration(said.step_time_s.value)}. "
        "Nothing is rented: total $0."
    )


def _run(launcher: Launcher, record: Launch, folder: Path) -> None:
    """Start the run and follow it to its end. Whatever interrupts the following also ends the run."""
    import os

    from hetopt.optimizer.cli import render

    handle: RunHandle | None = None
    with render.progress("training") as tell:
        tell("starting the workers", 0.0)
        try:
            handle = launcher.start(record.spec, folder, dict(os.environ))
            _follow(launcher, handle, record, tell)
        except BaseException:
            if handle is not None:
                tell("stopping the workers", None)
                launcher.stop(handle)
            raise


def _follow(launcher: Launcher, handle: RunHandle, record: Launch, tell: Callable[[str, float | None], None]) -> None:
    import time

    from hetopt.optimizer import words
    from hetopt.optimizer.progress import Progress, advance
    from hetopt.trainer.events import EVENTS_FILE, parse_events
    from hetopt.trainer.launch.logs import read_from

    progress, offset = Progress(started_s=record.started_s), 0
    expected = max(record.prediction.steps.value, 1.0)
    while True:
        over = launcher.poll(handle).state.is_over
        text, offset = read_from(handle.run_dir / EVENTS_FILE, offset)
        for event in parse_events(iter(text.splitlines(keepends=True))):
            progress = advance(progress, event)
        if progress.logged_steps:
            metrics = " ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
            loss = f", loss {progress.loss:.4g}" if progress.loss is not None else ""
            tell(
                f"epoch {progress.epoch:.1f}, step {words.count(progress.step)}{loss} {metrics}",
                min(progress.step / expected, 1.0),
            )
        if over:
            return
        time.sleep(POLL_S)


def _finish(launcher: Launcher, folder: Path, *, as_json: bool) -> None:
    """Say how it ended, with the exit code that goes with it."""
    import sys

    from hetopt.optimizer import words
    from hetopt.optimizer.cli import render
    from hetopt.optimizer.cli.status import read_run
    from hetopt.optimizer.report import make_report
    from hetopt.profiler.errors import RunFailed
    from hetopt.trainer.launch.base import RunHandle, RunState

    status = launcher.poll(RunHandle(run_dir=folder))
    if status.state is RunState.FAILED:
        raise RunFailed(status.reason or "the run failed without saying why.", hint=f"read `hetopt logs {folder.name}`")
    launch, progress = read_run(folder)
    if as_json and launch is not None:
        sys.stdout.write(make_report(launch, progress, state=status.state.value).to_json())
        return
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
    took = f" in {words.duration(progress.training_s)}" if progress.training_s is not None else ""
    render.line(f"{status.state.value} after {words.count(progress.step)} steps{took}: {metrics}", style="bold")
    render.note(f"model and log are in {folder}; compare with the prediction by `hetopt report`")
