"""Which processes take part in a collective, and where tensors must lie to travel between them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def group_size(group: dist.ProcessGroup | None) -> int:
    """Workers in the group; ``None`` is the default group, and a process that never joined one is alone."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's place in the group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def staging_device(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """Where the tensor has to lie for the group's backend: gloo carries CPU tensors, so a GPU's go through the host.

    That makes groups of GPU and CPU workers possible: on the wire all of them look alike.
    """
    backends = dist.get_backend(group)
    through_host = tensor.is_cuda and "gloo" in backends and "nccl" not in backends
    return torch.device("cpu") if through_host else tensor.device
