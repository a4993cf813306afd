"""The gradient of an optimizer's parameters, weighted by this worker's part of the batch and summed over all workers.

Every worker's gradient times its weight goes into the sum before anything is compressed: whatever the shares, the dense
result is the gradient of one machine with the whole batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.comm.cost import DIRECT_BYTES
from hetopt.core.comm.options import way_name
from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import ExchangeStats, summed
from hetopt.trainer.session.audit import Found
from hetopt.trainer.steps.buckets import Buckets, Part
from hetopt.trainer.steps.fused_step import all_finite
from hetopt.trainer.steps.step_config import ExchangeConfig

Named: TypeAlias = Sequence[tuple[str, nn.Parameter]]
MakeExchange: TypeAlias = Callable[[Sequence[tuple[int, ...]]], ExchangeConfig]
"""Returns the exchange of a gradient, given the shapes of its float32 parameters."""

MOST_NAMED = 3

_FLAGS = 3
"""Numbers that travel for each parameter: whether it has a gradient, a dense one, and one that changed once sent."""

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Scaler(Protocol):
    """What a session needs of a ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """Return the factor on the loss."""
        ...


class FlatGradient:
    """A buffer with a place for the gradient of every parameter.

    Args:
        parameters: whose gradients.
        single: [elements] float32 storage of the float32 ones; None: new.

    Attributes:
        whole: [ahead + elements] float32; ``ahead`` numbers, `_FLAGS` of each parameter, travel before the gradient.
        single: [elements] float32, the gradient in ``whole``.
        double: [elements] float64, of float64 parameters.
        views: [parameters] each in its parameter's shape and type.
        pending: [parameters] own gradients, weighted already, that `put` adds; None: nothing.
        used: [parameters] whether `put` found a gradient.
        dense: [parameters] whether it was a dense one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], single: Tensor | None = None) -> None:
        self._parameters = parameters
        device = parameters[0].device if parameters else torch.device("cpu")
        reals = [torch.view_as_real(one.detach()) if one.is_complex() else one.detach() for one in parameters]
        sizes = {
            wide: [real.numel() for real in reals if (real.dtype == torch.float64) is wide] for wide in (False, True)
        }
        # Views of complex numbers begin at an even place.
        self.ahead = 0 if single is not None else _FLAGS * len(parameters) + len(parameters) % 2
        self.whole = torch.zeros(self.ahead + sum(sizes[False]), device=device) if single is None else single
        self.single = self.whole[self.ahead :]
        self.double = torch.zeros(sum(sizes[True]), device=device, dtype=torch.float64)
        parts = {False: iter(torch.split(self.single, sizes[False])), True: iter(torch.split(self.double, sizes[True]))}
        self.reals = [next(parts[real.dtype == torch.float64]).view(real.shape) for real in reals]
        self.views = [
            torch.view_as_complex(own) if one.is_complex() else own
            for own, one in zip(self.reals, parameters, strict=True)
        ]
        self.pending: list[Tensor | None] = [None] * len(parameters)
        self.used = self.dense = [False] * len(parameters)

    def put(self, weight: float, first: int = 0, last: int | None = None) -> None:
        """Write the gradients in ``.grad`` times ``weight``, and what is pending, to their places.

        Args:
            weight: of this worker; 0 leaves nothing of ``.grad``, whatever is in it.
            first: parameter.
            last: parameter behind the last; None: all of them.
        """
        last = len(self.views) if last is None else last
        gradients = [one.grad for one in self._parameters[first:last]]
        pending = self.pending[first:last]
        dense = [one.detach() for one in gradients if one is not None and one.layout == torch.strided]
        if weight and len(dense) == len(gradients) and not any(one is not None for one in pending):
            torch._foreach_copy_(self.views[first:last], dense)
            if weight != 1:
                torch._foreach_mul_(self.views[first:last], weight)
            self._note(first, [True] * len(dense), [True] * len(dense))
            return
        used, is_dense = [], []
        for view, gradient, before in zip(self.views[first:last], gradients, pending, strict=True):
            own = [before] if before is not None else []
            if weight and gradient is not None:
                own.append(gradient.detach() * weight)
            view.zero_()
            for one in own:
                view.add_(one.to_dense() if one.layout != torch.strided else one)
            used.append(bool(own))
            is_dense.append(any(one.layout == torch.strided for one in own))
        self._note(first, used, is_dense)

    def _note(self, first: int, used: list[bool], dense: list[bool]) -> None:
        last = first + len(used)
        self.used = [*self.used[:first], *used, *self.used[last:]]
        self.dense = [*self.dense[:first], *dense, *self.dense[last:]]


class GradientSum:
    """Replaces ``parameter.grad`` by the sum over all workers.

    A parameter that no worker used in a step is left without a gradient, as in the script. One whose gradient is sparse
    on all workers that used it gets a sparse one.

    Args:
        named: the optimizer's parameters, as `check_parameters` wants them.
        make_exchange: returns what sums them.
        world_size: workers.
        overlaps: whether all workers can sum a dense gradient while backward makes it.

    Attributes:
        exchange: how gradients travel.
        room: float64 numbers that all of a gradient takes in a message (see `pack`); 0: it is not so small, or on a
            GPU, or compressed.
        stats: of the last exchange; None: there was none, as the gradient was not finite.
        was_hidden: whether it was under backward.
        is_pending: whether ``.grad`` holds this worker's own gradient of backward passes that are not summed yet.
    """

    def __init__(self, named: Named, make_exchange: MakeExchange, *, world_size: int, overlaps: bool = False) -> None:
        self._make_exchange = make_exchange
        self._world_size = world_size
        self._overlaps = overlaps
        self._buckets: Buckets | None = None
        self.is_pending = self.was_hidden = False
        self.stats: ExchangeStats | None = None
        self._kept: list[Tensor | None] | None = None  # of sums that the script did not step by yet
        self._audits: list[Tensor] = []  # the sum of what audits found, where random numbers are drawn
        self._take(named)

    def _take(self, named: Named) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.close()
        self._flat = FlatGradient(self.parameters)
        self._packed: tuple[Tensor, FlatGradient, npt.NDArray[np.uint8]] | None = None
        narrow = [one for one in self.parameters if one.dtype in (torch.float32, torch.complex64)]
        shapes = [(*one.shape, 2) if one.is_complex() else tuple(one.shape) for one in narrow]
        exchange = self._make_exchange(shapes)
        wide = self._flat.double.numel()
        if wide and not exchange.is_dense:
            raise BadInput(
                f"The model has float64 parameters, and {way_name(exchange.compression)} compresses float32 gradients.",
                hint="leave out compression, or make the model float32",
            )
        if self._overlaps and exchange.is_dense and not wide and self.parameters:
            self._buckets = Buckets(self.parameters, self._take_part)
        self.exchange = replace(exchange, dense_bytes=exchange.dense_bytes + self._flat.double.nbytes)
        single = self._flat.single
        is_small = (self._world_size - 1) * single.nbytes <= DIRECT_BYTES
        fits = is_small and exchange.is_dense and not wide and single.device.type == "cpu" and self._world_size > 1
        self.room = -(-(single.nbytes + 2 * len(self.parameters)) // 8) if fits else 0

    def close(self) -> None:
        """Look at no backward pass any more."""
        if self._buckets is not None:
            self._buckets.close()
        self._buckets = None

    def is_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether these are the parameters whose gradients it sums."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))

    def follow(self, named: Named) -> bool:
        """Train these parameters from here on; return whether they are others than before.

        Raises:
            RunFailed: they are, and compression keeps a residual of those of before.
        """
        if self.is_of([one for _, one in named]):
            return False
        if not self.exchange.is_dense:
            before = {id(one) for one in self.parameters}
            new = [name for name, one in named if id(one) not in before]
            raise RunFailed(
                f"the parameters that are trained have changed ({', '.join(new[:MOST_NAMED]) or 'fewer than before'}), "
                "and the residual of compression belongs to those of before.",
                hint="leave out compression, or begin the session once all parameters are trained",
            )
        self._take(named)
        return True

    def begin(self) -> None:
        """Take what is in ``.grad`` out of the way of a backward pass."""
        before = [one.grad for one in self.parameters]
        has_any = any(one is not None for one in before)
        if self.is_pending and has_any:
            self._flat.pending = before
        else:
            self.is_pending, self._flat.pending = False, [None] * len(before)
            # A sum that lies in the buffer that the next sum overwrites, or what the script put there.
            self._kept = [None if one is None else one.clone() for one in before] if has_any else None
        if has_any:
            for parameter in self.parameters:
                parameter.grad = None

    @property
    def is_made(self) -> bool:
        """Whether the backward pass made a gradient of these parameters."""
        return any(one.grad is not None for one in self.parameters)

    def put_back(self) -> None:
        """Leave in ``.grad`` what `begin` took away: the backward pass was not of these parameters."""
        before = self._flat.pending if self.is_pending or self._kept is None else self._kept
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient

    def hold(self, weight: float) -> None:
        """Weight what the backward pass left in ``.grad``, and add what was there before: summed by a later `sum`."""
        for parameter, before in zip(self.parameters, self._flat.pending, strict=True):
            own = None if parameter.grad is None or not weight else parameter.grad.detach() * weight
            parameter.grad = before if own is None else own if before is None else before + own
        self.is_pending = True

    def expect(self, weigh: Callable[[], float], reach: Callable[[float], None]) -> None:
        """Send what the backward pass that comes makes as soon as it is made, where that can be.

        A part that was sent cannot be taken back: where a gradient changes after that, all workers sum anew.

        Args:
            weigh: returns the weight of this worker's gradient; called when the first part is made, as it may wait.
            reach: waits until a worker that is slowed down would have made this part of the gradient (1 = all).
        """
        if self._buckets is not None:
            self._weigh, self._reach = weigh, reach
            self._sent, self._taken = list[dist.Work](), list[tuple[Tensor | None, int]]()
            self._buckets.arm()

    def _take_part(self, part: Part) -> None:
        """Put a part of the gradient to its place and send it; the last one waits for the numbers ahead of it."""
        if self._buckets is not None and self._buckets.is_armed:
            self._reach(part.done)
        self._flat.put(self._weigh(), part.members.start, part.members.stop)
        gradients = [self.parameters[index].grad for index in part.members]
        self._taken[:0] = [(one, _version(one)) for one in gradients]
        if part.start:
            self._send(self._flat.ahead + part.start, self._flat.ahead + part.stop)

    def _send(self, start: int, stop: int) -> None:
        work = dist.all_reduce(self._flat.whole[start:stop], async_op=True)
        assert work is not None  # as for every asynchronous collective of a member of the group
        self._sent.append(work)

    def sum(self, weight: float, scaler: Scaler | None, *, look_at: Sequence[float] = ()) -> None:
        """Sum over all workers what is pending, and what the backward pass left in ``.grad`` times ``weight``.

        Args:
            weight: of this worker.
            scaler: whose factor the gradients have. What compression holds back is kept without it, and a gradient
                that is not finite on some worker becomes infinite on all, so that all of them skip the step.
            look_at: ratios to tell the kept energy at.
        """
        flat, buckets = self._flat, self._buckets
        self.was_hidden = buckets is not None and buckets.is_armed
        if buckets is not None and buckets.is_armed:
            made = self.parameters[len(self.parameters) - len(self._taken) :]
            now = [(one.grad, _version(one.grad)) for one in made]
            spoilt = any(a is not b or new != old for (a, new), (b, old) in zip(now, self._taken, strict=True))
            buckets.finish()
            told = flat.whole[: _FLAGS * len(self.parameters)].view(_FLAGS, -1)
            told[:] = self._flags(spoilt=spoilt)
            self._send(0, flat.ahead + buckets.parts[-1].stop)
            for sent in self._sent:
                sent.wait()
            self.stats = ExchangeStats(sent_bytes=flat.single.nbytes, compress_s=0.0, sync_s=0.0)
            used, dense, spoilts = (told > 0).tolist()
            if any(spoilts):  # on some worker: all of them sum anew, and from now on after backward
                self._overlaps = False
                self.close()
                flat.put(weight)
                self._sum_flat(None, ())
        else:
            flat.put(weight)
            flags = self._flags(spoilt=False)
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True) if self._world_size > 1 else None
            self._sum_flat(scaler, look_at)
            if work is not None:
                work.wait()
            used, dense, _ = flags.bool().tolist()
        self._give(used, dense)

    def _flags(self, *, spoilt: bool) -> Tensor:
        """[3, parameters] see `_FLAGS`."""
        return torch.tensor([self._flat.used, self._flat.dense, [spoilt] * len(self.parameters)], dtype=torch.uint8)

    def _sum_flat(self, scaler: Scaler | None, look_at: Sequence[float]) -> None:
        exchange, flat = self.exchange.exchange, self._flat.single
        assert exchange is not None
        if scaler is None or self.exchange.is_dense:
            self.stats = exchange.run(flat, look_at)
            self._sum_doubles()
            return
        flat.mul_(1 / scaler.get_scale())
        if all_finite(flat):
            self.stats = exchange.run(flat, look_at)
            flat.mul_(scaler.get_scale())
        else:
            flat.fill_(torch.inf)
            self.stats = None

    def _sum_doubles(self) -> None:
        double = self._flat.double
        if double.numel() and self.stats is not None:
            channel = Channel(on=double.device)
            channel.all_reduce(double)
            sync_s = sum(message.time_s for message in channel.messages)
            sent = ExchangeStats(sent_bytes=double.nbytes, compress_s=0.0, sync_s=sync_s)
            self.stats = summed([self.stats, replace(sent, messages=tuple(channel.messages))])

    def pack(self, load: Tensor) -> bool:
        """Write the gradient in ``.grad`` and its flags into a message; return whether every parameter has a dense one.

        Args:
            load: [room] float64 storage of the message.
        """
        if self._packed is None or self._packed[0] is not load:
            numbers = load.view(torch.float32)[: self._flat.single.numel()]
            flags = load.view(torch.uint8)[numbers.nbytes : numbers.nbytes + 2 * len(self.parameters)]
            self._packed = load, FlatGradient(self.parameters, numbers), flags.numpy()
        _, own, told = self._packed
        own.put(1.0)
        is_whole = all(own.dense)
        told[:] = 1 if is_whole else [*own.used, *own.dense]
        return is_whole

    def merge(self, loads: Tensor, weights: Sequence[float], *, is_whole: bool, sync_s: float) -> None:
        """Sum what all workers have packed.

        Args:
            loads: [workers, room] in rank order; overwritten.
            weights: of the workers' gradients.
            is_whole: whether each said so of its own.
            sync_s: seconds that it was on its way.
        """
        single, count = self._flat.single, len(self.parameters)
        rows = loads.view(torch.float32)[:, : single.numel()]
        flags = loads.view(torch.uint8)[:, single.nbytes : single.nbytes + 2 * count]
        is_whole = is_whole and all(weights)
        for row, flag, weight in zip(rows, flags, weights, strict=True):
            if not weight:  # whatever was computed for nothing
                row.zero_()
                flag.zero_()
        torch.sum(rows.mul_(torch.tensor(weights)[:, None]), 0, out=single)
        self.was_hidden = False
        self.stats = ExchangeStats(sent_bytes=single.nbytes, compress_s=0.0, sync_s=sync_s)
        used, dense = [[True] * count] * 2 if is_whole else flags.amax(0).view(2, -1).bool().tolist()
        self._give(used, dense)

    def audit(self, weight: float, *, is_leader: bool, draws: bool) -> Found:
        """Take the leader's gradient, which is of the whole batch; return how far the sum of the others' is from it.

        Args:
            weight: of this worker's gradient.
            is_leader: whether this worker computed the whole batch.
            draws: whether random numbers were drawn while this worker computed.
        """
        flat = self._flat
        flat.put(weight)
        flags = self._flags(spoilt=draws)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        used, dense, draw = flags.bool().tolist()
        apart, total = list[Tensor](), 0.0
        for whole in (flat.single, flat.double):
            own = whole.cpu()
            parts = torch.zeros_like(own) if is_leader else own.clone()
            dist.all_reduce(parts)
            dist.broadcast(own, 0)
            apart.append((own - parts).double())
            total += float(own.double().square().sum())
            whole.copy_(own)
        self.stats, self.was_hidden = ExchangeStats(sent_bytes=flat.single.nbytes, compress_s=0.0, sync_s=0.0), False
        self._give(used, dense)
        return Found.of(torch.cat(apart), total**0.5, draws=any(draw), before=self._audits)

    def _give(self, used: Sequence[bool], dense: Sequence[bool]) -> None:
        """Leave the sum in ``.grad``, with an earlier one that the script did not step by."""
        kept = self._kept or [None] * len(self.parameters)
        for parameter, view, is_used, is_dense, before in zip(
            self.parameters, self._flat.views, used, dense, kept, strict=True
        ):
            if not is_used:
                parameter.grad = before
                continue
            gradient = view if is_dense else _sparse(view)
            parameter.grad = gradient if before is None else before + gradient
        self._kept, self.is_pending = None, False
        self._flat.pending = [None] * len(self.parameters)


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _sparse(dense: Tensor) -> Tensor:
    """Return the rows of a gradient that are not zero, as a sparse one."""
    rows = dense.reshape(len(dense), -1).ne(0).any(1).nonzero()[:, 0]
    return torch.sparse_coo_tensor(rows[None], dense[rows], dense.shape, is_coalesced=True, check_invariants=False)


def named_parameters(
    optimizer: Optimizer, names: Mapping[int, str] = MappingProxyType({})
) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's parameters that are trained, by name, in the order of its groups.

    Args:
        optimizer: whose.
        names: of parameters, by identity.
    """
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        (names.get(id(parameter), f"number {index} of the optimizer"), parameter)
        for index, parameter in enumerate(listed)
        if parameter.requires_grad
    ]


def check_parameters(named: Named) -> torch.device:
    """Return the device of an optimizer's parameters, and refuse what cannot be trained by several workers.

    Raises:
        BadInput: there are none, or they are not single or double precision, or on several devices.
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
