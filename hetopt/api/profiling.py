"""`hetopt.profile`: measure a training job on this machine, and write down what was measured."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetopt.api.options import MOST_MEASURED, Measurement
from hetopt.api.profiling_script import kept_on_failure, profile_script
from hetopt.backends.backend import POLL_S, Launcher, RunHandle
from hetopt.backends.processes import LocalLauncher
from hetopt.core.comm.composition import AUTO
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import timed_ways, tried_ways
from hetopt.core.errors import BadInput, RunFailed, setting
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.core.interruption import Reporter, stopping, usable_processors
from hetopt.core.memory import Precision
from hetopt.core.option import takes
from hetopt.core.plain_text import typed_script
from hetopt.core.profile import LOCAL, Profile
from hetopt.core.run_folder import LOG_FOLDER
from hetopt.core.run_rules import check_data_folder, check_found
from hetopt.core.run_spec import ProbeSchedule, RunSpec, StopRule, WorkerSpec, parse_sync, spell_sync
from hetopt.core.run_status import RunState
from hetopt.core.search_path import install_command
from hetopt.core.step_samples import StepSample
from hetopt.profiler.collect import collect, progress, refusals
from hetopt.profiler.schedule import make_schedule

if TYPE_CHECKING:
    from hetopt.trainer.check import Finding

NO_END = 10**9
"""Most epochs of a pilot that starts from a checkpoint: so many that the time limit alone ends it."""

STOP_GRACE_S = 3.0
"""Seconds that a probe is given to end by itself: it has nothing to save."""


@takes(Measurement)
def profile(
    task: str,
    *,
    arguments: Sequence[str] = (),
    samples: Iterable[StepSample] = (),
    reporter: Reporter | None = None,
    **options: Any,
) -> Profile:
    """Measure step times, memory, network, gradient noise, compressibility and pilot runs of a training job.

    The profile is what `hetopt.recommend` plans from; it is returned, and not written to a file. Measuring runs worker
    processes on this machine, and with ``probe_budget_usd`` also probes; on ec2 these rent machines. Measure while the
    machine has nothing else to do.

    Args:
        task: a bundled task, ``module:attribute``, ``file.py:attribute``, or a training script, ``file.py``, which is
            run as it is for some steps.
        arguments: arguments of the script; a task has none.
        samples: step times of the same task that were measured elsewhere, to be kept in the profile.
        reporter: receives progress and remarks; None: nothing is reported.
        **options: how it is measured.

    Raises:
        BadInput: an option is invalid or does not go with a task or a script, the task, script or its data cannot be
            used, or torch is not installed.
        RunFailed: the job failed or was stopped while it was measured; its folder is kept, and the hint names it.
        CloudRefused, BudgetStop: ec2: the first probe's machines cannot be had.
    """
    if not isinstance(task, str):
        raise BadInput(
            f"`task` must be the name of a task or script, got {task!r}.", hint='for example `hetopt.profile("digits")`'
        )
    asked, report, samples = Measurement(**options), reporter or Reporter(), tuple(samples)
    if asked.machine_type != LOCAL:  # else no plan could ever match it
        from hetopt.optimizer.market.catalog import load_catalog

        load_catalog().instance_type(asked.machine_type)
    task, *arguments = typed_script((task, *arguments))
    if is_script(task):
        for name in ("data", "sync", "precision", "probe_budget_usd", "samples", "from_checkpoint"):
            if samples if name == "samples" else getattr(asked, name):
                raise BadInput(
                    f"`{name}` is for tasks, and {task} is a script.",
                    hint=f"leave it out, or name the task in the file: {task}:task",
                )
        accelerators = _accelerators()
        if not Path(task).is_file():
            raise BadInput(f"there is no script {task} in {Path.cwd()}.", hint="give the path of its file")
        return profile_script(
            Path(task),
            tuple(arguments),
            dataset_size=asked.epoch_samples,
            workers=_worker_count(asked.workers, accelerators),
            accelerators=accelerators,
            time_budget_s=asked.time_budget_s,
            seed=asked.seed,
            machine_type=asked.machine_type,
            reporter=report,
        )
    if arguments or asked.epoch_samples is not None:
        raise BadInput(
            f"`arguments` and `epoch_samples` are for scripts, and {task} is a task.",
            hint="name a script: train.py",
        )
    syncs = tuple(_measurable(text) for text in asked.sync)
    if asked.probe_budget_usd is not None:
        from hetopt.api import exploring

        exploring.check_place(task, asked)
    check_found(task)
    report("loading the task")
    spec, schedule = _prepare(
        task,
        asked.data,
        workers=asked.workers,
        time_budget_s=asked.time_budget_s,
        seed=asked.seed,
        machine_type=asked.machine_type,
        syncs=syncs,
        precision=asked.precision,
        from_checkpoint=asked.from_checkpoint,
    )
    result = _measure(spec, schedule, machine_type=asked.machine_type, reporter=report)
    if samples:
        result = result.model_copy(update={"samples": samples})
    if asked.probe_budget_usd is None:
        return result
    return exploring.explore(
        result, exploring.place_of(result, task, asked, report), asked.probe_budget_usd, tell=report
    )


def is_script(task: str) -> bool:
    """Return whether a job's name is of a training script, ``file.py``, and not of a task, ``file.py:task``."""
    return task.endswith(".py") and ":" not in task


