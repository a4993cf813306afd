"""Models sharded over the devices of a machine by torch's ``fully_shard``, and their states cut and put together.

The devices of a machine hold one replica, or several where machines have unequal numbers of devices. Each device keeps
its part of every parameter, gradient and optimizer state, and sums its part of the gradient with its counterparts, the
devices that hold the same part of other replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from hetopt.core.errors import BadInput
from hetopt.core.memory import Sharding, memory_limit_bytes
from hetopt.core.run_rules import why_not_sharded
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.agreement import gather_numbers, gather_texts, take_parameters

if TYPE_CHECKING:  # a second of every worker's start
    from torch.distributed.device_mesh import DeviceMesh

REPLICA, SHARD = "replica", "shard"


def replica_devices(hosts: Sequence[str]) -> int:
    """Return the number of devices that hold a model replica: the largest that divides every host's number of devices.

    Args:
        hosts: host of each device, in rank order; devices of a machine are neighbours.
    """
    return math.gcd(*(len(list(same)) for _, same in groupby(hosts)))


def replica_mesh(hosts: Sequence[str], device_type: str) -> DeviceMesh:
    """Return torch's device mesh [replicas, devices of a replica], by the ranks' hosts; every worker must call it.

    Args:
        hosts: host of each device, in rank order.
        device_type: type of the devices, such as "cuda".
    """
    from torch.distributed.device_mesh import init_device_mesh

    each = replica_devices(hosts)
    return init_device_mesh(device_type, (len(hosts) // each, each), mesh_dim_names=(REPLICA, SHARD))


def held(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this device holds, detached; one that is not sharded is returned as it is."""
    return tensor.detach().to_local() if is_sharded([tensor]) else tensor  # type: ignore[attr-defined]  # of a DTensor


def viewed_as(parameter: Any, part: Tensor) -> Tensor:
    """Return ``part``, a piece of a flat vector, in the shape of a parameter, sharded as that is; shares the memory.

    Args:
        parameter: parameter whose shape and placement are taken.
        part: 1-D, as many elements as this device holds of it.
    """
    view = part.view_as(held(parameter))
    if not is_sharded([parameter]):
        return view
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        view,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of these tensors is sharded over several devices (a DTensor)."""
    return any(hasattr(tensor, "to_local") for tensor in tensors)


def gathered(value: Any, *, keep: bool = True) -> Any:
    """Return nested values with sharded tensors whole on the CPU; all devices of a replica must call it.

    Tensors that are not sharded stay as they are, where they are.

    Args:
        value: dictionaries, lists and tuples of tensors.
        keep: whether this device wants the whole tensors; else empty ones take their place.
    """

    def whole(tensor: Tensor) -> Tensor:
        """Return a tensor whole on the CPU, or an empty one in its place; one that is not sharded as it is."""
        if not is_sharded([tensor]):
            return tensor
        full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]  # of a DTensor
        return full.cpu() if keep else full.new_empty(0)

    return tree_map_only(Tensor, whole, value)


def cut_like(tensor: Tensor, reference: Any) -> Tensor:
    """Return this device's shard of a whole tensor, cut as ``reference`` is.

    Where ``reference`` is whole, or has another shape, the tensor is returned as it is.
    """
    if not is_sharded([reference]) or tensor.shape != reference.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        tensor.to(reference.device), reference.device_mesh, reference.placements, src_data_rank=None
    )


def cut_states(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], updates: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return saved whole states of a model and its optimizer (``updates``), cut to this device's shards of both.

    Args:
        model: sharded or not.
        optimizer: optimizer of its parameters.
        saved: whole state dictionary of the model.
        updates: whole state dictionary of the optimizer.

    Returns:
        State dictionaries of the model and of the optimizer, to load; entries that the model does not have stay whole.
    """
    references = model.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        index: tree_map_only(Tensor, partial(cut_like, reference=parameters[index]), state)
        for index, state in updates["state"].items()
    }
    weights = {
        name: cut_like(value, references[name]) if name in references else value for name, value in saved.items()
    }
    return weights, {**updates, "state": states}


LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Classes of modules in which models keep the blocks that they repeat."""


def blocks_of(model: nn.Module, kind: type[nn.Module] | None = None) -> list[nn.Module]:
    """Return a model's blocks to shard, the modules of class ``kind``; None: the blocks that its lists repeat.

    Args:
        model: not sharded yet.
        kind: class of the blocks; None: modules of one class, at least two, that a ``ModuleList``, ``ModuleDict`` or
            ``Sequential`` holds, in the outermost of such lists; without lists, that any module holds.

    Raises:
        BadInput: the model has none of that class, or repeats no module.
    """
    every = [module for module in list(model.modules())[1:] if type(module) is kind]
    blocks = every if kind else list(_repeated(model, LISTS)) or list(_repeated(model, (nn.Module,)))
    if not blocks:
        raise BadInput(
            f"The model has no block {'that it repeats' if kind is None else f'of class {kind.__name__}'}.",
            hint="name the class of its blocks with `blocks`, or leave `shard` out",
        )
    return blocks


def _repeated(module: nn.Module, holders: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """Yield the outermost modules of which a module of a class of ``holders`` has several of one class."""
    classes = Counter(type(child) for child in module.children() if any(True for _ in child.parameters()))
    for child in module.children():
        if isinstance(module, holders) and classes[type(child)] > 1 and not isinstance(child, LISTS):
            yield child
        else:
            yield from _repeated(child, holders)


def block_facts(model: nn.Module, kind: type[nn.Module] | None = None) -> dict[str, Any]:
    """Return a model's number of ``blocks`` and the ``block_share`` of all weights in the largest; empty: no blocks.

    Args:
        model: model, sharded or not.
        kind: class of the blocks; None: as `blocks_of` finds it.
    """
    try:
        return _facts_of(blocks_of(model, kind), model)
    except BadInput:
        return {}


def _facts_of(blocks: Sequence[nn.Module], model: nn.Module) -> dict[str, Any]:
    weights = [sum(parameter.nbytes for parameter in module.parameters()) for module in (*blocks, model)]
    return {"blocks": len(blocks), "block_share": max(weights[:-1]) / weights[-1]}


def facts_of_own_shards(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Return what a script that calls ``fully_shard`` shares: ``shard``, and the facts of the modules that it named.

    Facts are those of `block_facts`. Empty: none of ``modules``, all of the process, was sharded.
    """
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in modules if isinstance(module, FSDPModule)]
    if not parts:
        return {}
    model = max(parts, key=lambda part: sum(parameter.numel() for parameter in part.parameters()))
    blocks = [part for part in parts if part is not model] or [model]
    groups = [part._get_fsdp_state()._fsdp_param_group for part in blocks]  # torch has no other way to ask
    frees = any(group is not None and group.post_forward_mesh_info is not None for group in groups)
    return {"shard": "full" if frees else "grads", **_facts_of(blocks, model)}


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Make blocks keep only their inputs for backward, which then computes each again (Chen et al. 2016); in place."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The layout of a model's shards: how many devices hold a replica, and which hold the same part as this device.

    Attributes:
        devices: number of devices that hold a replica; 1: the model is not sharded.
        counterparts: process group of the devices with the same part of other replicas; None: all workers.
    """

    devices: int = 1
    counterparts: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Sequence[nn.Module], hosts: Sequence[str], device: torch.device, *, whole: bool
    ) -> Shards:
        """Shard a model in place by ``blocks`` (``whole``: weights, too); return the layout; every worker must call it.

        Args:
            model: on the CPU, the same on all workers.
            blocks: modules of the model that are sharded each by itself.
            hosts: host of each worker, in rank order.
            device: of this worker.
            whole: whether weights stay sharded between forward and backward as well; else gradients and optimizer
                state alone are sharded from then on.
        """
        from torch.distributed.fsdp._fully_shard import fully_shard  # as it is: scripts are given another

        mesh = replica_mesh(hosts, device.type)
        for module in (*reversed(blocks), model):  # from the inside out
            fully_shard(module, mesh=mesh[SHARD], reshard_after_forward=None if whole else False)
        return cls(devices=mesh[SHARD].size(), counterparts=mesh[REPLICA].get_group())


WHOLE = Shards()
"""Layout of a model of which every worker has all."""


def device_bytes(device: torch.device, sharing: int) -> int:
    """Return the bytes that a worker may use: 90 % of its GPU, or of main memory divided by ``sharing`` workers."""
    is_cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if is_cuda else psutil.virtual_memory().total
    return memory_limit_bytes(total, workers=1 if is_cuda else sharing, fraction=0.9)


def wish_of(spec: RunSpec, otherwise: Sharding) -> Sharding:
    """Return what devices share of a model, by the run or else ``otherwise``; "none" where a replica has one device."""
    return "none" if replica_devices([worker.host for worker in spec.workers]) == 1 else spec.shard or otherwise


def share(
    model: nn.Module,
    wish: Sharding,
    spec: RunSpec,
    rank: int,
    device: torch.device,
    kind: type[nn.Module] | None = None,
) -> Shards:
    """Shard a model in place as a run wishes, and return the layout, `WHOLE` where it stays; all workers must call it.

    It stays where a run wishes "none", and under "auto" where every device holds a replica.

    Args:
        model: the same on all workers.
        wish: what devices share of it, see `wish_of`.
        spec: spec of the run.
        rank: of this worker.
        device: device of this worker.
        kind: class of the blocks, see `blocks_of`.

    Raises:
        BadInput: something in the run does not go with a sharded model, workers have different versions of torch, the
            model has no blocks, or a parameter is in two of them.
    """
    hosts = [worker.host for worker in spec.workers]
    if wish == "auto":
        # To train a replica: buffers, weights, and of trained ones gradient and two moments: 16 bytes a parameter for
        # Adam in single precision (Rajbhandari et al. 2020).
        needed = sum(buffer.nbytes for buffer in model.buffers()) + sum(
            parameter.nbytes * (1 + 3 * parameter.requires_grad) for parameter in model.parameters()
        )
        fits = needed <= device_bytes(device, hosts.count(hosts[rank]))
        if all(row[0] for row in gather_numbers([float(fits)], len(hosts))):
            return WHOLE
    if wish == "none":
        return WHOLE
    if (reason := why_not_sharded(spec)) is not None:
        raise BadInput(reason, hint='leave it out, or train with `shard="none"`')
    releases = gather_texts(torch.__version__.partition("+")[0], len(hosts))
    if len(set(releases)) > 1:
        each = ", ".join(f"worker {rank} has {release}" for rank, release in enumerate(releases))
        raise BadInput(f"Devices that share a model need one torch: {each}.", hint="install one version everywhere")
    blocks = blocks_of(model, kind)
    if (tied := tied_apart(model, blocks)) is not None:
        raise BadInput(
            f"Parameter {tied} is in several blocks, or in one and outside, and would be sharded once for each.",
            hint='name `blocks` that hold all its places, or train with `shard="none"`',
        )
    return Shards.of(model, blocks, hosts, device, whole=wish != "grads")


def tied_apart(model: nn.Module, blocks: Sequence[nn.Module]) -> str | None:
    """Return the name of a parameter that is in two of ``blocks``, or in one and outside; None: there is none."""
    numbers = {id(block): number for number, block in enumerate(blocks, start=1)}
    named = model.named_modules(remove_duplicate=False)
    starts = [(f"{name}.", numbers[id(module)]) for name, module in named if id(module) in numbers]
    places: dict[int, int] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        # Of blocks inside each other, the inner one has it.
        _, place = max(((len(start), number) for start, number in starts if path.startswith(start)), default=(0, 0))
        if places.setdefault(id(parameter), place) != place:
            return path
    return None


def share_trained(
    model: nn.Module, optimizer: Optimizer, wish: Sharding, spec: RunSpec, rank: int, kind: type[nn.Module] | None
) -> Shards:
    """Shard a model that has its optimizer already, which then steps by the shards; all workers must call it.

    Rank 0's values count. The optimizer's groups and state are changed in place.

    Args:
        model: model to shard, in place.
        optimizer: optimizer of its parameters.
        wish: what devices share of it, see `wish_of`; ``none``: nothing is done.
        spec: spec of the run.
        rank: of this worker.
        kind: class of the blocks, see `blocks_of`.

    Raises:
        BadInput: as of `share`; a step of the optimizer may raise it later, see `refuse_whole_states`.
    """
    if wish == "none":
        return WHOLE
    take_parameters([*model.parameters(), *model.buffers()])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shards = share(model, wish, spec, rank, next(model.parameters()).device, kind)
    parameters = dict(model.named_parameters())

    def shard_of(parameter: Tensor) -> Tensor:
        return parameters.get(names.get(id(parameter), ""), parameter)

    states = {
        (part := shard_of(parameter)): tree_map_only(Tensor, partial(cut_like, reference=part), state)
        for parameter, state in optimizer.state.items()
    }
    for group in optimizer.param_groups:
        group["params"] = list(map(shard_of, group["params"]))
    optimizer.state.clear()
    optimizer.state.update(states)
    if shards is not WHOLE:
        optimizer.register_step_post_hook(lambda *_: refuse_whole_states(optimizer))
    return shards


def reshard(model: nn.Module) -> None:
    """Free the weights that a sharded model has gathered for a forward pass without backward; else do nothing."""
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()


def refuse_whole_states(optimizer: Optimizer) -> None:
    """Check that an optimizer, which has stepped, keeps no whole tensors of sharded parameters.

    Raises:
        BadInput: it keeps a tensor of more than one element whole.
    """
    for parameter, state in optimizer.state.items() if is_sharded(optimizer.state) else ():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1 and is_sharded([parameter]) and not is_sharded([value]):
                raise BadInput(
                    f"{type(optimizer).__name__} keeps {name} of whole parameters, which the devices that share a "
                    "model hold in parts.",
                    hint='take an optimizer of torch.optim, or train with `shard="none"`',
                )
