"""Where a session's worker is among the others, and how it meets them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from hetopt.core.errors import BadInput
from hetopt.core.listening import LOOPBACK, collectives_on
from hetopt.trainer.agreement import Store, meet_devices, meet_one_version
from hetopt.trainer.host.stores import group_store


def find_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of workers: of the process group that the script has, else of torchrun.

    Raises:
        BadInput: they are no numbers.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    except ValueError:
        raise BadInput("RANK and WORLD_SIZE must be whole numbers.", hint="start the script with torchrun") from None


def join(model: nn.Module, rank: int, world_size: int, timeout_s: float) -> tuple[Store | None, Callable[[], None]]:
    """Meet the other workers where torchrun says; return the store that they meet in, and how to leave them.

    Args:
        model: on the device of this worker.
        rank: of this worker.
        world_size: workers.
        timeout_s: a worker that is later than this is lost.

    Raises:
        BadInput: the script's own process group, which stays, cannot be used.
    """
    if world_size == 1 or dist.is_initialized():
        if world_size > 1 and "gloo" not in dist.get_backend_config():
            raise BadInput(
                f"The script's process group has only {dist.get_backend()}, and sessions also agree on the CPU.",
                hint="use init_process_group('cpu:gloo,cuda:nccl'), or leave it to the session",
            )
        return None, lambda: None
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        # All are on this machine: gloo would listen on the address that its name stands for, which others may reach.
        for name, interface in collectives_on(LOOPBACK).items():
            os.environ.setdefault(name, interface)
    store = group_store(os.environ, rank)
    meet_one_version(store, rank, world_size)
    device = next((one.device for one in model.parameters() if one.is_cuda), torch.device("cpu"))
    dist.init_process_group(
        meet_devices(store, rank, world_size, f"{os.uname().nodename}/{_named(device)}"),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return store, lambda: dist.destroy_process_group() if dist.is_initialized() else None


def _named(device: torch.device) -> str:
    """A device by a name that no other of its machine has, whatever index each process knows it by."""
    return "cpu" if device.type != "cuda" else f"cuda:{torch.cuda.get_device_properties(device).uuid}"
