"""Runs on machines that must be asked for first: a request for each, which may wait or be refused.

A `Source` asks for machines, tells their addresses, runs commands on them, and gives them back; `AskedBackend` and
`train_asked` do all else.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hetopt.backends.backend import RunHandle
from hetopt.backends.on_this_machine import Led, OnHosts, SshBackend, ready
from hetopt.backends.options import Machines
from hetopt.backends.processes import Program, conduct
from hetopt.backends.ssh.checking import INVENTORY_FILE, Inventory
from hetopt.backends.ssh.conductor import train
from hetopt.backends.ssh.link import Link
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.hosts import Host
from hetopt.core.interruption import StopSignal
from hetopt.core.option import options_of
from hetopt.core.paths import RUN_PATTERN, is_name, shown
from hetopt.core.run_spec import RunSpec
from hetopt.optimizer.plan import Plan

ORDER_FILE = "asked.json"
HOLDER = """# Holds this machine for a run of hetopt. It ends three minutes after the last process of the run here.
left=40
while [ $left -gt 0 ]; do
    sleep 15
    left=$((left - 1))
    grep -qsa '/[r]uns/{run}/{host}' /proc/[0-9]*/cmdline && left=12
done
exit 0
"""
"""The script of a machine's own job. The first process of the run must be there within 40 quarters of a minute."""
GATHER_S = 30.0
"""Seconds that a run waits for other machines once the first is there; a host whose machine comes later joins."""
ASK_AGAIN_S = 30.0
"""Seconds between two requests for a machine in the place of one that has ended or was refused."""
LOOK_S = 5.0
"""Seconds for which what was seen of a machine counts."""
NOTICE_S = 90.0
"""Seconds before a machine's end, by time limit or budget, at which it is left: time for a look and a checkpoint."""


def holding_script(run: str, host: str) -> str:
    """Return the shell script by which a job holds its machine while processes of the run are there.

    Args:
        run: name of the run.
        host: name of the machine in the run.

    Raises:
        BadInput: the run's name has other characters than letters, digits, ``_`` and ``-``, which a shell would read.
    """
    if not is_name(RUN_PATTERN, run):
        raise BadInput(f"a run has a name of letters, digits, _ and -, not {shown(run)}.", hint="rename it")
    return HOLDER.format(run=run, host=host)


class Source(Link, ABC):
    """The means to ask for the machines of a run, to run commands on them, and to give them back."""

    @abstractmethod
    def bring(self, host: Host) -> object:
        """Ask for a host's machine if that was not done; raise unless it is there. Return at once.

        Raises:
            RunFailed: the machine is waited for, or cannot be had.
        """

    @abstractmethod
    def is_awaited(self, host: Host) -> bool:
        """Return whether a host's machine was asked for, and not refused."""

    @abstractmethod
    def give_back(self) -> None:
        """Give back all machines of the run, and withdraw what is still asked for. Idempotent.

        Raises:
            HetoptError: some may be left.
        """


