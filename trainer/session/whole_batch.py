"""What depends on the whole batch, of which each worker has a part: gathered rows, and the statistics of BatchNorm.

The loss of the batch is  L = sum_i w_i L_i  over the workers: L_i what worker i computes, w_i how much its gradient
counts. A session multiplies the gradients that worker j made with w_j when it sums them. What the rows f_j of worker j
do to the losses of all workers therefore comes back to it as

    (1 / w_j)  sum_i  w_i dL_i / df_j

and the sum is the gradient of L, whether each worker computes the loss of its own samples against the rows of all, or
all compute the same loss of the whole batch. Batch statistics (Ioffe & Szegedy 2015) are means over all rows, so that
their gradients are sums over all rows in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hetopt.core.errors import BadInput
from hetopt.trainer.session.batches import Part

_SUMMED_AS = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.uint8}


class WholeBatch:
    """One worker's end, with connections of its own: gradients may travel meanwhile.

    Args:
        rank: this worker's.
        watched: around what all workers do together.

    Attributes:
        part: of the batch at hand; None: none was given yet.
        waited_s: for other workers, until `take_waited_s`.
    """

    def __init__(self, rank: int, watched: Callable[[], Any], *, audits: bool) -> None:
        self._rank = rank
        self._watched = watched
        self._audits = audits
        self._group: dist.ProcessGroup | None = None
        self._sharing: dist.ProcessGroup | None = None  # all but the leader, who computes audited batches alone
        self._weigh: Callable[[], float] | None = None
        self._norms: list[_BatchNorm] = []
        self.part: Part | None = None
        self.waited_s = 0.0

    def open(self) -> None:
        """Connect, once; all workers do."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
            if self._audits:
                self._sharing = dist.new_group(list(range(1, dist.get_world_size())), backend="gloo")

    @property
    def counts(self) -> bool:
        """Return whether this worker's rows count: one without a share of a batch computes some for nothing."""
        return self.part is None or self.part.samples > 0

    def close(self) -> None:
        """Leave; BatchNorm is again what it was."""
        for norm in self._norms:
            vars(norm).pop("forward", None)
        self._norms = []
        for group in (self._sharing, self._group):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._group = self._sharing = None

    @property
    def normalises(self) -> bool:
        """Whether BatchNorm layers normalise by the whole batch."""
        return bool(self._norms)

    @property
    def is_open(self) -> bool:
        """Whether the workers are connected."""
        return self._group is not None

    @contextmanager
    def backward(self, weigh: Callable[[], float]) -> Iterator[None]:
        """A backward pass runs inside, of a loss that counts so much."""
        self._weigh = weigh
        try:
            yield
        finally:
            self._weigh = None

    @property
    def weight(self) -> float:
        """Of this worker's loss in that of the batch, as a backward pass runs.

        Raises:
            BadInput: nobody knows.
        """
        if self._weigh is None:
            raise BadInput(
                "A gradient of rows of the whole batch was asked for before anybody knows how much each worker's loss "
                "counts.",
                hint="call run.backward(loss) in place of loss.backward()",
            )
        begun_s = time.perf_counter()
        weight = self._weigh()
        self.waited_s += time.perf_counter() - begun_s
        return weight

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all workers; changes the tensor where it is on the CPU."""
        is_audit = self.part is not None and self.part.is_audit
        if is_audit and self._rank == 0:
            return tensor
        begun_s = time.perf_counter()
        own = tensor.cpu()
        with self._watched():
            dist.all_reduce(own, group=self._sharing if is_audit else self._group)
        self.waited_s += time.perf_counter() - begun_s
        return own.to(tensor.device)

    def take_waited_s(self) -> float:
        """How long this worker has waited for others since this was last called."""
        waited_s, self.waited_s = self.waited_s, 0.0
        return waited_s

    def rows(self, own: Tensor, part: Part) -> Tensor:
        """The rows of all workers, in the order of the batch.

        Args:
            own: a row for each sample of this worker's part.
            part: of the batch.

        Raises:
            BadInput: it has another number of rows.
        """
        if not own.dim() or len(own) != part.rows:
            raise BadInput(
                f"run.gather takes a row for each sample of this worker's part, which has {part.rows}, and got "
                f"{tuple(own.shape)}.",
                hint="gather each view of the samples by itself, before they are put together",
            )
        place = slice(part.first, part.first + part.samples)
        gathered: Tensor = _Rows.apply(own, self, place, part.batch)  # type: ignore[no-untyped-call]  # torch's gap
        return gathered

    def synchronize(self, modules: Iterable[nn.Module]) -> None:
        """BatchNorm layers among these normalise by the whole batch from here on, while they are trained."""
        self.open()
        for one in modules:
            if isinstance(one, _BatchNorm):
                # A method of the layer: a copy of it (an average of weights) has its own.
                one.forward = MethodType(_Normalised(self), one)  # type: ignore[method-assign]
                self._norms.append(one)


class _Rows(torch.autograd.Function):
    """Rows of all workers; every row is written by one of them, and adding zeros rounds nothing."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, whole: WholeBatch, place: slice, batch: int) -> Tensor:
        ctx.whole, ctx.place, ctx.shape = whole, place, own.shape
        wide = own.to(_SUMMED_AS.get(own.dtype, own.dtype))
        rows = wide.new_zeros((batch, *own.shape[1:]))
        rows[place] = wide[: place.stop - place.start]
        return whole.sum(rows).to(own.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weight = ctx.whole.weight
        summed = ctx.whole.sum(weight * gradient.float() if gradient.dtype != torch.float64 else weight * gradient)
        own = gradient.new_zeros(ctx.shape)
        if weight:
            own[: ctx.place.stop - ctx.place.start] = (summed[ctx.place] / weight).to(own.dtype)
        return own, None, None, None


class _Normalised:
    """The forward pass of a BatchNorm layer over all workers.

    Args:
        whole: of the session.
    """

    def __init__(self, whole: WholeBatch) -> None:
        self._whole = whole

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's gap
    def __call__(self, norm: _BatchNorm, x: Tensor) -> Tensor:
        if not (norm.training and self._whole.is_open):
            return type(norm).forward(norm, x)
        if norm.num_features != x.shape[1]:
            raise BadInput(f"A BatchNorm of {norm.num_features} features got {x.shape[1]}.", hint="see the model")
        mean, variance, count = self._statistics(x)
        if norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None:
            with torch.no_grad():
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.add_(1)
                rate = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked or 1)
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), rate)
                norm.running_var.lerp_((variance * (count / max(1.0, count - 1))).to(norm.running_var.dtype), rate)
        spread = (variance + norm.eps).rsqrt()
        normalised: Tensor = _Statistics.apply(x, mean, spread, count, self._whole)  # type: ignore[no-untyped-call]
        if norm.affine:
            shape = (1, -1, *[1] * (x.dim() - 2))
            normalised = normalised * norm.weight.view(shape) + norm.bias.view(shape)
        return normalised.to(x.dtype)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mean and variance of each feature over the whole batch, and of how many values; in float64 on the way."""
        with torch.no_grad():
            count = float(x.numel() // x.shape[1]) * self._whole.counts
            wide = x if x.dtype == torch.float64 else x.float()
            variance, mean = torch.var_mean(wide, _without_features(x), unbiased=False)
            variance, mean = variance.double(), mean.double()
            told = torch.cat([count * mean, count * (variance + mean.square()), mean.new_tensor([count])])
            total = self._whole.sum(told if self._whole.counts else torch.zeros_like(told))
            mean, square = (total[:-1] / total[-1]).chunk(2)
            return mean, (square - mean.square()).clamp(min=0), float(total[-1])


class _Statistics(torch.autograd.Function):
    """(x - mean) spread, where mean and spread depend on the rows of all workers.

    With y the result and g_i the derivative of L_i by it, of N rows in all workers:

        dL/dx = spread (w g - sum_i w_i sum(g_i) / N - y sum_i w_i sum(g_i y_i) / N)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, spread: Tensor, count: float, whole: WholeBatch) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        wide = x if x.dtype == torch.float64 else x.float()
        spread = spread.to(wide.dtype).view(shape)
        result = (wide - mean.to(wide.dtype).view(shape)) * spread
        ctx.save_for_backward(result, spread)
        ctx.count, ctx.whole, ctx.dtype = count, whole, x.dtype
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        result, spread = ctx.saved_tensors
        weight, dims = ctx.whole.weight, _without_features(gradient)
        sums = torch.cat([gradient.sum(dims), (gradient * result).sum(dims)]).double()
        summed = ctx.whole.sum(weight * sums if weight else torch.zeros_like(sums))
        if not weight:
            return torch.zeros_like(gradient, dtype=ctx.dtype), None, None, None, None
        of_all, along = ((one / (ctx.count * weight)).to(gradient.dtype).view(spread.shape) for one in summed.chunk(2))
        return (spread * (gradient - of_all - result * along)).to(ctx.dtype), None, None, None, None


def _without_features(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
