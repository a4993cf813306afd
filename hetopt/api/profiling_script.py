"""`hetopt.profile` of a training script: runs it as it is, alone and beside copies of itself, and watches its steps."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from hetopt.api.converting import convert
from hetopt.api.script_text import PLACES, read_script, resumes, several_workers
from hetopt.backends.backend import POLL_S
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.core.interruption import THREADS_VARIABLE, Reporter, openmp_environment, usable_processors
from hetopt.core.listening import LOOPBACK, collectives_on
from hetopt.core.paths import inside
from hetopt.core.plain_text import one_line
from hetopt.core.profile import Host, Job, Profile
from hetopt.core.run_folder import OUTPUT_VARIABLE
from hetopt.core.run_spec import CompressorProbe, ProbeSchedule
from hetopt.core.search_path import INSTALLED_ONLY
from hetopt.profiler.collect import collect
from hetopt.profiler.records import EVENTS, FINISHED, STARTED
from hetopt.profiler.schedule import NETWORK_SHARE, PILOT_SHARE, SWEEP_SHARE
from hetopt.profiler.script.order import ORDER_FILE, SAID_FILE, ScriptOrder, Watch

STARTUP_S = 600.0
"""Seconds that a script may take until its first step (imports, data), beside what is measured."""

CLOSING_S = 60.0
"""Seconds for measuring compressors and the network, after the script's part."""

PATIENCE = 8.0
"""Factor on its share of the time budget that one start of the script may take: steps are never cut in two."""

UNTOUCHED_S = 120.0
"""Seconds within which a script should do a step by itself; one that has not is watched all the same."""

UNTOUCHED_SHARE = 0.1
"""Part of the step-time budget of a start that the unwatched start may take."""

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
"""Environment variables that name a display; scripts are measured without one."""

ONLY_WORKER = {
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": LOOPBACK,
    "MASTER_PORT": "29500",
}
"""Environment variables that torchrun gives the only worker of a script. Nobody listens at that port: its process group
is of one."""

STDIN = 0
"""File descriptor of a script's standard input, the user's own: `stty size` asks it how wide the terminal is."""


Events: TypeAlias = list[Mapping[str, object]]
"""Events of a measurement, as unchecked dictionaries."""
Starter: TypeAlias = Callable[[ScriptOrder], Events]
"""A function that starts a script and its copies in a folder of their own, and returns their events; empty: too little
was measured to use."""


def profile_script(
    script: Path,
    arguments: tuple[str, ...] = (),
    *,
    dataset_size: int | None,
    workers: int,
    accelerators: int,
    time_budget_s: float,
    seed: int,
    machine_type: str,
    reporter: Reporter,
) -> Profile:
    """Run a training script in other processes for about ``time_budget_s`` seconds, and return its profile.

    The script runs alone, unwatched and watched, and then beside copies of itself. Where watching fails, less is
    measured, and a remark says so.

    Args:
        script: file to run.
        arguments: arguments of the script.
        dataset_size: samples of one epoch. None: as the script's loader tells; where it does not, a stand-in.
        workers: copies of the script to measure together, after one alone; 1: only alone.
        accelerators: number of GPUs of this machine.
        time_budget_s: seconds that measuring may take, about; the script's own start comes on top, several times.
        seed: kept in the profile; the script sets its own.
        machine_type: instance type of this machine, or ``local``, kept in the profile.
        reporter: receives progress and remarks.

    Raises:
        BadInput: the script cannot be read or is no Python, or does no step that can be measured.
        RunFailed: the script fails, by itself or watched, or does not end in time; its output stays in a folder that
            the hint names.
    """
    text = read_script(script)
    starts = _starts(
        script,
        arguments,
        dataset_size=dataset_size,
        workers=workers,
        accelerators=accelerators,
        time_budget_s=time_budget_s,
    )
    with kept_on_failure("profile") as folder:
        try:
            began_s: list[float] = []

            def start(order: ScriptOrder) -> Events:
                """Run the script by an order in a new folder of its own, and return its events."""
                place = inside(folder, str(len(began_s)))
                place.mkdir()
                began_s.append(time.time())
                return _run(order, place, accelerators=accelerators)

            reporter("running it alone, untouched", 0.0)
            asks = any(word in file.text for file in text for word in (*PLACES, "init_process_group"))
            as_torchrun, is_timed = _untouched(start, starts[0], asks_for_place=asks)
            reporter("running it alone", 1 / (1 + len(starts)))
            chosen = {"as_torchrun": as_torchrun, "watch": "every-size"}
            chosen["watch"], log = _watched(start, starts[0].model_copy(update=chosen), is_timed, reporter)
            logs, is_watched = [log], chosen["watch"] != "steps"
            started_at_s = began_s[-1]
            for order in starts[1:] if is_watched else ():
                beside = f"running it beside {workers - 1} cop{'y' if workers == 2 else 'ies'} of itself"
                reporter(beside, 2 / (1 + len(starts)))
                try:
                    logs.append(start(order.model_copy(update=chosen)))
                except HetoptError as error:
                    reporter.note(f"{beside} failed, and is left out: {error.message}")
            profile = collect(
                list(_joined(logs)),
                ProbeSchedule(seed=seed, sweeps=starts),
                device_type=machine_type,
                started_at_s=started_at_s,
                hetopt_version=version("hetopt"),
            )
            facts = {
                "has_session": bool(several_workers(text)),
                "converts": _converts(script),
                "resumes": resumes(text),
            }
            return profile.model_copy(update={"job": profile.job.model_copy(update=facts)})
        except RunFailed as error:
            hint = (error.hint or "see what it printed").rstrip(".")
            raise RunFailed(error.message, hint=f"{hint}. What it printed is in {folder}") from None


