"""The step that computes a gradient in one flat buffer, and sums it at once or in buckets under backward.

At once what needs the whole gradient (Top-k, residuals in true units under loss scaling), what is so small that nothing
can be sent under backward, and what a single worker computes.

Forward and backward over one worker's micro-batches, and what happens when one of them does not fit into memory.

A micro-batch larger than any that this worker has computed may not fit. Before it is tried, what a forward pass changes
besides gradients is kept, and it is put back if memory runs out: the step can then be computed again in smaller
micro-batches as if the larger one had never been tried. No sample is lost and none counts twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetopt.core.comm.options import Candidate
from hetopt.core.errors import RunFailed
from hetopt.trainer.comm.compressor import NoResidual, Resumable
from hetopt.trainer.comm.exchange import BucketSum, Exchange, ExchangeStats
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.context import Generators
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.steps.buckets import Buckets, Part
from hetopt.trainer.steps.slowdown import FORWARD, Slowdown
from hetopt.trainer.steps.step import (
    LossModule,
    Reader,
    StepTrace,
    trainable_parameters,
)
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch

_RUNS_WITH_LESS = 1
"""Runs that prove nothing: the optimizer takes its memory at the end of the first."""


class DoesNotFit(RunFailed):
    """A micro-batch of ``samples`` needs more memory than this worker has."""

    def __init__(self, part: MicroBatch) -> None:
        super().__init__(
            f"a micro-batch of {len(part)} samples does not fit into the memory of this worker.",
            hint="set max_local_batch_size of the worker",
        )
        self.part = part

    @property
    def samples(self) -> int:
        """The size that was too large."""
        return len(self.part)


def remembered(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Keep what a forward pass changes besides gradients, the buffers and torch's random sequences; return what puts
    them back."""
    buffers, generators = [(buffer, buffer.clone()) for buffer in model.buffers()], Generators.at(device)

    def restore() -> None:
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        generators.restore_generators(device)

    return restore


def half_of(samples: int, rank: int) -> int:
    """The micro-batch to try when one of so many samples does not fit.

    Raises:
        RunFailed: it was a single sample.
    """
    if samples == 1:
        raise RunFailed(
            f"worker {rank} has too little memory for a single sample.",
            hint="leave this worker out, or give it a device with more memory",
        )
    return samples // 2


class WholeExchange(Resumable, Protocol):
    """What this step needs of an exchange; its state is what a checkpoint needs of it."""

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """Replace the weighted local gradient by the sum over all workers, in place (see `Exchange`)."""


Switch: TypeAlias = Callable[[bool], tuple[BucketSum | None, str]]
"""Says what sums buckets in the next step, if anything does, and the name of the way whose times the step has; told
whether the step looks at gains."""


def switch_between(exchange: Exchange, buckets: Mapping[str, BucketSum], present: Callable[[], Candidate]) -> Switch:
    """Return what says in each step whether gradients are summed at once or in buckets, and by which of them.

    Buckets remember nothing. So after a thin exchange the first step is summed at once, which sends the residual, and
    so is every step that looks at gains.

    Args:
        exchange: of whole gradients, whose compression changes.
        buckets: by compressor, what sums buckets under backward.
        present: the candidate in use, the same on all workers.
    """

    def now(looks: bool) -> tuple[BucketSum | None, str]:
        candidate = present()
        if not candidate.in_buckets:
            return None, candidate.option.key
        if looks or exchange.has_residual:
            # Whole gradients are exceptions: nobody should compare their times with those of the others.
            return None, ""
        return buckets[candidate.compression.name], candidate.option.key

    return now


