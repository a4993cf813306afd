"""Machines that SkyPilot rents, on any of its clouds and on Kubernetes: a cluster of one machine for each of a plan.

``python -m hetopt.integrations.sky RUN_DIR PARENT_PID`` rents them, conducts the run as on any hosts, and gives them
back. SkyPilot finds the machines, boots them, and writes how ssh reaches them. Each machine has one job, which ends a
while after the last process of the run there, and in any case when the budget is used up; the cluster goes with its job
(`autostop` with `down`), whatever has become of this machine. ssh's own sessions count for nothing there, as they have
no terminal (SkyPilot 0.14.1, `sky/skylet/autostop_lib.py`).
"""

from __future__ import annotations

import json
import math
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hetopt.backends.asked import ASK_AGAIN_S, LOOK_S, NOTICE_S, ORDER_FILE, AskedBackend, Source, holding_script
from hetopt.backends.ec2.facts import PYTHON
from hetopt.backends.ec2.renter.ordering import budget_of
from hetopt.backends.on_this_machine import OnHosts
from hetopt.backends.options import Machines, Sky
from hetopt.backends.prediction import PlacedRun
from hetopt.backends.ssh.checking import INVENTORY_FILE, Inventory
from hetopt.backends.ssh.link import ssh_argv
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import BadInput, BudgetStop, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.formatting import listed, usd
from hetopt.core.hosts import CPU, Host
from hetopt.core.paths import inside
from hetopt.core.plain_text import one_line
from hetopt.core.run_folder import STOP_FILE
from hetopt.core.run_spec import host_names
from hetopt.core.search_path import install_command
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch, Place
from hetopt.optimizer.plan import Plan, cloud_of

SPENT_FILE = "rented_s"
"""File in a run's folder with the seconds for which its machines were rented in earlier sessions."""
MACHINE: Mapping[str, Any] = {"python": "~/.cache/hetopt-python/bin/python", "install": True}
"""Settings of each machine: packages are installed for the run, by an interpreter that `SETUP` has brought."""
SETUP = f"~/.local/bin/uv venv --seed --allow-existing --python {PYTHON} ~/.cache/hetopt-python"
"""SkyPilot has put uv there (`sky/skylet/constants.py`)."""
ENDS: Mapping[str, Any] = {"idle_minutes": 5, "down": True, "wait_for": "jobs"}
"""When SkyPilot takes a cluster down: minutes after its job has ended, which the budget pays for, too."""


def client() -> Any:
    """Return SkyPilot's Python API, the module ``sky``.

    Raises:
        BadInput: SkyPilot is not installed.
    """
    try:
        import sky
    except ImportError:
        raise BadInput(
            "renting by SkyPilot needs it, and it is not installed.",
            hint=f"{install_command('sky')}, then `sky check`",
        ) from None
    return sky


def answered(ask: Callable[[Any], Any]) -> Any:
    """Return SkyPilot's answer to what ``ask`` requests of its Python API; wait for it.

    Raises:
        RunFailed: SkyPilot refuses, or does not answer.
        BadInput: SkyPilot is not installed.
    """
    sky = client()
    try:
        return sky.get(ask(sky))
    except Exception as refused:  # its errors have no base of their own
        said = one_line(str(refused) or type(refused).__name__)[:300].rstrip(".")
        raise RunFailed(f"SkyPilot refuses: {said}.", hint="see `sky check` and `sky status`") from None


