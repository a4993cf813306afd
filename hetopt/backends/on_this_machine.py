"""Backends that run a plan on this machine: as local processes, or on an emulation of its cluster."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.backend import LaunchOptions, Prepared, RunHandle
from hetopt.backends.emulation.backend import RehearsalLauncher
from hetopt.backends.emulation.description import parse_changes, parse_hosts
from hetopt.backends.emulation.plan import rehearse
from hetopt.backends.prediction.hosting import Mapped, ThisMachine
from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.backends.prediction.machine_speed import as_runs_found, at_present
from hetopt.backends.processes import LocalLauncher, ProcessLauncher
from hetopt.core.calibration_benchmark import MachineReading
from hetopt.core.errors import BadInput
from hetopt.core.extras import install_command
from hetopt.core.profile import Profile
from hetopt.core.reader_limits import check_readers, open_files_here, shared_bytes_here
from hetopt.core.run_folder import latest_checkpoint
from hetopt.core.run_spec import RunSpec
from hetopt.core.runs import RunFolders
from hetopt.core.task_reference import check_data_folder, check_found
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch, Place
from hetopt.optimizer.plan import Earlier, Plan
from hetopt.optimizer.step_time.earlier_runs import EarlierRuns, kept
from hetopt.optimizer.step_time.host_level import host_named


@dataclass(frozen=True, kw_only=True)
class _OnThisMachine(ProcessLauncher):
    """What the two have in common: nothing is rented, and the run is a process of this machine."""

    name: Place = "local"

    def _map(self, plan: Plan, options: LaunchOptions) -> Mapped:
        raise NotImplementedError("each of them maps its own way")

    def _known(self, profile: Profile) -> tuple[str | None, EarlierRuns | None]:
        """The machine that its workers have to themselves, and what earlier runs found; None where they emulate others.

        Args:
            profile: of the plan, which may have been taken on another machine.
        """
        return None, None

    def prepare(self, made: Plan, wanted: Plan, options: LaunchOptions) -> Prepared:
        """See `hetopt.backends.backend.Backend`."""
        present = at_present(wanted, _read_as_worker)
        host, earlier = self._known(present.plan.profile)
        wanted, counted = as_runs_found(present.plan, earlier)
        remarks = (*present.notes, *_said(counted))
        here = self._map(wanted, options)
        spec = here.run
        if options.data is not None:
            if not wanted.profile.job.script:
                check_data_folder(Path(options.data))
            spec = spec.model_copy(update={"data_dir": str(Path(options.data).resolve())})
        samples = [worker.local_batch_size for worker in spec.workers]
        reading, shared_bytes = wanted.profile.job.reading, shared_bytes_here()
        check_readers("this machine", reading, samples, shared_bytes=shared_bytes, open_files=open_files_here())
        launch = Launch(
            created="",
            started_s=0.0,
            run_id="",
            on=self.name,
            plan=made,
            spec=_restarted(spec, options),
            prediction=here.prediction,
            host=host,
            machine=present.reading,
            slower=present.slower,
            earlier=counted,
            notes=(*remarks, *here.notes),
        )
        return Prepared(launch=launch)

    def prepare_resumed(self, folder: Path, options: LaunchOptions) -> Prepared:
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

    def _map(self, plan: Plan, options: LaunchOptions) -> Mapped:
        return predict_on_local(plan, options.slowdowns)

    def _known(self, profile: Profile) -> tuple[str | None, EarlierRuns | None]:
        return (host_named(profile.host), kept()) if ThisMachine.seen().is_profiled(profile.host) else (None, None)


@dataclass(frozen=True, kw_only=True)
class RehearsalBackend(_OnThisMachine, RehearsalLauncher):
    """A scaled emulation of the plan's cluster, or of described hosts, with a network of its own. It needs root."""

    name: Place = "rehearsal"

    def _map(self, plan: Plan, options: LaunchOptions) -> Mapped:
        described = None if options.hosts is None else parse_hosts(options.hosts)
        count = sum(group.machines for group in plan.chosen.groups) if described is None else len(described)
        names = [f"h{number}" for number in range(count)]
        changes = () if options.schedule is None else parse_changes(options.schedule, names)
        stands_in = options.stand_in or plan.profile.is_counted
        return rehearse(plan, ThisMachine.seen(), described, changes, stands_in=stands_in)

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


def _said(counted: Earlier | None) -> tuple[str, ...]:
    return () if counted is None else (f"Counted in for this machine: {counted.in_words}.",)


def _restarted(spec: RunSpec, options: LaunchOptions) -> RunSpec:
    return spec if options.restarts is None else spec.model_copy(update={"max_restarts": options.restarts})


def resumable(launcher: ProcessLauncher, folder: Path, place: str) -> Launch:
    """The launch of a run that can go on.

    Args:
        launcher: that started it.
        folder: the run's.
        place: where that launcher's runs are, such as ``local``.

    Raises:
        BadInput: it was started elsewhere, is not over, or has no checkpoint.
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
    if latest_checkpoint(folder) is None:
        raise BadInput(f"{folder.name} has no checkpoint to go on from.", hint="start it anew from its plan")
    return launch
