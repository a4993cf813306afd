"""What a script hands to a session is looked at first: what would train wrongly is refused, with what to take out.

Some of it is known by class (torch's own wrappers), some by what it has (a sampler that counts replicas), some only by
name, because its package need not be installed (Accelerate, DeepSpeed, Lightning, Horovod).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hetopt.core.errors import BadInput

_WRAPPERS = (DistributedDataParallel, DataParallel)
_DOES = "sums or shards gradients itself"
_FOREIGN = {
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "horovod": "Horovod",
    "lightning": "Lightning",
    "lightning_fabric": "Lightning Fabric",
    "pytorch_lightning": "Lightning",
    "apex": "Apex",
    "fairscale": "FairScale",
    "colossalai": "Colossal-AI",
    "bagua": "Bagua",
}
"""Packages whose wrappers train on several workers themselves, by the first part of their module."""

_REPLICAS = ("num_replicas", "num_processes", "world_size")
_DEPTH = 5


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
            f"session(model=) must be a torch.nn.Module, got {_kind(model)}.",
            hint="give the module itself, or a tuple of several",
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise BadInput(
                f"Parameter {name} has no shape yet (a lazy module).",
                hint="run one batch through the model before the optimizer and the session are made",
            )
        if parameter.is_meta:
            raise BadInput(
                f"Parameter {name} is on the meta device and has no values.",
                hint="materialize the model (model.to_empty(device=...), then load its weights) before the session",
            )
    if world_size == 1:
        return
    for name, module in model.named_modules():
        said = f"The model is wrapped in {_kind(module)}" if not name else f"Module {name} is a {_kind(module)}"
        if isinstance(module, _WRAPPERS) or _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise BadInput(
                f"{said}, which {_DOES}; the session would sum them a second time.",
                hint="do not wrap it: session(model, ...) takes the plain module, wrapper.module",
            )
        package = _package(type(module))
        if package is not None and not name and not _is_lightning_module(module):
            raise BadInput(f"{said} of {package}, which {_DOES}.", hint=_before(package))
        if _is_a(module, "torch.distributed.fsdp", "FSDPModule"):
            raise BadInput(f"{said}: fully_shard has spread its parameters over the workers.", hint="leave it out")
    for name, parameter in model.named_parameters():
        if _is_a(parameter, "torch.distributed.tensor", "DTensor"):
            raise BadInput(
                f"Parameter {name} is a DTensor, spread over several workers already.",
                hint="leave out fully_shard, parallelize_module and distribute_tensor",
            )


def inspect_wrappers(model: nn.Module) -> None:
    """Refuse a wrapper that was put around the model since the session began; looked for once, at the first gradient.

    Raises:
        BadInput: there is one.
    """
    inside = {id(module) for module in model.modules()}
    things = gc.get_objects()
    wrap = {one for one in set(map(type, things)) if _wraps(one)}
    for thing in things if wrap else ():
        kind = type(thing)
        if kind in wrap and id(getattr(thing, "module", None)) in inside:
            raise BadInput(
                f"The model was wrapped in {kind.__name__} since the session began, which {_DOES} (Trainer "
                "of transformers and Accelerate do it where torchrun's variables are set).",
                hint=f"leave the wrapper out, or {_before('transformers')}",
            )


def _wraps(kind: type) -> bool:
    return issubclass(kind, _WRAPPERS) or kind.__name__ == "FullyShardedDataParallel"


def _is_lightning_module(module: nn.Module) -> bool:
    return any(one.__name__ == "LightningModule" for one in type(module).__mro__)


def inspect_optimizer(optimizer: object, world_size: int) -> None:
    """Refuse what is no plain optimizer: a wrapper decides itself when to step, or where gradients come from.

    Args:
        optimizer: as the script gave it.
        world_size: workers.

    Raises:
        BadInput: with what to give instead.
    """
    if isinstance(optimizer, LRScheduler):
        raise BadInput(
            f"session(optimizer=) must be a torch.optim.Optimizer, got the scheduler {_kind(optimizer)}.",
            hint="give its optimizer; schedulers need nothing",
        )
    inner = _inner_optimizer(optimizer)
    package = _package(type(optimizer))
    if package is not None or (inner is not None and not _has_hooks(optimizer)):
        where = f" of {package}" if package else ""
        raise BadInput(
            f"The optimizer, {_kind(optimizer)}{where}, is a wrapper around another one.",
            hint=_before(package) if package else "give the optimizer inside it",
        )
    if not isinstance(optimizer, Optimizer):
        raise BadInput(
            f"session(optimizer=) must be a torch.optim.Optimizer, got {_kind(optimizer)}.",
            hint="give the optimizer itself, or a tuple of several",
        )
    if world_size > 1 and _is_a(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
        raise BadInput(
            "The optimizer is a ZeroRedundancyOptimizer, which steps a part of the parameters on each worker.",
            hint="give the plain optimizer",
        )


def _inner_optimizer(optimizer: object) -> Optimizer | None:
    for name in ("optimizer", "_optimizer", "base_optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and inner is not optimizer:
            return inner
    return None


def _has_hooks(optimizer: object) -> bool:
    """Whether it is an optimizer of its own, if it uses another one for its steps (SAM, Lookahead)."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer)


