"""Backends that run a plan on this machine: as local processes, or on an emulation of its cluster.

What a profile of this machine would say were it taken now, when the machine may be faster or slower than it was.

One reading of the yardstick tells how fast the machine is for a second. Where a profile's own readings lay far apart,
as on processors that are shared with others and change their speed every few seconds, the next minutes will be more
like the mean of those readings than like the last one. A difference is followed as far as it is not scatter.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hetopt.backends.backend import Prepared, RunHandle
from hetopt.backends.emulation.conductor import RehearsalLauncher
from hetopt.backends.emulation.plan import parse_changes, parse_hosts, rehearse
from hetopt.backends.host import look
from hetopt.backends.options import Local, OnThisMachine, Rehearsal
from hetopt.backends.prediction import Mapped, predict_on_local
from hetopt.backends.processes import LocalLauncher, ProcessLauncher
from hetopt.core.calibration_benchmark import MachineReading
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.formatting import bytes_
from hetopt.core.interruption import usable_processors
from hetopt.core.profile import CompressorCost, Device, Link, Profile, Reading, StepTime
from hetopt.core.run_folder import RunFolders, latest_checkpoint
from hetopt.core.run_rules import check_data_folder, check_found
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState
from hetopt.core.search_path import install_command
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch, Place
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.profiled import contention_reach


@dataclass(frozen=True, kw_only=True)
class _OnThisMachine(ProcessLauncher):
    """What the two have in common: nothing is rented, and the run is a process of this machine."""

    name: Place = "local"

    def _map(self, plan: Plan, options: Any) -> Mapped:
        raise NotImplementedError("each of them maps its own way")

    def prepare(self, made: Plan, wanted: Plan, options: OnThisMachine) -> Prepared:
        """See `hetopt.backends.backend.Backend`."""
        present = at_present(wanted, _read_as_worker)
        wanted = present.plan
        here = self._map(wanted, options)
        spec = here.run
        if options.data is not None:
            if not wanted.profile.job.script:
                check_data_folder(Path(options.data))
            spec = spec.model_copy(update={"data_dir": str(Path(options.data).resolve())})
        samples = [worker.local_batch_size for worker in spec.workers]
        reading, shared_bytes = wanted.profile.job.reading, look.shared_bytes()
        check_readers("this machine", reading, samples, shared_bytes=shared_bytes, open_files=look.open_files())
        launch = Launch(
            created="",
            started_s=0.0,
            run_id="",
            on=self.name,
            plan=made,
            spec=_restarted(spec, options),
            prediction=here.prediction,
            machine=present.reading,
            slower=present.slower,
            notes=(*present.notes, *here.notes),
        )
        return Prepared(launch=launch)

    def prepare_resumed(self, folder: Path, options: OnThisMachine) -> Prepared:
        """See `hetopt.backends.backend.Backend`."""
        launch = resumable(self, folder, self.name)
        launch = launch.model_copy(update={"spec": _restarted(launch.spec, options)})
        return Prepared(launch=launch, folder=folder)

    def submit(self, prepared: Prepared, folders: RunFolders) -> tuple[RunHandle, Launch]:
        """See `hetopt.backends.backend.Backend`."""
        self.check_ready(prepared)
        folder, launch = prepared.begun(folders)
        try:
            launch.save(folder / LAUNCH_FILE)
        except BadInput:
            if prepared.folder is None:
                shutil.rmtree(folder, ignore_errors=True)  # it would look like a run that has failed
            raise
        return self.start(launch.spec, folder, {}), launch

    def check_ready(self, prepared: Prepared) -> None:
        """See `hetopt.backends.backend.Backend`.

        Raises:
            BadInput: torch is not installed, the task is not there, or no cluster can be emulated.
        """
        if importlib.util.find_spec("torch") is None:
            raise BadInput("training needs torch, which is not installed.", hint=install_command("train"))
        spec = prepared.launch.spec
        if not spec.script:
            check_found(spec.task)


@dataclass(frozen=True, kw_only=True)
class LocalBackend(_OnThisMachine, LocalLauncher):
    """Real processes on this machine, as many as the plan has workers, or one for each slowdown."""

    name: Place = "local"

    def _map(self, plan: Plan, options: Local) -> Mapped:
        return predict_on_local(plan, options.slowdowns)


@dataclass(frozen=True, kw_only=True)
class RehearsalBackend(_OnThisMachine, RehearsalLauncher):
    """A scaled emulation of the plan's cluster, or of described hosts, with a network of its own. It needs root."""

    name: Place = "rehearsal"

    def _map(self, plan: Plan, options: Rehearsal) -> Mapped:
        described = None if options.hosts is None else parse_hosts(options.hosts)
        count = sum(group.machines for group in plan.chosen.groups) if described is None else len(described)
        names = [f"h{number}" for number in range(count)]
        changes = () if options.schedule is None else parse_changes(options.schedule, names)
        stands_in = options.stand_in or plan.profile.is_counted
        return rehearse(plan, usable_processors(), described, changes, stands_in=stands_in)

    def check_ready(self, prepared: Prepared) -> None:
        """See `hetopt.backends.backend.Backend`; also whether a network can be built here."""
        super().check_ready(prepared)
        self._check(prepared.launch.spec)


