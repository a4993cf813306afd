"""The gradient of a script's parameters, weighted by this worker's share and summed over all workers.

Every worker's mean gradient times (its samples / B) goes into the sum before anything is compressed: whatever the
shares, the dense result is the mean gradient of one machine with the whole batch of B samples.
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

from hetopt.core.comm import overlap
from hetopt.core.comm.cost import DIRECT_BYTES
from hetopt.core.comm.options import way_name
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import ExchangeStats, summed
from hetopt.trainer.session.buckets import Buckets
from hetopt.trainer.session.flat import FlatGradients
from hetopt.trainer.steps.fused_step import all_finite
from hetopt.trainer.steps.step_config import ExchangeConfig

Named: TypeAlias = Sequence[tuple[str, nn.Parameter]]
MakeExchange: TypeAlias = Callable[[Sequence[tuple[int, ...]]], ExchangeConfig]
"""Of the shapes of float32 parameters."""

MOST_NAMED = 3

_FLAGS = 3
"""Of each parameter: has a gradient, a dense one, and was not sent as it is."""

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Scaler(Protocol):
    """What is needed of a ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """The factor on the loss."""
        ...


class _Packed:
    """A worker's gradient in the load of a message, and those of all workers as they arrive.

    Args:
        parameters: whose gradients.
        load: [room] of the message.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], load: Tensor) -> None:
        self.load = load
        self._numbers = sum(one.numel() * (1 + one.is_complex()) for one in parameters)
        self._bytes = slice(VALUE_BYTES * self._numbers, VALUE_BYTES * self._numbers + 2 * len(parameters))
        self.own = FlatGradients(parameters, load.view(torch.float32)[: self._numbers])
        self.flags: npt.NDArray[np.uint8] = load.view(torch.uint8)[self._bytes].numpy()
        self._received: tuple[Tensor, Tensor, Tensor] | None = None
        self._factors: tuple[Sequence[float], Tensor] | None = None

    def received(self, loads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients and flags of all workers, where these arrive."""
        if self._received is None or self._received[0] is not loads:
            rows, flags = loads.view(torch.float32)[:, : self._numbers], loads.view(torch.uint8)[:, self._bytes]
            self._received = loads, rows, flags
        return self._received[1:]

    def factors(self, weights: Sequence[float]) -> Tensor:
        """[workers, 1] the weights; mostly those of the step before."""
        if self._factors is None or self._factors[0] is not weights:
            self._factors = weights, torch.tensor(weights)[:, None]
        return self._factors[1]


