"""The gradient of a script's parameters, weighted by this worker's share and summed over all workers.

Every worker's mean gradient times (its samples / B) goes into the sum before anything is compressed: whatever the
shares, the dense result is the mean gradient of one machine with the whole batch of B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.profiler.errors import BadInput, RunFailed
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.exchange.stats import ExchangeStats
from hetopt.trainer.session.exchange import SessionExchange

MOST_NAMED = 3


class Scaler(Protocol):
    """What is needed of a ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """The factor on the loss."""
        ...


class GradientSum:
    """Replaces ``parameter.grad`` by the sum over all workers.

    A parameter that no worker used at the first step stays without a gradient, as in the script; later on it may not
    be used by some workers alone.

    Args:
        named: the optimizer's parameters, as `check_parameters` wants them.
        exchange: sums them.
        world_size: workers.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], exchange: SessionExchange, *, world_size: int
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._world_size = world_size
        sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device
        self._flat = torch.zeros(sum(sizes), device=device)
        self._views = [
            view.view_as(parameter)
            for view, parameter in zip(torch.split(self._flat, sizes), self._parameters, strict=True)
        ]
        self._waiting: Tensor | None = None
        self._unused: frozenset[int] | None = None
        self._exchange = exchange

    @property
    def is_waiting(self) -> bool:
        """Whether gradients were put aside that are in no sum yet."""
        return self._waiting is not None

    def put_aside(self, weight: float) -> None:
        """Keep what backward left in ``.grad``, so weighted, for the sum that comes later."""
        self._gather(weight)
        if self._waiting is None:
            self._waiting = self._flat.clone()
        else:
            self._waiting.add_(self._flat)
        self._flat.zero_()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = None

    def sum(self, weight: float, scaler: Scaler | None, *, look: bool = False) -> ExchangeStats | None:
        """Sum what was put aside, and what is in ``.grad`` times ``weight``, over all workers.

        Args:
            weight: of what backward left in ``.grad``; 0 where all of it was put aside.
            scaler: whose factor the gradients have. What compression holds back is kept without it, and a gradient
                that is not finite on some worker becomes infinite on all, so that all of them skip the step.
            look: whether what compression would keep is read.

        Returns:
            What the exchange took; None: there was none, as the gradient is not finite.
        """
        self._gather(weight)
        if self._waiting is not None:
            self._flat.add_(self._waiting)
            self._waiting = None
        if self._unused is None:
            self._unused = self._find_unused()
        stats: ExchangeStats | None
        if scaler is None or self._exchange.is_dense:
            stats = self._exchange.run(self._flat, look=look)
        else:
            stats = self._sum_unscaled(scaler.get_scale(), look=look)
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if index not in self._unused:
                parameter.grad = view
        return stats

    def _sum_unscaled(self, scale: float, *, look: bool) -> ExchangeStats | None:
        self._flat.mul_(1 / scale)
        finite = torch.isfinite(self._flat).all().to("cpu", torch.float32)
        if self._world_size > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not bool(finite):
            self._flat.fill_(torch.inf)
            return None
        stats = self._exchange.run(self._flat, look=look)
        self._flat.mul_(scale)
        return stats

    def _gather(self, weight: float) -> None:
        """Put ``.grad`` times ``weight`` into the flat buffer; what is there already stays in place."""
        self._used = [parameter.grad is not None for parameter in self._parameters]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() == view.data_ptr():
                view.mul_(weight)
            else:
                torch.mul(gradient, weight, out=view)

    def _find_unused(self) -> frozenset[int]:
        """Which parameters no worker has a gradient of; asked once."""
        given = [used or bool(view.any()) for used, view in zip(self._used, self._views, strict=True)]
        rows = gather_numbers([float(one) for one in given], self._world_size)
        return frozenset(index for index, column in enumerate(zip(*rows, strict=True)) if not any(column))

    def check_unused(self) -> None:
        """Refuse a gradient where there was none at the first step: other workers would not apply it.

        Raises:
            RunFailed: there is one.
        """
        late = [self._names[index] for index in self._unused or () if self._parameters[index].grad is not None]
        if late:
            raise RunFailed(
                f"{', '.join(late[:MOST_NAMED])} got a gradient after steps without one.",
                hint="use every parameter at the first step, or begin a session of its own for what comes later",
            )


def named_parameters(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters by their names in the model, in the order of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        (names.get(id(parameter), f"number {index} of the optimizer"), parameter)
        for index, parameter in enumerate(listed)
        if parameter.requires_grad
    ]


def check_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> torch.device:
    """Refuse what cannot be trained by several workers; where the parameters are.

    Raises:
        BadInput: there are none, or they are not fp32, or on several devices.
    """
    if not named:
        raise BadInput("The optimizer has no parameters to train.", hint="check requires_grad")
    for name, parameter in named:
        if parameter.dtype != torch.float32:
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
