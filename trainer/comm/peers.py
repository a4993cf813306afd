"""The other workers: whether they agree on the exchange, which of them is lost, and where that was."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.agreement import gather_texts
from hetopt.trainer.comm.channel import group_size

_PEER = re.compile(r"\[([0-9.]+)\]:\d+")  # gloo's way of naming the other end
_TIMED_OUT = ("Timed out waiting", "timeout caused pair closure", "Timed out after")
_LEFT = "left in the middle of an exchange"
ROLL_CALL_S = 10.0
"""Longest seconds between the first worker whose time is up in an exchange and the last one that had begun it."""

_LOOKS_EVERY_S = 0.05


class HungPeer(RunFailed):
    """Error that another worker did not come to a collective in time.

    The workers themselves are named in its message, where a store could tell which they are.
    """


class LostPeer(RuntimeError):
    """Error that a connection to another worker broke during a collective; not a failure of this worker."""


def meet(description: str, group: dist.ProcessGroup | None = None) -> None:
    """Compare a description of the exchange among all workers; raise BadInput on all if any differs. All must call it.

    One gather of a fixed size before the first step, which cannot hang because of what they are about to do
    differently.

    Args:
        description: description of the exchange, the same text on workers that agree.
        group: process group that is about to exchange; None: all workers.

    Raises:
        BadInput: descriptions differ; the message names the workers that are fewer.
    """
    digest = hashlib.sha256(description.encode()).hexdigest()
    texts = gather_texts(digest + description, group_size(group), group)
    digests = [text[: len(digest)] for text in texts]
    usual, _ = Counter(digests).most_common(1)[0]
    others = [rank for rank, other in enumerate(digests) if other != usual]
    if others:
        odd, common = (texts[rank][len(digest) :] for rank in (others[0], digests.index(usual)))
        raise BadInput(
            f"{workers(others).capitalize()} would exchange gradients by {odd}, and the others by {common}.",
            hint="give all workers the same run spec, and the same version of hetopt",
        )


def explain_loss(error: RuntimeError, store: Store | None, rank: int, members: Sequence[int]) -> Exception | None:
    """Return the error that names workers lost or hung in a failed collective, after up to 10 s; None: nobody was lost.

    gloo names the address of a connection that broke. A worker that hangs breaks none: then everyone else times out,
    each when it has waited for so long itself, and a roll call in the store, of up to `ROLL_CALL_S`, tells who hangs
    from who waits.

    Args:
        error: what the collective raised.
        store: store that all workers can reach; None: no roll call.
        rank: rank of this worker, among all of the run.
        members: ranks, among all of the run, of the workers in the group: several groups may share the store.

    Returns:
        `HungPeer` where the collective timed out, `LostPeer` where a connection broke; None: the error has another
        cause.
    """
    text = str(error)
    if has_timed_out(error):
        return hung(store, rank, members)
    if _PEER.search(text) is None:
        return None
    if store is not None:
        with suppress(RuntimeError):  # the store is gone, and whoever calls the roll with it
            store.set(_lost(rank), "here")
    return LostPeer(in_words(text))


def in_words(text: str) -> str:
    """Return gloo's message of a broken connection as a sentence that names the address.

    Return any other text as it is.
    """
    match = None if _LEFT in text else _PEER.search(text)
    return text if match is None else f"a worker at {match[1]} {_LEFT}: {text}"


def has_timed_out(error: Exception) -> bool:
    """Return whether an error is a RuntimeError of a collective that waited too long for another worker."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _TIMED_OUT)


def hung(store: Store | None, rank: int, members: Sequence[int]) -> HungPeer:
    """Return the error that names the workers which did not come to a collective; wait up to 10 s for others to report.

    Args:
        store: store that all workers can reach; None: nobody can be asked, nor is waited for.
        rank: rank of this worker, among all of the run.
        members: ranks, among all of the run, of the workers in the group.
    """
    who, missing, deadline = "the workers did not all come", sorted({*members} - {rank}), time.monotonic() + ROLL_CALL_S
    if store is not None:
        store.set(_lost(rank), "here")
        while missing and time.monotonic() < deadline:
            missing = [other for other in missing if not store.check([_lost(other)])]
            time.sleep(_LOOKS_EVERY_S)
        who = f"{workers(missing)} did not come" if missing else who
    return HungPeer(f"{who} to an exchange in time.", hint="see that worker's log, and whether its machine is up")


def workers(ranks: Sequence[int]) -> str:
    """Format ranks as a phrase: 'worker 3', 'workers 0, 1 and 4'."""
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def _lost(rank: int) -> str:
    return f"hetopt/roll-call/{rank}/lost-it"


class Guard:
    """Context manager around an exchange: checks first that all workers do the same, later names a worker lost in it.

    The check is made once, at the first entry; a worker that is alone is never checked.

    Leaving it raises BadInput where workers are about to exchange in different ways, `HungPeer` where one did not come
    in time, and `LostPeer` where one left in the middle.

    Args:
        description: description of the exchange, the same text on workers that agree.
        store: store for a roll call when an exchange times out; None: nobody is named.
        group: process group that exchanges; None: all workers.
    """

    def __init__(self, description: str, *, store: Store | None = None, group: dist.ProcessGroup | None = None) -> None:
        self._description = description
        self._store = store
        self._group = group
        self._has_met = False

    def __enter__(self) -> None:
        """At the first entry among several workers, check that all are about to do the same.

        Every worker must enter.
        """
        if not self._has_met and group_size(self._group) > 1:
            meet(self._description, self._group)
            self._has_met = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise `LostPeer` or `HungPeer` in place of a collective's error, where a worker was lost or hangs."""
        if self._has_met and isinstance(error, RuntimeError):
            named = explain_loss(error, self._store, dist.get_rank(), dist.get_process_group_ranks(self._group))
            if named is not None:
                raise named from error
