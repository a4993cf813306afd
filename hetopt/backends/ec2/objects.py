"""Objects in the run's bucket, as a machine reads and writes them; the only place of the trainer that knows boto3."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetopt.backends.ec2.data import READABLE, GoesOn, fetched
from hetopt.core.errors import BadInput

LARGEST_READ_BYTES = 64 * 2**20
"""Of what is read as a whole: messages, and what a log gains in seconds. Files are fetched in parts."""

PART_BYTES = 32 * 1024 * 1024
"""Files that are larger travel in parts, four at a time: one PUT carries 5 GB at most, and fails as a whole."""


class Objects(Protocol):
    """Named bytes that all machines of a run see."""

    def get(self, name: str) -> bytes | None:
        """What is under a name; None where there is nothing, or where nobody can be reached."""
        ...

    def put(self, name: str, data: bytes) -> bool:
        """Write; says whether that went well."""
        ...

    def send(self, name: str, path: Path) -> bool:
        """Write a file, in parts where it is large; says whether that went well.

        Raises:
            FileNotFoundError: there is none.
        """
        ...

    def fetch(self, name: str, path: Path) -> bool:
        """Read into a file; says whether that went well. The file is whole, or not there."""
        ...

    def versioned(self, name: str) -> Versioned | None:
        """What is under a name, with its version; None where there is nothing, or where nobody can be reached."""
        ...

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Write where that version still is (None: where nothing is); says whether that went well, and was so."""
        ...

    def names(self, prefix: str) -> Sequence[str]:
        """All names that begin so, sorted."""
        ...

    def delete(self, name: str) -> None:
        """Remove, if that goes well."""
        ...

    def download(self, url: str, folder: Path, goes_on: GoesOn) -> bool:
        """Fetch every object below a prefix into a folder; whether all of it is there."""
        ...


@dataclass(frozen=True, kw_only=True)
class Versioned:
    """What was under a name, and which version that was."""

    data: bytes
    version: str


@dataclass(frozen=True, kw_only=True)
class S3Objects:
    """The objects of one run. What fails is tried again later by whoever asked: a machine's network comes and goes.

    Attributes:
        prefix: of the run, without a slash at its end.
    """

    client: Any
    bucket: str
    prefix: str
    account_id: str

    @classmethod
    def connect(cls, *, region: str, bucket: str, prefix: str, account_id: str) -> S3Objects:
        """With the credentials of the machine's role."""
        import boto3
        from botocore.config import Config

        config = Config(retries={"mode": "standard", "total_max_attempts": 4}, connect_timeout=5, read_timeout=30)
        client = boto3.client("s3", region_name=region, config=config)
        return cls(client=client, bucket=bucket, prefix=prefix, account_id=account_id)

    def get(self, name: str) -> bytes | None:
        """The bytes of one object of the bucket; None where there is none."""
        found = self.versioned(name)
        return None if found is None else found.data

    def versioned(self, name: str) -> Versioned | None:
        """The same, with its tag."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = self.client.get_object(
                Bucket=self.bucket, Key=f"{self.prefix}/{name}", ExpectedBucketOwner=self.account_id
            )
            if answer["ContentLength"] > LARGEST_READ_BYTES:
                return None  # nothing that is read as a whole
            return Versioned(data=answer["Body"].read(), version=str(answer["ETag"]))
        except (ClientError, BotoCoreError):
            return None

    def put(self, name: str, data: bytes) -> bool:
        """Write one object of the bucket, whatever it held before. Returns whether that worked."""
        return self._put(name, data, {})

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Write one object, if nobody else has meanwhile."""
        return self._put(name, data, {"IfNoneMatch": "*"} if version is None else {"IfMatch": version})

    def _put(self, name: str, data: bytes, condition: Mapping[str, str]) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.put_object(
                Bucket=self.bucket,
                Key=f"{self.prefix}/{name}",
                Body=data,
                ExpectedBucketOwner=self.account_id,
                ServerSideEncryption="AES256",
                **condition,
            )
        except (ClientError, BotoCoreError):
            return False
        return True

    def send(self, name: str, path: Path) -> bool:
        """Write a file; no object is there before all of its parts are."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.upload_file(
                str(path),
                self.bucket,
                f"{self.prefix}/{name}",
                ExtraArgs={"ExpectedBucketOwner": self.account_id, "ServerSideEncryption": "AES256"},
                Config=_in_parts(),
            )
        except (Boto3Error, ClientError, BotoCoreError):
            return False
        return True

    def size_bytes(self, name: str) -> int | None:
        """How large an object is; None where there is none, or where nobody can be reached."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = self.client.head_object(
                Bucket=self.bucket, Key=f"{self.prefix}/{name}", ExpectedBucketOwner=self.account_id
            )
        except (ClientError, BotoCoreError):
            return None
        return int(answer["ContentLength"])

    def fetch(self, name: str, path: Path) -> bool:
        """Read into a file, which has another name until it is whole."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.download_file(
                self.bucket,
                f"{self.prefix}/{name}",
                str(path),
                ExtraArgs={"ExpectedBucketOwner": self.account_id},
                Config=_in_parts(),
            )
        except (Boto3Error, ClientError, BotoCoreError):
            return False
        return True

    def delete(self, name: str) -> None:
        """Remove one object; what stays goes with the bucket's own rule."""
        from botocore.exceptions import BotoCoreError, ClientError

        with contextlib.suppress(ClientError, BotoCoreError):
            self.client.delete_object(
                Bucket=self.bucket, Key=f"{self.prefix}/{name}", ExpectedBucketOwner=self.account_id
            )

    def download(self, url: str, folder: Path, goes_on: GoesOn) -> bool:
        """Fetch everything under ``s3://BUCKET/PREFIX`` into a folder; see `fetched`.

        Raises:
            BadInput: there is nothing, an object has a name that no file can have, or the machine's role may not read
                it.
        """
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return fetched(self.client, url, folder, goes_on)
        except (Boto3Error, ClientError, BotoCoreError) as error:
            raise BadInput(f"{url} cannot be read by the machines: {error}.", hint=READABLE) from None

    def names(self, prefix: str) -> Sequence[str]:
        """All names that begin so."""
        from botocore.exceptions import BotoCoreError, ClientError

        found: list[str] = []
        try:
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=f"{self.prefix}/{prefix}", ExpectedBucketOwner=self.account_id
            )
            for page in pages:
                found += [one["Key"].removeprefix(f"{self.prefix}/") for one in page.get("Contents", ())]
        except (ClientError, BotoCoreError):
            return []
        return sorted(found)


def _in_parts() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)