class GradientSum:
    """Replaces ``parameter.grad`` by the sum over all workers.

    A parameter that no worker used in a step is left without a gradient, as in the script. One whose gradient is sparse
    on all workers that used it gets a sparse one, with the rows that any of them has.

    Args:
        named: the optimizer's parameters, as `check_parameters` wants them.
        make_exchange: makes what sums them.
        world_size: workers.
        overlaps: whether all workers can sum a dense gradient while backward makes it.

    Attributes:
        exchange: how gradients travel.
        room: float64 numbers that all of a gradient takes in a message (see `pack`); 0: it is not so small, or on a
            GPU, or compressed.
        stats: what the last exchange took; None: there was none, as the gradient was not finite.
        was_hidden: whether it was under backward.
    """

    def __init__(self, named: Named, make_exchange: MakeExchange, *, world_size: int, overlaps: bool = False) -> None:
        self._make_exchange = make_exchange
        self._world_size = world_size
        self._overlaps = overlaps
        self._buckets: Buckets | None = None
        self._is_hidden = self.was_hidden = False
        self.stats: ExchangeStats | None = None
        self._take(named)
        self._aside: FlatGradients | None = None  # of this worker, weighted, and not summed yet
        self._kept: FlatGradients | None = None  # of all workers, which more is to be added to

    def _take(self, named: Named) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.close()
        self._flat = self._buffers()
        self._packed: _Packed | None = None
        narrow = [one for one in self._parameters if one.dtype in (torch.float32, torch.complex64)]
        shapes = [(*one.shape, 2) if one.is_complex() else tuple(one.shape) for one in narrow]
        exchange = self._make_exchange(shapes)
        if self._flat.double.numel() and not exchange.is_dense:
            raise BadInput(
                f"The model has float64 parameters, and {way_name(exchange.compression)} compresses float32 gradients.",
                hint="leave out compression, or make the model float32",
            )
        # A gradient of one bucket has nothing to send while backward still runs.
        narrow_alone = self._overlaps and exchange.is_dense and not self._flat.double.numel()
        if narrow_alone and exchange.dense_bytes > overlap.FIRST_BUCKET_BYTES:
            self._buckets = Buckets(self._parameters)
            self._flat = self._buffers()
        self.exchange = replace(exchange, dense_bytes=exchange.dense_bytes + self._flat.double.nbytes)
        single = self._flat.single
        is_small = (self._world_size - 1) * single.nbytes <= DIRECT_BYTES
        fits = is_small and exchange.is_dense and not self._flat.double.numel() and single.device.type == "cpu"
        self.room = -(-(single.nbytes + 2 * len(self._parameters)) // 8) if fits and self._world_size > 1 else 0

    def _buffers(self) -> FlatGradients:
        """With room for what travels with the last part, where parts are sent under backward."""
        return FlatGradients(self._parameters, ahead=0 if self._buckets is None else _FLAGS * len(self._parameters))

    @property
    def is_waiting(self) -> bool:
        """Whether gradients were put aside that are in no sum yet."""
        return self._aside is not None

    def close(self) -> None:
        """Look at no backward pass any more."""
        if self._buckets is not None:
            self._buckets.close()
        self._buckets = None

    def is_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are what it sums the gradients of."""
        return len(parameters) == len(self._parameters) and all(map(operator.is_, parameters, self._parameters))

    def follow(self, named: Named) -> bool:
        """The optimizer trains these parameters from here on; what there is of their gradients is kept.

        Returns:
            Whether they are others than before.

        Raises:
            RunFailed: they are others than before, and compression keeps a memory of those.
        """
        if self.is_of([one for _, one in named]):
            return False
        if not self.exchange.is_dense:
            before = {id(one) for one in self._parameters}
            new = [name for name, one in named if id(one) not in before]
            raise RunFailed(
                f"the parameters that are trained have changed ({', '.join(new[:MOST_NAMED]) or 'fewer than before'}), "
                "and the residual of compression belongs to those of before.",
                hint="leave out compression, or begin the session once all parameters are trained",
            )
        old = {id(one): index for index, one in enumerate(self._parameters)}
        aside, kept = self._aside, self._kept
        self._take(named)
        self._aside, self._kept = (self._moved(one, old) for one in (aside, kept))
        return True

    def _moved(self, buffers: FlatGradients | None, old: dict[int, int]) -> FlatGradients | None:
        if buffers is None:
            return None
        moved = self._buffers()
        for index, parameter in enumerate(self._parameters):
            if id(parameter) in old:
                moved.take_over(index, buffers, old[id(parameter)])
        moved.note()
        return moved

    def begin(self) -> None:
        """A backward pass comes: what is in ``.grad`` of sums and of what was put aside is taken out of its way.

        What the script dropped from ``.grad`` (``zero_grad``) counts no more, and what it left there of a sum that was
        not stepped with is added to the next one, as in the script.
        """
        self.drop()
        self._is_hidden = False
        if self._buckets is not None:
            self._buckets.end()
        if all(parameter.grad is None for parameter in self._parameters):
            for place in self._flat.places:
                place.given = None
            return
        for index, parameter in enumerate(self._parameters):
            if self._shows(index, parameter):
                parameter.grad = None
            if self._flat.holds(index, parameter):
                self._keep(index, parameter)
            self._flat.places[index].given = None

    def expect(self, weigh: Callable[[], float], reach: Callable[[float], None]) -> None:
        """The backward pass that comes completes the step: what it makes is sent as it is made, where that can be.

        Args:
            weigh: tells the weight of this worker's gradient, once all workers are known to be at the same point.
            reach: waits until a worker that is slowed down would have made this part of the gradient.
        """
        if self._buckets is not None and not self.is_waiting:
            self._buckets.begin(self._flat, weigh, reach)
            self._is_hidden = True

    def drop(self) -> None:
        """What the script took out of ``.grad`` counts no more.

        Raises:
            RunFailed: it changed what was put aside in another way.
        """
        put = [one for one in (self._aside, self._kept) if one is not None]
        if self._aside is None:
            put = []  # what is kept is shown nowhere
        changed = any(one.changed for one in put)
        if changed and not all(one.is_cleared for one in put):
            raise RunFailed(
                "gradients were changed (clipped, unscaled?) while they waited for more backward passes to be summed "
                "with, as the script steps earlier than `accumulate` says.",
                hint="give session(accumulate=...) the number of backward passes of a step, or call run.sync() before",
            )
        for buffers in put:
            if changed:
                buffers.wipe()
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is None and buffers.places[index].used:
                    buffers.clear(index)
            buffers.note()

    def _keep(self, index: int, parameter: nn.Parameter) -> None:
        if self._kept is None:
            self._kept = self._buffers()
        assert parameter.grad is not None
        self._kept.put(index, parameter.grad, 1.0)
        parameter.grad = None

    def put_aside(self, weight: float) -> None:
        """Keep what backward left in ``.grad``, so weighted, for the sum that comes later.

        ``.grad`` then shows what was put aside so far, until the workers' sum takes its place.
        """
        self._gather(weight, self._flat)
        if self._aside is None:
            self._aside, self._flat = self._flat, self._buffers()
        else:
            self._aside.add(self._flat)
        self._show(self._aside)

    def put_back(self) -> None:
        """The backward pass made no gradient of these: what was taken out of its way is there again."""
        if self._aside is not None:
            self._show(self._aside)
        elif self._kept is not None:
            self._flat, self._kept = self._kept, None
            for index, parameter in enumerate(self._parameters):
                if self._flat.places[index].used:
                    self._flat.give(index, parameter)

    def _show(self, aside: FlatGradients) -> None:
        """Leave in ``.grad`` what was put aside, and what is kept of sums."""
        for index, parameter in enumerate(self._parameters):
            aside.give(index, parameter)
            if self._kept is not None:
                self._kept.places[index].given = None
                if not aside.places[index].used:
                    self._kept.give(index, parameter)
        for one in (aside, self._kept):
            if one is not None:
                one.note()

    @property
    def is_made(self) -> bool:
        """Whether there are gradients in ``.grad`` that are in no buffer yet."""
        return any(
            one.grad is not None and not self._shows(index, one) and not self._flat.holds(index, one)
            for index, one in enumerate(self._parameters)
        )

    def _shows(self, index: int, parameter: nn.Parameter) -> bool:
        """Whether ``.grad`` is there for the script to look at, and in a buffer already."""
        return any(one is not None and one.holds(index, parameter) for one in (self._aside, self._kept))

    def sum(self, weight: float, scaler: Scaler | None, *, look_at: Sequence[float] = ()) -> None:
        """Sum what was put aside, and what is in ``.grad`` times ``weight``, over all workers.

        Args:
            weight: of what backward left in ``.grad``; 0 where all of it was put aside.
            scaler: whose factor the gradients have. What compression holds back is kept without it, and a gradient
                that is not finite on some worker becomes infinite on all, so that all of them skip the step.
            look_at: ratios to tell the kept energy at.
        """
        hidden = self._buckets if self._is_hidden else None
        self._is_hidden, self.was_hidden = False, hidden is not None
        self._gather(weight, self._flat, hidden)
        if self._aside is not None:
            self._flat.add(self._aside)
            self._aside = None
        flags = self._flags(is_spoilt=hidden is not None and hidden.is_spoilt)
        if hidden is not None:
            hidden.send_rest(flags.flatten())
            hidden.wait()
            hidden.end()
            self.stats = ExchangeStats(sent_bytes=self._flat.single.nbytes, compress_s=0.0, sync_s=0.0)
            flags = self._flat.whole[: flags.numel()].view_as(flags) > 0
        else:
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True) if self._world_size > 1 else None
            self._sum_whole(scaler, look_at)
            if work is not None:
                work.wait()
        used, dense, spoilt = flags.tolist()
        if any(spoilt):  # on some worker: all of them sum anew, and from now on after backward
            self._overlaps = False
            self.close()
            self._gather(weight, self._flat)
            self._sum_whole(None, ())
        self._set_used(used, dense)
        self._give()

    def _sum_whole(self, scaler: Scaler | None, look_at: Sequence[float]) -> None:
        """Sum the gradient that lies in its buffer (see `sum`)."""
        exchange = self.exchange.exchange
        assert exchange is not None
        if scaler is None or self.exchange.is_dense:
            self.stats = exchange.run(self._flat.single, look_at)
            self._sum_doubles()
        elif self._take_off(scaler):
            self.stats = exchange.run(self._flat.single, look_at)
            self._flat.single.mul_(scaler.get_scale())

    def pack(self, load: Tensor) -> bool:
        """Write what backward left in ``.grad`` where it travels from, and of which parameters it is.

        Args:
            load: [room] where to; until it is merged.

        Returns:
            Whether every parameter has a gradient, and a dense one.
        """
        if self._packed is None or self._packed.load is not load:
            self._packed = _Packed(self._parameters, load)
        own = self._packed.own
        is_whole = self._gather(1.0, own)
        used = (one.used for one in own.places)
        dense = (one.used and one.rows is None for one in own.places)
        self._packed.flags[:] = 1 if is_whole else [*used, *dense]
        return is_whole

    def merge(self, loads: Tensor, weights: Sequence[float], *, is_whole: bool, sync_s: float) -> None:
        """Sum what all workers have packed.

        Args:
            loads: [workers, room] in rank order; overwritten.
            weights: of the workers' gradients.
            is_whole: whether each said so of its own.
            sync_s: that it was on its way.
        """
        assert self._packed is not None
        rows, flags = self._packed.received(loads)
        single = self._flat.single
        is_whole = is_whole and all(weights)
        if not is_whole:  # leave out what was computed for nothing, whatever it is
            for row, flag, weight in zip(rows, flags, weights, strict=True):
                if not weight:
                    row.zero_()
                    flag.zero_()
        torch.sum(rows.mul_(self._packed.factors(weights)), 0, out=single)
        self.was_hidden = False
        self.stats = ExchangeStats(sent_bytes=single.nbytes, compress_s=0.0, sync_s=sync_s)
        if is_whole:
            self._flat.all_used()
            self._give()
            return
        for place, own in zip(self._flat.places, self._packed.own.places, strict=True):
            place.rows = own.rows
        used, dense = flags.amax(0).view(2, -1).tolist()
        self._set_used(used, dense)
        self._give()

    def _give(self) -> None:
        """Leave the sum in ``.grad``, with what is kept of another."""
        if self._kept is not None:
            self._flat.add(self._kept)
            self._kept = None
        for index, parameter in enumerate(self._parameters):
            self._flat.give(index, parameter)

    def _take_off(self, scaler: Scaler) -> bool:
        """Take a loss scale off the gradient, of which something will be held back; whether it is finite everywhere."""
        flat = self._flat.single
        flat.mul_(1 / scaler.get_scale())
        if all_finite(flat):
            return True
        flat.fill_(torch.inf)
        self.stats = None
        return False

    def _sum_doubles(self) -> None:
        """Float64 gradients are sent as they are, beside the others."""
        double = self._flat.double
        if double.numel() and self.stats is not None:
            channel = Channel(on=double.device)
            channel.all_reduce(double)
            sync_s = sum(message.time_s for message in channel.messages)
            sent = ExchangeStats(
                sent_bytes=double.nbytes, compress_s=0.0, sync_s=sync_s, messages=tuple(channel.messages)
            )
            self.stats = summed([self.stats, sent])

    def _gather(self, weight: float, into: FlatGradients, hidden: Buckets | None = None) -> bool:
        """Put ``.grad`` times ``weight`` into buffers; what was put aside and is shown there is no part of it.

        Args:
            weight: of this worker.
            into: the buffers.
            hidden: has put some there already, under backward.

        Returns:
            Whether every parameter is known to have a gradient, and a dense one.
        """
        if hidden is None:
            gradients = [one.grad for one in self._parameters]
            if self._aside is not None or self._kept is not None:
                gradients = [None if self._shows(*one) else one[1].grad for one in enumerate(self._parameters)]
            return into.put_all(gradients, weight)
        for index, parameter in enumerate(self._parameters):
            if hidden.has(index, parameter):
                continue
            if parameter.grad is None or self._shows(index, parameter):
                into.clear(index)
            else:
                into.put(index, parameter.grad, weight)
        return False

    def _flags(self, *, is_spoilt: bool) -> Tensor:
        """[3, parameters] which have a gradient, and which a dense one, and whether what was sent under backward was
        not all of it: of this worker."""
        places = self._flat.places
        used, dense = [one.used for one in places], [one.used and one.rows is None for one in places]
        return torch.tensor([used, dense, [is_spoilt] * len(places)], dtype=torch.uint8)

    def _set_used(self, used_by_any: Sequence[int], dense_on_any: Sequence[int]) -> None:
        for place, used, dense in zip(self._flat.places, used_by_any, dense_on_any, strict=True):
            if not used or dense:
                place.rows = None
            else:
                rows = place.rows if place.rows is not None else torch.zeros(len(place.view), dtype=torch.uint8)
                device, rows = place.view.device, rows.cpu()
                if self._world_size > 1:
                    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
                place.rows = rows.to(device)
            place.used = bool(used)


def named_parameters(
    optimizer: Optimizer, names: Mapping[int, str] = MappingProxyType({})
) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters that are trained, by name, in the order of its groups.

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
    """Refuse what cannot be trained by several workers; where the parameters are.

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
