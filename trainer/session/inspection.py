"""What a script hands to a session is looked at first: what would train wrongly is refused, with what to take out."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from functools import reduce

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hetopt.core.errors import BadInput
from hetopt.trainer.ddp.shares import rank_holder
from hetopt.trainer.statistics import parameters_of

_WRAPPERS = (DistributedDataParallel, DataParallel)
_SUMS_ITSELF = "sums or shards gradients itself"
_PLAIN = "a script that uses DistributedDataParallel needs no session: launch it as it is; or give the plain module"


def inspect_model(model: object, world_size: int) -> None:
    """Refuse a model that cannot be trained, or that something else already trains on several workers.

    Args:
        model: as the script gave it.
        world_size: workers; alone, wrappers change nothing.

    Raises:
        BadInput: with what to take out.
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
        if world_size > 1 and _is_a(parameter, "torch.distributed.tensor", "DTensor"):
            raise BadInput(
                f"Parameter {name} is a DTensor, spread over several workers already.",
                hint="leave out fully_shard, parallelize_module and distribute_tensor",
            )
    for name, module in model.named_modules() if world_size > 1 else ():
        if isinstance(module, _WRAPPERS) or _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            where = f"Module {name}" if name else "The model"
            raise BadInput(f"{where} is a {type(module).__name__}, which {_SUMS_ITSELF}.", hint=_PLAIN)


def inspect_wrappers(model: nn.Module) -> None:
    """Refuse a wrapper that was put around the model since the session began; looked for as batches are shared out.

    Raises:
        BadInput: there is one.
    """
    inside, things = {id(module) for module in model.modules()}, gc.get_objects()
    wrappers = {kind for kind in set(map(type, things)) if issubclass(kind, _WRAPPERS)}
    for thing in things if wrappers else ():
        if type(thing) in wrappers and id(getattr(thing, "module", None)) in inside:
            raise BadInput(
                f"The model was wrapped in {type(thing).__name__} since the session began, which {_SUMS_ITSELF}.",
                hint=_PLAIN,
            )


def inspect_optimizers(optimizers: Sequence[object], world_size: int) -> None:
    """Refuse what is no plain optimizer (a wrapper decides itself when to step, or where gradients come from).

    Args:
        optimizers: as the script gave them.
        world_size: workers.

    Raises:
        BadInput: with what to give instead; or two optimizers have the same parameter.
    """
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
            raise BadInput(
                f"session(optimizer=) must be a torch.optim.Optimizer, got {type(optimizer).__name__}.",
                hint="give the optimizer itself, without a wrapper or scheduler around it, or a tuple of several",
            )
        if world_size > 1 and _is_a(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            raise BadInput(
                "The optimizer is a ZeroRedundancyOptimizer, which steps a part of the parameters on each worker.",
                hint="give the plain optimizer",
            )
        for parameter in parameters_of(optimizer):
            if owners.setdefault(id(parameter), number) != number:
                raise BadInput(
                    f"Optimizers {owners[id(parameter)]} and {number} of the session have a parameter of shape "
                    f"{tuple(parameter.shape)} in common, and its gradient can be for one step alone.",
                    hint="give every parameter to one optimizer alone, as groups of different options if need be",
                )


def inspect_loader(loader: object, world_size: int) -> None:
    """Refuse a loader of which every worker would see other batches than its script means.

    Raises:
        BadInput: with what to give instead.
    """
    if not isinstance(loader, DataLoader):
        raise BadInput(
            f"The loader is a {type(loader).__name__}, and only a torch.utils.data.DataLoader can be shared out.",
            hint="put the samples into a dataset and give that to a DataLoader, or share rows by run.split",
        )
    if world_size == 1:
        return
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


def inspect_group(environment: Mapping[str, str]) -> None:
    """Refuse a process group of the script that is not that of all workers.

    Raises:
        BadInput: it has another number of workers than torchrun started.
    """
    told = environment.get("WORLD_SIZE", "")
    if dist.is_initialized() and told.isdigit() and int(told) != dist.get_world_size():
        raise BadInput(
            f"The script's process group has {dist.get_world_size()} workers, and torchrun started {told}.",
            hint="call init_process_group('gloo') without a size and rank of its own, or leave it to the session",
        )


def _is_a(thing: object, module: str, name: str) -> bool:
    """Return whether a thing is of a class whose module may not be loaded: then nothing is of it."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(thing, kind)
