"""Stale synchronous parallel, without a server: updates of all workers travel under the steps that follow.

A worker computes with all updates but, at most, those of the newest s steps, and always with its own (Ho et al. 2013):
that is what SSP promises. Here updates are summed by collectives that are begun in one step and waited for some steps
later, so a worker may run s steps ahead of the slowest, and all see the same updates at the same step. Nothing is left
to the order in which messages arrive. With s = 0 every step waits for its own sum: BSP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.events.log import Event
from hetopt.core.synchronization import StalenessSchedule
from hetopt.trainer.comm.channel import staging_device
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.model_vector import ModelVector
from hetopt.trainer.sync.synchroniser import own_state


@dataclass(frozen=True, kw_only=True, eq=False)
class _Flight:
    own: Tensor
    total: Tensor
    work: dist.Work


class StaleSync:
    """One worker's end (see `Synchronizer`).

    The model is what all have learned, as far as it has arrived, and what this worker has learned since: its updates
    count with its weight from the beginning, as they will when they have come back.

    Args:
        staleness: s.
        model: this worker's; now the same on all of them.
        optimizer: whose momentum is this worker's own.
        rank: this worker's.
        stopwatch: of the device.
    """

    def __init__(
        self, *, staleness: int, model: nn.Module, optimizer: Optimizer, rank: int, stopwatch: Stopwatch
    ) -> None:
        self._rhythm = StalenessSchedule.of(staleness)
        self._optimizer = optimizer
        self._vector = ModelVector(model)
        self._rank = rank
        self._stopwatch = stopwatch
        self._begin(self._vector.read())
        self._steps = self._bytes = 0

    def _begin(self, common: Tensor) -> None:
        self._common = common
        self._view = common.clone()
        self._gathered = torch.zeros_like(common)
        self._flights: deque[_Flight] = deque()
        self._settled = True

    def after(self, step: int, trace: StepTrace, samples: Sequence[int]) -> StepTrace:
        """Send this worker's update on its way, and take in those that have arrived (see `Synchronizer`)."""
        self._settled = False
        update = self._vector.read().sub_(self._view).mul_(samples[self._rank] / sum(samples))
        self._gathered += update
        self._view += update
        sent_bytes = 0
        if step % self._rhythm.every == 0:
            sent_bytes = self._send()
            while len(self._flights) >= self._rhythm.flights:
                self._arrive()
            self._view = self._common + self._gathered
            for flight in self._flights:
                self._view += flight.own
        self._vector.write(self._view)
        self._steps, self._bytes = self._steps + 1, self._bytes + sent_bytes
        stats = ExchangeStats(sent_bytes=sent_bytes, compress_s=0.0, sync_s=0.0)
        return replace(trace, reduce_end=self._stopwatch.mark(), exchange=stats)

    def _send(self) -> int:
        total = self._gathered.to(staging_device(self._gathered, None), copy=True)
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        self._flights.append(_Flight(own=self._gathered, total=total, work=work))
        self._gathered = torch.zeros_like(self._gathered)
        return total.nbytes

    def _arrive(self) -> None:
        flight = self._flights.popleft()
        flight.work.wait()
        self._common += flight.total.to(self._common.device)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Everything arrives first: the model is the same on all workers, and stays so (see `Synchronizer`)."""
        if not self._settled:
            self._send()
            while self._flights:
                self._arrive()
            self._view = self._common.clone()
            self._vector.write(self._view)
            self._settled = True
        yield

    def event(self, step: int) -> Event:
        """What was sent (see `Synchronizer`); of all steps done, for none of them is different."""
        steps, sent, self._steps, self._bytes = self._steps, self._bytes, 0, 0
        every = self._rhythm.every
        return (
            {
                "sync": {
                    "policy": "ssp",
                    "synchronised": steps // every,
                    "local": steps - steps // every,
                    "sent_bytes": sent,
                }
            }
            if steps
            else {}
        )

    def state(self) -> dict[str, Any]:
        """This worker's momentum: inside `averaged` there is nothing else of its own (see `Synchronizer`)."""
        return {"policy": "ssp", "optimizer": self._optimizer.state_dict()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the model that all have (see `Synchronizer`)."""
        self._begin(self._vector.read())
        if state.get("policy") != "ssp":
            return
        with own_state():
            self._optimizer.load_state_dict(state["optimizer"])
