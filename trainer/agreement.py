"""Small facts that all workers must share: gathered vectors and texts. Everything here travels on the CPU.

A run of one worker has no process group and agrees with itself.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hetopt.core.errors import BadInput

_TEXT_BYTES = 256


def meet_one_version(store: Store, rank: int, world_size: int, own: str | None = None) -> None:
    """Refuse a group whose workers run different versions of hetopt: they would not mean the same by a message.

    Called at the door, before the process group is made, by every worker of it.

    Args:
        store: that they meet in.
        rank: of this worker.
        world_size: workers of the group.
        own: this worker's version. Absent: that which is installed.

    Raises:
        BadInput: versions differ. All workers raise it.
    """
    store.set(f"hetopt/version/{rank}", own or version("hetopt"))
    versions = [store.get(f"hetopt/version/{other}").decode() for other in range(world_size)]
    if len(set(versions)) > 1:
        each = ", ".join(f"worker {other} has {release}" for other, release in enumerate(versions))
        raise BadInput(
            f"the workers run different versions of hetopt: {each}.", hint="install one version on all machines"
        )


def choose_backend(devices: list[str]) -> str:
    """Return the collective backend for workers on these devices, each named ``machine/device``, in rank order.

    NCCL carries CUDA tensors when every worker has a CUDA device to itself (it refuses two ranks on one device); CPU
    tensors, such as the control vector, go over gloo beside it. Every other group uses gloo alone.
    """
    own_cuda = len(set(devices)) == len(devices) and all("/cuda" in device for device in devices)
    return "cpu:gloo,cuda:nccl" if own_cuda else "gloo"


def join_group(store: Store, rank: int, world_size: int, device: object, timeout_s: float) -> None:
    """Open the default process group, over the backend that suits the devices of all workers.

    Args:
        store: that they meet in.
        rank: of this worker.
        world_size: workers of the group.
        device: of this worker, by a name that no other device of its machine has.
        timeout_s: that an operation may take.

    Raises:
        BadInput: versions differ (see `meet_one_version`).
    """
    meet_one_version(store, rank, world_size)
    store.set(f"hetopt/device/{rank}", f"{os.uname().nodename}/{device}")
    devices = [store.get(f"hetopt/device/{other}").decode() for other in range(world_size)]
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(choose_backend(devices), store=store, rank=rank, world_size=world_size, timeout=timeout)


def take_parameters(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values of parameters and buffers to all workers."""
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        staged = real.cpu().contiguous()
        dist.broadcast(staged, src=0)
        real.copy_(staged)


def gather_numbers(row: Sequence[float], world_size: int) -> list[list[float]]:
    """Gather a row of numbers from every worker, in rank order, bit for bit (NaN included); rows have one length."""
    return Gathering(row, world_size).wait()


class Gathering:
    """The rows of all workers on their way: `gather_numbers`, with something else done in between.

    Begun and waited for at the same points of the program on all ranks, like every collective. Others may be begun and
    finished in between: gloo carries out what is begun in that order, and keeps the messages of each apart.
    """

    def __init__(self, row: Sequence[float], world_size: int) -> None:
        self._row = list(row)
        self._work: dist.Work | None = None
        if world_size > 1:
            numbers = torch.tensor(self._row, dtype=torch.float64)
            self._rows = [torch.empty_like(numbers) for _ in range(world_size)]
            self._work = dist.all_gather(self._rows, numbers, async_op=True)

    def wait(self) -> list[list[float]]:
        """Return the rows of all workers, in rank order."""
        if self._work is None:
            return [self._row]
        self._work.wait()
        gathered: list[list[float]] = torch.stack(self._rows).tolist()
        return gathered


def gather_texts(text: str, world_size: int, group: dist.ProcessGroup | None = None) -> list[str]:
    """Gather a short text from every worker of a group, in rank order; cut to 256 bytes."""
    if world_size == 1:
        return [text]
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(packed) for _ in range(world_size)]
    dist.all_gather(rows, packed, group=group)
    return [bytes(gathered.tolist()).rstrip(b"\0").decode(errors="ignore") for gathered in rows]