class FusedStep:
    """Computes a gradient in one flat fp32 buffer, and sums it at once or in buckets under backward.

    Gradients of all parameters are views into the buffer; a parameter that a step does not use keeps a zero there.

    A worker that trains alone (no exchange) applies the mean gradient of its own samples, whatever the others have.
    Averaged over the workers, weighted by their samples, updates by such gradients are those by the gradient of the
    whole batch, for optimizers that are linear in it.

    A bucket is sent as soon as the backward pass of the last micro-batch has made it, and then there is no way back. So
    a micro-batch larger than any before, which may not fit into memory, is computed as a whole and only then sent,
    bucket by bucket in the usual order: the other workers, who may send theirs under backward, see no difference.

    Args:
        module: the model with its loss.
        reader: of the samples.
        exchange: sums the whole buffer over all workers; None: it stays this worker's own.
        stopwatch: of the device.
        pace: how fast this worker may be.
        way: name of what the exchange does, for the traces.
        norms: whether norms of local gradients are asked for, where the whole buffer is exchanged.
        counts: where a loss is a mean over something else than samples: whether the counts of ``all`` workers are added
            up, or of this worker ``alone``, whose samples then are the whole batch; ``unused``: samples are counted.
        in_buckets: sums buckets in the place of ``exchange``.
        switch: changes how gradients travel while training goes on; None: that stays as it is.

    Attributes:
        way: as above; it may change between steps, on all workers alike.
        in_buckets: likewise.
        flat: the gradient, 1-D fp32: of this worker while a step computes it, then of all.
        proven: samples of the largest micro-batch that is known to fit.
    """

    def __init__(
        self,
        *,
        module: LossModule,
        reader: Reader,
        stopwatch: Stopwatch,
        pace: Slowdown,
        exchange: WholeExchange | None = None,
        way: str = "",
        norms: bool = False,
        counts: Literal["all", "alone", "unused"] = "all",
        in_buckets: BucketSum | None = None,
        switch: Switch | None = None,
    ) -> None:
        self._module = module
        self._parameters = parameters = trainable_parameters(module.model)
        self._device = device = parameters[0].device
        self.way = way
        self.in_buckets = in_buckets
        self._norms = norms
        self._switch = switch
        self._reader = reader
        self._is_counted, self._is_alone = counts != "unused", counts == "alone"
        self._exchange = exchange
        self._stopwatch = stopwatch
        self._pace = pace
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=device)
        self._views = [
            view.view_as(parameter)
            for parameter, view in zip(parameters, torch.split(self.flat, [p.numel() for p in parameters]), strict=True)
        ]
        self._buckets = Buckets(parameters, self._send)
        self._computed: Mark | None = None
        self._counted: Tensor | None = None
        self._part: MicroBatch | None = None
        self._runs = self.proven = 0

    @property
    def residual(self) -> Resumable:
        """The residual state of the exchange."""
        in_use = self._exchange if self.in_buckets is None or self._switch is not None else self.in_buckets
        return in_use or NoResidual()

    def warm_up(self, part: MicroBatch) -> None:
        """Compute a micro-batch for nothing: its gradient is not wanted, and all else is put back.

        Raises:
            DoesNotFit: memory ran out.
        """
        self._take_gradients()
        restore = remembered(self._module.model, self._device)
        self._accumulated([part], 1.0, restore)
        restore()

    def run(
        self,
        parts: Sequence[MicroBatch],
        global_batch_size: int,
        loss_scale: float | None,
        look_at: Sequence[float] = (),
    ) -> StepTrace:
        """Compute the gradient of a step's micro-batches, and exchange it.

        Args:
            parts: what to compute.
            global_batch_size: B, samples of all workers.
            loss_scale: of fp16; None: there is none.
            look_at: ratios to tell the kept energy at.

        Raises:
            DoesNotFit: memory ran out. Gradients are spoilt; everything else is as before if ``parts`` held a
                micro-batch larger than ``proven``.
        """
        if self._switch is not None:
            self.in_buckets, self.way = self._switch(bool(look_at))
        begun = self._stopwatch.mark()
        samples = sum(map(len, parts))
        global_batch_size = max(1, samples) if self._is_alone else global_batch_size
        self._pace.begin(samples)
        self.flat.zero_()
        self._take_gradients()
        self._computed = None
        factor = (loss_scale or 1.0) / global_batch_size
        loss_sum = self._compute(parts, factor)
        if self._computed is None:
            self._pace.reach(1.0)
            self._computed = self._stopwatch.mark()
        if self._counted is not None:  # and so nothing is on its way yet
            by_samples = global_batch_size / self._count_all(self._counted)
            self.flat.mul_(by_samples)
            loss_sum = loss_sum * by_samples
        finite, square = True, None
        stats: ExchangeStats | None = None
        if self.in_buckets is not None:
            self._finish_buckets()
            stats = self.in_buckets.wait()
            if loss_scale is not None:
                # An overflow anywhere is in the sum, which is the same everywhere.
                finite = bool(torch.isfinite(self.flat).all())
                self.flat.mul_(1 / loss_scale)
        else:
            if loss_scale is not None:
                # Residuals are kept in true units, and an overflow on one worker must not enter any residual: the
                # workers agree before they exchange.
                self.flat.mul_(1 / loss_scale)
                finite = all_finite(self.flat)
            square = energy(self.flat) if self._norms and finite else None
            if finite:
                alone = ExchangeStats(sent_bytes=0, compress_s=0.0, sync_s=0.0)
                stats = alone if self._exchange is None else self._exchange.run(self.flat, look_at)
        return StepTrace(
            loss_sum=loss_sum,
            start=begun,
            backward_end=self._computed,
            reduce_end=self._stopwatch.mark(),
            finite=finite,
            way=self.way if finite else "",
            exchange=stats,
            under_backward=self.in_buckets is not None,
            gradient_energy=square,
        )

    def _compute(self, parts: Sequence[MicroBatch], factor: float) -> Tensor:
        """Accumulate the gradient; send its buckets as they are made, where no micro-batch may be too large."""
        largest = max(map(len, parts), default=0)
        fits = largest <= self.proven
        if self.in_buckets is not None and fits and not self._module.is_counted:
            self._buckets.arm(len(parts))
        try:
            loss_sum = self._accumulated(parts, factor, None if fits else remembered(self._module.model, self._device))
        except DoesNotFit as error:
            if self._buckets.told:
                raise RunFailed(
                    f"worker {dist.get_rank()} ran out of memory over {error.samples} samples that fitted before, "
                    "while their gradient was being sent.",
                    hint="set a smaller max_local_batch_size for this worker",
                ) from None
            self._buckets.is_armed = False
            raise
        self._runs += 1
        if self._runs > _RUNS_WITH_LESS:
            self.proven = max(self.proven, largest)
        return loss_sum

    def _accumulated(self, parts: Sequence[MicroBatch], factor: float, restore: Callable[[], None] | None) -> Tensor:
        """Add ``factor * samples * mean gradient`` of every micro-batch; return the sum of their losses over samples.

        Where the loss counts something else, that stands for samples. Where memory runs out, everything is put back.
        """
        try:
            loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
            counts = self._is_counted and self._module.is_counted
            self._counted = torch.zeros_like(loss_sum) if counts else None
            for part in parts:
                self._part = part
                loss_sum = loss_sum + self._added(part, factor)
            return loss_sum
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or self._part is None:
                raise
        # Out here, where the error is gone: its traceback holds on to what filled the memory.
        if restore is not None:
            restore()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise DoesNotFit(self._part)

    def _added(self, part: MicroBatch, factor: float) -> Tensor:
        """Add the gradient of a micro-batch; return the sum of its loss, a double on the device."""
        loss: Tensor = self._module(self._reader.read(part))
        summed = loss.detach().double() * len(part)
        # The weight enters as the gradient of the loss, which spares an operator forwards and one backwards.
        weight = torch.tensor(len(part) * factor, device=self._device)
        if self._counted is not None:
            count = self._module.count
            assert count is not None
            weight = (count * factor).to(loss.dtype)
            self._counted = self._counted + count
            # A mean over nothing is no number.
            summed = torch.where(count > 0, loss.detach().double() * count, 0.0)
        torch.autograd.backward(loss, weight)
        return summed

    def _send(self, part: Part) -> None:
        if self._computed is None:  # backward goes on
            is_last = part.start == 0
            if is_last or self._pace.waits:
                self._pace.reach(1.0 if is_last else FORWARD + (1 - FORWARD) * part.done)
            if is_last:
                self._computed = self._stopwatch.mark()
        buffer = self.flat[part.start : part.stop]
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

    def _count_all(self, counted: Tensor) -> float:
        """What the losses of the step are means over, of all workers; never 0."""
        total = counted.to("cpu")
        if not self._is_alone and dist.is_initialized():
            dist.all_reduce(total)
        return float(total) or 1.0


def all_finite(flat: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether no worker's part of a gradient is NaN or infinite; the same on all of them.

    Args:
        flat: this worker's part.
        group: of the workers; None: all.
    """
    finite = torch.isfinite(flat).all().to("cpu", torch.float32)
    if dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
    return bool(finite)
