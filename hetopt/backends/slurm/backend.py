"""The backend of a Slurm cluster, with hosts reached inside jobs of the run, and the process that leads a run there.

``python -m hetopt.backends.slurm.backend RUN_DIR PARENT_PID`` asks for the jobs, conducts the run as on any hosts, and
gives the jobs back.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetopt.backends.backend import RunHandle
from hetopt.backends.on_this_machine import OnHosts, SshBackend, ready
from hetopt.backends.options import Slurm
from hetopt.backends.processes import Program, conduct
from hetopt.backends.slurm.jobs import JOB_OPTIONS, LOOK_S, Node, SlurmLink, ask_nodes, give_back
from hetopt.backends.ssh.checking import INVENTORY_FILE, Inventory
from hetopt.backends.ssh.conductor import train
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.formatting import duration, listed
from hetopt.core.hosts import Host, read_hosts
from hetopt.core.interruption import StopSignal
from hetopt.core.run_folder import read_spec
from hetopt.core.run_spec import RunSpec
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.plan import Plan

ORDER_FILE = "slurm.json"
GATHER_S = 30.0
"""Seconds that a run waits for other jobs once the first job runs; a host whose job starts later joins."""


@dataclass(frozen=True, kw_only=True)
class SlurmBackend(SshBackend):
    """The backend of an inventory's nodes in a Slurm cluster, reached inside a job of the run on each.

    Attributes:
        name: of the backend.
    """

    name: Place = Slurm.PLACE

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """Return the program that leads a run on Slurm nodes from this machine; the arguments are not used."""
        return replace(super().program(spec, run_dir), module="hetopt.backends.slurm.backend")

    def hosts_of(self, options: Slurm) -> tuple[Host, ...]:
        """Return the hosts of the inventory file that launch options name.

        Raises:
            BadInput: the options name no inventory, or it cannot be read.
        """
        if options.inventory is None:
            raise BadInput(
                "a launch on Slurm needs to know which nodes: `inventory`.",
                hint="`hetopt hosts slurm -o nodes.toml` writes it",
            )
        return read_hosts(options.inventory)

    def prepare(self, made: Plan, wanted: Plan, options: Slurm) -> OnHosts:
        """Map the plan ``wanted`` onto the inventory's nodes and predict it; Slurm is not asked yet.

        Args:
            made: the plan as it was made, for the record.
            wanted: the plan as it is to be run.
            options: launch options, with an inventory.

        Raises:
            BadInput: as of `SshBackend.prepare`, or the jobs' time limit is shorter than a run that saves no checkpoint
                may take.
        """
        prepared = super().prepare(made, wanted, options)
        takes_s, limit_s = prepared.launch.prediction.total_s.high, options.time_limit
        if limit_s is not None and limit_s < takes_s and not prepared.launch.spec.resumes:
            raise BadInput(
                f"the run may take {duration(takes_s)}, and a job {duration(limit_s)} at most; "
                "it saves no checkpoint to go on from.",
                hint="give a longer `time_limit`",
            )
        return _ordered(prepared, {}, options)

    def prepare_resumed(self, folder: Path, options: Slurm) -> OnHosts:
        """Prepare the ended run in ``folder`` to go on in new jobs; ``options`` that are given replace earlier ones.

        Raises:
            BadInput: the run is not over, ran on another backend, or its inventory cannot be read.
        """
        prepared = super().prepare_resumed(folder, options)
        before = json.loads((folder / ORDER_FILE).read_text(encoding="utf-8"))
        return _ordered(prepared, before, options)

    def check_ready(self, prepared: Any) -> None:
        """Refuse a launch whose jobs Slurm would not take now; submit none.

        Raises:
            BadInput: Slurm would refuse a job or has no usable node, or there is no Slurm here.
            RunFailed: Slurm does not answer.
        """
        self._nodes(prepared)

    def asked(self, prepared: OnHosts) -> OnHosts:
        """Ask Slurm whether it would take the jobs; return the launch with addresses. Nodes are asked later.

        Raises:
            BadInput: as of `check_ready`.
            RunFailed: Slurm does not answer.
        """
        nodes, addresses = self._nodes(prepared), dict[str, str]()
        for host in prepared.inventory.hosts:
            with suppress(OSError):
                addresses[host.name] = host.private or socket.gethostbyname(nodes[host.address].address)
        return prepared.answered(prepared.inventory.model_copy(update={"addresses": addresses}))

    def _nodes(self, prepared: OnHosts) -> Mapping[str, Node]:
        """Return the nodes that there are, once Slurm has said that it would take the jobs.

        Raises:
            BadInput: Slurm is not installed here, or would not take the jobs.
            RunFailed: Slurm does not answer.
        """
        options, nodes = Slurm(**json.loads(prepared.files[ORDER_FILE])), ask_nodes()
        SlurmLink(run="new", options=options).check(prepared.inventory.hosts, nodes)
        return nodes

    def stop(self, handle: RunHandle) -> None:
        """End a run as `ProcessLauncher.stop` does, then cancel its Slurm jobs.

        Raises:
            BadInput: the run's process is of another user or machine, or there is no Slurm here.
        """
        super().stop(handle)
        give_back(handle.run_dir.resolve().name)


def _ordered(prepared: OnHosts, before: Mapping[str, object], options: Slurm) -> OnHosts:
    """Return a prepared launch whose folder keeps the options of its jobs.

    Args:
        prepared: on hosts.
        before: options of an earlier launch, where others are not given.
        options: of this one.
    """
    given = {name: getattr(options, name) for name in (*JOB_OPTIONS, "time_limit")}
    kept = {**before, **{name: value for name, value in given.items() if value is not None}}
    return replace(
        prepared,
        files={**prepared.files, ORDER_FILE: json.dumps(kept).encode()},
        connects_to=(f"Asks Slurm for a job on each of {listed([host.name for host in prepared.inventory.hosts])}.",),
    )


def train_on_slurm(run_dir: Path, stop_signal: StopSignal) -> int:
    """Submit the jobs of the run in a folder, lead the run until it is over, cancel them; return hetopt's exit code.

    Args:
        run_dir: the run's folder.
        stop_signal: returns the number of the signal that asked this process to end; None: none did.

    Raises:
        HetoptError: Slurm takes no job, no node can take part, or the run cannot go on.
    """
    options = Slurm(**json.loads((run_dir / ORDER_FILE).read_text(encoding="utf-8")))
    link, path = SlurmLink(run=run_dir.name, options=options), run_dir / INVENTORY_FILE
    inventory = Inventory.load(path)
    try:
        hosts = gather(inventory.hosts, link, run_dir, stop_signal)
        if not hosts:
            return 128 + (stop_signal() or 0)
        there = (host.model_copy(update={"private": inventory.address(host.name)}) for host in hosts)
        asked = ready(inventory.model_copy(update={"hosts": tuple(there)}), read_spec(run_dir), link)
        inventory.model_copy(update={"left_out": asked.left_out}).save(path)
        return train(run_dir, stop_signal, link)
    finally:
        with suppress(HetoptError):  # where Slurm does not answer, they end by themselves
            give_back(run_dir.name)


def gather(hosts: Sequence[Host], link: SlurmLink, run_dir: Path, stop_signal: StopSignal) -> list[Host]:
    """Submit all hosts' jobs, and wait for them up to 30 s after the first runs; return the hosts whose jobs run.

    Those that still wait are noted in the event log, and take part once they run.

    Args:
        hosts: of the run.
        link: that submits the jobs.
        run_dir: the run's folder.
        stop_signal: returns the number of the signal that asked this process to end; None: none did. After one, no host
            is returned.

    Raises:
        RunFailed: Slurm takes no job.
    """
    reported, log = set[str](), EventLog(run_dir / EVENTS_FILE)
    begun_s = first_s = time.monotonic()
    while stop_signal() is None:
        waits = dict[str, RunFailed]()
        for host in hosts:
            try:
                link.running(host)
            except RunFailed as waiting:
                waits[host.name] = waiting
        now_s = time.monotonic()
        there = [host for host in hosts if host.name not in waits]
        first_s = first_s if there else now_s
        if not waits or (there and now_s - first_s >= GATHER_S):
            return there
        if now_s - begun_s > 2 * LOOK_S:
            if all(link.job(host) is None for host in hosts):
                raise next(iter(waits.values()))
            for name, reason in waits.items():
                if name not in reported:
                    log.write("condition_changed", host=name, dies=True, reason=reason.message.rstrip("."))
                reported.add(name)
        time.sleep(0.5)
    return []


if __name__ == "__main__":
    # Inside a job of somebody's own, its variables would be taken for what is asked for here.
    for name in [name for name in os.environ if name.startswith("SLURM_") and not name.startswith("SLURM_CONF")]:
        del os.environ[name]
    sys.exit(conduct(sys.argv, train_on_slurm))
