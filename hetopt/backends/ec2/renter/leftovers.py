"""Which of the things that are found belong to runs that are over: what `gc` may remove, and what it leaves alone.

A run that was launched here is known by its folder. Of a run from elsewhere, its own bucket tells whose it is and
whether it goes on: tags are written once, and a lease is longer with each look of whoever follows the run. So the lease
and the machines' heartbeats decide, and tags only where there is no lease.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.protocol import Lease
from hetopt.backends.ec2.renter.account import Identity, default_bucket
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
from hetopt.backends.ec2.renter.errors import if_there
from hetopt.backends.ec2.renter.ledger import (
    LEDGER_FILE,
    SETTLES_S,
    Entry,
    known_regions,
    last_made_s,
    read_ledger,
    unresolved,
)
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.removal import Found
from hetopt.backends.ec2.renter.request import Edge, read
from hetopt.core.bucket_traffic import HEARTBEAT_S, LEASE_OBJECT
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.paths import BUCKET_PATTERN, is_name


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """What this machine knows of a run.

    Attributes:
        follows: until when its machines may live, by what they were told last.
        over: it was stopped, or its machines were seen to end.
        cleared: everything of it was removed.
        hanging: calls that were begun and never heard of again.
        made_s: when something was last made that is not known to be removed; None: nothing is.
    """

    folder: Path
    region: str | None
    follows: float | None
    over: bool
    cleared: bool
    hanging: tuple[Entry, ...]
    made_s: float | None


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
            made_s=last_made_s(entries),
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
    """Wait until lists show everything that a dead process has made, or may have. One whose clock was ahead of this
    counts as of now."""
    begun = [entry.time_s for run in runs.values() for entry in run.hanging]
    begun += [run.made_s for run in runs.values() if run.over and run.made_s is not None]
    wait_s = max((moment + SETTLES_S - now_s for moment in begun), default=0.0)
    if wait_s > 0:
        sleep(min(wait_s, SETTLES_S))


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


SILENT_S = 5 * HEARTBEAT_S
"""Machines that have not said for so long that they live are taken to be gone."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
_ABSENT = frozenset({*facts.NO_OBJECT.value, facts.NO_BUCKET.value})


def is_of(found: Found, who: Identity) -> bool:
    """Whether a thing belongs to this caller, in whichever session it was made."""
    return found.owner in (who.owner, who.user_id) or (found.owner or "").partition(":")[0] == who.owner


def owner_named(things: Iterable[Found]) -> str:
    """Whose they are, for people."""
    named = (name for one in things for name in (one.launched_by, one.owner) if name)
    return next(named, "nobody whose name is on it")


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Where the leases of an account's runs are.

    Attributes:
        edge: of the runs' region.
        region: where its machines are.
        account_id: whose the buckets must be.
    """

    edge: Edge
    region: str
    account_id: str

    def why_leave(self, things: Sequence[Found], now_s: float) -> str | None:
        """Why a run's things are left alone; None where the run is over.

        Args:
            things: of one run.
            now_s: seconds since the epoch.
        """
        run_id = things[0].run_id
        bucket = next((one.bucket for one in things if one.bucket), default_bucket(self.account_id, self.region))
        lease: Lease | None = None
        if _RUN.fullmatch(run_id) and is_name(BUCKET_PATTERN, bucket):
            try:
                lease, beat_s = self._lease(bucket, run_id), self._beat_s(bucket, run_id)
            except CloudRefused as refused:
                return f"whether its run goes on cannot be read: {refused.message.rstrip('.')}"
            if beat_s is not None and now_s < beat_s + SILENT_S:
                return f"its machines said {max(0.0, now_s - beat_s):.0f} s ago that they live"
        if lease is not None:
            goes_on = not lease.wishes_end and now_s < lease.end_s
            return f"its run goes on, for up to {(lease.end_s - now_s) / 3600:.1f} h" if goes_on else None
        expires_s = max((one.expires_at_s for one in things if one.expires_at_s is not None), default=0.0)
        return "a run from elsewhere may be going on" if now_s < expires_s else None

    def _lease(self, bucket: str, run_id: str) -> Lease | None:
        parameters = {"Bucket": bucket, "Key": f"runs/{run_id}/{LEASE_OBJECT}", "ExpectedBucketOwner": self.account_id}
        request = read("s3", "get_object", "until when the run's machines may live", **parameters)
        answer = if_there(self.edge, request, _ABSENT)
        return None if answer is None else Lease.of_json(answer["Body"])

    def _beat_s(self, bucket: str, run_id: str) -> float | None:
        parameters = {"Bucket": bucket, "Prefix": f"runs/{run_id}/state/", "ExpectedBucketOwner": self.account_id}
        request = read("s3", "list_objects_v2", "when the run's machines last said that they live", **parameters)
        answer = if_there(self.edge, request, _ABSENT)
        beats = [one["LastModified"].timestamp() for one in (answer or {}).get("Contents", ())]
        return max(beats, default=None)
