"""Sums over the whole batch, of which each worker has a part: gathered rows, and the statistics of BatchNorm.

The loss of the batch is  L = sum_i w_i L_i  over the workers: L_i what worker i computes, w_i how much its gradient
counts. A session multiplies the gradients that worker j made with w_j when it sums them. What a tensor f_j of worker j,
of which the workers share the sum, does to the losses of all workers therefore comes back to it as

    (1 / w_j)  sum_i  w_i dL_i / df_j

and the sum of gradients is that of L, whether each worker computes the loss of its own samples against the rows of all,
or all compute the same loss of the whole batch. Rows are a sum to which every worker adds its own, and zeros elsewhere;
the mean and variance of a batch (Ioffe & Szegedy 2015) are sums over rows, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hetopt.core.errors import BadInput
from hetopt.trainer.script.batches import Part


class WholeBatch:
    """The sums of a worker with the others over the whole batch, by process groups beside that of the gradients.

    Args:
        rank: this worker's.
        watched: returns a context for what all workers do together.
        audits: whether there are batches that the leader computes whole, and the others in shares.

    Attributes:
        part: part of the batch at hand; None: none was given yet.
        weight: weight of this worker's loss in that of the batch, while a backward pass runs; None: not known.
        waited_s: seconds of the step under way spent waiting for other workers.
        groups: process groups of all workers and, with ``audits``, of all but the leader; empty: none was opened yet.
    """

    def __init__(self, rank: int, watched: Callable[[], Any], *, audits: bool) -> None:
        self._rank, self._watched, self._audits = rank, watched, audits
        self.groups: list[dist.ProcessGroup] = []
        self._norms: list[_BatchNorm] = []
        self.part: Part | None = None
        self.weight: float | None = None
        self.waited_s = 0.0

    def open(self) -> None:
        """Create the process groups with the other workers, unless they exist; every worker must call it."""
        if not self.groups:
            self.groups = [dist.new_group(backend="gloo")]
            if self._audits:
                self.groups.append(dist.new_group(list(range(1, dist.get_world_size())), backend="gloo"))

    def close(self) -> None:
        """Destroy the process groups, and give BatchNorm layers their own forward pass back.

        Do nothing where there are none.
        """
        for norm in self._norms:
            vars(norm).pop("forward", None)
        for group in self.groups if dist.is_initialized() else ():
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        self._norms, self.groups = [], []

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all workers, a new one, who must all call it; `open` must have been called.

        In an audit the leader gets its own tensor back, as it computes the whole batch, and the others sum theirs
        without it.
        """
        is_audit = self.part is not None and self.part.is_audit
        if is_audit and self._rank == 0:
            return tensor
        begun_s = time.perf_counter()
        summed = tensor.detach().cpu().clone()
        with self._watched():
            dist.all_reduce(summed, group=self.groups[is_audit])
        self.waited_s += time.perf_counter() - begun_s
        return summed.to(tensor.device)

    def rows(self, local: Tensor, part: Part) -> Tensor:
        """Return all workers' rows, [batch, ...] in its order, differentiable; every worker must call it.

        Args:
            local: [``part.rows``, ...], a row for each sample that this worker computes.
            part: part of the batch.

        Raises:
            BadInput: ``local`` has another number of rows, or no dimension.
        """
        if not local.dim() or len(local) != part.rows:
            raise BadInput(
                f"run.gather takes a row for each sample of this worker's part, which has {part.rows}, and got "
                f"{tuple(local.shape)}.",
                hint="gather each view of the samples by itself, before they are put together",
            )
        wide = (
            local.dtype if local.dtype == torch.float64 else torch.float32 if local.is_floating_point() else torch.int64
        )
        places = torch.arange(part.first, part.first + part.samples, device=local.device)
        empty = local.new_zeros((part.batch, *local.shape[1:]), dtype=wide)
        rows: Tensor = _Sum.apply(empty.index_copy(0, places, local[: part.samples].to(wide)), self)  # type: ignore[no-untyped-call]  # torch's gap
        return rows.to(local.dtype)

    def synchronize(self, modules: Iterable[nn.Module]) -> None:
        """Make BatchNorm layers among modules normalise by the whole batch in training; every worker must call it.

        Their forward pass is replaced until `close`, and running statistics are those of the whole batch. In evaluation
        mode they are as before.
        """
        self.open()
        for module in modules:
            if isinstance(module, _BatchNorm):
                # A method of the layer: a copy of it (an average of weights) has its own.
                module.forward = MethodType(self._normalise, module)  # type: ignore[method-assign]
                self._norms.append(module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's gap
    def _normalise(self, norm: _BatchNorm, x: Tensor) -> Tensor:
        """Return a BatchNorm layer's output, normalised by the samples of all workers; every worker must call it.

        Running statistics are updated by the whole batch. In evaluation mode the layer's own forward pass is used.
        """
        if not (norm.training and self.groups):
            return type(norm).forward(norm, x)
        part = self.part
        counts = part is None or part.samples > 0  # a worker without a share computes some rows for nothing
        wide = x if x.dtype == torch.float64 else x.float()
        dims, shape = [dim for dim in range(x.dim()) if dim != 1], (1, -1, *[1] * (x.dim() - 2))
        variance, mean = (moment.double() for moment in torch.var_mean(wide, dims, unbiased=False))
        sums = torch.cat([mean, variance + mean.square(), mean.new_ones(1)]) * (x.numel() // x.shape[1])
        total: Tensor = _Sum.apply(sums if counts else 0 * sums, self)  # type: ignore[no-untyped-call]  # torch's gap
        mean, square = (total[:-1] / total[-1]).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        if norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None:
            with torch.no_grad():
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.add_(1)
                rate = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked or 1)
                count = float(total[-1])
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), rate)
                norm.running_var.lerp_((variance * (count / max(1.0, count - 1))).to(norm.running_var.dtype), rate)
        spread = (variance + norm.eps).rsqrt()
        result = (wide - mean.to(wide.dtype).view(shape)) * spread.to(wide.dtype).view(shape)
        if norm.affine:
            result = result * norm.weight.view(shape) + norm.bias.view(shape)
        return result.to(x.dtype)


class _Sum(torch.autograd.Function):
    """The differentiable sum over all workers of a tensor that each of them has a part of."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, whole: WholeBatch) -> Tensor:
        ctx.whole = whole
        return whole.sum(summand)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient summed over all workers, each weighted as its loss.

        BadInput: weights are not known yet.
        """
        weight = ctx.whole.weight
        if weight is None:
            raise BadInput(
                "A gradient of rows of the whole batch was asked for before anybody knows how much each worker's loss "
                "counts.",
                hint="call run.backward(loss) in place of loss.backward()",
            )
        summed = ctx.whole.sum(gradient * weight if weight else torch.zeros_like(gradient))
        return (summed / weight if weight else torch.zeros_like(gradient)), None
