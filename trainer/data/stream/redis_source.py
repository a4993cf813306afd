"""Samples out of Redis Streams, each trained on exactly once as far as the model of a checkpoint can tell.

A consumer group hands every entry to this worker once and keeps it as pending until it is acknowledged. It is
acknowledged when two checkpoints hold what it taught (the older one is kept in case the newer is damaged). After a
crash the broker delivers again what is pending:

- entries up to the place that the checkpoint names were trained on: they are dropped, and acknowledged in time;
- later ones were trained on by nobody who survived: they are trained on.

One number a stream is enough for that, as one worker reads a stream, in the order of its entries. A connection that
breaks is the same in small: what was delivered and did not arrive is pending, and asked for again.

The next batch is read in a thread while the present one is computed: one round trip acknowledges, reads, and asks how
many samples have arrived.

The connection to Redis: opened as the run says, and its refusals in one sentence each.

Samples that were received and not yet trained on, as a data set whose indices continue those of the task's own.

Entries of a Redis Stream: their names, what they hold, and how far a worker is with each stream.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import torch

from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.run_spec import Stream
from hetopt.core.search_path import install_command
from hetopt.trainer.data.cursor import Indices
from hetopt.trainer.data.fetch import Batch, MapDataset, each_tensor, fetch, joined, rows_of
from hetopt.trainer.data.stream.source import Flow, RateMeter, Taken
from hetopt.trainer.data.stream.wire import Header, read_header, unpack

if TYPE_CHECKING:
    from redis import Redis


PASSWORD_VARIABLE = "HETOPT_REDIS_PASSWORD"
OLDEST = (7, 0)
"""The first Redis that counts what was added to a stream, which is how rates are measured."""

_CONNECT_S = 5.0
_ANSWER_S = 30.0


class Unreachable(Exception):
    """The broker does not answer now; it may later."""


def connect(url: str) -> Redis:
    """A connection, which is opened by its first command.

    Raises:
        BadInput: the client is not installed, or the address cannot be.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise BadInput("streams out of Redis need its client.", hint=install_command("streams")) from None
    options: dict[str, Any] = {
        "password": os.environ.get(PASSWORD_VARIABLE) or None,
        "socket_connect_timeout": _CONNECT_S,
        "socket_timeout": _ANSWER_S,
        "retry": Retry(NoBackoff(), 0),  # whoever asks knows whether a command may be said twice
    }
    if urlsplit(url).scheme == "unix":
        del options["socket_connect_timeout"]
    try:
        return redis.Redis.from_url(url, **options)
    except ValueError as error:
        raise BadInput(
            f"the address of Redis must be a URL, got {url}: {error}", hint="for example redis://127.0.0.1:6379/0"
        ) from None


