"""The workers of a pilot that train for themselves and average what they learned, as a run under that sync does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.core.synchronization import Synchronization
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.steps.fused_step import FusedStep, NoExchange
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.slowdown import Slowdown
from hetopt.trainer.steps.step import LossModule
from hetopt.trainer.steps.stopwatch import make_stopwatch
from hetopt.trainer.sync.sync_assembly import make_synchroniser


class LocalPilot:
    """Steps of one such pilot. Built and called by all ranks together.

    Args:
        crew: the workers.
        sync: how they put together what they learn.
        loss: the model with its loss; now the same on all of them.
        optimizer: this worker's own.
        reader: of the samples.
        shares: samples of each worker in a step.
    """

    def __init__(
        self,
        crew: ProbeGroup,
        sync: Synchronization,
        *,
        loss: LossModule,
        optimizer: Optimizer,
        reader: BatchReader,
        shares: Sequence[int],
    ) -> None:
        context = crew.context
        stopwatch = make_stopwatch(context.device)
        step = FusedStep(
            module=loss,
            reader=reader,
            exchange=NoExchange(),
            stopwatch=stopwatch,
            pace=Slowdown(),
            norms=sync.name == "selsync",
            counts="alone",
        )
        model: nn.Module = loss.model
        synchroniser = make_synchroniser(
            context.spec.model_copy(update={"sync": sync}),
            model,
            optimizer,
            device=context.device,
            clock=context.clock,
            stopwatch=stopwatch,
            dataset_size=len(reader.dataset),
        )
        if synchroniser is None:
            raise BadInput(
                f"a pilot with {sync.name} needs at least 2 workers, got 1.",
                hint="profile with `workers=2`",
            )
        self._crew, self._step, self._optimizer, self._shares = crew, step, optimizer, tuple(shares)
        self._synchroniser = synchroniser
        self._steps = 0

    def step(self, parts: Sequence[MicroBatch]) -> bool:
        """Compute, learn, and average if it is time to; False where the loss of any worker is not finite."""
        trace = self._step.run(parts, sum(self._shares), None)
        if not math.isfinite(self._crew.total([float(trace.loss_sum)])[0]):
            return False
        self._optimizer.step()
        self._steps += 1
        self._synchroniser.after(self._steps, trace, self._shares)
        return True

    def averaged(self) -> AbstractContextManager[None]:
        """The model is the average of all workers' inside."""
        return self._synchroniser.averaged()

    def synchronised(self) -> int:
        """Steps that ended in an average, since this was asked last."""
        told = self._synchroniser.event(self._steps).get("sync", {})
        return int(told.get("synchronised", 0))
