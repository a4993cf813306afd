"""Machines of one's own as a backend: each machine of a plan is a host of the inventory, reached by ssh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.backends.backend import Prepared, RunHandle
from hetopt.backends.host.bundle import Bundle, make_bundle
from hetopt.backends.host.protocol import Place, ranked_spec
from hetopt.backends.on_this_machine import resumable
from hetopt.backends.options import Ssh
from hetopt.backends.prediction import Mapped, predict_on_local
from hetopt.backends.processes import ProcessLauncher, Program
from hetopt.backends.ssh.checking import INVENTORY_FILE, HostFound, Inventory, check_hosts
from hetopt.backends.ssh.conductor import BUNDLE_FILE
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.formatting import listed
from hetopt.core.hosts import CPU, Host, alike, parse_hosts, read_hosts
from hetopt.core.profile import Reading
from hetopt.core.run_folder import RunFolders
from hetopt.core.run_spec import RunSpec, host_names
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.plan import CostTerm, Plan, Prediction, Range

PLACE = "ssh"
_CHECK = "`hetopt hosts check` says what else there is to mend"


@dataclass(frozen=True, kw_only=True)
class OnHosts(Prepared):
    """A plan on hosts that were asked and can begin.

    Attributes:
        inventory: those.
        bundle: the code that they run; None: a run that goes on has it in its folder.
    """

    inventory: Inventory
    bundle: Bundle | None = None


@dataclass(frozen=True, kw_only=True)
class SshBackend(ProcessLauncher):
    """Runs on hosts of an inventory. The run's process here is their conductor, and ends with this one's."""

    name: str = field(default=PLACE)

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """See `ProcessLauncher.program`."""
        return Program(module="hetopt.backends.ssh.conductor", log_name="conductor.log", defaults={})

    def prepare(self, made: Plan, wanted: Plan, options: Ssh) -> OnHosts:
        """See `hetopt.backends.backend.Backend`. No host is asked anything yet."""
        mapped, hosts = _mapped(wanted, _hosts(options))
        run = mapped.run
        bundle = make_bundle(run.task, run.script, rented=all(host.install for host in hosts))
        inventory = Inventory(hosts=hosts, bundle_sha256=bundle.sha256)
        prediction, costs = _priced(mapped.prediction, hosts)
        launch = Launch(
            created="",
            started_s=0.0,
            run_id="",
            on=PLACE,
            plan=made,
            spec=spec_on(run, inventory, bundle, options.data),
            prediction=prediction,
            notes=(*mapped.notes, *costs),
        )
        return OnHosts(launch=launch, inventory=inventory, bundle=bundle, connects_to=_told(inventory))

    def prepare_resumed(self, folder: Path, options: Ssh) -> OnHosts:
        """See `hetopt.backends.backend.Backend`."""
        launch = resumable(self, folder, PLACE)
        inventory = Inventory.load(folder / INVENTORY_FILE)
        return OnHosts(launch=launch, folder=folder, inventory=inventory, connects_to=_told(inventory))

    def check_ready(self, prepared: Prepared) -> None:
        """See `hetopt.backends.backend.Backend`: only the hosts know, and `submit` asks them."""

    def submit(self, prepared: Prepared, folders: RunFolders) -> tuple[RunHandle, Launch]:
        """See `hetopt.backends.backend.Backend`. The hosts are asked first, and nothing is changed on them by that.

        Those that cannot take part are left out, which the run's events say with the reason.

        Raises:
            RunFailed: no host can take part; nothing has begun.
        """
        assert isinstance(prepared, OnHosts)
        inventory = ready(prepared.inventory, prepared.launch.spec, prepared.launch.plan.profile.job.reading)
        folder, launch = prepared.begun(folders)
        launch = launch.model_copy(update={"spec": _ranked(launch.spec, inventory)})
        inventory.save(folder / INVENTORY_FILE)
        if prepared.bundle is not None:
            (folder / BUNDLE_FILE).write_bytes(prepared.bundle.data)
        launch.save(folder / LAUNCH_FILE)
        return self.start(launch.spec, folder, {}), launch


@dataclass(frozen=True, kw_only=True)
class SshProbes(SshBackend):
    """Short runs on hosts that were asked already: whatever is started takes their inventory and code along.

    Attributes:
        inventory: those hosts.
        bundle: the code.
    """

    inventory: Inventory
    bundle: Bundle

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """See `ProcessLauncher.start`; the spec names some of the hosts."""
        names = set(host_names(spec))
        hosts = tuple(host for host in self.inventory.hosts if host.name in names)
        some = self.inventory.model_copy(update={"hosts": hosts})
        some.save(run_dir / INVENTORY_FILE)
        (run_dir / BUNDLE_FILE).write_bytes(self.bundle.data)
        return super().start(_ranked(spec_on(spec, some, self.bundle, None), some), run_dir, environment)


def _hosts(options: Ssh) -> tuple[Host, ...]:
    """The inventory of this launch.

    Raises:
        BadInput: there is none, or two.
    """
    if (options.hosts is None) == (options.inventory is None):
        raise BadInput(
            "a launch on machines of your own needs to know which: `inventory` or `hosts`, and not both.",
            hint='give `inventory="hosts.toml"`, or `hosts="alice@box1,bob@box2"`',
        )
    return parse_hosts(options.hosts) if options.hosts is not None else read_hosts(options.inventory or Path())


def _mapped(plan: Plan, hosts: Sequence[Host]) -> tuple[Mapped, tuple[Host, ...]]:
    """The run on these hosts, and those that take part.

    A plan that was made for an inventory names its hosts, and is run as it was planned. Any other is shared by all
    hosts alike, until the run has seen how fast each is.

    Raises:
        BadInput: a planned host has other devices now, or there are more workers than samples in a batch.
    """
    kinds = alike(hosts, plan.profile.measured_machines)
    groups = plan.chosen.groups
    if not all(group.machines <= len(kinds.get(group.instance_type, ())) for group in groups):
        return _shared_alike(plan, hosts)
    placed = [(host, group) for group in groups for host in kinds[group.instance_type][: group.machines]]
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
    return Mapped(run=run, prediction=plan.chosen.prediction, notes=()), planned


def _shared_alike(plan: Plan, hosts: Sequence[Host]) -> tuple[Mapped, tuple[Host, ...]]:
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
    return Mapped(run=run, prediction=here.prediction, notes=(note,)), tuple(hosts)


def checked(hosts: Sequence[Host], plan: Plan | None) -> tuple[HostFound, ...]:
    """Ask hosts what would keep them from training together, or from running a plan.

    Raises:
        BadInput: the plan cannot run on them.
    """
    if plan is None:
        return check_hosts(hosts)
    return check_hosts(hosts, _mapped(plan, hosts)[0].run, plan.profile.job.reading)


def ready(inventory: Inventory, spec: RunSpec | None = None, reading: Reading | None = None) -> Inventory:
    """Ask the hosts of an inventory; it then has the address by which each was reached, and why some are left out.

    Args:
        inventory: of those to ask.
        spec: of the run; None: they are to be measured.
        reading: of the job; None: it is not known.

    Raises:
        RunFailed: none can take part.
    """
    found = check_hosts(inventory.hosts, spec, reading)
    troubles = {
        host.name: RunFailed(
            f"{host.name} cannot take part: {host.troubles[0].said}.",
            hint=f"{host.troubles[0].hint.rstrip('.')}; {_CHECK}",
        )
        for host in found
        if host.verdict == "bad"
    }
    if len(troubles) == len(found):
        first, *others = troubles.values()
        more = f" {len(others)} more cannot either." if others else ""
        raise RunFailed(f"{first.message}{more}", hint=first.hint)
    reached = {host.name: host.seen.address for host in found if host.seen is not None and host.seen.address}
    left_out = {name: trouble.message for name, trouble in troubles.items()}
    return inventory.model_copy(update={"addresses": reached, "left_out": left_out})


def _told(inventory: Inventory) -> tuple[str, ...]:
    return (f"Connects to {listed([host.reached_as for host in inventory.hosts])}.",)


def spec_on(spec: RunSpec, inventory: Inventory, bundle: Bundle, data: str | None) -> RunSpec:
    """The run as the hosts read it."""
    workers = tuple(
        worker.model_copy(update={"device": "cpu" if CPU in inventory.host(worker.host).devices else "cuda"})
        for worker in spec.workers
    )
    there = {"task": bundle.task, "script": bundle.script, "data_dir": data if data is not None else spec.data_dir}
    return spec.model_copy(update={"workers": workers, **there})


def _ranked(spec: RunSpec, inventory: Inventory) -> RunSpec:
    """The run with its workers in the order of their hosts' addresses, those of hosts that are left out behind them."""
    places = [Place(host=host.name, address=inventory.address(host.name)) for host in inventory.fit()]
    absent = tuple(worker for worker in spec.workers if worker.host in inventory.left_out)
    there = tuple(worker for worker in spec.workers if worker.host not in inventory.left_out)
    ranked = ranked_spec(spec.model_copy(update={"workers": there}), places)
    return ranked.model_copy(update={"workers": (*ranked.workers, *absent)})


def _priced(prediction: Prediction, hosts: Sequence[Host]) -> tuple[Prediction, tuple[str, ...]]:
    """The prediction with what the hosts themselves cost, and whose cost nobody knows."""
    costs = {host.name: host.cost_usd_per_hour for host in hosts}
    unknown = [name for name, cost in costs.items() if cost is None]
    hourly, took = sum(filter(None, costs.values())), prediction.total_s
    # Who waits for the hours of its owner draws nothing.
    at_work = 1.0 - min(1.0, prediction.closed_s / took.value)
    hourly_s = at_work * hourly / SECONDS_PER_HOUR
    cost = Range(value=hourly_s * took.value, low=hourly_s * took.low, high=hourly_s * took.high)
    terms = (CostTerm(name="own machines", usd=cost.value, basis=f"${hourly:.3g} an hour, by the inventory"),)
    update = {"cost_usd": cost, "cost_terms": terms, "data_transfer_usd": 0.0}
    notes = (f"nobody said what {', '.join(unknown)} costs, which counts as nothing",) if unknown else ()
    return prediction.model_copy(update=update), notes
