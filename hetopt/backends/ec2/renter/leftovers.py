"""Which of the things that are found belong to runs that are over: what `gc` may remove, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
from hetopt.backends.ec2.renter.ledger import LEDGER_FILE, SETTLES_S, Entry, known_regions, read_ledger, unresolved
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.survey import Found
from hetopt.core.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """What this machine knows of a run.

    Attributes:
        follows: until when its machines may live, by what they were told last.
        over: it was stopped, or its machines were seen to end.
        cleared: everything of it was removed.
        hanging: calls that were begun and never heard of again.
    """

    folder: Path
    region: str | None
    follows: float | None
    over: bool
    cleared: bool
    hanging: tuple[Entry, ...]


def local_runs(folders: Iterable[Path]) -> dict[str, LocalRun]:
    """The runs on EC2 among these folders, by name."""
    runs = {}
    for folder in folders:
        entries = read_ledger(folder / LEDGER_FILE)
        if not entries and not (folder / ORDER_FILE).exists():
            continue
        seen = _seen(folder / SEEN_FILE)
        runs[folder.name] = LocalRun(
            folder=folder,
            region=_region(folder / ORDER_FILE) or next((entry.region for entry in entries), None),
            follows=seen.lease_end_s if seen is not None else None,
            over=seen is None or seen.cleared or not seen.alive,
            cleared=seen is not None and seen.cleared,
            hanging=tuple(unresolved(entries)),
        )
    return runs


def regions_to_look_in(home: Path, runs: Mapping[str, LocalRun], more: Iterable[str]) -> list[str]:
    """Every region that anything was ever rented in from here, and those that were named."""
    known = {run.region for run in runs.values() if run.region is not None}
    return sorted(known | set(known_regions(home)) | set(more))


def why_leave(found: Found, runs: Mapping[str, LocalRun], now_s: float) -> str | None:
    """Why a thing is left alone: its run may be going on. None where it is a leftover."""
    run = runs.get(found.run_id)
    if run is not None:
        if run.over:
            return None
        if run.follows is not None and now_s < run.follows:
            return "its run goes on"
        return None
    if found.expires_at_s is not None and now_s < found.expires_at_s:
        return "a run from elsewhere may be going on"
    return None


def is_known(run: LocalRun | None, now_s: float) -> bool:
    """Whether what is known here tells if a run goes on: somebody elsewhere may follow it since."""
    return run is not None and (run.over or (run.follows is not None and now_s < run.follows))


def settle(runs: Mapping[str, LocalRun], now_s: float, sleep: Callable[[float], None]) -> None:
    """Wait until everything that a call of a dead process may have made can be seen."""
    begun = [entry.time_s for run in runs.values() for entry in run.hanging]
    wait_s = max((moment + SETTLES_S - now_s for moment in begun), default=0.0)
    if 0 < wait_s <= SETTLES_S:
        sleep(wait_s)


def _seen(path: Path) -> ClusterState | None:
    try:
        return ClusterState.load(path) if path.exists() else None
    except BadInput:
        return None  # cut off by whatever ended the process; the tags tell


def _region(path: Path) -> str | None:
    try:
        return Order.load(path).region if path.exists() else None
    except BadInput:
        return None