def place_of(url: str) -> str:
    """The broker's address for messages, without its password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"


@contextmanager
def explained(url: str, key: str) -> Iterator[None]:
    """What the client raises, as what hetopt raises.

    Raises:
        Unreachable: it may work later.
        BadInput: the broker refuses, for a reason that whoever started the run can change.
        RunFailed: it refuses what it did not refuse before.
    """
    from redis import exceptions

    try:
        yield
    # Refused passwords are connection errors to the client, so they come first.
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise refusal(error, url, key) from None
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise Unreachable(_said(error)) from None
    except exceptions.RedisError as error:
        raise refusal(error, url, key) from None


def refusal(error: Exception, url: str, key: str) -> HetoptError:
    """What an answer of the broker means."""
    said, where = _said(error), f"the Redis at {place_of(url)}"
    code = said.partition(" ")[0]
    known: dict[str, HetoptError] = {
        "WRONGTYPE": BadInput(
            f"{key} in {where} must be a stream, and is another type.", hint="name another key, or delete that one"
        ),
        "NOAUTH": BadInput(f"{where} asks for a password.", hint=f"give it as {PASSWORD_VARIABLE}"),
        "WRONGPASS": BadInput(f"{where} refuses the password.", hint=f"correct {PASSWORD_VARIABLE}"),
        "NOPERM": BadInput(
            f"{where} does not allow this user to work on {key}.",
            hint="allow XREADGROUP, XACK, XADD, XGROUP, XINFO, XPENDING and XTRIM on the streams",
        ),
        "NOGROUP": RunFailed(
            f"{where} has lost the stream {key}.",
            hint="run it with an append-only file (appendonly yes, appendfsync always), see docs/streams.md",
        ),
        "OOM": RunFailed(
            f"{where} has no memory left for {key}.",
            hint="raise its maxmemory, or keep fewer samples (StreamWriter(max_samples=...))",
        ),
        "READONLY": RunFailed(f"{where} is a replica and takes nothing.", hint="name the one that it follows"),
        "MISCONF": RunFailed(f"{where} cannot write to its disk and takes nothing.", hint="make room on its disk"),
    }
    if code in known:
        return known[code]
    if "AUTH" in said or "password" in said.lower() or "username" in said.lower():
        return known["WRONGPASS"] if "invalid" in said.lower() else known["NOAUTH"]
    # The client takes the first word of some answers away.
    for name, words in (
        ("OOM", "maxmemory"),
        ("NOGROUP", "o such key"),
        ("WRONGTYPE", "wrong kind of value"),
        ("READONLY", "read only replica"),
        ("NOPERM", "has no permissions"),
    ):
        if words in said:
            return known[name]
    return RunFailed(f"{where} refuses to work on {key}: {said}", hint="see its log")


def _said(error: Exception) -> str:
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return said.rpartition("of pipeline caused error: ")[2]


@dataclass(frozen=True, kw_only=True, eq=False)
class Received:
    """Samples that came together.

    Attributes:
        key: of their stream.
        ids: their names there.
        batch: one row a sample.
    """

    key: str
    ids: list[bytes]
    batch: Batch

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, count: int) -> tuple[Received, Received]:
        """The first so many, and the rest."""
        first = Received(key=self.key, ids=self.ids[:count], batch=rows_of(self.batch, 0, count))
        rest = Received(key=self.key, ids=self.ids[count:], batch=rows_of(self.batch, count, len(self)))
        return first, rest


class ReceivedSamples:
    """The samples of the present step under new indices, and those of the task's data under its own.

    Args:
        dataset: of the task: steps are warmed up with its samples, before any was received.
    """

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset
        self._waiting: deque[Received] = deque()
        self._next = len(dataset)
        self._present: tuple[int, Batch] | None = None
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> object:
        return self._dataset[index]

    def gather(self, indices: Sequence[int] | Indices, /) -> Batch:
        """The batch of these samples, received or the task's own."""
        wanted = np.asarray(indices, dtype=np.int64)
        if self._present is None or wanted[0] < len(self._dataset):
            return fetch(self._dataset, indices)
        first, batch = self._present
        if len(wanted) == self._next - first and wanted[0] == first and bool((np.diff(wanted) == 1).all()):
            return batch
        places = torch.from_numpy(wanted - first)
        return each_tensor(batch, lambda tensor: tensor[places])

    def add(self, received: Received) -> None:
        """Put samples that have arrived behind those that wait."""
        self._waiting.append(received)
        self.waiting += len(received)

    def take(self, count: int) -> tuple[Indices, list[Received]]:
        """The oldest so many of those that wait become those of the present step: their indices, and what they are."""
        taken: list[Received] = []
        left = count
        while left:
            head = self._waiting.popleft()
            if len(head) > left:
                head, rest = head.split(left)
                self._waiting.appendleft(rest)
            taken.append(head)
            left -= len(head)
        self.waiting -= count
        first = self._next
        self._next += count
        self._present = (first, joined([part.batch for part in taken]))
        return np.arange(first, first + count, dtype=np.int64), taken


HEADER_FIELD = b"header"
DATA_FIELD = b"data"

EntryId = tuple[int, int]
NOTHING: EntryId = (0, 0)


def entry_id(text: bytes) -> EntryId:
    """An entry's name as numbers: names grow along a stream."""
    first, _, second = text.partition(b"-")
    return int(first), int(second)


def id_text(name: EntryId) -> str:
    """The id of an entry as Redis writes it: 'MILLISECONDS-NUMBER'."""
    return f"{name[0]}-{name[1]}"


def entry_of(place: Mapping[str, int], tap: Tap) -> EntryId:
    """The last entry of a stream that was trained on at that place."""
    return place.get(f"time_ms_of_{tap.number}", 0), place.get(f"sequence_of_{tap.number}", 0)


@dataclass(kw_only=True)
class Tap:
    """One stream of this worker.

    Attributes:
        key: of the stream.
        number: of it among all.
        trained: name of the last entry that was given to a step.
        received: of the last one that came.
        recovers: whether what is pending has to be asked for before what is new.
        taken: entries that were given to steps and not yet owed, in pieces, behind the name of the last of each.
        owed: entries to acknowledge.
        arrived: samples that the stream has ever had, as last heard; None: never heard.
        unread: samples that wait in the broker.
    """

    key: str
    number: int
    trained: EntryId = NOTHING
    received: EntryId = NOTHING
    recovers: bool = True
    taken: deque[tuple[EntryId, list[bytes]]] = field(default_factory=deque)
    owed: deque[bytes] = field(default_factory=deque)
    arrived: int | None = None
    unread: int = 0


