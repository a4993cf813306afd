"""Watches whether another generation is wanted or a member is dead, and then ends the waiting of the present one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hetopt.trainer.elastic.rendezvous import RendezvousStore, wanted

EVERY_S = 0.25


class Watch:
    """A thread beside training; one look costs a message to the store and back.

    Args:
        store: a connection that nothing else uses.
        number: of the present generation.
        end_waiting: breaks the connections of the present generation; called until `stop`, for more may be opened.
        is_lost: whether a member of the present generation is known to be dead: while connections are being made,
            nothing else tells, and all would wait until they time out.
    """

    def __init__(
        self,
        store: RendezvousStore,
        number: int,
        end_waiting: Callable[[], object],
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._number = number
        self._end_waiting = end_waiting
        self._is_lost = is_lost
        self._over = threading.Event()
        self.rang = False
        self._thread = threading.Thread(target=self._look, name="watches-generations", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread that watches, and wait for it."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self.rang = self.rang or wanted(self._store) > self._number or self._is_lost()
            except (RuntimeError, ValueError):
                self.rang = True  # the store is gone, and with it its host: whoever is left meets elsewhere
            if self.rang:
                self._end_waiting()
