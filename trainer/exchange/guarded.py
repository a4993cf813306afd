"""An exchange among workers that may disagree or get lost: both become a sentence that says who."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from hetopt.trainer.exchange.channel import Channel
from hetopt.trainer.exchange.group import group_size
from hetopt.trainer.exchange.memory import Memory
from hetopt.trainer.exchange.peers import Peers, Store, explain_loss, meet
from hetopt.trainer.exchange.stats import ExchangeStats, LookingExchange


class GuardedExchange:
    """Compares notes with the other workers before the first step, and names the peer that a later one loses.

    Args:
        exchange: that is guarded.
        description: of it, the same text on workers that agree.
        group: of workers; absent: the default group, or this process alone.
        store: for a roll call when an exchange times out.
    """

    def __init__(
        self,
        exchange: LookingExchange,
        description: str,
        *,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
    ) -> None:
        self._exchange = exchange
        self._description = description
        self._group = group
        self._store = store
        self._peers: Peers | None = None

    @property
    def memory(self) -> Memory:
        """The exchange's."""
        return self._exchange.memory

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """The exchange's.

        Raises:
            BadInput: the workers are about to exchange in different ways.
            RunFailed: a worker did not come in time.
            LostPeer: a worker left in the middle.
        """
        size = group_size(self._group)
        if size == 1:
            return self._exchange.run(flat, look_at)
        if self._peers is None:
            self._peers = meet(self._description, Channel(self._group))
        try:
            return self._exchange.run(flat, look_at)
        except RuntimeError as error:
            named = explain_loss(error, self._peers, self._store, size)
            if named is None:
                raise
            raise named from error
