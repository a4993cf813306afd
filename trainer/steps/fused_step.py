"""The step that computes a gradient in one flat buffer, and sums it at once or in buckets under backward.

At once what needs the whole gradient (Top-k, residuals in true units under loss scaling), what is so small that nothing
can be sent under backward, and what a single worker computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.errors import RunFailed
from hetopt.trainer.comm.buckets import BucketSum
from hetopt.trainer.comm.compressor import Resumable
from hetopt.trainer.comm.error_feedback import NoResidual
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.steps.buckets import Buckets, Part
from hetopt.trainer.steps.local_gradient import DoesNotFit, LocalGradient
from hetopt.trainer.steps.noise_groups import MicroBatchGroups, NoiseSums, square_norm, weighted_square_norm
from hetopt.trainer.steps.slowdown import FORWARD, Slowdown
from hetopt.trainer.steps.step import LossModule, Reader, StepTrace, trainable_parameters
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch


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


_NO_EXCHANGE = NoExchange()


class FusedStep:
    """Computes a gradient in one flat fp32 buffer, and sums it at once or in buckets under backward.

    Gradients of all parameters are views into the buffer; a parameter that a step does not use keeps a zero there.

    A worker that trains alone (`NoExchange`) applies the mean gradient of its own samples, whatever the others have.
    Averaged over the workers, weighted by their samples, updates by such gradients are those by the gradient of the
    whole batch, for optimizers that are linear in it.

    A bucket is sent as soon as the backward pass of the last micro-batch has made it, and then there is no way back. So
    a micro-batch larger than any before, which may not fit into memory, is computed as a whole and only then sent,
    bucket by bucket in the usual order: the other workers, who may send theirs under backward, see no difference.

    Args:
        module: the model with its loss.
        reader: of the samples.
        exchange: sums the whole buffer over all workers.
        stopwatch: of the device.
        pace: how fast this worker may be.
        noise: the groups of samples whose gradients are measured for their noise; None: nobody asks.
        way: name of what the exchange does, for the traces.
        norms: whether norms of local gradients are asked for, where the whole buffer is exchanged.
        counts: where a loss is a mean over something else than samples: whether the counts of ``all`` workers are added
            up, or of this worker ``alone``, whose samples then are the whole batch; ``unused``: samples are counted.
        in_buckets: sums buckets in the place of ``exchange``.

    Attributes:
        way: as above; it may change between steps, on all workers alike.
        in_buckets: likewise.
    """

    def __init__(
        self,
        *,
        module: LossModule,
        reader: Reader,
        stopwatch: Stopwatch,
        pace: Slowdown,
        exchange: WholeExchange = _NO_EXCHANGE,
        noise: Literal["workers", "micro-batches"] | None = None,
        way: str = "",
        norms: bool = False,
        counts: Literal["all", "alone", "unused"] = "all",
        in_buckets: BucketSum | None = None,
    ) -> None:
        self._module = module
        self._parameters = parameters = trainable_parameters(module.model)
        device = parameters[0].device
        self.way = way
        self.in_buckets = in_buckets
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
        self._buckets = Buckets(parameters, self._send)
        self._squares: list[Tensor] = []
        self._computed: Mark | None = None

    @property
    def residual(self) -> Resumable:
        """The residual state of the exchange."""
        return self._exchange if self.in_buckets is None else self.in_buckets

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
        self._squares, self._computed = [], None
        factor = (loss_scale or 1.0) / global_batch_size
        loss_sum = self._compute(parts, factor)
        if self._computed is None:
            self._pace.reach(1.0)
            self._computed = self._stopwatch.mark()
        weight: float | Tensor = samples
        by_samples = 1.0
        if self._local.counted is not None:  # and so nothing is on its way yet
            by_samples = global_batch_size / self._count_all(self._local.counted)
            self._flat.mul_(by_samples)
            loss_sum = loss_sum * by_samples
            weight = self._local.counted * by_samples
        finite, square, stats = True, None, None
        if self.in_buckets is not None:
            self._finish_buckets()
            stats = self.in_buckets.wait()
            if loss_scale is not None:
                # An overflow anywhere is in the sum, which is the same everywhere.
                finite = bool(torch.isfinite(self._flat).all())
                self._flat.mul_(1 / loss_scale)
        else:
            self._note_square(self._flat)
            if loss_scale is not None:
                # Residuals are kept in true units, and an overflow on one worker must not enter any residual: the
                # workers agree before they exchange.
                self._flat.mul_(1 / loss_scale)
                finite = all_finite(self._flat)
            square = energy(self._flat) if self._norms and finite else None
            stats = self._exchange.run(self._flat, look_at) if finite else None
        return StepTrace(
            loss_sum=loss_sum,
            start=begun,
            backward_end=self._computed,
            reduce_end=self._stopwatch.mark(),
            micro_batches=len(parts),
            finite=finite,
            noise=self._noise_sums(factor, weight, by_samples) if self._noise and finite else None,
            way=self.way if finite else "",
            exchange=stats,
            under_backward=self.in_buckets is not None,
            gradient_energy=square,
        )

    def _compute(self, parts: Sequence[MicroBatch], factor: float) -> Tensor:
        """Accumulate the gradient; send its buckets as they are made, where no micro-batch may be too large."""
        if self._groups is not None:
            self._groups.begin(factor)
        fits = max(map(len, parts), default=0) <= self._local.proven
        if self.in_buckets is not None and fits and not self._module.is_counted:
            self._buckets.arm(len(parts))
        try:
            return self._local.run(parts, factor, after=None if self._groups is None else self._add_group)
        except DoesNotFit as error:
            if self._buckets.told:
                raise RunFailed(
                    f"worker {dist.get_rank()} ran out of memory over {error.samples} samples that fitted before, "
                    "while their gradient was being sent.",
                    hint="set a smaller max_local_batch_size for this worker",
                ) from None
            self._buckets.is_armed = False
            raise

    def _send(self, part: Part) -> None:
        if self._computed is None:  # backward goes on
            is_last = part.start == 0
            if is_last or self._pace.waits:
                self._pace.reach(1.0 if is_last else FORWARD + (1 - FORWARD) * part.done)
            if is_last:
                self._computed = self._stopwatch.mark()
        buffer = self._flat[part.start : part.stop]
        self._note_square(buffer)
        assert self.in_buckets is not None
        members = self._parameters[part.members.start : part.members.stop]
        self.in_buckets.begin(members, buffer, last=part.start == 0)

    def _finish_buckets(self) -> None:
        self._buckets.finish()
        if self._buckets.is_repeated:
            raise RunFailed(
                "a layer's gradient was made twice in one backward pass, the second time when it was sent already.",
                hint="pass use_reentrant=False to torch.utils.checkpoint",
            )

    def _take_gradients(self) -> None:
        """Gradients go into the buffer from here on; another step may have led them elsewhere."""
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

    def _note_square(self, piece: Tensor) -> None:
        if self._noise == "workers":
            self._squares.append(square_norm([piece]))

    def _noise_sums(self, factor: float, weight: float | Tensor, by_samples: float) -> NoiseSums:
        """The squared norms of this worker's groups, whose samples weigh so much in all, and of the sum."""
        if self._groups is not None:
            groups, weighted = self._groups.count, self._groups.weighted_square_norm * by_samples
        else:
            groups, weighted = 1, weighted_square_norm(torch.stack(self._squares).sum(), factor, weight)
        return NoiseSums(groups=groups, weighted_square_norm=weighted, mean_square_norm=square_norm([self._flat]))


def all_finite(flat: Tensor) -> bool:
    """Whether no worker's part of a gradient is NaN or infinite; the same on all of them."""
    finite = torch.isfinite(flat).all().to("cpu", torch.float32)
    if dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)
