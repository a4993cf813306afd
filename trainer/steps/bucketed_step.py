"""The step that sums gradients bucket by bucket while backward still runs, hosted by DistributedDataParallel."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the annotations of its hook with types.

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hetopt.core.errors import RunFailed
from hetopt.trainer.comm.buckets import BucketExchange
from hetopt.trainer.comm.compressor import Resumable
from hetopt.trainer.comm.error_feedback import NoResidual
from hetopt.trainer.comm.peers import Guard
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.steps.local_gradient import DoesNotFit, LocalGradient
from hetopt.trainer.steps.noise_groups import NoiseSums, square_norm
from hetopt.trainer.steps.slowdown import FORWARD, Slowdown
from hetopt.trainer.steps.step import LossModule, Reader, StepTrace, trainable_parameters
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch

_FEW = 2
"""Samples that buckets are laid out with: as few as BatchNorm can normalise, for memory may be scarce."""


class Sent(Protocol):
    """Something on its way to the other workers."""

    def wait(self) -> object:
        """Return when it is there."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bucket:
    """Gradients that travel together, one after the other, and whose they are."""

    buffer: Tensor
    parameters: tuple[Tensor, ...]


class BucketedStep:
    """Sums gradients bucket by bucket under backward, hosted by DistributedDataParallel.

    Needs a process group, and a model that uses all of its trainable parameters at every step. `warm_up` comes first,
    on all ranks.

    A micro-batch larger than any before may not fit, and once a bucket is sent there is no way back. Such a step is
    computed as a whole and only then sent, bucket by bucket in the usual order: the other workers, who may send
    theirs under backward, see no difference.

    Args:
        module: the model with its loss.
        reader: of the samples.
        stopwatch: of the device.
        pace: how fast this worker may be.
        noise: whether the gradients of the workers are measured for their noise.
        exchange: compresses buckets; None: they are summed as they are.
        way: name of what becomes of buckets, for the traces.
        bucket_bytes: that a bucket holds; None: what DistributedDataParallel takes.
        guard: names who is lost when the workers do not all come.
    """

    def __init__(
        self,
        *,
        module: LossModule,
        reader: Reader,
        stopwatch: Stopwatch,
        pace: Slowdown,
        noise: bool = False,
        exchange: BucketExchange | None = None,
        way: str = "",
        bucket_bytes: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._parameters = trainable_parameters(module.model)
        self._device = self._parameters[0].device
        self._devices: list[int | str | torch.device] = [self._device] if self._device.type == "cuda" else []
        self._stopwatch = stopwatch
        self._pace = pace
        self._noise = noise
        self._exchange = exchange
        self.way = way
        self._guard = guard if guard is not None else Guard(way)
        self._computed: Mark = stopwatch.mark()
        self._buckets: list[Bucket] = []
        self._sent: list[Sent] = []
        self._squares: list[Tensor] = []
        self._expected = 0  # buckets of a step; 0: they are being laid out, and no pace is kept
        self._is_laying_out = True
        self._views: list[Tensor] = []  # of the buckets: where the gradients are
        self._parallel = DistributedDataParallel(
            module,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / 2**20,
        )
        # Weakly: the reducer's hold on its hook is one that no collector sees. It would keep the group's connections
        # and threads when the workers have come together in another one.
        method = weakref.WeakMethod(self._watch_bucket if pace.waits else self._send_bucket)

        def send(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            bound = method()
            assert bound is not None
            return bound(state, bucket)

        self._parallel.register_comm_hook(None, send)
        self._local = LocalGradient(model=module.model, forward=self._parallel, reader=reader, device=self._device)

    @property
    def residual(self) -> Resumable:
        """Nothing where all of the gradient is sent."""
        return NoResidual() if self._exchange is None else self._exchange

    def compress_by(self, exchange: BucketExchange | None, way: str) -> None:
        """Exchange buckets like this from the next step on; None: sum them as they are. All workers the same."""
        self._exchange = exchange
        self.way = way

    @property
    def buckets(self) -> int:
        """How many there are, once they are laid out."""
        return len(self._buckets)

    def warm_up(self, part: MicroBatch) -> None:
        """Compute a micro-batch (see `Step`); the first time, lay out the buckets with some of its samples.

        DistributedDataParallel lays its buckets out anew after the first backward pass, and sums round differently in
        another layout. Done here, a resumed run has the same layout from its first step as one that never stopped. The
        second pass shows the buckets that stay.
        """
        if not self._buckets:
            self._lay_out(MicroBatch(epoch=part.epoch, indices=part.indices[:_FEW]))
        self._local.try_out(part, around=self._unsent)

    def _lay_out(self, few: MicroBatch) -> None:
        for _ in range(2):
            self._sent, self._squares, self._buckets = [], [], []
            try:
                self._local.try_out(few)
            except DoesNotFit as error:
                raise self._lost(error) from None
            self._wait()
        self._is_laying_out = False
        self._views = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        assert len(self._views) == len(self._parameters), "buckets are of models that use all of their parameters"

    def take_gradients(self) -> None:
        """Gradients go into the buckets again, after another form of step has led them elsewhere."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def run(
        self,
        parts: Sequence[MicroBatch],
        global_batch_size: int,
        loss_scale: float | None,
        look_at: Sequence[float] = (),
    ) -> StepTrace:
        """Compute and exchange (see `Step`); there must be at least one micro-batch."""
        assert self._buckets, "warm_up comes first"
        begun = self._stopwatch.mark()
        samples = sum(map(len, parts))
        self._pace.begin(samples)
        # All at once: to ask each module for its parameters takes longer than to clear them, where they are many.
        torch._foreach_zero_(self._views)
        self._sent, self._squares = [], []
        self._expected = len(self._buckets)  # as many as in the step before
        factor = (loss_scale or 1.0) / global_batch_size
        if max(map(len, parts)) > self._local.proven:
            loss_sum = self._local.run(parts, factor, around=self._unsent)
            self._pace.reach(1.0)
            self._computed = self._stopwatch.mark()
            buckets = tuple(self._buckets)
            for bucket in buckets:
                self._send(bucket, is_last=bucket is buckets[-1])
        else:
            loss_sum = self._run_overlapped(parts, factor)
        self._wait()
        finite = True
        if loss_scale is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            # An overflow anywhere is in the sum, which is the same everywhere.
            finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
            torch._foreach_mul_(gradients, 1 / loss_scale)  # pyright: ignore[reportPrivateImportUsage]  # public in use
        summed = self._stopwatch.mark()
        return StepTrace(
            loss_sum=loss_sum,
            start=begun,
            backward_end=self._computed,
            reduce_end=summed,
            micro_batches=len(parts),
            finite=finite,
            noise=self._noise_sums(factor, samples) if self._noise and finite else None,
            way=self.way,
            exchange=None if self._exchange is None else self._exchange.take_stats(),
            under_backward=True,
        )

    def _run_overlapped(self, parts: Sequence[MicroBatch], factor: float) -> Tensor:
        """Compute; the last backward sends, and what the others left in .grad goes with it."""
        last = parts[-1]

        def around(part: MicroBatch) -> AbstractContextManager[object]:
            return nullcontext() if part is last else self._unsent(part)

        try:
            return self._local.run(parts, factor, around=None if len(parts) == 1 else around)
        except DoesNotFit as error:
            if error.part is last and error.in_backward:
                raise self._lost(error) from None
            raise

    def _lost(self, error: DoesNotFit) -> RunFailed:
        return RunFailed(
            f"worker {dist.get_rank()} ran out of memory over {error.samples} samples that fitted before, while their "
            "gradient was being sent.",
            hint="set a smaller max_local_batch_size for this worker",
        )

    def _unsent(self, part: MicroBatch) -> AbstractContextManager[object]:
        return self._parallel.no_sync()

    def _wait(self) -> None:
        with self._guard.watch():
            for work in self._sent:
                work.wait()

    def _noise_sums(self, factor: float, samples: int) -> NoiseSums:
        local = torch.stack(self._squares).sum() / (factor**2 * samples)
        buffers = [bucket.buffer for bucket in self._buckets]
        return NoiseSums(groups=1, weighted_square_norm=local, mean_square_norm=square_norm(buffers))

    def _send(self, bucket: Bucket, *, is_last: bool) -> None:
        if self._noise:
            self._squares.append(square_norm([bucket.buffer]))
        if not self._sent:
            self._buckets = []
        self._buckets.append(bucket)
        # Gradients that nobody wants must not enter what the exchange remembers.
        if self._exchange is None or self._is_laying_out:
            work = dist.all_reduce(bucket.buffer, async_op=True)
            assert work is not None  # as for every asynchronous collective of a member of the group
            self._sent.append(work)
        else:
            self._sent.append(self._exchange.sum_bucket(bucket.parameters, bucket.buffer, last=is_last))

    # The type exists at run time and is compared with; torch's stubs do not know it.
    def _send_bucket(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Send a bucket.

        The sum comes to lie in the bucket itself, and the step waits for it when backward is over. So there is nothing
        to tell DistributedDataParallel later on, and no Python runs in the threads that communicate.
        """
        buffer = bucket.buffer()
        if bucket.is_last():
            self._computed = self._stopwatch.mark()
        self._send(Bucket(buffer=buffer, parameters=tuple(bucket.parameters())), is_last=bucket.is_last())
        sent: torch.futures.Future[Tensor] = torch.futures.Future(devices=self._devices)
        sent.set_result(buffer)
        return sent

    def _watch_bucket(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Send a bucket when the pace allows; every bucket is an equal part of backward."""
        if bucket.is_last() and self._expected:
            self._pace.reach(1.0)
        elif self._expected:
            ready = min(len(self._sent) + 1, self._expected - 1)
            self._pace.reach(FORWARD + (1 - FORWARD) * ready / self._expected)
        return self._send_bucket(state, bucket)
