"""Entries of a Redis Stream: their names, what they hold, and how far a worker is with each stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from hetopt.core.errors import RunFailed
from hetopt.trainer.data.stream.received import Received
from hetopt.trainer.data.stream.wire import Header, read_header, unpack

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
