"""A model's shards on the devices of a machine: how they are cut by torch's ``fully_shard``, and put together again.

The devices of a machine hold one replica, or several where machines have unequal numbers of devices. Each device keeps
its part of every parameter, gradient and optimizer state, and sums its part of the gradient with its counterparts, the
devices that hold the same part of other replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
from hetopt.core.memory import memory_limit_bytes

if TYPE_CHECKING:  # a second of every worker's start
    from torch.distributed.device_mesh import DeviceMesh

REPLICA, SHARD = "replica", "shard"


def replica_devices(hosts: Sequence[str]) -> int:
    """Return the devices of a replica: the largest number that divides the devices of every machine.

    Args:
        hosts: of the devices, in rank order; those of a machine are neighbours.
    """
    return math.gcd(*(len(list(same)) for _, same in groupby(hosts)))


def replica_mesh(hosts: Sequence[str], device_type: str) -> DeviceMesh:
    """Make the device mesh of a run, [replicas, devices of a replica]; called by all of its workers.

    Args:
        hosts: of the devices, in rank order.
        device_type: such as "cuda".
    """
    from torch.distributed.device_mesh import init_device_mesh

    each = replica_devices(hosts)
    return init_device_mesh(device_type, (len(hosts) // each, each), mesh_dim_names=(REPLICA, SHARD))


def held(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this device holds: all of it where it is not sharded."""
    return tensor.detach().to_local() if is_sharded([tensor]) else tensor  # type: ignore[attr-defined]  # of a DTensor


def viewed_as(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a part of a flat vector with the shape of a parameter; sharded where that is."""
    view = part.view_as(held(parameter))
    if not is_sharded([parameter]):
        return view
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]  # of a DTensor
    return DTensor.from_local(view, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor is sharded over several devices."""
    return any(hasattr(tensor, "to_local") for tensor in tensors)


def gathered(value: Any, *, keep: bool = True) -> Any:
    """Replace the sharded tensors in nested values by whole ones on the CPU; called by all devices of a replica.

    Args:
        value: dictionaries, lists and tuples.
        keep: whether this device wants them; else empty tensors take their place.
    """

    def whole(tensor: Tensor) -> Tensor:
        if not is_sharded([tensor]):
            return tensor
        full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]  # of a DTensor
        return full.cpu() if keep else full.new_empty(0)

    return tree_map_only(Tensor, whole, value)


def cut_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """Return this device's part of a whole tensor where the reference, of the same shape, is sharded; else as it is."""
    if not is_sharded([reference]) or tensor.shape != reference.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = reference.device_mesh, reference.placements  # type: ignore[attr-defined]  # of a DTensor
    return distribute_tensor(tensor.to(reference.device), mesh, placements, src_data_rank=None)


def cut_states(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], updates: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the whole states of a model and its optimizer, cut as both are now.

    Args:
        model: sharded or not.
        optimizer: of its parameters.
        saved: state of the model.
        updates: state of the optimizer.
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


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList)


def blocks_of(model: nn.Module, kind: type[nn.Module] | None = None) -> list[nn.Module]:
    """Return the blocks that a model is sharded by: those of the class that holds most parameters among repeated ones.

    Args:
        model: not sharded yet.
        kind: class of the blocks; None: found.

    Raises:
        BadInput: the model has none of that class, or no class that occurs twice.
    """
    modules: dict[type[nn.Module], list[nn.Module]] = {}
    for module in list(model.modules())[1:]:  # the model itself is sharded in any case
        modules.setdefault(type(module), []).append(module)
    sizes = {found: sum(each.numel() for one in same for each in one.parameters()) for found, same in modules.items()}
    # Lists of modules repeat, too: what they hold counts for itself.
    repeated = [found for found in sizes if len(modules[found]) > 1 and sizes[found] and found not in _LISTS]
    chosen = kind or max(repeated, key=lambda found: sizes[found], default=None)
    if chosen is None or chosen not in modules:
        named = "that occurs twice" if kind is None else f"of class {kind.__name__}"
        raise BadInput(
            f"The task's model has no block {named}, by which it could be sharded.",
            hint="name the class of its blocks with `blocks`, or leave `shard` out",
        )
    return modules[chosen]


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Keep the inputs of blocks alone for the backward pass, which computes the blocks again (Chen et al. 2016)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The place of this device among those that hold a sharded model.

    Attributes:
        devices: that hold a replica.
        counterparts: those with the same part of other replicas; None: all workers.
    """

    devices: int = 1
    counterparts: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Sequence[nn.Module], hosts: Sequence[str], device: torch.device, *, whole: bool
    ) -> Shards:
        """Shard a model block by block; called by all workers.

        Args:
            model: on the CPU, the same on all workers.
            blocks: of it.
            hosts: of the workers, in rank order.
            device: of this worker.
            whole: whether weights stay sharded between forward and backward as well; else gradients and optimizer
                state alone are sharded from then on.
        """
        from torch.distributed.fsdp import fully_shard

        mesh = replica_mesh(hosts, device.type)
        for module in (*reversed(blocks), model):  # from the inside out
            fully_shard(module, mesh=mesh[SHARD], reshard_after_forward=None if whole else False)
        return cls(devices=mesh[SHARD].size(), counterparts=mesh[REPLICA].get_group())


WHOLE = Shards()
"""Of a model of which every worker has all."""


def replica_bytes(model: nn.Module) -> int:
    """Return the bytes that a whole replica keeps: weights, buffers, and gradient and two moments of what is trained.

    16 a parameter for Adam in single precision (Rajbhandari et al. 2020).
    """
    parameters = sum(parameter.nbytes * (1 + 3 * parameter.requires_grad) for parameter in model.parameters())
    return parameters + sum(buffer.nbytes for buffer in model.buffers())


def device_bytes(device: torch.device, sharing: int) -> int:
    """Return the bytes that a worker may use of its GPU, or of the main memory that so many workers share."""
    is_cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if is_cuda else psutil.virtual_memory().total
    return memory_limit_bytes(total, workers=1 if is_cuda else sharing, fraction=0.9)


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has gathered."""
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()


def whole_states(optimizer: Optimizer) -> list[str]:
    """Return the names of optimizer states that are tensors, of sharded parameters, and not sharded themselves."""
    return [
        name
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if is_sharded([parameter]) and isinstance(value, Tensor) and value.numel() > 1 and not is_sharded([value])
    ]
