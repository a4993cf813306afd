"""What has to be the same on all workers: taken from rank 0 when a session begins, compared while it goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetopt.core.errors import RunFailed
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.comm.peers import workers
from hetopt.trainer.likeness import CLOSE, Groups, options_of, tensors_mark
from hetopt.trainer.session.several import Optimizers


def take_parameters(model: nn.Module, optimizer: Groups) -> None:
    """Take rank 0's parameters and buffers, also those that only the optimizer knows."""
    known = {id(one) for one in model.parameters()}
    others = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in known]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), *others]:
            _broadcast(tensor)


def _broadcast(tensor: Tensor) -> None:
    staged = tensor.detach().cpu().contiguous()
    if staged.is_complex():
        staged = torch.view_as_real(staged)
    dist.broadcast(staged, src=0)
    tensor.detach().copy_(torch.view_as_complex(staged) if tensor.is_complex() else staged)


_ALIKE = "run the same code on every worker, with the same arguments"


def check_replicas(
    named: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizers | None, step: int, world_size: int
) -> None:
    """Compare parameters, gradients and optimizer state with the other workers, bit by bit.

    Args:
        named: the parameters.
        optimizer: about to step by the gradients; None: none is, and only parameters count.
        step: of the session.
        world_size: workers.

    Raises:
        RunFailed: some differ; all workers raise it.
    """
    of_each: dict[str, list[list[Tensor]]] = {"parameter {}": [[one] for _, one in named]}
    if optimizer is not None:
        states = [optimizer.state_of(one) for _, one in named]
        of_each["the gradient of {}"] = [_dense(one.grad) for _, one in named]
        of_each["the optimizer's state of {}"] = [
            [state[key] for key in sorted(state) if isinstance(state[key], Tensor)] for state in states
        ]
        _check_options(optimizer, step, world_size)
    marks = [float(tensors_mark(one for own in each for one in own)) for each in of_each.values()]
    rows = gather_numbers([float(len(named)), *marks], world_size)
    if all(row == rows[0] for row in rows):
        return
    if len({row[0] for row in rows}) > 1:
        raise RunFailed(f"the workers' models have other numbers of parameters at step {step}.", hint=_ALIKE)
    for what, each in of_each.items():
        who, index, _ = _first_difference([float(tensors_mark(own)) for own in each], world_size)
        if index is not None:
            raise RunFailed(
                f"{what.format(named[index][0])} is not the same on {workers(who)} as on the others at step {step}.",
                hint="change parameters and gradients by what all workers share (run.backward, run.mean), load "
                "checkpoints on every worker or before the session begins, and step with the same learning rate "
                "everywhere",
            )


def _check_options(optimizer: Optimizers, step: int, world_size: int) -> None:
    own = options_of(optimizer)
    who, index, values = _first_difference([value for _, value in own], world_size, CLOSE)
    if index is not None:
        usual = next(value for rank, value in enumerate(values) if rank not in who)
        raise RunFailed(
            f"{own[index][0]} is {values[who[0]]:g} on {workers(who)} and {usual:g} on the others at step {step}.",
            hint="drive schedulers by what all workers share: scheduler.step(run.mean(loss)) instead of the own loss",
        )


def _dense(gradient: Tensor | None) -> list[Tensor]:
    if gradient is None:
        return [torch.tensor([torch.nan])]
    return [gradient if gradient.layout == torch.strided else gradient.to_dense()]


def _first_difference(
    own: Sequence[float], world_size: int, close: float = 0.0
) -> tuple[list[int], int | None, list[float]]:
    """The workers that differ from most where the first difference is, that place, and all workers' values there."""
    lengths = gather_numbers([len(own)], world_size)
    if len({row[0] for row in lengths}) > 1:
        return [], None, []
    rows = gather_numbers(own, world_size)
    for index, column in enumerate(zip(*rows, strict=True)):
        if not all(math.isclose(value, column[0], rel_tol=close) or value == column[0] for value in column):
            usual = max(column, key=column.count)
            return [rank for rank, value in enumerate(column) if value != usual], index, list(column)
    return [], None, []