def decoded(key: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]], expected: Header) -> list[Received]:
    """Entries as samples; those that follow each other with one header together.

    Raises:
        RunFailed: they are no samples, or not like those of the task.
    """
    found: list[Received] = []
    try:
        for text, group in groupby(entries, key=lambda entry: entry[1][HEADER_FIELD]):
            same = list(group)
            try:
                header = read_header(text)
            except RunFailed as error:
                name = same[0][0].decode("ascii", errors="replace")
                raise RunFailed(
                    f"entry {name} of {key}: {error.message}", hint=f"{error.hint}; drop it with `XDEL {key} {name}`"
                ) from None
            if header.leaves != expected.leaves:
                raise RunFailed(
                    f"the samples of {key} are {header}, and those of the task's data are {expected}.",
                    hint="write to the stream what the task trains on",
                )
            batch = unpack(header, [data[DATA_FIELD] for _, data in same])
            found.append(Received(key=key, ids=[name for name, _ in same], batch=batch))
    except KeyError as missing:
        raise RunFailed(
            f"an entry of {key} has no field {missing.args[0].decode()!r}.",
            hint="write samples with hetopt's StreamWriter, or as docs/streams.md says",
        ) from None
    return found


CONSUMER = "trainer"
"""The same whichever worker reads a stream, so that what is pending is the next one's when workers come and go."""

NOTICE_S = 5.0
"""A wait that is longer than this is told while it lasts."""

_BLOCK_MS = 250
_ACKNOWLEDGED_AT_ONCE = 5_000
_LEAST_READ = 64
_COUNTED_EVERY_S = 0.1
_AGAIN_S = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class _Read:
    """What one round trip brought."""

    received: list[Received]
    repeated: int
    lost: int
    arrived: int
    unread: int