def machines(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return SkyPilot's resources (as its YAML has them) of each machine of a plan, by the host's name in the run.

    Raises:
        BadInput: the plan is for machines of the user's own.
    """
    if any(group.is_own for group in plan.chosen.groups):
        raise BadInput(
            "the plan is for machines of your own, of which nothing is rented.", hint="plan without `inventory`"
        )
    names = iter(host_names(plan.run))
    return {
        next(names): {
            "infra": "/".join((cloud_of(group.region), group.region.rpartition(":")[2])),
            "instance_type": group.instance_type,
            "use_spot": group.market == "spot",
        }
        for group in plan.chosen.groups
        for _ in range(group.machines)
    }


class Seen(NamedTuple):
    """What was seen of a host's cluster.

    Attributes:
        at_s: when, by the monotonic clock.
        address: IP address of the host's machine in its cloud's network; None: SkyPilot does not tell.
        refusal: why there is no machine; None: it is up.
    """

    at_s: float
    address: str | None
    refusal: RunFailed | None


NEVER = Seen(-math.inf, None, None)


@dataclass(kw_only=True)
class SkyLink(Source):
    """The way to a run's machines by ssh, as SkyPilot rents them: host `Host.address` is a cluster of that name.

    Attributes:
        run_dir: the run's folder, where the machines' host keys are kept.
        hosts: all hosts of the run.
        resources: resources of each machine, as `machines` returns them.
        limit_s: seconds that the budget still pays for all machines.
        spent_s: seconds for which they were rented in earlier sessions.
        clock: returns seconds of a monotonic clock.
    """

    RETURN_WITHIN_S: ClassVar[float] = 3600.0

    run_dir: Path
    hosts: Sequence[Host]
    resources: Mapping[str, Mapping[str, Any]]
    limit_s: float
    spent_s: float
    clock: Callable[[], float] = time.monotonic
    _begun_s: float | None = None
    _seen: dict[str, Seen] = field(default_factory=dict)
    _asks: dict[str, Future[Seen]] = field(default_factory=dict)
    _requests: dict[str, Any] = field(default_factory=dict)

    def bring(self, host: Host) -> None:
        """Ask for a host's cluster where it is not up; raise unless it was seen up. Return at once.

        It is looked at again after 5 s, and asked for again 30 s after a refusal.

        Raises:
            RunFailed: the cluster is waited for, or cannot be had.
            BudgetStop: the budget is used up.
        """
        if self.left_s <= NOTICE_S:
            raise BudgetStop("the budget of the run is used up.", hint="resume it with a higher `budget_usd`")
        if self._begun_s is None:
            self._begin()
        seen, ask = self._seen.get(host.name, NEVER), self._asks.get(host.name)
        if ask is not None and ask.done():
            del self._asks[host.name]
            self._seen[host.name] = seen = ask.result()
        elif ask is None and self.clock() - seen.at_s >= (LOOK_S if seen.refusal is None else ASK_AGAIN_S):
            self._asks[host.name] = self._pool.submit(self._look, host)
        if seen.refusal is not None:
            raise seen.refusal
        if seen is NEVER:
            raise RunFailed(f"{host.name} waits for its machine.", hint=f"see `sky status {host.address}`")

    def _begin(self) -> None:
        """Start the time that the budget pays, which counts as spent unless the machines are given back before."""
        (self.run_dir / SPENT_FILE).write_text(str(self.spent_s + self.limit_s), encoding="ascii")
        self._begun_s, self._pool = self.clock(), ThreadPoolExecutor(max_workers=len(self.hosts))
        timer = threading.Timer(self.limit_s - NOTICE_S, self._stop)
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        """Have the workers save a checkpoint and stop, as the budget is used up."""
        log = EventLog(self.run_dir / EVENTS_FILE)
        log.write("condition_changed", host=self.hosts[0].name, notice=True, reason="the budget is used up")
        (self.run_dir / STOP_FILE).touch()

    @property
    def left_s(self) -> float:
        """Seconds from now on that the budget pays for all machines."""
        return self.limit_s - (0.0 if self._begun_s is None else self.clock() - self._begun_s)

    def _look(self, host: Host) -> Seen:
        """Wait until a host's cluster is up, which is launched where it is not, or refused; return what was seen."""
        cluster = host.address

        def launched(sky: Any) -> Any:
            """Request the cluster's launch of SkyPilot; keep the request, and return it."""
            task = sky.Task.from_yaml_config(self.task(host))
            self._requests[cluster] = sky.launch(task, cluster_name=cluster, retry_until_up=True)
            return self._requests[cluster]

        try:
            found = answered(lambda sky: sky.status([cluster], refresh=sky.StatusRefreshMode.FORCE))
            handle = next((record["handle"] for record in found if record["status"].value == "UP"), None)
            if handle is None:
                self._seen.pop(host.name, None)
                self._keys(host).unlink(missing_ok=True)  # another machine has another key
                _, handle = answered(launched)
        except RunFailed as refused:
            why = f"there is no machine for {host.name}: {refused.message}"
            return Seen(self.clock(), None, RunFailed(why, hint=refused.hint))
        return Seen(self.clock(), next(iter(handle.cached_internal_ips or ()), None), None)

    def task(self, host: Host) -> dict[str, Any]:
        """Return the task of a host's cluster, as SkyPilot's YAML has it: it holds the machine for the run."""
        hold = ["timeout", str(math.ceil(self.left_s)), "sh", "-c", holding_script(self.run_dir.name, host.name)]
        resources = {**self.resources[host.name], "autostop": dict(ENDS)}
        return {"name": "hetopt", "resources": resources, "setup": SETUP, "run": shlex.join(hold)}

    def is_awaited(self, host: Host) -> bool:
        """Return whether a host's cluster was asked for, and not refused."""
        return self._seen.get(host.name, NEVER).refusal is None

    def address(self, host: Host) -> str | None:
        """Return a host's IP address in its cloud's network, as SkyPilot saw it last; None: it does not tell."""
        return self._seen.get(host.name, NEVER).address

    def argv(self, host: Host, command: str) -> list[str]:
        """Return the ssh command line that runs a shell command on a host, by the entry that SkyPilot wrote for it.

        The first key that a machine shows is kept, and no other is accepted from it.

        Raises:
            RunFailed: the host's cluster is not up yet.
        """
        self.bring(host)
        keys = {"StrictHostKeyChecking": "accept-new", "UserKnownHostsFile": str(self._keys(host))}
        return ssh_argv(host, command, options=keys)

    def _keys(self, host: Host) -> Path:
        return inside(self.run_dir, f"known_hosts-{host.name}", what="file of host keys")

    def give_back(self) -> None:
        """Take all clusters of the run down, and withdraw what is still asked for. Idempotent.

        Raises:
            RunFailed: some may be left; they end by themselves when the budget is used up.
            BadInput: SkyPilot is not installed.
        """
        left = list[str]()
        with suppress(RunFailed):  # they are over
            if self._requests:  # of none, all of this user's may be meant
                answered(methodcaller("api_cancel", [*self._requests.values()]))
        for cluster in (host.address for host in self.hosts):
            try:
                if answered(methodcaller("status", [cluster])):
                    answered(methodcaller("down", cluster))
            except RunFailed as refused:
                left.append(f"{cluster}: {refused.message}")
        if self._begun_s is not None:
            rented_s = self.spent_s + self.limit_s - max(0.0, self.left_s)
            (self.run_dir / SPENT_FILE).write_text(str(rented_s), encoding="ascii")
        if left:
            raise RunFailed(f"SkyPilot may have left machines ({'; '.join(left)}).", hint="`sky status`, `sky down`")


@dataclass(frozen=True, kw_only=True)
class SkyBackend(AskedBackend):
    """The backend that rents a plan's machines by SkyPilot, a cluster each, within a budget.

    Attributes:
        name: name of the backend.
    """

    OPTIONS: ClassVar[type[Machines]] = Sky

    name: Place = Sky.PLACE

    def source(self, run_dir: Path, options: Sky) -> SkyLink:
        """Return the way to the machines of the run in a folder, with what its budget still pays for; rent none."""
        plan, spent = Launch.load(run_dir / LAUNCH_FILE).plan, run_dir / SPENT_FILE
        spent_s = float(spent.read_text(encoding="ascii")) if spent.exists() else 0.0
        lasts_s = SECONDS_PER_HOUR * budget_of(plan, options.budget_usd) / plan.chosen.usd_per_hour
        return SkyLink(
            run_dir=run_dir,
            hosts=Inventory.load(run_dir / INVENTORY_FILE).hosts,
            resources=machines(plan),
            limit_s=lasts_s - spent_s - 60 * ENDS["idle_minutes"],
            spent_s=spent_s,
        )

    def mapped(self, plan: Plan, options: Sky) -> tuple[PlacedRun, tuple[Host, ...]]:
        """Return a plan's run and prediction as they are, and a host for each machine, named as its cluster will be.

        Args:
            plan: as it is to be run.
            options: options of the launch.

        Raises:
            BadInput: the plan is for machines of the user's own, or its data is on this machine alone.
        """
        if plan.run.data_dir is not None and options.data is None:
            raise BadInput(
                f"the data is in {plan.run.data_dir} on this machine, which rented machines cannot read.",
                hint="say where it is there: `data`",
            )
        groups = [group for group in plan.chosen.groups for _ in range(group.machines)]
        clusters = f"hetopt-{secrets.token_hex(4)}"
        hosts = tuple(
            Host(
                name=name,
                address=f"{clusters}-{number}",
                devices=(group.hardware.gpu,) * group.workers_per_machine
                if group.hardware is not None and group.hardware.gpu is not None
                else (CPU,),
                **MACHINE,
            )
            for number, (name, group) in enumerate(zip(machines(plan), groups, strict=True))
        )
        return PlacedRun(run=plan.run, prediction=plan.chosen.prediction, notes=()), hosts

    def prepare(self, made: Plan, wanted: Plan, options: Sky) -> OnHosts:
        """Return a launch on the plan's machines, with the most that it may cost; SkyPilot is asked for nothing.

        Args:
            made: the plan as it was made, for the record.
            wanted: the plan as it is to be run.
            options: launch options.

        Raises:
            BadInput: as of `mapped`, or neither the launch nor the plan has a budget.
            BudgetStop: the plan may cost more than the budget.
        """
        budget_usd = budget_of(made, options.budget_usd)
        rented = [
            f"{group.machines} × {group.instance_type} ({group.market}, {group.region})" for group in made.chosen.groups
        ]
        prepared = super().prepare(made, wanted, options)
        said = f"Rents {listed(rented)} by SkyPilot, for at most {usd(budget_usd)} at the plan's prices."
        return replace(prepared, connects_to=(said,), spends_usd=budget_usd)

    def prepare_resumed(self, folder: Path, options: Sky) -> OnHosts:
        """Prepare the ended run in ``folder`` to go on, on machines rented anew; what it has cost counts.

        Raises:
            BadInput: the run is not over, ran on another backend, or its inventory cannot be read.
        """
        prepared = super().prepare_resumed(folder, options)
        budget_usd = json.loads(prepared.files[ORDER_FILE]).get("budget_usd")
        return replace(prepared, spends_usd=budget_of(prepared.launch.plan, budget_usd))

    def check_ready(self, prepared: Any) -> None:
        """Raise if SkyPilot is not installed; it is asked for nothing.

        Raises:
            BadInput: it is not.
        """
        client()

    def asked(self, prepared: Any) -> Any:
        """Return the launch as it is once SkyPilot answers, whose server must not begin, and end, with the run.

        Raises:
            BadInput: SkyPilot is not installed.
            RunFailed: it does not answer.
        """
        answered(methodcaller("status"))
        return prepared


if __name__ == "__main__":
    sys.exit(SkyBackend().lead(sys.argv))