@contextmanager
def kept_on_failure(purpose: str) -> Iterator[Path]:
    """Make a private temporary folder for a with block and yield it; remove it after, unless `RunFailed` is raised.

    Args:
        purpose: word in the folder's name, ``hetopt-PURPOSE-...``.
    """
    folder = inside(Path(tempfile.gettempdir()), f"hetopt-{purpose}-{secrets.token_hex(8)}")
    is_kept = False
    try:
        folder.mkdir(mode=0o700)
        yield folder
    except RunFailed:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def _untouched(start: Starter, order: ScriptOrder, *, asks_for_place: bool) -> tuple[bool, bool]:
    """Run a script by itself for some steps; where that fails, as torchrun's only worker, if the script reads its rank.

    Args:
        start: runs the script by an order.
        order: order of the run to be measured.
        asks_for_place: whether the script's text reads a rank.

    Returns:
        Whether the script needs what torchrun gives; whether its optimizer makes enough steps to be timed alone.

    Raises:
        RunFailed: the script fails by itself, and why.
    """
    plain = order.model_copy(
        update={
            "watch": "steps",
            "startup_s": UNTOUCHED_S,
            "time_limit_s": UNTOUCHED_SHARE * order.time_limit_s,
            "network_s": 0,
            "compressors": None,
        }
    )
    failed = []
    for as_torchrun in (False, True) if asks_for_place else (False,):
        try:
            return as_torchrun, bool(start(plain.model_copy(update={"as_torchrun": as_torchrun})))
        except RunFailed as error:
            failed.append(error.message)
    raise RunFailed(
        f"The script fails by itself, not watched by hetopt: {'; as torchrun starts it: '.join(dict.fromkeys(failed))}",
        hint="mend it, or give it the arguments with which it trains, after --",
    )


def _watched(start: Starter, order: ScriptOrder, is_timed: bool, reporter: Reporter) -> tuple[Watch, Events]:
    """Measure a script as closely as it allows; return how closely, and its events.

    With batches of every size; else, if that fails, of its own size; else, if ``is_timed``, by the steps of its
    optimizer alone. A remark says which, and why.

    Raises:
        BadInput: the script does no step that can be measured.
        RunFailed: the script fails where it is watched, and its steps cannot be timed alone.
    """
    try:
        return "every-size", start(order)
    except (RunFailed, BadInput) as error:
        if isinstance(error, BadInput) and not is_timed:
            raise
        first = error.message
    try:
        events = start(order.model_copy(update={"watch": "own-size"}))
        reporter.note(f"It is measured with batches of its own size alone: {first}")
        return "own-size", events
    except (RunFailed, BadInput) as error:
        failure: HetoptError = error
        if isinstance(error, RunFailed):
            failure = RunFailed(
                f"It runs by itself, and fails where hetopt watches it, which is a fault of hetopt: {error.message}",
                hint="tell its authors; name `epoch_samples` for its steps to be timed alone",
            )
        if not is_timed:
            raise failure from None
        reporter.note(f"{failure.message.rstrip('.')}. {_BY_OPTIMIZER}")
        return "steps", start(order.model_copy(update={"watch": "steps"}))


_BY_OPTIMIZER = "Its steps are timed by its optimizer alone: no noise, memory or other sizes."


def _converts(script: Path) -> bool:
    """Return whether `hetopt convert` could write a session into the script; nothing is written."""
    with suppress(BadInput):
        convert(script)
        return True
    return False


