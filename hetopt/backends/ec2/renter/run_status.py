"""How a rented run is, by what is in its folder: the events that its machines wrote, and what was seen of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetopt.backends.ec2.renter.boots import failed, why_failed
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
from hetopt.backends.ec2.renter.order import Order
from hetopt.core.errors import BadInput
from hetopt.core.events.records import LogEvent, ProbeEvent, TrainingFinished
from hetopt.core.run_status import RunState, RunStatus, failure_reason, judge, last_events, last_log_line

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
    return RunStatus(state=status.state, reason=status.reason or seen.stop_reason)


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
