"""The step that computes the whole gradient in one flat buffer and then exchanges it at once.

For what needs the whole gradient (Top-k, residuals in true units under loss scaling), for models that do not use all
parameters at every step or are so small that nothing can be sent under backward, and for a single worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.trainer.comm.compressor import Resumable
from hetopt.trainer.comm.error_feedback import NoResidual
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.steps.local_gradient import LocalGradient
from hetopt.trainer.steps.noise_groups import MicroBatchGroups, NoiseSums, square_norm, weighted_square_norm
from hetopt.trainer.steps.slowdown import Slowdown
from hetopt.trainer.steps.step import LossModule, Reader, StepTrace, trainable_parameters
from hetopt.trainer.steps.stopwatch import Stopwatch


class WholeExchange(Resumable, Protocol):
    """What this step needs of an exchange; its state is what a checkpoint needs of it."""

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """Replace the weighted local gradient by the sum over all workers, in place (see `Exchange`)."""
        ...


class NoExchange(NoResidual):
    """Leaves the gradient as it is."""

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """Leave the worker's own gradient as it is; nothing is sent."""
        return ExchangeStats(sent_bytes=0, compress_s=0.0, sync_s=0.0)


class FusedStep:
    """Computes the whole gradient in one flat fp32 buffer, then exchanges it at once.

    Gradients of all parameters are views into the buffer; a parameter that a step does not use keeps a zero there.

    A worker that trains alone (`NoExchange`) applies the mean gradient of its own samples, whatever the others have.
    Averaged over the workers, weighted by their samples, updates by such gradients are those by the gradient of the
    whole batch, for optimizers that are linear in it.

    Args:
        module: the model with its loss.
        reader: of the samples.
        exchange: sums the buffer over all workers.
        stopwatch: of the device.
        pace: how fast this worker may be.
        noise: the groups of samples whose gradients are measured for their noise; None: nobody asks.
        way: name of what the exchange does, for the traces.
        norms: whether norms of local gradients are asked for.
        counts: where a loss is a mean over something else than samples: whether the counts of ``all`` workers are added
            up, or of this worker ``alone``, whose samples then are the whole batch; ``unused``: samples are counted.
    """

    def __init__(
        self,
        *,
        module: LossModule,
        reader: Reader,
        exchange: WholeExchange,
        stopwatch: Stopwatch,
        pace: Slowdown,
        noise: Literal["workers", "micro-batches"] | None = None,
        way: str = "",
        norms: bool = False,
        counts: Literal["all", "alone", "unused"] = "all",
    ) -> None:
        self._parameters = parameters = trainable_parameters(module.model)
        device = parameters[0].device
        self.way = way
        self._norms = norms
        counting = None if counts == "unused" else module
        self._local = LocalGradient(model=module.model, forward=module, reader=reader, device=device, counting=counting)
        self._is_alone, self._adds_counts = counts == "alone", counts == "all"
        self._exchange = exchange
        self._stopwatch = stopwatch
        self._pace = pace
        self._flat = torch.zeros(sum(p.numel() for p in parameters), device=device)
        self._views = [
            view.view_as(parameter)
            for parameter, view in zip(
                parameters, torch.split(self._flat, [p.numel() for p in parameters]), strict=True
            )
        ]
        self._noise = noise
        self._groups = MicroBatchGroups(self._flat) if noise == "micro-batches" else None

    @property
    def residual(self) -> Resumable:
        """The residual state of the exchange."""
        return self._exchange

    def warm_up(self, part: MicroBatch) -> None:
        """Compute a micro-batch (see `Step`)."""
        self._take_gradients()
        self._local.try_out(part)

    def run(
        self,
        parts: Sequence[MicroBatch],
        global_batch_size: int,
        loss_scale: float | None,
        look_at: Sequence[float] = (),
    ) -> StepTrace:
        """Compute and exchange (see `Step`)."""
        begun = self._stopwatch.mark()
        samples = sum(map(len, parts))
        global_batch_size = max(1, samples) if self._is_alone else global_batch_size
        self._pace.begin(samples)
        self._flat.zero_()
        self._take_gradients()
        factor = (loss_scale or 1.0) / global_batch_size
        if self._groups is not None:
            self._groups.begin(factor)
        loss_sum = self._local.run(parts, factor, after=None if self._groups is None else self._add_group)
        self._pace.reach(1.0)
        computed = self._stopwatch.mark()
        measured = self._measured(factor, samples)
        if self._local.counted is not None:
            by_samples = global_batch_size / self._count_all(self._local.counted)
            self._flat.mul_(by_samples)
            loss_sum = loss_sum * by_samples
            measured = None if measured is None else (measured[0], measured[1] * by_samples)
        finite = True
        if loss_scale is not None:
            # Residuals are kept in true units, and an overflow on one worker must not enter any residual: the workers
            # agree before they exchange.
            self._flat.mul_(1 / loss_scale)
            finite = all_finite(self._flat)
        square = energy(self._flat) if self._norms and finite else None
        stats = self._exchange.run(self._flat, look_at) if finite else None
        summed = self._stopwatch.mark()
        noise = None
        if measured is not None and finite:
            groups, weighted = measured
            noise = NoiseSums(groups=groups, weighted_square_norm=weighted, mean_square_norm=square_norm([self._flat]))
        return StepTrace(
            loss_sum=loss_sum,
            start=begun,
            backward_end=computed,
            reduce_end=summed,
            micro_batches=len(parts),
            finite=finite,
            noise=noise,
            way=self.way if finite else "",
            exchange=stats,
            gradient_energy=square,
        )

    def _take_gradients(self) -> None:
        """Gradients go into the buffer from here on; another form of step may have led them elsewhere."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def _add_group(self, part: MicroBatch) -> None:
        assert self._groups is not None
        self._groups.add(len(part) if self._local.part_counted is None else self._local.part_counted)

    def _count_all(self, counted: Tensor) -> float:
        """What the losses of the step are means over, of all workers; never 0."""
        total = counted.to("cpu")
        if self._adds_counts and dist.is_initialized():
            dist.all_reduce(total)
        return float(total) or 1.0

    def _measured(self, factor: float, samples: int) -> tuple[int, Tensor] | None:
        """How many groups this worker's samples are, and their weighted squared norms."""
        if self._groups is not None:
            return self._groups.count, self._groups.weighted_square_norm
        if self._noise is None:
            return None
        counted = self._local.counted
        return 1, weighted_square_norm([self._flat], factor, samples if counted is None else counted)


def all_finite(flat: Tensor) -> bool:
    """Whether no worker's part of a gradient is NaN or infinite; the same on all of them."""
    finite = torch.isfinite(flat).all().to("cpu", torch.float32)
    if dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)