def _read_as_worker() -> MachineReading:
    """Read speed and contention of this machine in a session of its own, as workers are started: a scheduler may share
    processors out by sessions first."""
    command = [sys.executable, "-m", "hetopt.core.calibration_benchmark"]
    read = subprocess.run(command, start_new_session=True, stdout=subprocess.PIPE, check=True)
    return MachineReading.model_validate_json(read.stdout)


def _restarted(spec: RunSpec, options: OnThisMachine) -> RunSpec:
    return spec if options.restarts is None else spec.model_copy(update={"max_restarts": options.restarts})


def resumable(launcher: ProcessLauncher, folder: Path, place: str) -> Launch:
    """Return the launch of a run that can go on: from its newest checkpoint, or anew where it has saved none yet.

    Args:
        launcher: that started it.
        folder: the run's.
        place: where that launcher's runs are, such as ``local``.

    Raises:
        BadInput: it was started elsewhere, is not over, or has come to its end and left no checkpoint.
    """
    launch = Launch.load(folder / LAUNCH_FILE)
    if launch.on != place:
        raise BadInput(
            f"{folder.name} was started on {launch.on}, and goes on there.",
            hint=f"hetopt launch --on {launch.on} --resume {folder.name}",
        )
    state = launcher.poll(RunHandle(run_dir=folder)).state
    if not state.is_over:
        raise BadInput(f"{folder.name} is still {state.value}.", hint=f"end it first with `hetopt stop {folder.name}`")
    if state is RunState.FINISHED and latest_checkpoint(folder) is None:
        raise BadInput(f"{folder.name} has come to its end, and left no checkpoint.", hint="launch its plan anew")
    return launch


FILES_OF_A_READER = 4
"""Pipes and a handle that a process keeps of each of its readers (counted with torch 2.13 on Linux)."""


def check_readers(
    where: str, reading: Reading | None, samples: Sequence[int], *, shared_bytes: int | None, open_files: int | None
) -> None:
    """Refuse what a machine's shared memory or limit of open files cannot hold.

    The ``r`` readers of a worker have ``a`` batches each ready, of ``t`` tensors and ``n_i`` samples of ``s`` bytes:

        sum_i n_i s r a          bytes in /dev/shm
        r (a t + 4)              open files of a worker, one for each tensor (torch, "Multiprocessing")

    Args:
        where: the machine, to begin the sentence.
        reading: of the job; None: nobody reads for its workers.
        samples: of a batch of each worker that the machine has.
        shared_bytes: that /dev/shm has in all; None: it is not there.
        open_files: that a process may have; None: as many as it wants.

    Raises:
        RunFailed: they cannot.
    """
    if reading is None:
        return
    ready = reading.processes * reading.batches_ahead
    needed = sum(samples) * reading.sample_bytes * ready
    readers = f"the loader's {reading.processes} readers keep {ready} batches ready for each worker"
    fewer = "a smaller `num_workers` or `prefetch_factor` of the DataLoader"
    if shared_bytes is not None and needed > shared_bytes:
        raise RunFailed(
            f"{where} has {bytes_(shared_bytes)} of shared memory in /dev/shm, and {readers}, {bytes_(needed)} in all.",
            hint=f"make /dev/shm larger (docker calls it shm-size), or take {fewer}",
        )
    files = ready * reading.tensors + reading.processes * FILES_OF_A_READER
    if open_files is not None and files > open_files:
        raise RunFailed(
            f"{where} lets a process open {open_files:,} files, and {readers}, {files:,} files in all.",
            hint=f"raise the limit (`ulimit -n`), or take {fewer}",
        )


OWN_LOG_SD = 0.05
"""The yardstick's own scatter, on a machine that keeps its speed: nothing below it is followed."""

WORTH_SAYING = 0.15


class Present(NamedTuple):
    """A plan with its profile as it would be now.

    Attributes:
        plan: what is about to run.
        reading: of the machine; None: nothing was to be measured.
        slower: times as long as when it was profiled that everything takes.
        notes: what a person should know of that.
    """

    plan: Plan
    reading: MachineReading | None = None
    slower: float = 1.0
    notes: tuple[str, ...] = ()


