"""Runs that this machine did not launch: whose they are, and whether they go on, by what their own bucket says.

Tags are written once, and a lease is longer with each look of whoever follows the run. So the lease and the machines'
heartbeats tell whether a run goes on, and tags only where there is no lease.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetopt.backends.ec2.protocol import Lease
from hetopt.backends.ec2.renter.account import Identity, default_bucket
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.request import Answer, Edge, Request
from hetopt.backends.ec2.renter.survey import Found
from hetopt.core.bucket_traffic import HEARTBEAT_S, LEASE_OBJECT
from hetopt.core.errors import CloudRefused

SILENT_S = 5 * HEARTBEAT_S
"""Machines that have not said for so long that they live are taken to be gone."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ABSENT = frozenset({"NoSuchKey", "NoSuchBucket", "404"})


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
        if _RUN.fullmatch(run_id) and _BUCKET.fullmatch(bucket):
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
        answer = self._ask("get_object", parameters, "until when the run's machines may live")
        return None if answer is None else Lease.of_json(answer["Body"])

    def _beat_s(self, bucket: str, run_id: str) -> float | None:
        parameters = {"Bucket": bucket, "Prefix": f"runs/{run_id}/state/", "ExpectedBucketOwner": self.account_id}
        answer = self._ask("list_objects_v2", parameters, "when the run's machines last said that they live")
        beats = [one["LastModified"].timestamp() for one in (answer or {}).get("Contents", ())]
        return max(beats, default=None)

    def _ask(self, operation: str, parameters: dict[str, str], purpose: str) -> Answer | None:
        try:
            return self.edge(
                Request(step=operation, service="s3", operation=operation, parameters=parameters, purpose=purpose)
            )
        except ApiRefused as refused:
            if refused.code in _ABSENT:
                return None
            raise
