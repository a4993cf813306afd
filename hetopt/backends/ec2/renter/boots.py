"""Machines that end before they have booted: who is not rented again for that, and what they said last.

A machine whose boot fails leaves its log in the bucket and shuts down, so nobody hears of it by the run's events. It is
asked for once more, as a package index may have been away; the second failure is no accident, and each costs minutes of
the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from hetopt.backends.ec2.renter.cluster_state import ClusterState, MachineState
from hetopt.backends.ec2.renter.order import Order
from hetopt.core.run_status import read_tail

BOOT_FOLDER = "boot"
"""In the bucket and in the run's folder: the logs of machines that failed to boot."""

TRIES = 2
"""Failures of a host, or of a type that has never booted, after which it is not rented again."""

_LINES = 4
_LINE_CHARACTERS = 200


def failed(machines: Iterable[MachineState], life: int | None = None) -> list[MachineState]:
    """Those that ended by themselves and never said that they live.

    Args:
        machines: of a run.
        life: of the run; absent: any.
    """
    return [machine for machine in machines if machine.failed_to_boot and life in (None, machine.life)]


def hopeless_types(order: Order, seen: ClusterState) -> set[str]:
    """Types that have failed to boot as often as is tried, of which none ever booted, nor may still."""
    counts = Counter(machine.instance_type for machine in failed(seen.machines, order.life))
    good = {machine.instance_type for machine in seen.machines if machine.heartbeat_s is not None or machine.alive}
    return {name for name, times in counts.items() if times >= TRIES and name not in good}


def hopeless_hosts(order: Order, seen: ClusterState, hosts: Collection[str]) -> list[str]:
    """Of these hosts, those that no machine is to be rented for again: their boots fail, or those of their types."""
    counts = Counter(machine.host for machine in failed(seen.machines, order.life))
    types = hopeless_types(order, seen)
    of_host = {host: role.instance_types for role in order.roles for host in role.hosts}
    return [host for host in hosts if counts[host] >= TRIES or types.issuperset(of_host.get(host, ("",)))]


def last_words(run_dir: Path, machines: Sequence[MachineState]) -> str | None:
    """The end of the newest boot log of these machines; where none is theirs by its name, of the newest there is."""
    folder = run_dir / BOOT_FOLDER
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    mine = [path for path in logs if any(_is_of(machine, path.stem) for machine in machines)]
    for path in reversed(mine or logs):
        lines = [line.strip()[:_LINE_CHARACTERS] for line in read_tail(path).splitlines() if line.strip()]
        if lines:
            return " | ".join(lines[-_LINES:])
    return None


def why_failed(run_dir: Path, machines: Sequence[MachineState]) -> str:
    """One sentence on machines that failed to boot, with the end of their log.

    Args:
        run_dir: the run's folder, with the logs that were fetched.
        machines: at least one.
    """
    named = ", ".join(dict.fromkeys(f"{machine.host} ({machine.instance_type})" for machine in machines))
    words = last_words(run_dir, machines)
    reason = next((machine.reason for machine in machines if machine.reason), None)
    told = f"its boot log ends: {words}" if words else f"EC2 says: {reason or 'nothing'}; it left no boot log"
    return f"{named} ended before it had booted; {told}"


def _is_of(machine: MachineState, name: str) -> bool:
    """Whether a log of that name is a machine's: EC2 calls hosts by their address, or by their id."""
    dashed = machine.address.replace(".", "-")
    return machine.id in name or (bool(dashed) and f"ip-{dashed}" == name.partition(".")[0])