def at_present(plan: Plan, read: Callable[[], MachineReading]) -> Present:
    """Return the plan with its profile as it would be now: as fast, and as busy as the machine has been seen.

    What the plan assumes of machines that are rented stays as it is. A profile without a yardstick, or one of a GPU,
    of which the yardstick knows nothing, stays too, and nothing is measured for it.

    Args:
        plan: what is about to run on this machine.
        read: `hetopt.core.calibration_benchmark.read_machine`.
    """
    then_s = plan.profile.yardstick_s
    if then_s is None or any(device.kind != "cpu" for device in plan.profile.devices):
        return Present(plan)
    now = read()
    slower = now.yardstick_s / then_s
    scatter = max(OWN_LOG_SD, plan.profile.yardstick_log_sd or 0.0)
    factor = math.exp(followed(math.log(slower), scatter))
    profile = plan.profile if factor == 1 else slowed(plan.profile, factor)
    busy = profile.model_copy(update={"contention": now.contention, "contention_log_sd": now.contention_log_sd})
    busiest = max(profile, busy, key=contention_reach)
    changed = plan.model_copy(update={"profile": busiest})
    return Present(changed, now, factor, tuple(_notes(slower, factor, scatter, contention_reach(busiest))))


def followed(difference: float, log_sd: float) -> float:
    """Return what part of a difference of logs is not scatter: none at all below it, almost all far above.

    As far as a James-Stein estimate would follow it, ``1 - s^2 / r^2`` of a difference ``r`` that scatters by ``s``.
    """
    return 0.0 if abs(difference) <= log_sd else difference * (1 - (log_sd / difference) ** 2)


def _notes(slower: float, factor: float, scatter: float, reach: float) -> Iterator[str]:
    if max(slower, 1 / slower) >= 1 + WORTH_SAYING:
        compared = f"{slower:.2f} times as much" if slower > 1 else f"{100 * slower:.0f} % of the"
        then = "as when the job was profiled" if slower > 1 else "that it took when the job was profiled"
        follows = "the prediction follows."
        if scatter > WORTH_SAYING / 2:
            follows = (
                f"the prediction is for {factor:.2f} times as much, as that also scattered by {100 * scatter:.0f} %."
            )
        yield f"The same arithmetic takes this machine {compared} processor time {then}: {follows}"
    if reach >= 1 + WORTH_SAYING:
        yield (
            f"Other programs share the processors: computing was seen to take up to {reach:.1f} times its processor "
            "time, and the interval reaches as far."
        )


def slowed(profile: Profile, slower: float) -> Profile:
    """The profile with everything that this machine's processors did taking ``slower`` times as long."""
    return profile.model_copy(
        update={
            "devices": tuple(_device(device, slower) for device in profile.devices),
            "links": tuple(_link(link, slower) if link.scope == "host" else link for link in profile.links),
            "evaluation_s": None if profile.evaluation_s is None else slower * profile.evaluation_s,
            "startup_s": None if profile.startup_s is None else slower * profile.startup_s,
            "yardstick_s": None if profile.yardstick_s is None else slower * profile.yardstick_s,
        }
    )


def _device(device: Device, slower: float) -> Device:
    flops, copied = device.matmul_flops_per_s, device.copy_bytes_per_s
    return device.model_copy(
        update={
            "step_times": tuple(_step_time(point, slower) for point in device.step_times),
            "compressors": tuple(_compressor(cost, slower) for cost in device.compressors),
            "matmul_flops_per_s": None if flops is None else flops / slower,
            "copy_bytes_per_s": None if copied is None else copied / slower,
        }
    )


def _step_time(point: StepTime, slower: float) -> StepTime:
    return point.model_copy(
        update={
            "step_time_s": slower * point.step_time_s,
            "samples_s": tuple(slower * sample for sample in point.samples_s),
            "load_s": slower * point.load_s,
            "forward_s": slower * point.forward_s,
            "backward_s": slower * point.backward_s,
            "optimizer_s": slower * point.optimizer_s,
        }
    )


def _compressor(cost: CompressorCost, slower: float) -> CompressorCost:
    return cost.model_copy(update={"compress_s": slower * cost.compress_s, "decompress_s": slower * cost.decompress_s})


def _link(link: Link, slower: float) -> Link:
    """Between workers of one machine bytes are carried by its processors."""
    return link.model_copy(
        update={
            "time_s": tuple(slower * time_s for time_s in link.time_s),
            "latency_s": slower * link.latency_s,
            "bytes_per_s": link.bytes_per_s / slower,
        }
    )
