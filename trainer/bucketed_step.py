"""The step that sums dense gradients bucket by bucket while backward still runs, hosted by DistributedDataParallel."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the annotations of its hook with types.

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hetopt.trainer.exchange.memory import Memory, NoMemory
from hetopt.trainer.local_batch import BatchReader, MicroBatch
from hetopt.trainer.step import LossModule, StepTrace, trainable_parameters
from hetopt.trainer.stopwatch import Mark, Stopwatch


class BucketedStep:
    """Sums dense gradients bucket by bucket under backward, hosted by DistributedDataParallel.

    Needs a process group, no pace, and a model that uses all of its trainable parameters at every step.
    """

    def __init__(self, *, module: LossModule, reader: BatchReader, stopwatch: Stopwatch) -> None:
        self._parameters = trainable_parameters(module.model)
        self._reader = reader
        self._stopwatch = stopwatch
        self._memory = NoMemory()
        self._computed: Mark = stopwatch.mark()
        self._parallel = DistributedDataParallel(module, forward_sync_buffers=False, gradient_as_bucket_view=True)
        self._parallel.register_comm_hook(None, self._sum_bucket)

    @property
    def memory(self) -> Memory:
        """Nothing: all of the gradient is sent."""
        return self._memory

    def run(self, parts: Sequence[MicroBatch], global_batch_size: int, loss_scale: float | None) -> StepTrace:
        """Compute and exchange (see `Step`); there must be at least one micro-batch."""
        begun = self._stopwatch.mark()
        self._parallel.zero_grad(set_to_none=False)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        for part in parts:
            # Only the last backward exchanges; what the others left in .grad goes with it.
            exchange: AbstractContextManager[object] = nullcontext() if part is parts[-1] else self._parallel.no_sync()
            with exchange:
                loss = self._parallel(self._reader.read(part))
                (loss * (len(part) / global_batch_size * (loss_scale or 1.0))).backward()
            loss_sum += loss.detach() * len(part)
        finite = True
        if loss_scale is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            # An overflow anywhere is in the sum, which is the same everywhere.
            finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
            torch._foreach_mul_(gradients, 1 / loss_scale)
        return StepTrace(
            loss_sum=loss_sum, begun=begun, computed=self._computed, summed=self._stopwatch.mark(), finite=finite
        )

    # The type exists at run time and is compared with; torch's stubs do not know it.
    def _sum_bucket(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        if bucket.is_last():
            self._computed = self._stopwatch.mark()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None  # as for every asynchronous collective of a member of the group
        summed: torch.futures.Future[Tensor] = work.get_future().then(_first_tensor)
        return summed


def _first_tensor(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
    return reduced.value()[0]