class RedisSource:
    """One worker's streams.

    Args:
        stream: what the run says.
        rank: whose.
        workers: how many share the streams.
        samples: where received ones go.
        expected: what the task's samples are like.
        tell: hears of long waits.
    """

    def __init__(
        self,
        stream: Stream,
        rank: int,
        workers: int,
        *,
        samples: ReceivedSamples,
        expected: Header,
        tell: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._count = stream.streams or workers
        if self._count < workers:
            raise BadInput(
                f"{workers} workers cannot share {self._count} streams: worker {self._count} would have no samples.",
                hint="write to at least as many streams as there are workers, or use fewer workers",
            )
        self._taps = [Tap(key=f"{stream.key}:{number}", number=number) for number in range(rank, self._count, workers)]
        self._samples = samples
        self._expected = expected
        self._tell = tell
        self._rank = rank
        self._client = connect(stream.url)
        self._thread = ThreadPoolExecutor(1, "reads-stream")
        self._reading: Future[_Read] | None = None
        self._meter = RateMeter(window_s=4 * stream.batch_interval_s, least_s=stream.batch_interval_s / 2)
        self._safe: Mapping[str, int] = {}
        self._counted_s = 0.0
        self._arrived = 0
        self._unread = 0
        self._most_held = 0
        self._wait_s = 0.0
        self._lost = 0
        self._repeated = 0

    def begin(self) -> None:
        """Join the group of every stream (see `Source`).

        Raises:
            BadInput: the broker is not there, refuses, or is too old; a key is no stream.
            RunFailed: it does not come back within the run's patience, where the run is a resumed one.
        """
        is_new = all(tap.trained == NOTHING for tap in self._taps)
        begun_s = time.monotonic()
        while True:
            try:
                for tap in self._taps:
                    with explained(self._stream.url, tap.key):
                        self._join(tap)
                break
            except Unreachable as error:
                if is_new:
                    raise BadInput(
                        f"no Redis answers at {place_of(self._stream.url)}: {error}",
                        hint="start `redis-server --appendonly yes --appendfsync always`, or name another address",
                    ) from None
                self._endure(begun_s, str(error))
        self._reading = self._read_ahead(_LEAST_READ)

    def take(self, count: int) -> Taken:
        """The next samples, oldest first (see `Source`).

        Raises:
            RunFailed: they did not come within the run's patience, or what came cannot be used.
        """
        begun_s = time.monotonic()
        told = False
        wait_s = 0.0
        assert self._reading is not None, "the source was not begun"
        while self._samples.waiting < count or self._reading.done():
            try:
                read = self._reading.result()
            except Unreachable as error:
                if self._samples.waiting < count:
                    self._endure(begun_s, str(error), told=told)
                    told = True
            else:
                self._note(read)
                if self._samples.waiting < count and time.monotonic() - begun_s > self._stream.patience_s:
                    raise RunFailed(
                        f"worker {self._rank} has waited {self._stream.patience_s:g} s for a batch of {count}: "
                        f"{self._samples.waiting} samples are here, and no more come from {self._keys} at "
                        f"{place_of(self._stream.url)}.",
                        hint="see whether its writer still lives, or raise the stream's patience",
                    )
            # What is read now is for the next step, if this one has all it needs.
            enough = self._samples.waiting >= count
            self._reading = self._read_ahead(2 * count - self._samples.waiting)
            wait_s = time.monotonic() - begun_s
            if enough:
                break
            if wait_s > NOTICE_S and not told:
                told = True
                self._tell(f"waits for samples of {self._keys}: {self._samples.waiting} of {count} are here")
        self._wait_s += wait_s
        self._most_held = max(self._most_held, self._samples.waiting + self._unread)
        names, taken = self._samples.take(count)
        taps = {tap.key: tap for tap in self._taps}
        for part in taken:
            tap = taps[part.key]
            tap.trained = entry_id(part.ids[-1])
            tap.taken.append((tap.trained, part.ids))
        return Taken(names=names, epochs=np.zeros(count, dtype=np.int64))

    def place(self) -> Mapping[str, int]:
        """Name of the last entry of every stream that was trained on (see `Source`)."""
        place = {f"{part}_of_{number}": 0 for number in range(self._count) for part in ("time_ms", "sequence")}
        for tap in self._taps:
            place[f"time_ms_of_{tap.number}"], place[f"sequence_of_{tap.number}"] = tap.trained
        return place

    def go_to(self, place: Mapping[str, int]) -> None:
        """Go on behind the entries of that place (see `Source`)."""
        self._safe = place
        for tap in self._taps:
            tap.trained = tap.received = entry_of(place, tap)

    def committed(self, place: Mapping[str, int], *, is_last: bool = False) -> None:
        """Acknowledge what is safe now, with the next round trips (see `Source`)."""
        safe, self._safe = (place if is_last else self._safe), place
        for tap in self._taps:
            while tap.taken and tap.taken[0][0] <= entry_of(safe, tap):
                tap.owed.extend(tap.taken.popleft()[1])

    def flow(self) -> Flow:
        """What it was like since the last call (see `Source`)."""
        known = all(tap.arrived is not None for tap in self._taps)
        flow = Flow(
            rate_per_s=self._meter.rate_per_s(self._counted_s, self._arrived) if known else -1.0,
            buffered=max(self._most_held, self._samples.waiting + self._unread),
            wait_s=self._wait_s,
            dropped=self._lost,
            repeated=self._repeated,
        )
        self._wait_s, self._most_held, self._lost, self._repeated = 0.0, 0, 0, 0
        return flow

    def close(self) -> None:
        """Acknowledge what is committed, if the broker is there, and let go of it."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        try:
            for tap in self._taps:
                with explained(self._stream.url, tap.key):
                    while tap.owed:
                        self._settle(tap)
        except (Unreachable, BadInput, RunFailed):
            pass  # the checkpoint knows
        self._client.close()

    @property
    def _keys(self) -> str:
        return ", ".join(tap.key for tap in self._taps)

    def _join(self, tap: Tap) -> None:
        """Create the group where there is none; what is pending and was trained on is owed from the next commit on."""
        from redis.exceptions import ResponseError

        version = str(self._client.info("server")["redis_version"])
        if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
            raise BadInput(f"Redis {version} is too old.", hint="install Redis 7.0 or newer")
        kind: Any = self._client.type(tap.key)
        if kind not in (b"stream", b"none"):
            raise BadInput(
                f"{tap.key} in the Redis at {place_of(self._stream.url)} is a {kind.decode()}, not a stream.",
                hint="name another key, or delete that one",
            )
        try:
            # From the first sample that is still there: whatever was written before the run belongs to it.
            self._client.xgroup_create(tap.key, self._stream.group, id=id_text(tap.trained), mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        tap.taken.clear()
        first = "-"
        while tap.trained != NOTHING:
            pending = self._client.xpending_range(
                tap.key, self._stream.group, min=first, max=id_text(tap.trained), count=_ACKNOWLEDGED_AT_ONCE
            )
            if not pending:
                break
            names: list[Any] = [entry["message_id"] for entry in pending]
            first = f"({names[-1].decode()}"
            tap.taken.append((entry_id(names[-1]), names))
            self._repeated += len(names)
        tap.recovers = True

    def _endure(self, since_s: float, reason: str, *, told: bool = True) -> None:
        """Wait a little for a broker that is away.

        Raises:
            RunFailed: it has been for too long.
        """
        if time.monotonic() - since_s > self._stream.patience_s:
            raise RunFailed(
                f"the Redis at {place_of(self._stream.url)} has not answered for {self._stream.patience_s:g} s: "
                f"{reason}",
                hint="start it again: the run goes on from its checkpoint, and no sample is lost",
            ) from None
        if not told:
            self._tell(f"waits for the Redis at {place_of(self._stream.url)}: {reason}")
        time.sleep(_AGAIN_S)

    def _note(self, read: _Read) -> None:
        for received in read.received:
            self._samples.add(received)
        self._repeated += read.repeated
        self._lost += read.lost
        self._unread = read.unread

    def _read_ahead(self, count: int) -> Future[_Read]:
        """Read so many; none, but acknowledge and count, where enough are here."""
        each = -(-max(count, _LEAST_READ) // len(self._taps)) if count > 0 else 0
        return self._thread.submit(self._read, each)

    def _read(self, count: int) -> _Read:
        """One round trip; in the thread."""
        recovering = [tap for tap in self._taps if tap.recovers]
        try:
            with explained(self._stream.url, self._keys):
                answers = self._ask(recovering, count)
        except Unreachable:
            for tap in self._taps:  # what was on its way is pending now
                tap.recovers = True
            self._client.close()
            raise
        received: list[Received] = []
        repeated = lost = 0
        taps = {tap.key: tap for tap in self._taps}
        answered = set()
        for key, entries in answers:
            tap = taps[key.decode()]
            if entries:
                answered.add(tap.key)
                tap.received = entry_id(entries[-1][0])
            whole = [entry for entry in entries if entry[1]]
            lost += len(entries) - len(whole)
            repeated += len(entries) if tap.recovers else 0
            received += decoded(tap.key, whole, self._expected)
        if count:
            for tap in recovering:
                tap.recovers = tap.key in answered
        return _Read(
            received=received,
            repeated=repeated,
            lost=lost,
            arrived=self._arrived,
            unread=sum(tap.unread for tap in self._taps),
        )

    def _ask(self, recovering: list[Tap], count: int) -> list[tuple[bytes, list[tuple[bytes, Any]]]]:
        """Acknowledge, read and count, in one message."""
        group = self._stream.group
        pipe = self._client.pipeline(transaction=False)
        settled: list[tuple[Tap, int]] = []
        for tap in self._taps:
            if tap.owed:
                batch = [tap.owed[place] for place in range(min(len(tap.owed), _ACKNOWLEDGED_AT_ONCE))]
                pipe.xack(tap.key, group, *batch)
                if self._stream.delete_trained:
                    pipe.xdel(tap.key, *batch)
                settled.append((tap, len(batch)))
        now_s = time.monotonic()
        counts = now_s - self._counted_s >= _COUNTED_EVERY_S
        if counts:
            for tap in self._taps:
                pipe.xinfo_stream(tap.key)
                pipe.xinfo_groups(tap.key)
        wanted: dict[Any, Any] = {tap.key: id_text(tap.received) for tap in recovering}
        wanted = wanted or dict.fromkeys((tap.key for tap in self._taps), ">")
        if count:
            pipe.xreadgroup(group, CONSUMER, wanted, count=count, block=_BLOCK_MS)
        answers = pipe.execute()
        for tap, length in settled:
            for _ in range(length):
                tap.owed.popleft()
        if counts:
            first = len(settled) * (1 + self._stream.delete_trained)
            self._count_arrivals(answers[first : first + 2 * len(self._taps)], now_s)
        read = answers[-1] if count else []
        return list(read.items()) if isinstance(read, dict) else list(read or [])

    def _count_arrivals(self, answers: Sequence[Any], now_s: float) -> None:
        for tap, about, groups in zip(self._taps, answers[::2], answers[1::2], strict=True):
            tap.arrived = int(about["entries-added"])
            own: Mapping[str, Any] = next((one for one in groups if one["name"] == self._stream.group.encode()), {})
            tap.unread = int(own.get("lag") or 0)
        self._arrived = sum(tap.arrived or 0 for tap in self._taps)
        self._counted_s = now_s
        self._meter.see(now_s, self._arrived)

    def _settle(self, tap: Tap) -> None:
        batch = [tap.owed[place] for place in range(min(len(tap.owed), _ACKNOWLEDGED_AT_ONCE))]
        self._client.xack(tap.key, self._stream.group, *batch)
        if self._stream.delete_trained:
            self._client.xdel(tap.key, *batch)
        for _ in batch:
            tap.owed.popleft()
