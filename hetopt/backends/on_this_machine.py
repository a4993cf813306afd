"""Backends that rent nothing: processes of this machine, rehearsals on it, and the user's hosts that ssh reaches.

Each machine of a plan is a process, an emulated host, or a host of the inventory.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetopt.backends.backend import Prepared, RunHandle, check_place
from hetopt.backends.emulation.conductor import RehearsalLauncher
from hetopt.backends.emulation.plan import parse_changes, parse_hosts as emulated_hosts, rehearse
from hetopt.backends.host.bundle import Bundle, make_bundle
from hetopt.backends.options import Local, OnThisMachine, Rehearsal, Ssh
from hetopt.backends.prediction import PlacedRun, predict_on_local
from hetopt.backends.processes import LocalLauncher, ProcessLauncher, Program
from hetopt.backends.ssh.checking import INVENTORY_FILE, HostFound, Inventory, check_hosts
from hetopt.backends.ssh.link import SSH, Link
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.calibration_benchmark import MachineReading
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.formatting import listed
from hetopt.core.hosts import CPU, Host, parse_hosts, placeable, read_hosts
from hetopt.core.interruption import usable_processors
from hetopt.core.run_folder import BUNDLE_FILE, RunFolders
from hetopt.core.run_rules import check_data_folder, check_found
from hetopt.core.run_spec import RunSpec, host_names
from hetopt.core.search_path import install_command
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch, Place
from hetopt.optimizer.plan import CostTerm, Group, Plan, Prediction, Range
from hetopt.optimizer.step_time.model import contention_reach


@dataclass(frozen=True, kw_only=True)
class Led(ProcessLauncher):
    """The base of backends whose runs are led by a process of this machine.

    Attributes:
        name: name of the place.
    """

    name: Place

    def asked(self, prepared: Any) -> Any:
        """Return the prepared launch as it can begin now, here unchanged.

        Raises:
            HetoptError: it cannot begin.
        """
        self.check_ready(prepared)
        return prepared

    def check_ready(self, prepared: Any) -> None:  # only hosts know whether they can begin
        """Raise if a prepared launch could not begin now, as far as this machine knows.

        Raises:
            HetoptError: it could not.
        """

    def submit(self, prepared: Prepared, folders: RunFolders) -> tuple[RunHandle, Launch]:
        """Look again whether a launch can begin, record it in the run's folder, and start it; do not wait for training.

        Of hosts, those that cannot take part are left out. Asking changes nothing on them.

        Raises:
            HetoptError: it cannot be started; a folder that was made for it is gone.
        """
        prepared = self.asked(prepared)
        folder, launch = prepared.begun(folders)
        try:
            for name, data in prepared.files.items():
                (folder / name).write_bytes(data)
            launch.save(folder / LAUNCH_FILE)
            return replace(self, detached=prepared.detached).start(launch.spec, folder, {}), launch
        except (HetoptError, OSError):
            if prepared.folder is None:
                shutil.rmtree(folder, ignore_errors=True)  # it would look like a run that has failed
            raise


@dataclass(frozen=True, kw_only=True)
class _OnThisMachine(Led):
    """A launcher of runs that rent nothing, and are processes of this machine."""

    @abstractmethod
    def _map(self, plan: Plan, options: Any) -> PlacedRun:
        """Return a plan's run as this machine can do it, with its prediction."""

    def prepare(self, made: Plan, wanted: Plan, options: OnThisMachine) -> Prepared:
        """Measure this machine's contention, map the plan ``wanted`` onto it and predict it; start nothing.

        On a CPU the measurement takes seconds, and a worse contention than the profile's widens the prediction.

        Args:
            made: the plan as it was made, for the record.
            wanted: the plan as it is to be run.
            options: launch options.

        Raises:
            BadInput: the plan cannot run here, or the data folder that the options name cannot be used.
        """
        computes = wanted.profile.yardstick_s is not None  # not a GPU
        now = _read_as_worker() if computes else None
        wanted = wanted if now is None else with_contention(wanted, now)
        here = self._map(wanted, options)
        spec = here.run
        if options.data is not None:
            if not wanted.profile.job.script:
                check_data_folder(Path(options.data))
            spec = spec.model_copy(update={"data_dir": str(Path(options.data).resolve())})
        launch = Launch(
            created="",
            started_s=0.0,
            run_id="",
            on=self.name,
            plan=made,
            spec=_restarted(spec, options),
            prediction=here.prediction,
            machine=now,
            notes=here.notes,
        )
        return Prepared(launch=launch)

    def prepare_resumed(self, folder: Path, options: OnThisMachine) -> Prepared:
        """Prepare the ended run in ``folder`` to go on, with a new limit of restarts if options give it.

        Raises:
            BadInput: the run is not over, ran on another backend, or its launch record cannot be read.
        """
        launch = resumable(self, folder, self.name)
        launch = launch.model_copy(update={"spec": _restarted(launch.spec, options)})
        return Prepared(launch=launch, folder=folder)

    def check_ready(self, prepared: Prepared) -> None:
        """Raise BadInput if torch or the task is missing here, or no cluster can be emulated for a rehearsal.

        Raises:
            BadInput: torch is not installed, the task is not there, or no cluster can be emulated.
        """
        if importlib.util.find_spec("torch") is None:
            raise BadInput("training needs torch, which is not installed.", hint=install_command("train"))
        spec = prepared.launch.spec
        if not spec.script:
            check_found(spec.task)
        self._check(spec)


