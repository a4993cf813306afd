"""The models and optimizers of a session; they are the same on all workers from its beginning on, and are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.errors import RunFailed
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.comm.peers import workers
from hetopt.trainer.statistics import CLOSE, options_of, tensors_mark


def take_parameters(tensors: Iterable[Tensor]) -> None:
    """Take rank 0's values of parameters and buffers."""
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        own = tensor.detach()
        real = torch.view_as_real(own) if own.is_complex() else own
        staged = real.cpu().contiguous()
        dist.broadcast(staged, src=0)
        real.copy_(staged)


Mark: TypeAlias = tuple[str, float, float]
"""What a number is of, the number, and the relative distance at which another worker's counts as equal."""


def replica_marks(named: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizer | None = None) -> list[Mark]:
    """Return checksums of parameters, their gradients, and an optimizer's state, and the optimizer's options.

    Args:
        named: the parameters.
        optimizer: about to step by their gradients; None: none is, and only parameters count.
    """
    tensors = [(f"parameter {name}", [parameter.detach()]) for name, parameter in named]
    if optimizer is None:
        return [(what, float(tensors_mark(values)), 0.0) for what, values in tensors]
    for name, parameter in named:
        state = optimizer.state.get(parameter, {})
        values = [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        tensors += [(f"the gradient of {name}", _dense(parameter.grad)), (f"the optimizer's state of {name}", values)]
    options = [(what, value, CLOSE) for what, value in options_of(optimizer)]
    return [(what, float(tensors_mark(values)), 0.0) for what, values in tensors] + options


def check_replicas(marks: Sequence[Mark], step: int, world_size: int) -> None:
    """Compare numbers with those of the other workers, which have as many.

    Args:
        marks: see `replica_marks`.
        step: of the session.
        world_size: workers.

    Raises:
        RunFailed: some differ; all workers raise it.
    """
    columns = zip(*gather_numbers([mark for _, mark, _ in marks], world_size), strict=True)
    for (what, _, close), column in zip(marks, columns, strict=True):
        usual = max(column, key=column.count)
        ranks = [rank for rank, mark in enumerate(column) if not math.isclose(mark, usual, rel_tol=close)]
        if ranks:
            raise RunFailed(f"{what} is not the same on {workers(ranks)} as on the others at step {step}.", hint=_HINT)


_HINT = (
    "run the same code on every worker, with the same arguments: change parameters, gradients and learning rates by "
    "what all workers share (run.backward, run.mean), and load checkpoints on every worker or before the session begins"
)


def _dense(gradient: Tensor | None) -> list[Tensor]:
    if gradient is None:
        return [torch.tensor([torch.nan])]
    return [gradient if gradient.layout == torch.strided else gradient.to_dense()]
