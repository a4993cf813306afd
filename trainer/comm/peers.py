"""Who the other workers are: where they run, whether they agree on the exchange, and which of them is lost."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.channel import Channel, group_size

_TEXT_BYTES = 160
_ADDRESSES = 12
_ADDRESS_BYTES = 4
_PEER = re.compile(r"\[([0-9.]+)\]:\d+")  # gloo's way of naming the other end
_TIMED_OUT = ("Timed out waiting", "timeout caused pair closure", "Timed out after")
_ROLL_CALL_S = 5.0


class HungPeer(RunFailed):
    """Another worker did not come to an exchange in time."""


class LostPeer(RuntimeError):
    """Another worker ended in the middle of an exchange. Not this worker's failure: whoever saw it end knows why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """The workers of a group, in rank order, by the addresses of their machines."""

    addresses: tuple[frozenset[str], ...]
    rank: int

    def at(self, address: str) -> tuple[int, ...]:
        """The other workers that have this address."""
        return tuple(i for i, own in enumerate(self.addresses) if address in own and i != self.rank)


def meet(description: str, channel: Channel) -> Peers:
    """Exchange descriptions with all workers before the first step: one gather of a fixed size, which cannot hang
    because of what they are about to do differently.

    Args:
        description: of the exchange, the same text on workers that agree.
        channel: to the other workers.

    Raises:
        BadInput: some workers have another description than most.
    """
    digest = hashlib.sha256(description.encode()).digest()
    text = description.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    packed = b"".join(ipaddress.IPv4Address(address).packed for address in sorted(_own_addresses())[:_ADDRESSES])
    message = digest + text + packed.ljust(_ADDRESSES * _ADDRESS_BYTES, b"\0")
    rows = channel.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    received = [bytes(row.tolist()) for row in rows]
    _agree([row[: len(digest)] for row in received], [_text(row[len(digest) :]) for row in received])
    return Peers(addresses=tuple(_addresses(row[len(digest) + _TEXT_BYTES :]) for row in received), rank=channel.rank)


def explain_loss(error: RuntimeError, peers: Peers, store: Store | None, world_size: int) -> Exception | None:
    """What a failed collective says about the other workers, with those it is about named; None if it says nothing.

    gloo names the address of a connection that broke. A worker that hangs breaks none: then everyone else times out,
    and answers a roll call in the store, and who does not answer is the one.

    Args:
        error: what the collective raised.
        peers: of the group.
        store: that all workers can reach; absent: no roll call.
        world_size: workers in the group.
    """
    said = str(error)
    if has_timed_out(error):
        missing = roll_call(store, peers.rank, world_size) if store is not None else ()
        who = f"{workers(missing)} did not come" if missing else "the workers did not all come"
        return HungPeer(
            f"{who} to the exchange of gradients in time.", hint="see that worker's log, and whether its machine is up"
        )
    found = _PEER.search(said)
    if found is None:
        return None
    there = peers.at(found[1])
    who = workers(there) if len(there) == 1 else f"one of {workers(there)}" if there else "a worker"
    return LostPeer(f"{who} at {found[1]} left in the middle of an exchange: {said}")


def has_timed_out(error: Exception) -> bool:
    """Whether a collective waited for somebody in vain."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _TIMED_OUT)


def roll_call(
    store: Store,
    rank: int,
    world_size: int,
    *,
    patience_s: float = _ROLL_CALL_S,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, ...]:
    """The ranks that do not answer within ``patience_s``; all that lost the exchange call at about the same time."""
    store.set(_answer(rank), "here")
    deadline = clock() + patience_s
    missing = [other for other in range(world_size) if other != rank]
    while missing and clock() < deadline:
        missing = [other for other in missing if not store.check([_answer(other)])]
        time.sleep(0.05)
    return tuple(missing)


def workers(ranks: Sequence[int]) -> str:
    """Some ranks as a phrase: 'worker 3', 'workers 0, 1 and 4'."""
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def _answer(rank: int) -> str:
    return f"hetopt/roll-call/{rank}"


def _agree(digests: Sequence[bytes], texts: Sequence[str]) -> None:
    usual, _ = Counter(digests).most_common(1)[0]
    others = [rank for rank, digest in enumerate(digests) if digest != usual]
    if others:
        raise BadInput(
            f"{workers(others).capitalize()} would exchange gradients by {texts[others[0]]}, and the others by "
            f"{texts[digests.index(usual)]}.",
            hint="give all workers the same run spec, and the same version of hetopt",
        )


def _text(row: bytes) -> str:
    return row[:_TEXT_BYTES].rstrip(b"\0").decode(errors="ignore")


def _own_addresses() -> set[str]:
    found = {a.address for each in psutil.net_if_addrs().values() for a in each if a.family.name == "AF_INET"}
    return found or {"127.0.0.1"}


def _addresses(packed: bytes) -> frozenset[str]:
    parts = (packed[start : start + _ADDRESS_BYTES] for start in range(0, len(packed), _ADDRESS_BYTES))
    return frozenset(str(ipaddress.IPv4Address(part)) for part in parts if any(part))


class Guard:
    """Compares notes with the other workers before the first exchange, and names the peer that a later one loses.

    Args:
        description: of the exchange, the same text on workers that agree.
        group: of workers; absent: the default group, or this process alone.
        store: for a roll call when an exchange times out.
    """

    def __init__(self, description: str, *, group: dist.ProcessGroup | None = None, store: Store | None = None) -> None:
        self._description = description
        self._group = group
        self._store = store
        self._peers: Peers | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Exchange inside.

        Raises:
            BadInput: the workers are about to exchange in different ways.
            RunFailed: a worker did not come in time.
            LostPeer: a worker left in the middle.
        """
        size = group_size(self._group)
        if size == 1:
            yield
            return
        if self._peers is None:
            self._peers = meet(self._description, Channel(self._group))
        try:
            yield
        except RuntimeError as error:
            named = explain_loss(error, self._peers, self._store, size)
            if named is None:
                raise
            raise named from error