@dataclass(frozen=True, kw_only=True)
class LocalBackend(_OnThisMachine, LocalLauncher):
    """The backend of real processes here: as many as the plan has workers, at most the CPUs, or one a slowdown."""

    name: Place = "local"

    def _map(self, plan: Plan, options: Local) -> PlacedRun:
        return predict_on_local(plan, options.slowdowns)


@dataclass(frozen=True, kw_only=True)
class RehearsalBackend(_OnThisMachine, RehearsalLauncher):
    """The backend of scaled emulations on this machine, of a plan's cluster or of described hosts. It needs root."""

    name: Place = "rehearsal"

    def _map(self, plan: Plan, options: Rehearsal) -> PlacedRun:
        """Map a plan onto its emulated machines, or the hosts that the options describe; BadInput: as of `rehearse`."""
        described = None if options.hosts is None else emulated_hosts(options.hosts)
        count = sum(group.machines for group in plan.chosen.groups) if described is None else len(described)
        names = [f"h{number}" for number in range(count)]
        changes = () if options.schedule is None else parse_changes(options.schedule, names)
        stands_in = options.stand_in or plan.profile.is_counted
        return rehearse(plan, usable_processors(), described, changes, stands_in=stands_in)


def _read_as_worker() -> MachineReading:
    """Read this machine's contention in a session of its own, as workers are started; takes seconds.

    A scheduler may share processors out by sessions first.
    """
    command = [sys.executable, "-m", "hetopt.core.calibration_benchmark"]
    read = subprocess.run(command, start_new_session=True, stdout=subprocess.PIPE, check=True)
    return MachineReading.model_validate_json(read.stdout)


def _restarted(spec: RunSpec, options: OnThisMachine) -> RunSpec:
    return spec if options.restarts is None else spec.model_copy(update={"max_restarts": options.restarts})


def resumable(launcher: ProcessLauncher, folder: Path, place: str) -> Launch:
    """Return the launch record of an ended run, which ``launcher`` can resume.

    The run goes on from its newest checkpoint, or begins anew where it has saved none yet.

    Args:
        launcher: launcher that started the run.
        folder: the run's.
        place: name of the launcher's backend, such as ``local``.

    Raises:
        BadInput: the run was started on another backend, or is not over, or its launch record cannot be read.
    """
    launch = Launch.load(folder / LAUNCH_FILE)
    check_place(launch, folder, place)
    state = launcher.poll(RunHandle(run_dir=folder)).state
    if not state.is_over:
        raise BadInput(f"{folder.name} is still {state.value}.", hint=f"end it first with `hetopt stop {folder.name}`")
    return launch


