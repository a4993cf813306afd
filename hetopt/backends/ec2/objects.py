"""The objects in a run's bucket as a machine reads and writes them, and the reading of data sets."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.backends.host.protocol import GoesOn, Objects, Versioned
from hetopt.core.errors import BadInput
from hetopt.core.paths import inside

LARGEST_READ_BYTES = 64 * 2**20
"""Largest object that is read as a whole: messages, and what a log gains in seconds. Files are fetched in parts."""

AT_A_TIME = 8
"""Number of objects that are downloaded at a time. Each large one comes in parts itself, ten at a time."""

READABLE = "name a folder of the run's own bucket, which is what the machines' role may read"

PART_BYTES = 32 * 1024 * 1024
"""Size above which files travel in parts of this size, four at a time: one PUT carries 5 GB at most, and fails as a
whole."""


@dataclass(frozen=True, kw_only=True)
class S3Objects(Objects):
    """The objects of one run in an S3 bucket; a failed request returns None or False, and the caller tries again.

    Attributes:
        client: boto3's client of S3.
        bucket: name of the bucket.
        prefix: prefix of the run's objects, without a slash at its end.
        account_id: number of the account that must own the bucket.
    """

    client: Any
    bucket: str
    prefix: str
    account_id: str

    @classmethod
    def connect(cls, *, region: str, bucket: str, prefix: str, account_id: str) -> S3Objects:
        """Return the objects under ``prefix`` in a bucket, with the credentials of the machine's role; call nothing."""
        retries = {"mode": "standard", "total_max_attempts": 4}
        client = _client("s3", region, retries=retries, connect_timeout=5, read_timeout=30)
        return cls(client=client, bucket=bucket, prefix=prefix, account_id=account_id)

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{name}", "ExpectedBucketOwner": self.account_id}

    def _answer(self, operation: str, name: str, **parameters: Any) -> Mapping[str, Any] | None:
        """Return S3's answer to ``operation`` on the object ``name``; None: S3 refuses, or cannot be reached."""
        try:
            answer: Mapping[str, Any] = getattr(self.client, operation)(**self._at(name), **parameters)
        except failures():
            return None
        return answer

    def versioned(self, name: str) -> Versioned | None:
        """Return the bytes under a name with their ETag; None: absent, over 64 MiB, or S3 does not answer."""
        answer = self._answer("get_object", name)
        if answer is None or answer["ContentLength"] > LARGEST_READ_BYTES:
            return None  # nothing that is read as a whole
        try:
            return Versioned(data=answer["Body"].read(), version=str(answer["ETag"]))
        except failures():
            return None

    def put(self, name: str, data: bytes) -> bool:
        """Write bytes under a name; return whether that succeeded.

        Args:
            name: name of the object, below the prefix.
            data: new contents.
        """
        return self._answer("put_object", name, Body=data) is not None

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Write bytes if the object's ETag is still ``version``; return whether they were written.

        Args:
            name: name of the object, below the prefix.
            data: new contents.
            version: ETag that the object must have; None: it must be absent.
        """
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        return self._answer("put_object", name, Body=data, **condition) is not None

    def _carry(self, operation: str, *places: str) -> bool:
        """Transfer a file by a client's method, in parts; return whether that went well, without the reason.

        Args:
            operation: name of the method, such as ``upload_file``.
            places: arguments of the method: where from, and where to.
        """
        from boto3.s3.transfer import TransferConfig

        in_parts = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)
        owner = {"ExpectedBucketOwner": self.account_id}
        try:
            getattr(self.client, operation)(*places, ExtraArgs=owner, Config=in_parts)
        except failures():
            return False
        return True

    def send(self, name: str, path: Path) -> bool:
        """Upload a file under a name, above 32 MiB in parts, whole or not at all; return whether that succeeded.

        Args:
            name: name of the object, below the prefix.
            path: path of the file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return self._carry("upload_file", str(path), self.bucket, f"{self.prefix}/{name}")

    def size_bytes(self, name: str) -> int | None:
        """Return the size of an object in bytes; None: there is none, or S3 cannot be reached."""
        answer = self._answer("head_object", name)
        return None if answer is None else int(answer["ContentLength"])

    def fetch(self, name: str, path: Path) -> bool:
        """Download an object into the file ``path``, whole or not at all; return whether that succeeded."""
        return self._carry("download_file", self.bucket, f"{self.prefix}/{name}", str(path))

    def delete(self, name: str) -> None:
        """Try to delete an object; report no failure, as the bucket's own rule deletes it later."""
        self._answer("delete_object", name)

    def download(self, url: str, folder: Path, goes_on: GoesOn) -> bool:
        """Download the objects under ``s3://BUCKET/PREFIX`` while ``goes_on``; return whether all are in the folder.

        Arguments are those of `fetched`.

        Raises:
            BadInput: there is no object, an object has a name that no file can have, or the machine's role may not read
                one.
        """
        try:
            return fetched(self.client, url, folder, goes_on)
        except failures() as error:
            raise BadInput(f"{url} cannot be read by the machines: {error}.", hint=READABLE) from None

    def names(self, prefix: str) -> Sequence[str] | None:
        """Return the sorted names of all objects with a prefix; None if S3 refuses or does not answer."""
        place = {"Bucket": self.bucket, "Prefix": f"{self.prefix}/{prefix}", "ExpectedBucketOwner": self.account_id}
        try:
            return sorted(entry["Key"].removeprefix(f"{self.prefix}/") for entry in _listed(self.client, **place))
        except failures():
            return None