@dataclass(frozen=True, kw_only=True)
class AskedBackend(SshBackend, ABC):
    """The base of backends whose machines are asked for; options that may change in a run are kept in its folder.

    Attributes:
        OPTIONS: class of the launch options.
    """

    OPTIONS: ClassVar[type[Machines]]

    asked = Led.asked
    """The launch as it was prepared, once it was checked: machines are asked for by the run's process."""

    @abstractmethod
    def source(self, run_dir: Path, options: Any) -> Source:
        """Return the source of a run's machines; ask for none.

        Args:
            run_dir: the run's folder, whose name is the run's.
            options: options of the launch.
        """

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """Return the program that leads a run on these machines, which is this class's module; no argument is used."""
        return replace(super().program(spec, run_dir), module=type(self).__module__)

    def prepare(self, made: Plan, wanted: Plan, options: Any) -> OnHosts:
        """Map the plan ``wanted`` onto the machines of the options and predict it; none is asked for yet.

        Args:
            made: the plan as it was made, for the record.
            wanted: the plan as it is to be run.
            options: launch options.

        Raises:
            BadInput: as of `SshBackend.prepare`.
        """
        return self._kept(super().prepare(made, wanted, options), {}, options)

    def prepare_resumed(self, folder: Path, options: Any) -> OnHosts:
        """Prepare the ended run in ``folder`` to go on, on machines asked for anew; options given replace earlier ones.

        Raises:
            BadInput: the run is not over, ran on another backend, or its inventory cannot be read.
        """
        before = json.loads((folder / ORDER_FILE).read_text(encoding="utf-8"))
        return self._kept(super().prepare_resumed(folder, options), before, options)

    def _kept(self, prepared: OnHosts, before: Mapping[str, object], options: Any) -> OnHosts:
        """Return a prepared run with a file of its options that may change: ``before``, and those given over them."""
        fields = (name for name, option in options_of(self.OPTIONS).items() if not option.is_fixed)
        given = {name: value for name in fields if (value := getattr(options, name)) is not None}
        order = json.dumps({**before, **given}).encode()
        return replace(prepared, files={**prepared.answered(prepared.inventory).files, ORDER_FILE: order})

    def stop(self, handle: RunHandle) -> None:
        """End a run as `ProcessLauncher.stop` does, then give its machines back.

        Raises:
            HetoptError: the run's process is of another user or machine, or some machines may be left.
        """
        super().stop(handle)
        self.source_of(handle.run_dir.resolve()).give_back()

    def source_of(self, run_dir: Path) -> Source:
        """Return the source of the machines of the run in a folder, by its options there.

        Raises:
            BadInput: an option cannot be used.
        """
        return self.source(run_dir, self.OPTIONS(**json.loads((run_dir / ORDER_FILE).read_text(encoding="utf-8"))))

    def lead(self, argv: Sequence[str]) -> int:
        """Lead a run as its process, with the command line ``argv``, until it is over; return hetopt's exit code."""
        return conduct(argv, partial(train_asked, self))


def train_asked(backend: AskedBackend, run_dir: Path, stop_signal: StopSignal) -> int:
    """Ask for the machines of the run in a folder, lead the run until it is over, give them back; return the exit code.

    Args:
        backend: backend of the run.
        run_dir: the run's folder.
        stop_signal: returns the number of the signal that asked this process to end; None: none did.

    Raises:
        HetoptError: no machine can be had, none can take part, or the run cannot go on.
    """
    source, path = backend.source_of(run_dir), run_dir / INVENTORY_FILE
    inventory = Inventory.load(path)
    try:
        hosts = gather(inventory.hosts, source, run_dir, stop_signal)
        if not hosts:
            return 128 + (stop_signal() or 0)
        known = {host.name: source.address(host) or inventory.addresses.get(host.name) for host in hosts}
        there = (host.model_copy(update={"private": host.private or known[host.name]}) for host in hosts)
        found = ready(inventory.model_copy(update={"hosts": tuple(there)}), source)
        inventory.model_copy(update={"left_out": found.left_out, "addresses": found.addresses}).save(path)
        return train(run_dir, stop_signal, source)
    finally:
        with suppress(HetoptError):  # where nobody answers, they end by themselves
            source.give_back()


def gather(hosts: Sequence[Host], source: Source, run_dir: Path, stop_signal: StopSignal) -> list[Host]:
    """Ask for all hosts' machines, and wait up to 30 s after the first is there; return the hosts whose machines are.

    Those that still wait are noted in the event log, and take part once they are there.

    Args:
        hosts: hosts of the run.
        source: source of their machines.
        run_dir: the run's folder.
        stop_signal: returns the number of the signal that asked this process to end; None: none did. After one, no host
            is returned.

    Raises:
        RunFailed: no machine can be had.
    """
    told, log = set[str](), EventLog(run_dir / EVENTS_FILE)
    begun_s = first_s = time.monotonic()
    while stop_signal() is None:
        waits = dict[str, RunFailed]()
        for host in hosts:
            try:
                source.bring(host)
            except RunFailed as waiting:
                waits[host.name] = waiting
        now_s = time.monotonic()
        there = [host for host in hosts if host.name not in waits]
        first_s = first_s if there else now_s
        if not waits or (there and now_s - first_s >= GATHER_S):
            return there
        if now_s - begun_s > 2 * LOOK_S:
            if not any(map(source.is_awaited, hosts)):
                raise next(iter(waits.values()))
            for name, reason in waits.items():
                if name not in told:
                    log.write("condition_changed", host=name, dies=True, reason=reason.message.rstrip("."))
                told.add(name)
        time.sleep(0.5)
    return []