def with_contention(plan: Plan, now: MachineReading) -> Plan:
    """Return the plan with its profile at this machine's present contention, where that is worse than the profile's.

    It widens the intervals of predictions: how busy others keep the processors is no speed, and changes in minutes.

    Args:
        plan: plan to be predicted.
        now: contention of this machine, read now.
    """
    then = plan.profile
    busy = then.model_copy(update={"contention": now.contention, "contention_log_sd": now.contention_log_sd})
    return plan.model_copy(update={"profile": max(then, busy, key=contention_reach)})


@dataclass(frozen=True, kw_only=True)
class OnHosts(Prepared):
    """A prepared launch on the hosts of an inventory, of which none has been asked anything yet.

    Attributes:
        inventory: the hosts, and the hash of the code.
    """

    inventory: Inventory

    def answered(self, inventory: Inventory) -> OnHosts:
        """Return the launch with the given inventory in place of its own, also in the run's files; ask no host."""
        return replace(self, inventory=inventory, files={**self.files, INVENTORY_FILE: inventory.to_json().encode()})


@dataclass(frozen=True, kw_only=True)
class SshBackend(Led):
    """The backend of hosts of an inventory, reached by ssh; a process on this machine leads each run.

    That process ends with the launching process, unless the run is detached.

    Attributes:
        name: name of the backend.
    """

    name: Place = Ssh.PLACE

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """Return the program that leads a run on ssh hosts from this machine; the arguments are not used."""
        return Program(module="hetopt.backends.ssh.conductor", log_name="conductor.log", defaults={})

    def hosts_of(self, options: Any) -> tuple[Host, ...]:
        """Return the hosts that launch options name, by an inventory file or by ``hosts``, of which one is given.

        Raises:
            BadInput: neither an inventory nor ``hosts`` is given, or both, or they cannot be read.
        """
        if (options.hosts is None) == (options.inventory is None):
            raise BadInput(
                "a launch on machines of your own needs to know which: `inventory` or `hosts`, and not both.",
                hint='give `inventory="hosts.toml"`, or `hosts="alice@box1,bob@box2"`',
            )
        return parse_hosts(options.hosts) if options.hosts is not None else read_hosts(options.inventory or Path())

    def mapped(self, plan: Plan, options: Any) -> tuple[PlacedRun, tuple[Host, ...]]:
        """Return a plan's run on hosts of the options, its prediction with their cost, and the hosts that take part.

        A plan for other machines is shared by all hosts alike, with a note.

        Args:
            plan: plan as it is to be run.
            options: options of the launch.

        Raises:
            BadInput: the hosts cannot be read, or the plan cannot run on them.
        """
        placed, hosts = _mapped(plan, self.hosts_of(options))
        prediction, costs = _priced(placed.prediction, hosts)
        return PlacedRun(run=placed.run, prediction=prediction, notes=(*placed.notes, *costs)), hosts

    def asked(self, prepared: OnHosts) -> OnHosts:
        """Ask the hosts over ssh; return the launch with their addresses, and why some hosts are left out.

        Raises:
            RunFailed: no host can take part.
            BadInput: ssh is not installed here.
        """
        return prepared.answered(ready(prepared.inventory))

    def prepare(self, made: Plan, wanted: Plan, options: Any) -> OnHosts:
        """Map the plan ``wanted`` onto the hosts of the options and predict it; no host is asked anything yet.

        Hosts that the plan is not for get its workers one a device, with a note.

        Args:
            made: the plan as it was made, for the record.
            wanted: the plan as it is to be run.
            options: launch options, with an inventory or hosts.

        Raises:
            BadInput: the hosts cannot be read, the plan cannot run on them, or its code or data cannot be sent.
        """
        mapped, hosts = self.mapped(wanted, options)
        run = mapped.run
        bundle = make_bundle(run.task, run.script, rented=all(host.install for host in hosts))
        inventory = Inventory(hosts=hosts, bundle_sha256=bundle.sha256)
        launch = Launch(
            created="",
            started_s=0.0,
            run_id="",
            on=self.name,
            plan=made,
            spec=spec_on(run, inventory, bundle, options.data),
            prediction=mapped.prediction,
            notes=mapped.notes,
        )
        return OnHosts(
            launch=launch, inventory=inventory, files={BUNDLE_FILE: bundle.data}, connects_to=self.told(inventory)
        )

    def prepare_resumed(self, folder: Path, options: Any) -> OnHosts:
        """Prepare the ended run in ``folder`` to go on with its inventory and code; no host is asked yet.

        The options are not used.

        Raises:
            BadInput: the run is not over, ran on another backend, or its inventory cannot be read.
        """
        launch = resumable(self, folder, self.name)
        inventory = Inventory.load(folder / INVENTORY_FILE)
        return OnHosts(launch=launch, folder=folder, inventory=inventory, connects_to=self.told(inventory))

    def told(self, inventory: Inventory) -> tuple[str, ...]:
        """Return sentences on the machines that a launch goes to, for whoever says yes to it."""
        return (f"Connects to {listed([host.reached_as for host in inventory.hosts])}.",)


