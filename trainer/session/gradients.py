"""The gradient of an optimizer's parameters, weighted by this worker's part of the batch and summed over all workers.

Every worker's gradient times its weight goes into the sum before anything is compressed: whatever the shares, the dense
result is the gradient of one machine with the whole batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hetopt.core.comm.cost import DIRECT_BYTES
from hetopt.core.comm.options import way_name
from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.comm.exchange import DenseBuckets, ExchangeStats
from hetopt.trainer.comm.vectors import GradientNorms
from hetopt.trainer.engine import parameters_of
from hetopt.trainer.script.batches import AuditResult
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig
from hetopt.trainer.steps.step import Buckets, Part, all_finite

Named: TypeAlias = Sequence[tuple[str, nn.Parameter]]

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class GradientSum:
    """The summation of an optimizer's gradients over all workers, weighted, which leaves the sum in ``parameter.grad``.

    A parameter that no worker used in a step is left without a gradient, as in the script. One whose gradient is sparse
    gets a sparse one. A gradient that is there before a backward pass counts as it is: this worker's own, where it
    waits to be summed; else one of all workers, of which each adds an equal part.

    Args:
        named: the optimizer's parameters, as (name, parameter), as `check_parameters` wants them.
        make_exchange: returns the exchange that sums gradients of these shapes.
        world_size: number of workers.
        overlaps: whether all workers can sum a dense gradient while backward makes it.
        watched: returns a context for what all workers do together.

    Attributes:
        exchange: how gradients travel.
        room: number of values that the whole gradient takes in a message (see `pack`); 0: it is too large for that, on
            a GPU, or compressed.
        stats: cost of the last exchange; None: there was none, as the gradient was not finite.
        was_hidden: whether that exchange was under backward.
        norms: squared norms of a step's gradient, where they are wanted.
        has_arrived: whether the sum over all workers came in a message (see `unpack`).
        is_pending: whether ``.grad`` holds this worker's own gradient of backward passes that are not summed yet.

    Raises:
        BadInput: the parameters are float64, and the exchange compresses float32.
    """

    def __init__(
        self,
        named: Named,
        make_exchange: Callable[[Sequence[tuple[int, ...]]], ExchangeConfig],
        *,
        world_size: int,
        overlaps: bool = False,
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._make_exchange, self._world_size, self._overlaps = make_exchange, world_size, overlaps
        self._watched = watched
        self._sharers = world_size  # of a gradient of all workers that is there already
        self._buckets: Buckets | None = None
        self._dense = DenseBuckets()
        self.is_pending = self.was_hidden = self.has_arrived = False
        self.stats: ExchangeStats | None = None
        self._audits: list[Tensor] = []  # the sum of what audits found, where random numbers are drawn
        self._take(named)

    def _take(self, named: Named) -> None:
        """Take over parameters: make buffers, marks, views and the exchange for them, and forget the ones before.

        Raises:
            BadInput: a parameter is float64, and the compression is of float32 gradients.
        """
        self.parameters = [parameter for _, parameter in named]
        self.close()
        reals = [
            torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
            for parameter in self.parameters
        ]
        is_wide = any(torch.finfo(parameter.dtype).bits > 32 for parameter in self.parameters)
        device = reals[0].device if reals else torch.device("cpu")
        # One number for each parameter travels ahead, and one of all; views of complex numbers begin at an even place.
        self._ahead = -(-(len(reals) + 1) // 2) * 2
        sizes = [self._ahead, *(real.numel() for real in reals)]
        self.norms = GradientNorms()
        self._whole = torch.zeros(sum(sizes), device=device, dtype=torch.float64 if is_wide else torch.float32)
        marks, *parts = torch.split(self._whole, sizes)
        self._marks, self._flat = marks[: len(reals) + 1], self._whole[self._ahead :]
        self._parts = parts
        views = [part.view(real.shape) for part, real in zip(parts, reals, strict=True)]
        self._views = [
            torch.view_as_complex(view) if parameter.is_complex() else view
            for view, parameter in zip(views, self.parameters, strict=True)
        ]
        self._before: list[Tensor | None] = [None] * len(reals)
        self._used, self._sparse = [False] * len(reals), [False] * len(reals)
        exchange = self._make_exchange([tuple(real.shape) for real in reals])
        if is_wide and not exchange.is_dense:
            raise BadInput(
                f"The model has float64 parameters, and {way_name(exchange.compression)} compresses float32 gradients.",
                hint="leave out compression, or make the model float32",
            )
        self.exchange = replace(exchange, dense_bytes=self._flat.nbytes)
        if self._overlaps and exchange.is_dense and not is_wide and reals:
            self._buckets = Buckets(self.parameters, self._take_part)
        fits = 0 < (self._world_size - 1) * self._flat.nbytes <= DIRECT_BYTES
        self.room = len(self._whole) if fits and exchange.is_dense and device.type == "cpu" else 0

    def close(self) -> None:
        """Remove the hooks that follow backward passes; do nothing where there are none."""
        if self._buckets is not None:
            self._buckets.close()
        self._buckets = None

    def follow(self, named: Named) -> bool:
        """Take over the parameters to sum, as (name, parameter); return whether they differ from the ones before.

        Raises:
            RunFailed: the parameters differ, and compression keeps a residual of the old ones.
        """
        new = [parameter for _, parameter in named]
        if len(new) == len(self.parameters) and all(map(operator.is_, new, self.parameters)):
            return False
        if not self.exchange.is_dense:
            raise RunFailed(
                "the parameters that are trained have changed, and the residual of compression belongs to those of "
                "before.",
                hint="leave out compression, or begin the session once all parameters are trained",
            )
        self._take(named)
        return True

    def begin(self, sharers: int | None = None, *, wants_norms: bool = False) -> None:
        """Move ``.grad`` aside before backward, so that `hold` or `sum` can add it to what backward makes.

        Args:
            sharers: number of workers whose gradients are added up, fewer in an audit; None: all. Of a gradient that
                they have in common already, each adds ``1 / sharers``.
            wants_norms: whether to measure the norms of the gradient.
        """
        self._sharers = sharers or self._world_size
        self.norms.ask(wants_norms)
        self._before = [parameter.grad for parameter in self.parameters]
        has_any = any(gradient is not None for gradient in self._before)
        self.is_pending = self.is_pending and has_any
        for parameter in self.parameters if has_any else ():
            parameter.grad = None

    @property
    def is_clear(self) -> bool:
        """True if `begin` found no ``.grad`` of these parameters to move aside."""
        return self._before.count(None) == len(self._before)

    @property
    def is_made(self) -> bool:
        """True if any of these parameters has a ``.grad`` now."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def put_back(self) -> None:
        """Put the gradients that `begin` moved aside back into ``.grad``, after a backward pass of other parameters."""
        for parameter, gradient in zip(self.parameters, self._before, strict=True):
            parameter.grad = gradient

    def hold(self, weight: float) -> None:
        """Multiply ``.grad`` by ``weight``, and add to it what `begin` moved aside; a later `sum` sends it."""
        for index, parameter in enumerate(self.parameters):
            parameter.grad = self._summand(index, weight)
        self.is_pending = True

    def _summand(self, index: int, weight: float) -> Tensor | None:
        """Return what this worker adds to a parameter's summed gradient; None: nothing.

        This is ``.grad`` times ``weight``, and what `begin` moved aside: held gradients as they are, one that all
        workers have in common divided by the number of sharers.
        """
        gradient, before = self.parameters[index].grad, self._before[index]
        summand = None if gradient is None or not weight else gradient.detach() * weight
        if before is None:
            return summand
        before = before if self.is_pending else before / self._sharers
        if summand is None:
            return before.clone()
        return before + summand if before.layout == torch.strided else summand + before  # as torch adds sparse ones

    def _put(self, weight: float, first: int = 0, last: int | None = None) -> None:
        """Copy this worker's weighted gradients of parameters ``first`` to ``last``, and held ones, into the buffer.

        Args:
            weight: factor on ``.grad``; held gradients have theirs already.
            first: index of the first parameter.
            last: index behind the last; None: all that follow.
        """
        last = len(self.parameters) if last is None else last
        gradients, views = [parameter.grad for parameter in self.parameters[first:last]], self._views[first:last]
        dense = [
            gradient.detach() for gradient in gradients if gradient is not None and gradient.layout == torch.strided
        ]
        before = self._before[first:last]
        if weight and len(dense) == len(views) and before.count(None) == len(views):
            torch._foreach_copy_(views, dense)
            if weight != 1:
                torch._foreach_mul_(views, weight)
            self._used[first:last] = [True] * len(views)
            self.norms.add_own(self._parts[first:last], first=last == len(self.parameters))
            return
        for index, (view, gradient) in enumerate(zip(views, gradients, strict=True), start=first):
            summand = self._summand(index, weight)
            self._used[index] = summand is not None
            kinds = [tensor.layout != torch.strided for tensor in (gradient, self._before[index]) if tensor is not None]
            self._sparse[index] = all(kinds) if kinds else self._sparse[index]
            view.copy_(summand.to_dense() if summand is not None else torch.zeros(()))
        self.norms.add_own(self._parts[first:last], first=last == len(self.parameters))

    def expect(self, weigh: Callable[[], float], reach: Callable[[float], None]) -> None:
        """Let the next backward pass sum the gradient, times ``weigh()``, in buckets; do nothing where there are none.

        A part that was sent cannot be taken back: where a gradient is made twice, all workers sum anew.

        Args:
            weigh: returns the weight of this worker's gradient; called when the first part is made, as it may wait.
            reach: waits until a worker that is slowed down would have made this part of the gradient (1 = all).
        """
        if self._buckets is not None:
            self._weigh, self._reach = weigh, reach
            self._buckets.arm()

    def _take_part(self, part: Part) -> None:
        """Copy a bucket of the gradient into the flat buffer and start its all-reduce; the last waits for the marks."""
        if self._buckets is not None and self._buckets.is_armed:
            self._reach(part.done)
        self._put(self._weigh(), part.members.start, part.members.stop)
        if part.start:
            sent = self._whole[self._ahead + part.start : self._ahead + part.stop]
            self._dense.begin(self.parameters, sent, last=False)

    def sum(self, weight: float, scaler: GradScaler | None = None, *, look_at: Sequence[float] = ()) -> None:
        """Sum ``weight`` times ``.grad``, with held gradients, over all workers, in place; every worker must call it.

        Args:
            weight: factor on this worker's gradient; 0: it adds nothing but what is held.
            scaler: whose factor the gradients have. What compression holds back is kept without it, and a gradient
                that is not finite on some worker becomes infinite on all, so that all of them skip the step.
            look_at: compression ratios to measure the kept energy at; empty: none.

        Raises:
            BadInput: workers are about to exchange in different ways.
            HungPeer: another worker did not come in time.
            LostPeer: another worker left in the middle.
        """
        self.was_hidden = self._buckets is not None and self._buckets.is_armed
        if not self.has_arrived:
            with self._watched():
                if self._buckets is not None and self.was_hidden:
                    self._sum_in_buckets(self._buckets, weight)
                else:
                    self._put(weight)
                    self._mark()
                    work = dist.all_reduce(self._marks, async_op=True) if self._world_size > 1 else None
                    self._sum_flat(scaler, look_at)
                    if work is not None:
                        work.wait()
        self._give()
        if scaler is not None:
            self.norms.divide(scaler.get_scale())

    def _sum_in_buckets(self, buckets: Buckets, weight: float) -> None:
        """Wait for the all-reduces of buckets; where a worker made a gradient twice, sum all of it again."""
        buckets.finish()
        self._mark(spoilt=buckets.is_repeated)
        self._dense.begin(self.parameters, self._whole[: self._ahead + buckets.parts[-1].stop], last=True)
        self._dense.wait()
        self.stats = self._sent_dense()
        if self._marks[-1]:  # from now on after backward
            self._overlaps = False
            self.close()
            self.norms.ask(False)
            self._put(weight)
            dist.all_reduce(self._flat)

    def _mark(self, *, spoilt: bool = False) -> None:
        self._marks.copy_(torch.tensor([*self._used, spoilt]))

    def _sent_dense(self, sync_s: float = 0.0) -> ExchangeStats:
        return ExchangeStats(sent_bytes=self._flat.nbytes, sync_s=sync_s)

    def _sum_flat(self, scaler: GradScaler | None, look_at: Sequence[float]) -> None:
        """Sum the flat buffer over all workers, without the scaler's factor where it is compressed.

        Infinite on overflow. ``scaler`` None: gradients have no factor.
        """
        exchange, flat = self.exchange.exchange, self._flat
        assert exchange is not None
        scale = 1.0 if scaler is None or self.exchange.is_dense else scaler.get_scale()
        if flat.dtype == torch.float64:
            self.stats = self._sent_dense()
            if self._world_size > 1:
                dist.all_reduce(flat)
        elif scale == 1 or all_finite(flat.mul_(1 / scale)):
            self.stats = exchange.run(flat, look_at)
            flat.mul_(scale)
        else:
            flat.fill_(torch.inf)
            self.stats = None

    def pack(self, load: Tensor, weight: float) -> None:
        """Write ``weight`` times ``.grad`` into ``load``, the part of a message to all workers; `unpack` reads the sum.

        Args:
            load: [room] of the message.
            weight: weight of this worker's gradient.
        """
        self._put(weight)
        self._mark()
        load.copy_(self._whole)

    def unpack(self, load: Tensor, weights: float, sync_s: float) -> None:
        """Take the sum of all workers' packed gradients, divided by ``weights``; `sum` then leaves it in ``.grad``.

        Args:
            load: [room] of the message: the sum over the workers.
            weights: sum of all workers' weights.
            sync_s: seconds that the message was on its way.
        """
        self._whole.copy_(load)
        self._flat.div_(weights)
        self.norms.divide(weights)
        self.stats, self.has_arrived = self._sent_dense(sync_s), True

    def audit(self, weight: float, *, is_leader: bool, draws: bool) -> AuditResult:
        """Set ``.grad`` to the leader's whole-batch gradient; return how the others' sum differs; all must call it.

        Args:
            weight: weight of this worker's gradient.
            is_leader: whether this worker computed the whole batch.
            draws: whether random numbers were drawn while this worker computed.

        Returns:
            How far the sum of the others' gradients is from the leader's, the same on all workers.
        """
        self._put(weight)
        self._mark(spoilt=draws)
        gradient = self._whole.cpu()
        parts = gradient.clone()
        if is_leader:
            parts[self._ahead :] = 0
        dist.all_reduce(parts)
        dist.broadcast(gradient, 0)
        self._whole.copy_(gradient)
        self._marks.copy_(parts[: len(self._marks)])
        self.stats, self.was_hidden = self._sent_dense(), False
        drawn, flat = bool(self._marks[-1]), gradient[self._ahead :].double()
        self._give()
        return AuditResult.of(flat - parts[self._ahead :], float(flat.norm()), draws=drawn, before=self._audits)

    def _give(self) -> None:
        """Write the summed gradients to ``.grad``, None where no worker had one; forget held gradients."""
        self.norms.add_summed([self._flat])
        marks = self._marks.tolist()
        for parameter, view, used, sparse in zip(self.parameters, self._views, marks, self._sparse, strict=False):
            gradient = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
            parameter.grad = None if not used else _sparse(gradient) if sparse else gradient
        self._before, self.is_pending, self.has_arrived = [None] * len(self.parameters), False, False


