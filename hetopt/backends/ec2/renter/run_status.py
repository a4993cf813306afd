"""How a rented run is, by what is in its folder: the events that its machines wrote, and what was seen of them.

A machine whose boot fails leaves its log in the bucket and shuts down, so nobody hears of it by the run's events. It is
asked for again, as is one that has booted and ends before a step was done, until it is given up
(`hetopt.core.placings`): each try costs minutes of the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState, MachineState
from hetopt.backends.ec2.renter.order import Order
from hetopt.core.errors import BadInput
from hetopt.core.events.records import LogEvent, ProbeEvent, TrainingFinished
from hetopt.core.placings import is_given_up
from hetopt.core.run_status import RunState, RunStatus, failure_reason, judge, last_events, last_log_line, read_tail

BOOT_FOLDER = "boot"
"""In the bucket and in the run's folder: the logs of machines that failed to boot."""

_LINES = 4
_LINE_CHARACTERS = 200


def failed(machines: Iterable[MachineState], life: int | None = None) -> list[MachineState]:
    """Those that ended by themselves before a step was done with them.

    Args:
        machines: of a run.
        life: of the run; absent: any.
    """
    return [machine for machine in machines if machine.has_failed and life in (None, machine.life)]


def hopeless_types(order: Order, seen: ClusterState) -> set[str]:
    """Types that have failed as often as is tried, of which no machine ever booted, nor may still."""
    counts = Counter(machine.instance_type for machine in failed(seen.machines, order.life))
    good = {machine.instance_type for machine in seen.machines if machine.heartbeat_s is not None or machine.alive}
    return {name for name, times in counts.items() if is_given_up(times) and name not in good}


def hopeless_hosts(order: Order, seen: ClusterState, hosts: Collection[str]) -> list[str]:
    """Of these hosts, those that no machine is to be rented for again: theirs fail, or those of their types."""
    counts = Counter(machine.host for machine in failed(seen.machines, order.life))
    types = hopeless_types(order, seen)
    of_host = {host: role.instance_types for role in order.roles for host in role.hosts}
    return [host for host in hosts if is_given_up(counts[host]) or types.issuperset(of_host.get(host, ("",)))]


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
    """One sentence on machines that failed, with the end of their log.

    Args:
        run_dir: the run's folder, with the logs that were fetched.
        machines: at least one.
    """
    named = ", ".join(dict.fromkeys(f"{machine.host} ({machine.instance_type})" for machine in machines))
    reason = next((machine.reason for machine in machines if machine.reason), None)
    if all(machine.heartbeat_s is not None for machine in machines):
        words, said = last_log_line(run_dir, machines[-1].host), f"EC2 says: {reason or 'nothing'}"
        return f"{named} ended before a step was done; {words or said}"
    words = last_words(run_dir, machines)
    told = f"its boot log ends: {words}" if words else f"EC2 says: {reason or 'nothing'}; it left no boot log"
    return f"{named} ended before it had booted; {told}"


def _is_of(machine: MachineState, name: str) -> bool:
    """Whether a log of that name is a machine's: EC2 calls hosts by their address, or by their id."""
    dashed = machine.address.replace(".", "-")
    return machine.id in name or (bool(dashed) and f"ip-{dashed}" == name.partition(".")[0])


_LOSSES_SHOW_S = 180.0


def judged(run_dir: Path, seen: ClusterState) -> RunStatus:
    """How the run is, by what is in its folder."""
    if not seen.machines:
        return RunStatus(state=RunState.FAILED, reason="its machines were never granted")
    status = judge(
        last_events(run_dir),
        alive=bool(seen.alive),
        stop_wished=seen.stop_wished_s is not None,
        last_line=None if seen.alive else _last_words(run_dir, seen),
    )
    return replace(status, reason=status.reason or seen.stop_reason)


def known(run_dir: Path) -> RunStatus:
    """How the run is by what its folder says; nobody is asked."""
    path = run_dir / SEEN_FILE
    return judged(run_dir, ClusterState.load(path) if path.exists() else ClusterState(time_s=0.0))


def is_cleared(run_dir: Path) -> bool:
    """Whether everything of the run was given back. Where what was seen last cannot be read, nobody knows that."""
    path = run_dir / SEEN_FILE
    try:
        return path.exists() and ClusterState.load(path).cleared
    except BadInput:
        return False


def has_failed(order: Order, events: Sequence[LogEvent], now_s: float) -> bool:
    """Whether the run failed by itself: no machine went with it, nor in the minutes that a notice gives."""
    since_s = events[-1].time_s if events else now_s
    # A failure before the run was resumed is what it was resumed from.
    in_this_life = since_s >= order.created_s
    return in_this_life and failure_reason(events) is not None and now_s - since_s > _LOSSES_SHOW_S


def is_finished(events: Sequence[LogEvent]) -> bool:
    """Whether machines end because there is nothing left to do."""
    match events[-1] if events else None:
        case TrainingFinished(reason=reason):
            return reason != "stopped"
        case ProbeEvent(event="probe_finished"):
            return True
    return False


def stopped_s(events: Sequence[LogEvent]) -> float | None:
    """When the run last stopped with a checkpoint; None while it goes on."""
    last = events[-1] if events else None
    return last.time_s if isinstance(last, TrainingFinished) else None


def _last_words(run_dir: Path, seen: ClusterState) -> str | None:
    """Why a run ended that wrote no event about it."""
    taken = [machine for machine in seen.machines if machine.ending == "interrupted"]
    if taken:
        return f"EC2 took {', '.join(machine.host for machine in taken)} back"
    told = last_log_line(run_dir)
    if told is not None:
        return told
    unbooted = failed(seen.machines)
    if unbooted:
        return why_failed(run_dir, unbooted)
    reasons = [machine.reason for machine in seen.machines if machine.reason]
    return reasons[0] if reasons else None