def _accelerators() -> int:
    """Return the number of GPUs of this machine, as torch sees them.

    Raises:
        BadInput: torch is not installed.
    """
    _needs_torch("profiling")
    import torch

    return torch.cuda.device_count()


def _worker_count(asked: int | None, accelerators: int, most: int = MOST_MEASURED) -> int:
    """Return workers to measure together: as many as were asked for, else one a GPU, else two (one on one processor).

    At most ``most``, also of GPUs.

    Raises:
        BadInput: more were asked for than there are GPUs, or than ``most``, or fewer than 1.
    """
    most = min(most, accelerators or MOST_MEASURED)
    if asked is not None and not 1 <= asked <= most:
        raise BadInput(
            f"`workers` must be 1 to {most} here, got {asked}.",
            hint="leave it out" + (": each worker has a GPU to itself" if accelerators else ""),
        )
    return asked if asked is not None else min(most, accelerators or min(2, usable_processors()))


def _needs_torch(what: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise BadInput(f"{what} needs torch, which is not installed.", hint=install_command("train"))


def check(task: str, *, data: Path | str | None = None) -> list[Finding]:
    """Return findings on what would go wrong with a task on many workers, before anything is measured; empty: none.

    The task is tried on a few samples, and nothing is written. A task that cannot be loaded is a finding, too.

    Args:
        task: as of `profile`, no script.
        data: folder of the task's data; None: the task needs none.

    Raises:
        BadInput: torch is not installed.
    """
    _needs_torch("checking a task")
    from hetopt.trainer.check import check as find

    return find(task, None if data is None else Path(data))


def _measurable(text: str) -> str:
    """Return a synchronization policy that averages parameters, in its canonical spelling for pilots.

    Raises:
        BadInput: the text is no such policy, or sums gradients or never averages.
    """
    wanted = parse_sync(text)
    if wanted.name == "bsp" or wanted.delta == "never":
        raise BadInput(
            f"pilots measure averages of parameters, and {text} makes none.", hint="for example `sync=local-sgd(8)`"
        )
    return spell_sync(wanted)


def _prepare(
    reference: str,
    data: Path | None,
    *,
    workers: int | None,
    time_budget_s: float,
    seed: int,
    machine_type: str,
    syncs: tuple[str, ...],
    precision: str | None,
    from_checkpoint: Path | None,
) -> tuple[RunSpec, ProbeSchedule]:
    """Return the run and the schedule of a probe, after reading the task and its data in this process.

    Args are those of `profile`; nothing is measured.

    Raises:
        BadInput: torch is not installed, the task, its data or the checkpoint cannot be used, the number of workers or
            the precision is not for this machine, or averages are to be compared with one worker.
    """
    logical_cpus, accelerators = usable_processors(), _accelerators()
    if data is not None:
        check_data_folder(data)

    from hetopt.trainer.tasks.load import load_task

    task = load_task(reference)
    dataset_size = len(task.data(data).train)
    count = _worker_count(workers, accelerators, dataset_size)
    if syncs and count == 1:
        raise BadInput("`sync` compares workers that train for themselves, and there is one.", hint="add `workers=2`")
    schedule = make_schedule(
        seed=seed,
        workers=count,
        logical_cpus=logical_cpus,
        batch_size=task.batch_size,
        dataset_size=dataset_size,
        time_budget_s=time_budget_s,
        accelerators=accelerators,
        syncs=syncs,
        precisions=(precisions := _precisions(precision, on_gpu=accelerators > 0)),
        exchanges=[spell(way) for way in tried_ways()],
        timed=timed_ways(),
    )
    if from_checkpoint is not None:
        from hetopt.trainer.checkpoints.folder import begin_from
        from hetopt.trainer.task import make_model, make_optimizer

        model = make_model(task)
        begin_from(str(from_checkpoint), model, make_optimizer(task, model))  # is refused before anything is measured
        first = schedule.pilots[0].model_copy(update={"max_epochs": NO_END})
        changes = {"pilots": (first,), "from_checkpoint": str(from_checkpoint.resolve())}
        schedule = schedule.model_copy(update=changes)
    spec = RunSpec(
        task=reference,
        data_dir=str(data.resolve()) if data is not None else None,
        seed=seed,
        workers=tuple(
            WorkerSpec(
                host="localhost",
                type=machine_type,
                local_batch_size=max(1, task.batch_size // count),
                threads=max(1, logical_cpus // count),
            )
            for _ in range(count)
        ),
        # What was named, the task must bear; what was only looked at is left out where it does not.
        precision=precisions[-1] if precision not in (None, AUTO) else "fp32",
        stop=StopRule(max_steps=1),
        probe=schedule,
    )
    return spec, schedule


def _precisions(asked: str | None, *, on_gpu: bool) -> tuple[Precision, ...]:
    """Return the precisions to measure: fp32, which all else is compared with, then any other that was asked for.

    Args:
        asked: name of one precision; ``auto``: all that the machine has; None: all on a GPU, and fp32 alone elsewhere.
        on_gpu: whether the machine has a GPU.

    Raises:
        BadInput: ``asked`` is of GPUs, and there is none.
    """
    if asked in ("tf32", "fp16") and not on_gpu:
        raise BadInput(
            f"{setting('precision', asked)} is for GPUs, and torch sees none here.",
            hint=f"leave it out, or choose {setting('precision', 'bf16')}, which CPUs have as well",
        )
    there: tuple[Precision, ...] = ("tf32", "bf16", "fp16") if on_gpu else ("bf16",)
    everything = asked == AUTO or (asked is None and on_gpu)
    return ("fp32", *(precision for precision in there if everything or precision == asked))


def _measure(spec: RunSpec, schedule: ProbeSchedule, *, machine_type: str, reporter: Reporter) -> Profile:
    """Run the probe, and return the profile from its events; what the task refused is reported as remarks.

    Raises:
        RunFailed: the measurement failed or was stopped from outside, or its events are not whole.
        HetoptError: the workers cannot be started.
    """
    started_at_s = time.time()

    def look(folder: Path) -> None:
        reporter(*progress(read_events(folder / EVENTS_FILE), schedule))

    launcher = LocalLauncher(grace_s=STOP_GRACE_S)
    with measured(launcher, spec, {}, what="the measurement", reporter=reporter, look=look) as folder:
        events = read_events(folder / EVENTS_FILE)
        for remark in refusals(events):
            reporter.note(f"{remark}.")
        return collect(
            events,
            schedule,
            device_type=machine_type,
            started_at_s=started_at_s,
            hetopt_version=version("hetopt"),
            data_dir=spec.data_dir,
        )


@contextmanager
def measured(
    launcher: Launcher,
    spec: RunSpec,
    environment: Mapping[str, str],
    *,
    what: str,
    reporter: Reporter,
    look: Callable[[Path], None] = lambda folder: None,
    folder: Path | None = None,
    command: str | None = None,
) -> Iterator[Path]:
    """Run a measurement in a with block that begins once it has ended well; yield the folder with its results.

    A temporary folder is removed after the block, unless `RunFailed` is raised. Where anything interrupts the
    measurement, its workers are stopped first.

    Args:
        launcher: starts the workers.
        spec: spec of the run.
        environment: variables of the workers, on top of this process's.
        what: is measured, for messages, such as "a probe".
        reporter: receives a line while workers are stopped.
        look: called with the folder about 5 times a second while the measurement runs; by default nothing.
        folder: an existing folder of the run, which stays; None: a temporary one.
        command: shell command that ends what could not be stopped; None: it ends with this process.

    Raises:
        RunFailed: the measurement failed or was stopped from outside.
        HetoptError: the launcher cannot start it.
    """
    with kept_on_failure("measure") if folder is None else nullcontext(folder) as run_dir:
        handle = RunHandle(run_dir=run_dir)
        try:
            launcher.start(spec, run_dir, environment)
            while not (status := launcher.poll(handle)).state.is_over:
                look(run_dir)
                time.sleep(POLL_S)
        except BaseException:
            with stopping(f"the workers of {what}", command, reporter):
                launcher.stop(handle)
            raise
        if status.state is not RunState.FINISHED:
            raise RunFailed(
                f"{what} failed: {status.reason or 'it was stopped from outside'}",
                hint=status.next_step(f"read what the workers printed in {run_dir / LOG_FOLDER}"),
            )
        yield run_dir
