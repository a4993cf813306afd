"""The step that computes the whole gradient in one flat buffer and then exchanges it at once.

For what needs the whole gradient (Top-k, residuals in true units under loss scaling), for paced workers, whose stretch
lies between computing and exchanging, for models that do not use all parameters at every step, and for a single worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.trainer.exchange.exchange import GradientExchange
from hetopt.trainer.exchange.memory import Memory
from hetopt.trainer.local_batch import BatchReader, MicroBatch
from hetopt.trainer.pace import Pace
from hetopt.trainer.step import LossModule, StepTrace, trainable_parameters
from hetopt.trainer.stopwatch import Stopwatch


class FusedStep:
    """Computes the whole gradient in one flat fp32 buffer, then exchanges it at once.

    Gradients of all parameters are views into the buffer; a parameter that a step does not use keeps a zero there.
    """

    def __init__(
        self, *, module: LossModule, reader: BatchReader, exchange: GradientExchange, stopwatch: Stopwatch, pace: Pace
    ) -> None:
        parameters = trainable_parameters(module.model)
        self._module = module
        self._reader = reader
        self._exchange = exchange
        self._stopwatch = stopwatch
        self._pace = pace
        self._flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        for parameter, view in zip(parameters, torch.split(self._flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad = view.view_as(parameter)

    @property
    def memory(self) -> Memory:
        """The exchange's."""
        return self._exchange.memory

    def run(self, parts: Sequence[MicroBatch], global_batch_size: int, loss_scale: float | None) -> StepTrace:
        """Compute and exchange (see `Step`)."""
        begun = self._stopwatch.mark()
        self._pace.begin()
        self._flat.zero_()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._flat.device)
        for part in parts:
            loss = self._module(self._reader.read(part))
            (loss * (len(part) / global_batch_size * (loss_scale or 1.0))).backward()
            loss_sum += loss.detach() * len(part)
        self._pace.end()
        computed = self._stopwatch.mark()
        finite = True
        if loss_scale is not None:
            # Residuals are kept in true units, and an overflow on one worker must not enter any residual: the workers
            # agree before they exchange.
            self._flat.mul_(1 / loss_scale)
            finite = _all_finite(self._flat)
        if finite:
            self._exchange.run(self._flat)
        return StepTrace(
            loss_sum=loss_sum, begun=begun, computed=computed, summed=self._stopwatch.mark(), finite=finite
        )


def _all_finite(flat: Tensor) -> bool:
    finite = torch.isfinite(flat).all().to("cpu", torch.float32)
    if dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)
