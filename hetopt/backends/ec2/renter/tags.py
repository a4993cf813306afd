"""The tags by which everything of a run is found again, in every region, by whoever looks."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

RUN_ID = "hetopt:run-id"
OWNER = "hetopt:owner"
LAUNCHED_BY = "hetopt:launched-by"
BUCKET = "hetopt:bucket"
CREATED = "hetopt:created"
EXPIRES_AT = "hetopt:expires-at"
VERSION = "hetopt:version"

AwsTags = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class RunTags:
    """What everything of a run carries. Times in seconds since the epoch; written as ISO 8601 in UTC.

    Attributes:
        owner: as policies compare it.
        launched_by: the same for people.
        bucket: where the run's lease is, by which others see that it goes on.
    """

    run_id: str
    owner: str
    launched_by: str
    bucket: str
    created_s: float
    expires_at_s: float
    version: str

    def by_key(self) -> dict[str, str]:
        """The tags that are set, by their keys."""
        values = {
            RUN_ID: self.run_id,
            OWNER: self.owner,
            LAUNCHED_BY: self.launched_by,
            BUCKET: self.bucket,
            CREATED: iso(self.created_s),
            EXPIRES_AT: iso(self.expires_at_s),
            VERSION: self.version,
        }
        return {key: value for key, value in values.items() if value}

    def to_aws(self) -> AwsTags:
        """The tags as AWS takes them: a list of ``Key`` and ``Value``."""
        return [{"Key": key, "Value": value} for key, value in self.by_key().items()]

    def specification(self, *kinds: str) -> list[dict[str, object]]:
        """TagSpecifications of a call that makes things of these kinds."""
        return [{"ResourceType": kind, "Tags": self.to_aws()} for kind in kinds]


def of_aws(tags: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Tags as AWS lists them (``Key``, ``Value``), as a mapping from key to value."""
    return {tag["Key"]: tag["Value"] for tag in tags}


def filters(run_id: str | None) -> list[dict[str, object]]:
    """What selects the things of one run, or of any."""
    if run_id is None:
        return [{"Name": "tag-key", "Values": [RUN_ID]}]
    return [{"Name": f"tag:{RUN_ID}", "Values": [run_id]}]


def iso(seconds: float) -> str:
    """A moment as it stands in a tag."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def from_iso(text: str) -> float | None:
    """Seconds since the epoch; None where somebody wrote something else."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
