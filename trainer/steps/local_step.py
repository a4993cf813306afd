"""The step of a worker that applies its own gradient: nothing is exchanged in it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hetopt.trainer.comm.compressor import Resumable
from hetopt.trainer.comm.error_feedback import NoResidual
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.steps.fused_step import FusedStep
from hetopt.trainer.steps.step import StepTrace


class NoExchange(NoResidual):
    """Leaves the gradient as it is."""

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """Leave the worker's own gradient as it is; nothing is sent."""
        return ExchangeStats(sent_bytes=0, compress_s=0.0, sync_s=0.0)


class LocalStep:
    """Leaves the mean gradient of this worker's own samples, whatever the others have.

    Averaged over the workers, weighted by their samples, updates by such gradients are those by the gradient of the
    whole batch, for optimizers that are linear in it.

    Args:
        inner: computes, and exchanges by `NoExchange`.
    """

    def __init__(self, inner: FusedStep) -> None:
        self._inner = inner

    @property
    def residual(self) -> Resumable:
        """An empty residual state: nothing is sent, so nothing is left unsent."""
        return self._inner.residual

    def warm_up(self, part: MicroBatch) -> None:
        """Compute a micro-batch (see `Step`)."""
        self._inner.warm_up(part)

    def run(
        self,
        parts: Sequence[MicroBatch],
        global_batch_size: int,
        loss_scale: float | None,
        look_at: Sequence[float] = (),
    ) -> StepTrace:
        """Compute (see `Step`); the batch is this worker's."""
        return self._inner.run(parts, max(1, sum(map(len, parts))), loss_scale, ())
