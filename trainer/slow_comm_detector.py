"""Notices between two looks at the statistics that exchanges have become slow: one bit of every worker now and then."""

from __future__ import annotations

from hetopt.trainer.agreement import Gathering

IN_A_ROW = 2
"""Slow exchanges that are no hiccup."""

EVERY = 2
"""Steps for a bit: where workers share cores, a message takes a step two or three hundredths longer, however small."""


class SlowCommDetector:
    """Rings on all workers at the same step.

    The bits travel under the next step, so it rings a step or a few late and costs nobody a wait. A worker that others
    wait for sees short exchanges: if even that one finds them long, it is the network.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._limit_s: float | None = None
        self._in_a_row = 0
        self._steps = 0
        self._on_its_way: Gathering | None = None

    def set(self, limit_s: float | None) -> None:
        """Begin anew: exchanges that take longer count; None: nobody listens. The same on all workers."""
        self.rest()
        self._limit_s = limit_s
        self._in_a_row = self._steps = 0

    def rings(self, exchange_s: float | None) -> bool:
        """Whether it rings after a step; called by all workers after the same steps.

        Args:
            exchange_s: that the step's exchange took here; None: it does not count.
        """
        if self._limit_s is None:
            return False
        late = exchange_s is not None and exchange_s > self._limit_s
        self._in_a_row = self._in_a_row + 1 if late else 0
        self._steps += 1
        before, self._on_its_way = self._on_its_way, None
        if self._steps % EVERY == 0:
            self._on_its_way = Gathering([float(self._in_a_row >= IN_A_ROW)], self._world_size)
        return before is not None and all(row[0] for row in before.wait())

    def rest(self) -> None:
        """Nothing may be on its way when a period ends."""
        if self._on_its_way is not None:
            self._on_its_way.wait()
            self._on_its_way = None