def inspect_loader(loader: object, world_size: int) -> None:
    """Refuse a loader of which every worker would see other batches than its script means.

    Raises:
        BadInput: with what to give instead.
    """
    if not isinstance(loader, DataLoader):
        raise BadInput(
            f"The loader is a {type(loader).__name__}, and only a torch.utils.data.DataLoader can be shared out.",
            hint="put the samples into a dataset and give that to a DataLoader",
        )
    if world_size == 1:
        return
    for name, kept in (("__iter__", DataLoader.__iter__), ("_get_iterator", DataLoader._get_iterator)):
        if getattr(type(loader), name) is not kept:
            package = _package(type(loader))
            raise BadInput(
                f"The loader is a {_kind(loader)} with an {name} of its own, which the session cannot share out.",
                hint=_before(package)
                if package
                else "give a plain DataLoader of the same dataset, and do what it adds in the dataset or the loop",
            )
    for sampler in _samplers(loader):
        for attribute in _REPLICAS:
            replicas = getattr(sampler, attribute, 1)
            if isinstance(replicas, int) and replicas > 1:
                raise BadInput(
                    f"The loader's sampler is a {_kind(sampler)} with {attribute}={replicas}, so that every worker "
                    "draws a part of the data, and the session would share out worker 0's part alone.",
                    hint="leave it out (shuffle=True instead): the session shares out every batch",
                )


def _samplers(loader: DataLoader[object]) -> Iterator[object]:
    """The loader's samplers, and those inside them."""
    waiting = [(one, 0) for one in (loader.batch_sampler, loader.sampler) if one is not None]
    seen: set[int] = set()
    while waiting:
        sampler, depth = waiting.pop()
        if id(sampler) in seen:
            continue
        seen.add(id(sampler))
        yield sampler
        if depth < _DEPTH:
            inner = [one for name, one in getattr(sampler, "__dict__", {}).items() if "sampler" in name]
            waiting.extend((one, depth + 1) for one in inner if hasattr(one, "__iter__"))


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


def explain_script_error(error: BaseException) -> None:
    """Add what to do to errors that a script gets because a session is there."""
    said = str(error)
    if isinstance(error, ValueError) and "default process group twice" in said:
        error.add_note(
            "hetopt: the session has made the process group already; call init_process_group before the session, or "
            "leave it out."
        )
    elif isinstance(error, ValueError) and "process group has not been initialized" in said:
        error.add_note("hetopt: the process group was destroyed inside the session; do it after, or leave it out.")


def _is_a(thing: object, module: str, name: str) -> bool:
    """Whether it is of a class that may not be loaded: then nothing is of it."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(thing, kind)


def _package(kind: type) -> str | None:
    """The foreign package that a class is of."""
    for one in kind.__mro__:
        name = _FOREIGN.get(one.__module__.partition(".")[0])
        if name is not None:
            return name
    return None


_FRAMEWORKS = {
    "Accelerate": "from hetopt.integrations.accelerate import Accelerator",
    "Lightning": "from hetopt.integrations.lightning import HetoptStrategy, for Trainer(strategy=HetoptStrategy())",
    "transformers": "from hetopt.integrations.transformers import Trainer",
}
"""The line by which a framework trains in a session of its own."""


def _before(package: str) -> str:
    line = _FRAMEWORKS.get(package)
    if line is not None:
        return f"let {package} begin the session: leave the script's own out and write `{line}`"
    return (
        f"give the session what {package} was given: the plain model, optimizer and DataLoader, and leave {package} out"
    )


def _kind(thing: object) -> str:
    return type(thing).__name__
