"""Exchanges among workers that may disagree or get lost: both become a sentence that says who."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.group import group_size
from hetopt.trainer.comm.peers import Peers, explain_loss, meet


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