@dataclass(frozen=True, kw_only=True)
class SshProbes(SshBackend):
    """The launcher of short measuring runs on hosts that were asked already, with their inventory and code.

    Attributes:
        inventory: the hosts.
        bundle: the code.
    """

    inventory: Inventory
    bundle: Bundle

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Write the inventory of the hosts that ``spec`` names, and the code, into ``run_dir``; start the run there.

        Args:
            spec: spec of the probe, whose hosts are those of the inventory.
            run_dir: folder of the probe, which exists.
            environment: variables of the process that leads the run.

        Raises:
            BadInput: the folder cannot be written, or a run is alive in it.
        """
        names = set(host_names(spec))
        hosts = tuple(host for host in self.inventory.hosts if host.name in names)
        some = self.inventory.model_copy(update={"hosts": hosts})
        some.save(run_dir / INVENTORY_FILE)
        (run_dir / BUNDLE_FILE).write_bytes(self.bundle.data)
        return super().start(spec_on(spec, some, self.bundle, None), run_dir, environment)


def _mapped(plan: Plan, hosts: Sequence[Host]) -> tuple[PlacedRun, tuple[Host, ...]]:
    """Return the run mapped onto hosts, and the hosts that take part.

    A plan that was made for an inventory names its hosts, and is run as it was planned. Any other is shared by all
    hosts alike, until the run has seen how fast each is.

    Raises:
        BadInput: a planned host has other devices now, or there are more workers than samples in a batch.
    """
    kinds = placeable(hosts, plan.profile.measured_machines)
    groups = plan.chosen.groups
    if not all(group.machines <= len(kinds.get(group.instance_type, ())) for group in groups):
        return _shared_alike(plan, hosts)
    placed: list[tuple[Host, Group]] = []
    for group in groups:
        taken = {other.way for other, _ in placed}
        free = [host for host in kinds[group.instance_type] if host.way not in taken]
        placed += [(host, group) for host in free[: group.machines]]
    planned = tuple(host for host, _ in placed)
    for host, group in placed:
        if len(host.devices) != group.workers_per_machine:
            raise BadInput(
                f"{host.name} has {len(host.devices)} devices, and was planned with {group.workers_per_machine}.",
                hint="plan again: `hetopt recommend PROFILE --inventory hosts.toml`",
            )
    names = dict(zip(host_names(plan.run), (host.name for host in planned), strict=True))
    workers = tuple(worker.model_copy(update={"host": names[worker.host]}) for worker in plan.run.workers)
    run = plan.run.model_copy(update={"workers": workers})
    return PlacedRun(run=run, prediction=plan.chosen.prediction, notes=()), planned


def _shared_alike(plan: Plan, hosts: Sequence[Host]) -> tuple[PlacedRun, tuple[Host, ...]]:
    """Return a run with a worker a device, as fast as the profiled machine's workers, with a note, and all hosts."""
    places = [host.name for host in hosts for _ in host.devices]
    here = predict_on_local(plan, [1.0] * len(places))
    workers = tuple(
        worker.model_copy(update={"host": name, "threads": None})
        for worker, name in zip(here.run.workers, places, strict=True)
    )
    note = (
        "the plan is for other machines: times are those of as many workers on the machine that was profiled, and how "
        "fast each host is, the run sees; "
        "`hetopt recommend PROFILE --inventory hosts.toml --market own` plans for these"
    )
    run = here.run.model_copy(update={"workers": workers})
    return PlacedRun(run=run, prediction=here.prediction, notes=(note,)), tuple(hosts)


