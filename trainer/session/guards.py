"""Guards of a session: models, optimizers and loaders that would train wrongly are refused, and replicas compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.comm.peers import workers
from hetopt.trainer.ddp.script import rank_holder
from hetopt.trainer.engine import CLOSE, options_of, parameters_of, tensors_mark
from hetopt.trainer.sharding import held, is_sharded


def inspect_model(model: object, world_size: int) -> None:
    """Raise BadInput for a model that cannot be trained, or that a wrapper already trains on several workers.

    Args:
        model: model as the script gave it.
        world_size: number of workers; with 1, wrappers and sharded parameters are let pass.

    Raises:
        BadInput: the model is no module, a parameter has no values yet, or with several workers a parameter is sharded
            or a module is wrapped by DistributedDataParallel, DataParallel or FSDP.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"session(model=) must be a torch.nn.Module, got {type(model).__name__}.",
            hint="give the module itself, or a tuple of several",
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise BadInput(
                f"Parameter {name} has no values yet ({'a lazy module' if is_lazy(parameter) else 'the meta device'}).",
                hint="run one batch through the model, or load its weights, before the optimizer is made",
            )
        if world_size > 1 and is_sharded([parameter]):
            raise BadInput(
                f"Parameter {name} is a DTensor, spread over several workers already.",
                hint='leave out fully_shard, parallelize_module and distribute_tensor, or let shard="full" do it',
            )
    for name, module in model.named_modules() if world_size > 1 else ():
        is_fsdp = any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)
        if isinstance(module, (DistributedDataParallel, DataParallel)) or is_fsdp:
            where = f"Module {name}" if name else "The model"
            raise BadInput(
                f"{where} is a {type(module).__name__}, which sums or shards gradients itself.",
                hint="a script that uses DistributedDataParallel needs no session: launch it as it is; or give the "
                "plain module",
            )


def inspect_optimizers(optimizers: Sequence[object]) -> None:
    """Raise BadInput for an optimizer that is no plain torch optimizer, or a parameter that two optimizers have.

    Args:
        optimizers: optimizers as the script gave them.

    Raises:
        BadInput: one is no torch optimizer (a wrapper or a scheduler, say), or two have the same parameter; the hint
            says what to give instead.
    """
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
            raise BadInput(
                f"session(optimizer=) must be a torch.optim.Optimizer, got {type(optimizer).__name__}.",
                hint="give the optimizer itself, without a wrapper or scheduler around it, or a tuple of several",
            )
        for parameter in parameters_of(optimizer):
            if owners.setdefault(id(parameter), number) != number:
                raise BadInput(
                    f"Optimizers {owners[id(parameter)]} and {number} of the session have a parameter of shape "
                    f"{tuple(parameter.shape)} in common, and its gradient can be for one step alone.",
                    hint="give every parameter to one optimizer alone, as groups of different options if need be",
                )


def inspect_loader(loader: object, world_size: int) -> DataLoader[Any]:
    """Return a training loader as it is; raise BadInput if it is no DataLoader, or workers would draw other data.

    Args:
        loader: loader as the script gave it.
        world_size: number of workers; with 1, any DataLoader will do.

    Raises:
        BadInput: ``loader`` is no DataLoader, has an ``__iter__`` of its own, or its sampler gives each rank a part.
    """
    if not isinstance(loader, DataLoader):
        raise BadInput(
            f"The loader is a {type(loader).__name__}, and only a torch.utils.data.DataLoader can be shared out.",
            hint="put the samples into a dataset and give that to a DataLoader, or share rows by run.split",
        )
    if world_size == 1:
        return loader
    if type(loader).__iter__ is not DataLoader.__iter__ or type(loader)._get_iterator is not DataLoader._get_iterator:
        raise BadInput(
            f"The loader is a {type(loader).__name__} with an __iter__ of its own, which the session cannot share out.",
            hint="give a plain DataLoader of the same dataset, and do what it adds in the dataset or the loop",
        )
    holder = rank_holder(loader.batch_sampler, world_size)
    if holder is not None:
        sampler = reduce(getattr, holder[0], loader.batch_sampler)
        raise BadInput(
            f"The loader's sampler is a {type(sampler).__name__} of rank {getattr(sampler, holder[1])}, so that every "
            "worker draws a part of the data, and the session would share out worker 0's part alone.",
            hint="leave it out (shuffle=True instead): the session shares out every batch",
        )
    return loader


Mark: TypeAlias = tuple[str, float, float]
"""What is compared (such as 'parameter NAME'), its checksum or value, and the relative distance up to which another
worker's counts as equal."""


def replica_marks(named: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizer | None = None) -> list[Mark]:
    """Return (what, checksum, tolerance) of parameters and, of an optimizer, of gradients, its state and its options.

    Nothing is communicated; `check_replicas` compares the marks of all workers.

    Args:
        named: the parameters, as (name, parameter).
        optimizer: about to step by their gradients; None: only parameters count.
    """
    tensors = [(f"parameter {name}", [held(parameter).detach()]) for name, parameter in named]
    if optimizer is None:
        return [(what, float(tensors_mark(values)), 0.0) for what, values in tensors]
    for name, parameter in named:
        state = optimizer.state.get(parameter, {})
        values = [held(state[key]) for key in sorted(state) if isinstance(state[key], Tensor)]
        gradient = torch.tensor([torch.nan]) if parameter.grad is None else held(parameter.grad).to_dense()
        tensors += [(f"the gradient of {name}", [gradient]), (f"the optimizer's state of {name}", values)]
    options = [(what, value, CLOSE) for what, value in options_of(optimizer)]
    return [(what, float(tensors_mark(values)), 0.0) for what, values in tensors] + options


def check_replicas(marks: Sequence[Mark], step: int, world_size: int, devices: int = 1) -> None:
    """Raise RunFailed on all workers if their checksums of `replica_marks` differ; every worker must call it.

    Args:
        marks: marks of this worker, see `replica_marks`.
        step: number of the session's step, for the error.
        world_size: number of workers.
        devices: number of devices that share a replica, each of which is compared with its counterparts.

    Raises:
        RunFailed: some worker's mark differs from that of most; all workers raise it.
    """
    columns = zip(*gather_numbers([mark for _, mark, _ in marks], world_size), strict=True)
    for (what, _, close), column in zip(marks, columns, strict=True):
        usual = [max(alike := column[place::devices], key=alike.count) for place in range(devices)]
        ranks = [
            rank for rank, mark in enumerate(column) if not math.isclose(mark, usual[rank % devices], rel_tol=close)
        ]
        if ranks:
            raise RunFailed(f"{what} is not the same on {workers(ranks)} as on the others at step {step}.", hint=_HINT)


_HINT = (
    "run the same code on every worker, with the same arguments: change parameters, gradients and learning rates by "
    "what all workers share (run.backward, run.mean), and load checkpoints on every worker or before the session begins"
)
