"""Brings a data set from S3 onto a machine: several objects at a time, once, and with word of how far it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetopt.core.errors import BadInput
from hetopt.core.paths import inside

AT_A_TIME = 8
"""Objects. Each large one comes in parts itself, ten at a time."""

READABLE = "name a folder of the run's own bucket, which is what the machines' role may read"

GoesOn = Callable[[int, int], bool]
"""Is told the bytes that are there, and all; says whether to go on."""


@dataclass
class _Count:
    """Bytes that are here; many threads add to it."""

    bytes: int = 0
    stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        if self.stopped:
            raise InterruptedError
        with self._lock:
            self.bytes += count


def fetched(client: Any, url: str, folder: Path, goes_on: GoesOn, *, look_every_s: float = 1.0) -> bool:
    """Bring everything under ``s3://BUCKET/PREFIX`` into a folder. What is there already in its size is not fetched.

    Args:
        client: of S3.
        url: where from.
        folder: where to.
        goes_on: is asked every so often.
        look_every_s: how often.

    Returns:
        whether all of it is there; not where it was not to go on.

    Raises:
        BadInput: there is nothing, or an object has a name that no file can have.
        Exception: what the client raises.
    """
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix else ""
    found = list(_listed(client, bucket, prefix))
    if not found:
        raise BadInput(f"there is nothing in {url}.", hint=READABLE)
    places = [(inside(folder, key.removeprefix(prefix), what="object", any_text=True), key, n) for key, n in found]
    new = [(path, key, size) for path, key, size in places if not (path.is_file() and path.stat().st_size == size)]
    total, count = sum(size for _, size in found), _Count()
    count.bytes = total - sum(size for _, _, size in new)

    def one(path: Path, key: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(path), Callback=count.add)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        left: set[Future[None]] = {pool.submit(one, path, key) for path, key, _ in new}
        try:
            while left:
                done, left = wait(left, timeout=look_every_s, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
                if not goes_on(count.bytes, total):
                    return False
        finally:
            count.stopped = True
            pool.shutdown(cancel_futures=True)
    return goes_on(total, total)


def _listed(client: Any, bucket: str, prefix: str) -> Iterator[tuple[str, int]]:
    """Objects with their sizes; not those by which consoles show folders."""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for one in page.get("Contents", ()):
            if not one["Key"].endswith("/"):
                yield one["Key"], int(one["Size"])


@dataclass(kw_only=True)
class Progress:
    """Says how far it is, when a tenth more is there, or half a minute has passed."""

    say: Callable[[str], None]
    clock: Callable[[], float] = time.time
    every_s: float = 30.0
    _said_bytes: int = -1
    _said_s: float = 0.0

    def told(self, done: int, total: int) -> None:
        """There are so many bytes now, of so many."""
        now_s = self.clock()
        if done == self._said_bytes:
            return
        first = self._said_bytes < 0
        if first or done == total or done - self._said_bytes >= total / 10 or now_s >= self._said_s + self.every_s:
            self._said_bytes, self._said_s = done, now_s
            self.say(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB of data are here")
