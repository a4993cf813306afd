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


_MET: list[Store] = []
"""The store of the group that was met here, until a session takes it."""


def join(model: nn.Module, rank: int, world_size: int, timeout_s: float) -> tuple[Store | None, Callable[[], None]]:
    """The store that the workers met through, and how to leave them. A group that was there before stays."""
    if world_size == 1 or dist.is_initialized():
        if world_size > 1 and "gloo" not in dist.get_backend_config():
            raise BadInput(
                f"The script's process group has only {dist.get_backend()}, and sessions also agree on the CPU.",
                hint="use init_process_group('cpu:gloo,cuda:nccl'), or leave it to the session",
            )
        return (_MET.pop() if _MET else None), lambda: None
    device = next((one.device for one in model.parameters() if one.is_cuda), torch.device("cpu"))
    leave = meet(rank, world_size, timeout_s, device)
    return _MET.pop(), leave


def meet(rank: int, world_size: int, timeout_s: float, device: torch.device) -> Callable[[], None]:
    """Meet the other workers where torchrun says; how to leave them.

    Args:
        rank: of this worker.
        world_size: workers.
        timeout_s: a worker that is later than this is lost.
        device: of this worker's gradients.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        # All are on this machine: gloo would listen on the address that its name stands for, which others may reach.
        for name, interface in collectives_on(LOOPBACK).items():
            os.environ.setdefault(name, interface)
    store = group_store(os.environ, rank)
    meet_one_version(store, rank, world_size)
    dist.init_process_group(
        meet_devices(store, rank, world_size, f"{os.uname().nodename}/{_named(device)}"),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    _MET[:] = [store]
    return _part


def _part() -> None:
    _MET.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _named(device: torch.device) -> str:
    """A device by a name that no other of its machine has, whatever index each process knows it by."""
    return "cpu" if device.type != "cuda" else f"cuda:{torch.cuda.get_device_properties(device).uuid}"
