"""`hetopt profile`: measure a training job on this machine and write down what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.cli.completion import SYNCHRONIZATIONS, one_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hetopt.backends.backend import Launcher
    from hetopt.core.probe_schedule import ProbeSchedule
    from hetopt.core.profile import Profile
    from hetopt.core.run_spec import RunSpec
    from hetopt.core.run_status import RunStatus

POLL_S = 0.2
STOP_GRACE_S = 3.0
"""A probe has nothing to save, so it need not be waited for long."""

SHORTEST_BUDGET_S = 5.0

SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN = {"GOMP_SPINCOUNT": "20000"}
"""OpenMP threads wait for each other by spinning, for milliseconds by default. Whenever something else wants a
processor, they then spin where the awaited thread should run, and a step takes ten times as long. A short spin (some
0.1 ms) still bridges the gaps between operators."""


def profile(
    task: str | None = typer.Argument(None, help="Bundled task, module:attribute or file.py:attribute."),
    from_samples: Path | None = typer.Option(
        None,
        "--from-samples",
        help="Import step times measured elsewhere (JSON Lines, - for standard input): alone, or beside TASK.",
    ),
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
    explore: bool = typer.Option(
        False, "--explore", help="Then measure whole steps of more workers, as long as that is worth its price."
    ),
    probe_budget: str | None = typer.Option(
        None, "--probe-budget", help="USD that exploring may cost, at the prices of the machines it stands for."
    ),
    on: str = typer.Option(
        "local",
        "--on",
        autocompletion=one_of("hetopt.optimizer.launch_record:PLACES"),
        help="Where to explore: local, rehearsal or ec2, which rents.",
    ),
    hosts: str | None = typer.Option(
        None, "--hosts", help="rehearsal: the cluster to explore, such as 'speed=1,rate=100mbit x8'."
    ),
    types: str | None = typer.Option(None, "--types", help="ec2: the machine types to explore, with commas between."),
    region: str = typer.Option("us-east-1", "--region", help="ec2: where to rent."),
    ec2_data: str | None = typer.Option(
        None, "--ec2-data", help="ec2: where the task's data is for rented machines: s3://BUCKET/PREFIX."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="ec2: rent without asking."),
    sync: list[str] = typer.Option(
        [],
        "--sync",
        autocompletion=SYNCHRONIZATIONS,
        help="Also measure how many steps the target takes when workers average parameters now and then: "
        "'selsync(auto)', 'local-sgd(8)'. May be repeated.",
    ),
    check: bool = typer.Option(
        False, "--check", help="Only look whether the task can be trained on many workers, with a few samples."
    ),
    json_: bool = typer.Option(False, "--json", help="Print the profile as JSON."),
) -> None:
    """Measure a training job on this machine: step times, memory, network, gradient noise, compressibility, pilot runs.

    The profile is what `hetopt recommend` plans from. Measure while the machine has nothing else to do.
    """

    from hetopt.cli import parse, profile_view, render, terminal
    from hetopt.cli.import_samples import import_samples, read_file
    from hetopt.core.errors import BadInput

    if check:
        from hetopt.cli.task_check import check_task

        check_task(task, data, json_=json_)
        return
    if output is None and not json_:
        output = Path("profile.json")
    if from_samples is not None and task is None:
        import_samples(from_samples, output, force=force, json_=json_)
        return
    if task is None:
        raise BadInput(
            "name the task to measure, or a file of step times with --from-samples.", hint="hetopt profile digits"
        )
    parse.ready_to_write(output, force=force)
    if not SHORTEST_BUDGET_S <= time_budget <= 86_400:
        raise BadInput(
            f"--time-budget must be {SHORTEST_BUDGET_S:g} to 86400 seconds, not {time_budget:g}.",
            hint="leave it out for the usual 40 seconds",
        )
    if seed < 0:
        raise BadInput(f"--seed must not be negative, and is {seed}.", hint="for example --seed 1")
    _check_type(type_)
    syncs = tuple(_measurable(text) for text in sync)
    budget_usd = parse.positive(probe_budget, "--probe-budget", "USD")
    elsewhere_asked = on != "local" or hosts is not None or types is not None or ec2_data is not None
    if explore != (budget_usd is not None) or (not explore and elsewhere_asked):
        raise BadInput(
            "--explore, --probe-budget, --on, --hosts and --types belong together.",
            hint="hetopt profile TASK --explore --probe-budget 0.10",
        )
    if explore:
        from hetopt.cli.explore import check_place

        check_place(on, hosts, types)
    if on == "ec2":
        from hetopt.cli import ec2_explore

        assert budget_usd is not None
        ec2_explore.check(task, data, ec2_data)
        ec2_explore.ask(budget_usd, yes=yes)
    elsewhere = read_file(from_samples) if from_samples is not None else ()
    with render.progress(f"profiling {task}") as tell:
        tell("loading the task", None)
        spec, schedule = _prepare(
            task, data, workers=workers, time_budget_s=time_budget, seed=seed, device_type=type_, syncs=syncs
        )
        measured = _measure(spec, schedule, device_type=type_, tell=tell)
        if elsewhere:
            measured = measured.model_copy(update={"samples": elsewhere})
        if budget_usd is not None:
            from hetopt.cli.explore import explore as explore_layouts
            from hetopt.cli.explore import place_here

            if on == "ec2":
                names = parse.names(types)
                place = ec2_explore.place_on_ec2(
                    measured, task=task, types=names, region=region, data=ec2_data, tell=tell
                )
            else:
                place = place_here(measured, hosts=hosts, workers=workers, tell=tell)
            measured = explore_layouts(measured, place, budget_usd=budget_usd, tell=tell)
    if output is not None:
        measured.save(output)
        render.note(f"wrote {output}")
    if json_:
        terminal.write(measured.to_json())
    else:
        profile_view.show(measured)


def _check_type(name: str) -> None:
    """Refuse a type that no plan could ever match with the catalogue."""
    from hetopt.core.profile import LOCAL

    if name != LOCAL:
        from hetopt.optimizer.market.catalog import load_catalog

        load_catalog().instance_type(name)


def _measurable(text: str) -> str:
    """A way to average parameters, as a pilot is told."""
    from hetopt.core.errors import BadInput
    from hetopt.core.synchronization_text import parse_sync, spell_sync

    wanted = parse_sync(text, option="--sync")
    if wanted.name in ("bsp", "ssp") or wanted.delta == "never":
        raise BadInput(
            f"pilots measure averages of parameters, and {text} makes none.", hint="for example --sync 'selsync(auto)'"
        )
    return spell_sync(wanted)


def _prepare(
    reference: str,
    data: Path | None,
    *,
    workers: int | None,
    time_budget_s: float,
    seed: int,
    device_type: str,
    syncs: tuple[str, ...],
) -> tuple[RunSpec, ProbeSchedule]:
    """Look at the task and its data before any process is started, and write the schedule for them."""
    import importlib.util
    import os

    from hetopt.core.errors import BadInput
    from hetopt.core.extras import install_command
    from hetopt.core.probe_schedule import make_schedule
    from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec

    if importlib.util.find_spec("torch") is None:
        raise BadInput("profiling needs torch, which is not installed.", hint=install_command("train"))
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
    if syncs and count == 1:
        raise BadInput("--sync compares workers that train for themselves, and there is one.", hint="add --workers 2")
    schedule = make_schedule(
        seed=seed,
        workers=count,
        logical_cpus=logical_cpus,
        batch_size=task.batch_size,
        dataset_size=dataset_size,
        time_budget_s=time_budget_s,
        accelerators=accelerators,
        syncs=syncs,
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

    from hetopt.backends.local import LocalLauncher
    from hetopt.core.errors import RunFailed
    from hetopt.core.events.log import EVENTS_FILE, read_events
    from hetopt.core.run_status import RunState
    from hetopt.profiler.collect import collect

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

    from hetopt.backends.backend import RunHandle
    from hetopt.core.events.log import EVENTS_FILE, read_events
    from hetopt.core.interruption import stopping
    from hetopt.profiler.progress import progress

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
        with stopping("the measurement's workers", None, lambda told: tell(told, None)):
            launcher.stop(handle)
        raise