def _starts(
    script: Path,
    arguments: tuple[str, ...],
    *,
    dataset_size: int | None,
    workers: int,
    accelerators: int,
    time_budget_s: float,
) -> tuple[ScriptOrder, ...]:
    """Return the starts of a script: one alone and, with two ``workers`` or more, one beside copies of itself.

    ``dataset_size``: samples of an epoch; None: as the script tells. ``accelerators``: GPUs of this machine; 0: none.
    """
    cpus = usable_processors()
    alone = ScriptOrder(
        script=str(script),
        arguments=arguments,
        threads_per_worker=max(1, cpus // accelerators) if accelerators else cpus,
        dataset_size=dataset_size,
        startup_s=STARTUP_S,
        time_limit_s=SWEEP_SHARE * time_budget_s / min(2, workers),
        training_s=PILOT_SHARE * time_budget_s,
        compressors=CompressorProbe(),
        network_s=NETWORK_SHARE * time_budget_s,
    )
    beside = {
        "sweep": 1,
        "concurrent_workers": workers,
        "threads_per_worker": max(1, cpus // workers),
        "training_s": 0.0,
        "compressors": None,
    }
    return (alone, *([alone.model_copy(update=beside)] if workers > 1 else []))


def _run(order: ScriptOrder, place: Path, *, accelerators: int) -> Events:
    """Run the script's processes to their end in a folder, and return the events that they logged.

    An order to watch only the optimizer's steps gives no events, and no error, where the script hangs or leaves early.

    Raises:
        RunFailed: a process failed, or did not end in time.
        BadInput: the script left its process before enough was measured, or does no step that can be measured.
    """
    (place / ORDER_FILE).write_text(order.model_dump_json(), encoding="utf-8")
    limit_s = order.startup_s + CLOSING_S + PATIENCE * (order.time_limit_s + order.training_s + order.network_s)
    with _processes(order, place, accelerators=accelerators) as processes:
        begun_s = time.monotonic()
        while (codes := [process.poll() for process in processes]).count(0) < len(codes) and not any(codes):
            if time.monotonic() - begun_s > limit_s:
                if order.watch == "steps":
                    return []  # where it hangs, those who watch it see
                raise RunFailed(
                    f"{order.script} did not come to an end of measuring in {limit_s:.0f} s.",
                    hint="see that it trains by itself with these arguments, and how long its first steps take",
                )
            time.sleep(POLL_S)
    for rank, code in enumerate(codes):
        if code:
            raise _failure(place, rank, code)
    events: Events = list(read_events(place / EVENTS_FILE)) if (place / EVENTS_FILE).exists() else []
    if any(event.get("event") == FINISHED for event in events):
        return events
    if order.watch == "steps":
        return []
    raise BadInput(
        f"{order.script} left its process (os._exit) before enough of it was measured.",
        hint="let it come to its end, or give it an argument with which it trains for longer",
    )


@contextmanager
def _processes(order: ScriptOrder, place: Path, *, accelerators: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the script's processes, each in a group of its own, yield them, and kill all of them at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as outputs:
        try:
            for rank in range(order.concurrent_workers):
                # A file, as of a launch: what a script cannot do there is found out now.
                output = outputs.enter_context(inside(place, SAID_FILE.format(rank=rank)).open("wb"))
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "hetopt.profiler.script.child", str(place), str(rank)],
                        stdin=STDIN,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=_environment(order, rank, accelerators=accelerators) | {OUTPUT_VARIABLE: str(place)},
                        start_new_session=True,
                    )
                )
            yield processes
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _environment(order: ScriptOrder, rank: int, *, accelerators: int) -> dict[str, str]:
    """Return the environment variables of the process of ``rank``: threads, torchrun's, its own GPU if several run.

    ``accelerators``: GPUs of this machine; 0: none.
    """
    variables = {**openmp_environment(order.concurrent_workers), THREADS_VARIABLE: str(order.threads_per_worker)}
    if accelerators and order.concurrent_workers > 1:
        variables["CUDA_VISIBLE_DEVICES"] = str(rank)
    return {**alone_environment(), **(ONLY_WORKER if order.as_torchrun else {}), **variables}


def alone_environment() -> dict[str, str]:
    """Return this process's environment variables for a script that runs by itself: no other worker, and no display."""
    hidden = (*PLACES, "MASTER_ADDR", "MASTER_PORT", *DISPLAYS)
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "MPLBACKEND": "Agg", **INSTALLED_ONLY, **collectives_on(LOOPBACK)}


def _failure(place: Path, rank: int, code: int) -> HetoptError:
    """Return the error of the script's process ``rank``, by its event in the folder ``place``, else its last line.

    `BadInput` where the event and the exit ``code``, which is not 0, say so, else `RunFailed`.
    """
    for event in read_events(place / EVENTS_FILE):
        if event["event"] == "run_failed" and event["rank"] == rank:
            kind = BadInput if code == BadInput.exit_code else RunFailed
            return kind(event["reason"], hint=event["hint"])
    printed = inside(place, SAID_FILE.format(rank=rank)).read_text(errors="replace")
    lines = [line for line in printed.splitlines() if line.strip()]
    reason = "ran out of memory" if code == -signal.SIGKILL else f"ended with code {code}"
    last = f": {one_line(lines[-1])[:200]}" if lines else ""
    return RunFailed(f"the script {reason}{last}")


def _joined(logs: Sequence[Events]) -> Iterator[Mapping[str, object]]:
    """Yield the events of all starts as those of one: one beginning, one end, one host and one job."""
    for number, log in enumerate(logs):
        for event in log:
            name = event.get("event")
            if name in (STARTED, EVENTS[Host], EVENTS[Job]) and number > 0:
                continue
            if name == FINISHED and number < len(logs) - 1:
                continue
            yield event
