"""The workers of a probe, and numbers gathered from them, so that every rank decides the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
import torch.distributed as dist

from hetopt.core.artifact import Record
from hetopt.profiler.records import EVENTS
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.context import WorkerContext

Alignment: TypeAlias = "dist.ProcessGroup | None"
"""Process group of the workers that step together; None: this worker alone."""


class ProbeStopped(Exception):
    """Error of a probe that was asked to end, raised on all ranks at the same place."""


@dataclass(frozen=True, kw_only=True)
class ProbeGroup:
    """One worker's view of all workers of a probe, by which it gathers numbers, reads the clock and writes events.

    ``context`` belongs to this worker; ``started_s`` is the reading of its clock when the probe began.
    """

    context: WorkerContext
    started_s: float

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        """Return ``row`` of every worker, [ranks][numbers], all of one length; collective: every rank calls it.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        context = self.context
        rows = gather_numbers([*row, float(context.stop_requested())], context.world_size)
        if any(other[-1] for other in rows):
            raise ProbeStopped
        return [other[:-1] for other in rows]

    def total(self, row: Sequence[float]) -> list[float]:
        """Return the sum over all workers of each number in ``row``; collective, with rows of one length.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        return [sum(column) for column in zip(*self.gather(row), strict=True)]

    def elapsed_s(self) -> float:
        """Return the seconds since the probe began, by the leader's clock; collective: every rank calls it.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        return self.gather([self.context.clock() - self.started_s])[0][0]

    def record(self, measured: Record) -> None:
        """Write a record to the event log under its name in `EVENTS`; only the leader's log writes."""
        self.context.events.write(EVENTS[type(measured)], **measured.model_dump(mode="json"))

    def first(self, workers: int) -> Alignment:
        """Return a process group of the first ``workers`` ranks (None: of one); every rank must call it.

        Other ranks must not use the result.
        """
        if workers in (1, self.context.world_size):
            return None if workers == 1 else dist.group.WORLD
        return cast("Alignment", dist.new_group(range(workers)))  # torch: or 0


def align(group: Alignment, value: float = 0.0) -> float:
    """Wait for all workers of a group, and return the largest of their values; ``group`` None: ``value`` at once."""
    if group is None:
        return value
    flag = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return float(flag)
