"""`hetopt profile`: measure a training job on this machine and write down what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from hetopt.profiler.profile import Device, Profile, StepTime
    from hetopt.profiler.schedule import ProbeSchedule
    from hetopt.profiler.throughput import Timing
    from hetopt.trainer.launch.base import Launcher, RunStatus
    from hetopt.trainer.spec import RunSpec

POLL_S = 0.2
STOP_GRACE_S = 3.0
"""A probe has nothing to save, so it need not be waited for long."""

SHORTEST_BUDGET_S = 5.0

SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN = {"GOMP_SPINCOUNT": "20000"}
"""OpenMP threads wait for each other by spinning, for milliseconds by default. Whenever something else wants a processor,
they then spin where the awaited thread should run, and a step takes ten times as long. A short spin (some 0.1 ms) still
bridges the gaps between operators."""


def profile(
    task: str = typer.Argument(..., help="Bundled task, module:attribute or file.py:attribute."),
    data: Path | None = typer.Option(None, "--data", help="Folder of the task's data, for tasks that read files."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Write the profile to this JSON file. Default: profile.json, or none with --json."
    ),
    force: bool = typer.Option(False, "--force", help="Replace the output file if it exists."),
    workers: int | None = typer.Option(
        None, "--workers", help="Worker processes to measure together. Default: the GPUs, else two or one a processor."
    ),
    time_budget: float = typer.Option(
        40.0, "--time-budget", help="Seconds that measuring may take, about; starting up comes on top."
    ),
    seed: int = typer.Option(0, "--seed", help="Seed of weights and sample order."),
    type_: str = typer.Option("local", "--type", help="What this machine is: an instance type of the catalogue."),
    json_: bool = typer.Option(False, "--json", help="Print the profile as JSON."),
) -> None:
    """Measure a training job on this machine: step times, memory, network, gradient noise, compressibility, pilot runs.

    The profile is what `hetopt recommend` plans from. Measure while the machine has nothing else to do.
    """
    import sys

    from hetopt.optimizer.cli import parse, render
    from hetopt.profiler.errors import BadInput

    if output is None and not json_:
        output = Path("profile.json")
    parse.ready_to_write(output, force=force)
    if not SHORTEST_BUDGET_S <= time_budget <= 86_400:
        raise BadInput(
            f"--time-budget must be {SHORTEST_BUDGET_S:g} to 86400 seconds, not {time_budget:g}.",
            hint="leave it out for the usual 40 seconds",
        )
    if seed < 0:
        raise BadInput(f"--seed must not be negative, and is {seed}.", hint="for example --seed 1")
    _check_type(type_)
    with render.progress(f"profiling {task}") as tell:
        tell("loading the task", None)
        spec, schedule = _prepare(task, data, workers=workers, time_budget_s=time_budget, seed=seed, device_type=type_)
        measured = _measure(spec, schedule, device_type=type_, tell=tell)
    if output is not None:
        measured.save(output)
        render.note(f"wrote {output}")
    if json_:
        sys.stdout.write(measured.to_json())
    else:
        show(measured)


def _check_type(name: str) -> None:
    """Refuse a type that no plan could ever match with the catalogue."""
    from hetopt.profiler.profile import LOCAL

    if name != LOCAL:
        from hetopt.optimizer.catalog import load_catalog

        load_catalog().instance_type(name)


def _prepare(
    reference: str,
    data: Path | None,
    *,
    workers: int | None,
    time_budget_s: float,
    seed: int,
    device_type: str,
) -> tuple[RunSpec, ProbeSchedule]:
    """Look at the task and its data before any process is started, and write the schedule for them."""
    import importlib.util
    import os

    from hetopt.profiler.errors import BadInput
    from hetopt.profiler.schedule import make_schedule
    from hetopt.trainer.spec import RunSpec, StopRule, WorkerSpec

    if importlib.util.find_spec("torch") is None:
        raise BadInput("profiling needs torch, which is not installed.", hint="pip install 'hetopt[train]'")
    if data is not None and not data.is_dir():
        raise BadInput(f"there is no data folder {data}.", hint="give the folder that holds the task's files")

    import torch

    from hetopt.trainer.tasks.load import load_task

    task = load_task(reference)
    dataset_size = len(task.data(data).train)
    logical_cpus, accelerators = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    most = min(dataset_size, accelerators or 64)
    if workers is not None and not 1 <= workers <= most:
        raise BadInput(
            f"--workers must be 1 to {most} here, not {workers}.",
            hint="leave it out" + (": each worker has a GPU to itself" if accelerators else ""),
        )
    count = workers if workers is not None else min(most, accelerators or min(2, logical_cpus))
    schedule = make_schedule(
        seed=seed,
        workers=count,
        logical_cpus=logical_cpus,
        batch_size=task.batch_size,
        dataset_size=dataset_size,
        time_budget_s=time_budget_s,
        accelerators=accelerators,
    )
    spec = RunSpec(
        task=reference,
        data_dir=str(data.resolve()) if data is not None else None,
        seed=seed,
        workers=tuple(
            WorkerSpec(
                host="localhost",
                type=device_type,
                local_batch_size=max(1, task.batch_size // count),
                threads=max(1, logical_cpus // count),
            )
            for _ in range(count)
        ),
        stop=StopRule(max_steps=1),
        probe=schedule,
    )
    return spec, schedule


def _measure(
    spec: RunSpec, schedule: ProbeSchedule, *, device_type: str, tell: Callable[[str, float | None], None]
) -> Profile:
    """Run the probe in a folder of its own, which goes when it is no longer of use. Interrupting it ends the run."""
    import shutil
    import tempfile
    import time
    from importlib.metadata import version

    from hetopt.profiler.collect import collect
    from hetopt.profiler.errors import RunFailed
    from hetopt.trainer.events import EVENTS_FILE, read_events
    from hetopt.trainer.launch.base import RunState
    from hetopt.trainer.launch.local import LocalLauncher

    folder = Path(tempfile.mkdtemp(prefix="hetopt-profile-"))
    keep = False
    try:
        started_at_s = time.time()
        status = _follow(LocalLauncher(grace_s=STOP_GRACE_S), spec, schedule, folder, tell)
        if status.state is not RunState.FINISHED:
            keep = True
            raise RunFailed(
                f"the measurement failed: {status.reason or 'it was stopped from outside'}",
                hint=f"what the workers printed is in {folder / 'log'}",
            )
        return collect(
            read_events(folder / EVENTS_FILE),
            schedule,
            device_type=device_type,
            started_at_s=started_at_s,
            hetopt_version=version("hetopt"),
            data_dir=spec.data_dir,
        )
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _follow(
    launcher: Launcher,
    spec: RunSpec,
    schedule: ProbeSchedule,
    folder: Path,
    tell: Callable[[str, float | None], None],
) -> RunStatus:
    """Start the run and follow it to its end. Whatever interrupts the following also ends the run."""
    import os
    import time

    from hetopt.profiler.progress import progress
    from hetopt.trainer.events import EVENTS_FILE, read_events
    from hetopt.trainer.launch.base import RunHandle

    handle = RunHandle(run_dir=folder)
    environment = {} if any(name in os.environ for name in SPIN_VARIABLES) else SPIN
    try:
        launcher.start(spec, folder, environment)
        while True:
            status = launcher.poll(handle)
            now = progress(read_events(folder / EVENTS_FILE), schedule)
            tell(now.text, now.done)
            if status.state.is_over:
                return status
            time.sleep(POLL_S)
    except BaseException:
        tell("stopping the workers", None)
        launcher.stop(handle)
        raise


def show(profile: Profile) -> None:
    """The profile as a person reads it."""
    from hetopt.optimizer import words
    from hetopt.optimizer.cli import render

    job, host = profile.job, profile.host
    render.line(
        f"{job.task}: {words.count(job.parameters)} parameters ({_bytes(job.gradient_bytes)} of gradient), "
        f"{words.count(job.dataset_size)} samples an epoch",
        style="bold",
    )
    render.line(f"  measured in {words.duration(profile.profiling_s)} on {host.accelerator or host.cpu_model}")
    render.heading("Step time by local batch size")
    render.table(
        [
            render.Column(name="workers at once"),
            render.Column(name="batch", justify="right"),
            render.Column(name="step", justify="right"),
            render.Column(name="spread", justify="right"),
            render.Column(name="samples/s each", justify="right"),
            render.Column(name="memory", justify="right"),
        ],
        [row for device in profile.devices for row in _step_rows(device)],
    )
    for link in profile.links:
        render.line(
            f"  {link.collective.replace('_', '-')} between {link.workers} workers: "
            f"{words.duration(link.latency_s)} + {_bytes(link.bytes_per_s)}/s"
        )
    render.heading("Training")
    for sentence in _training(profile):
        render.bullet(sentence)
    noisy = [point for device in profile.devices for point in device.step_times if _spread(point).is_noisy]
    if noisy:
        render.note(
            f"{len(noisy)} step times scatter a lot: the machine was busy with other things. "
            "Measure again when it is quiet for narrower predictions."
        )


def _step_rows(device: Device) -> list[list[str]]:
    from hetopt.optimizer import words

    rows = []
    for point in device.step_times:
        timing = _spread(point)
        rows.append(
            [
                f"{device.workers_per_host} × {device.threads_per_worker} thread"
                f"{'s' if device.threads_per_worker > 1 else ''}"
                if device.kind == "cpu"
                else f"{device.workers_per_host} × GPU",
                words.count(point.local_batch_size),
                words.duration(point.step_time_s),
                f"±{100 * timing.spread_s / timing.median_s:.0f} %",
                words.count(round(point.local_batch_size / point.step_time_s)),
                _bytes(point.peak_memory_bytes) if point.peak_memory_bytes is not None else "",
            ]
        )
    return rows


def _training(profile: Profile) -> list[str]:
    """What the pilots say, a sentence each."""
    from hetopt.optimizer import words
    from hetopt.profiler.noise import Moments, noise_scale

    job = profile.job
    goal = f"{job.target_metric} {job.target_value:g}"
    sentences = []
    for pilot in profile.pilots:
        last = pilot.evaluations[-1]
        sentences.append(
            f"at batch {pilot.global_batch_size}, {goal} after {words.count(round(pilot.steps_to_target))} steps"
            if pilot.steps_to_target is not None
            else f"at batch {pilot.global_batch_size}, {goal} not reached: "
            f"{last.metric:.4g} after {words.count(last.step)} steps"
        )
    if not profile.pilots:
        sentences.append(f"no pilot came far enough to say how many steps {goal} takes; plan with --epochs or --steps")
    if profile.noise:
        last_sample = profile.noise[-1]
        scale = noise_scale(
            Moments(gradient_variance=last_sample.gradient_variance, gradient_square=last_sample.gradient_square)
        )
        sentences.append(
            f"gradient noise scale {words.count(round(scale))} samples by the last sample"
            if scale is not None
            else "the gradient's signal could not be told from its noise by the last sample"
        )
    at_one_percent = [point for point in profile.gain if point.ratio == 0.01]
    sentences += [f"Top-k of 1 % keeps {100 * point.gain:.0f} % of the gradient's energy" for point in at_one_percent]
    return sentences


def _spread(point: StepTime) -> Timing:
    from hetopt.profiler.throughput import summarize

    return summarize(point.samples_s)


def _bytes(count: float) -> str:
    """'393 kB', '12.4 GB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