def _client(service: str, region: str, **config: Any) -> Any:
    """Return a boto3 client with the machine's own credentials; nothing is called."""
    import boto3
    from botocore.config import Config

    return boto3.client(service, region_name=region, config=Config(**config))


def failures() -> tuple[type[Exception], ...]:
    """Return the exception types of failed boto3 calls; a function, as boto3 is imported only when it is needed."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return Boto3Error, ClientError, BotoCoreError


def fetched(client: Any, url: str, folder: Path, goes_on: GoesOn, *, look_every_s: float = 1.0) -> bool:
    """Download the objects under ``s3://BUCKET/PREFIX`` that a folder lacks; return whether all are there.

    A file that is there already in its size is not fetched.

    Args:
        client: boto3's client of S3.
        url: address of the objects.
        folder: folder to download into; objects keep their paths below the prefix.
        goes_on: called with the bytes that are there and all bytes; False ends the download.
        look_every_s: most seconds between two such calls.

    Raises:
        BadInput: there is no object, or an object has a name that no file can have.
        Exception: a call of the client failed, see `failures`.
    """
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix else ""
    # Consoles show folders by objects whose names end so.
    listed = [entry for entry in _listed(client, Bucket=bucket, Prefix=prefix) if not entry["Key"].endswith("/")]
    objects = [(entry["Key"], int(entry["Size"])) for entry in listed]
    if not objects:
        raise BadInput(f"there is nothing in {url}.", hint=READABLE)
    places = [(inside(folder, key.removeprefix(prefix), what="object", any_text=True), key, n) for key, n in objects]
    new = [(path, key, size) for path, key, size in places if not (path.is_file() and path.stat().st_size == size)]
    total, stopped = sum(size for _, size in objects), threading.Event()
    here = [total - sum(size for _, _, size in new)]  # what many threads append to: bytes as they arrive

    def count(arrived: int) -> None:
        """Note bytes that have arrived; end their transfer, by an InterruptedError, once the download was stopped."""
        if stopped.is_set():
            raise InterruptedError
        here.append(arrived)

    def download(path: Path, key: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(path), Callback=count)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        left: set[Future[None]] = {pool.submit(download, path, key) for path, key, _ in new}
        try:
            while left:
                done, left = wait(left, timeout=look_every_s, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
                if not goes_on(sum(here), total):
                    return False
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
    return goes_on(total, total)


def _listed(client: Any, **place: str) -> list[Mapping[str, Any]]:
    listing = client.get_paginator("list_objects_v2").paginate(**place).build_full_result()
    return list(listing.get("Contents", ()))