def checked(hosts: Sequence[Host], plan: Plan | None) -> tuple[HostFound, ...]:
    """Ask hosts what would keep them from training together, or from running ``plan``; return one result a host.

    Args:
        hosts: hosts to ask.
        plan: whose run they are to take part in; None: any.

    Raises:
        BadInput: the plan cannot run on them, or ssh is not installed here.
    """
    if plan is not None:
        _mapped(plan, hosts)
    return check_hosts(hosts)


def ready(inventory: Inventory, link: Link = SSH) -> Inventory:
    """Ask an inventory's hosts; return it with each reached host's address, and the reason why others are left out.

    Args:
        inventory: inventory of the hosts to ask.
        link: the way to them.

    Raises:
        RunFailed: no host can take part; the sentence says why the first cannot.
        BadInput: the command that reaches hosts (ssh) cannot be started here.
    """
    checked = check_hosts(inventory.hosts, link)
    troubles = {
        host.name: RunFailed(
            f"{host.name} cannot take part: {host.troubles[0].said}.",
            hint=f"{host.troubles[0].hint.rstrip('.')}; `hetopt hosts check` says what else there is to mend",
        )
        for host in checked
        if host.verdict == "bad"
    }
    if len(troubles) == len(checked):
        first, *others = troubles.values()
        more = f" {len(others)} more cannot either." if others else ""
        raise RunFailed(f"{first.message}{more}", hint=first.hint)
    reached = {host.name: host.seen.address for host in checked if host.seen is not None and host.seen.address}
    left_out = {name: trouble.message for name, trouble in troubles.items()}
    return inventory.model_copy(update={"addresses": reached, "left_out": left_out})


def spec_on(spec: RunSpec, inventory: Inventory, bundle: Bundle, data: str | None) -> RunSpec:
    """Return the run's spec as hosts read it: devices, and task, script and data by their names there.

    Args:
        spec: spec of the run.
        inventory: inventory of its hosts.
        bundle: the code.
        data: folder of the data on the hosts; None: as in ``spec``.
    """
    workers = tuple(
        worker.model_copy(update={"device": "cpu" if CPU in inventory.host(worker.host).devices else "cuda"})
        for worker in spec.workers
    )
    there = {"task": bundle.task, "script": bundle.script, "data_dir": data if data is not None else spec.data_dir}
    return spec.model_copy(update={"workers": workers, **there})


def _priced(prediction: Prediction, hosts: Sequence[Host]) -> tuple[Prediction, tuple[str, ...]]:
    """Return the prediction with the cost of the hosts themselves, and notes on hosts whose cost nobody knows."""
    costs = {host.name: host.cost_usd_per_hour for host in hosts}
    unknown = [name for name, cost in costs.items() if cost is None]
    hourly, took = sum(filter(None, costs.values())), prediction.total_s
    # Who waits for the hours of its owner draws nothing.
    at_work = 1.0 - min(1.0, prediction.closed_s / took.value)
    hourly_s = at_work * hourly / SECONDS_PER_HOUR
    cost = Range(value=hourly_s * took.value, low=hourly_s * took.low, high=hourly_s * took.high)
    terms = (CostTerm(name="own machines", usd=cost.value, basis=f"${hourly:.3g} an hour, by the inventory"),)
    notes = (f"nobody said what {', '.join(unknown)} costs, which counts as nothing",) if unknown else ()
    priced = prediction.model_copy(update={"cost_usd": cost, "cost_terms": terms, "data_transfer_usd": 0.0})
    return priced, notes