def _sparse(dense: Tensor) -> Tensor:
    """Return the rows of a dense gradient that are not zero, as a sparse tensor."""
    rows = dense.reshape(len(dense), -1).ne(0).any(1).nonzero()[:, 0]
    return torch.sparse_coo_tensor(rows[None], dense[rows], dense.shape, is_coalesced=True, check_invariants=False)


def named_parameters(
    optimizer: Optimizer, names: Mapping[int, str] = MappingProxyType({})
) -> list[tuple[str, nn.Parameter]]:
    """Return an optimizer's parameters that require gradients, as (name, parameter), in the order of its groups.

    Args:
        optimizer: optimizer of the parameters.
        names: of parameters, by their ``id``; others are called 'number N of the optimizer', N from 0 among all of its
            own.
    """
    return [
        (names.get(id(parameter)) or f"number {index} of the optimizer", parameter)
        for index, parameter in enumerate(parameters_of(optimizer))
        if parameter.requires_grad
    ]


def check_parameters(named: Named) -> torch.device:
    """Return the device of parameters, (name, parameter) each; raise BadInput if they cannot be trained together.

    Raises:
        BadInput: there are none, one is not single or double precision (real or complex), or they are on several
            devices.
    """
    if not named:
        raise BadInput("The optimizer has no parameters to train.", hint="check requires_grad")
    for name, parameter in named:
        if parameter.dtype not in _DTYPES:
            raise BadInput(
                f"Parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, not float32.",
                hint="keep parameters float32 and compute in torch.autocast",
            )
        if parameter.device != named[0][1].device:
            raise BadInput(
                f"Parameter {name} is on {parameter.device}, others are on {named[0][1].device}.",
                hint="move the whole model to one device before the session begins",
            )
    return named[0][1].device
