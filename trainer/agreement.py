"""Collectives for small facts that all workers share: rows of numbers, texts, versions, parameters; all on the CPU.

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


def meet_one_version(store: Store, rank: int, world_size: int, release: str | None = None) -> None:
    """Raise BadInput on all workers unless all run one hetopt version; all must call it, and each waits for the others.

    Called before the process group is made: other versions would not mean the same by a message.

    Args:
        store: store that all workers have open; each writes its version into it.
        rank: rank of this worker, from 0 on.
        world_size: workers of the group.
        release: this worker's version; None: the installed one.

    Raises:
        BadInput: two workers have different versions; the error names the version of each.
    """
    store.set(f"hetopt/version/{rank}", release or version("hetopt"))
    versions = [store.get(f"hetopt/version/{other}").decode() for other in range(world_size)]
    if len(set(versions)) > 1:
        each = ", ".join(f"worker {other} has {installed}" for other, installed in enumerate(versions))
        raise BadInput(
            f"the workers run different versions of hetopt: {each}.", hint="install one version on all machines"
        )


def choose_backend(devices: list[str]) -> str:
    """Return torch's backend for workers on ``devices`` ('machine/device' by rank): NCCL if all are different GPUs.

    NCCL carries CUDA tensors when every worker has a CUDA device to itself (it refuses two ranks on one device); CPU
    tensors, such as the control vector, go over gloo beside it. Every other group uses gloo alone.
    """
    own_cuda = len(set(devices)) == len(devices) and all("/cuda" in device for device in devices)
    return "cpu:gloo,cuda:nccl" if own_cuda else "gloo"


def join_group(store: Store, rank: int, world_size: int, device: object, timeout_s: float) -> None:
    """Check that versions agree, and open torch's default process group, with NCCL where it can be; all must call it.

    Args:
        store: store that all workers have open; each writes its version and device into it.
        rank: rank of this worker.
        world_size: workers of the group.
        device: device of this worker, by a name that no other device of its machine has.
        timeout_s: seconds that any collective of the group may take before it fails.

    Raises:
        BadInput: versions differ (see `meet_one_version`).
    """
    meet_one_version(store, rank, world_size)
    store.set(f"hetopt/device/{rank}", f"{os.uname().nodename}/{device}")
    devices = [store.get(f"hetopt/device/{other}").decode() for other in range(world_size)]
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(choose_backend(devices), store=store, rank=rank, world_size=world_size, timeout=timeout)


def take_parameters(tensors: Iterable[Tensor]) -> None:
    """Overwrite parameters and buffers, in place, with rank 0's values; every worker must call it with equal shapes.

    Needs an initialised process group. A tensor that is given twice travels once; order and shapes must be equal
    everywhere.
    """
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        staged = real.cpu().contiguous()
        dist.broadcast(staged, src=0)
        real.copy_(staged)


def gather_numbers(row: Sequence[float], world_size: int) -> list[list[float]]:
    """Return all workers' rows, bit for bit, [workers][numbers] by rank; all must call it, with rows of one length.

    With ``world_size`` 1 nothing is sent, and the result is this row alone.
    """
    return Gathering(row, world_size).wait()


class Gathering:
    """A started all-gather of a row of numbers per worker, whose result `wait` returns; every worker must start it.

    `gather_numbers` in two parts, started and waited for at the same points of the program on all ranks. Between them
    other collectives may be started and finished: gloo carries them out in the order in which they are started. Of one
    worker nothing is sent, and `wait` returns its own row.

    Args:
        row: numbers of this worker; as many on all workers.
        world_size: workers of the group.
        group: process group; None: the default one.
    """

    def __init__(self, row: Sequence[float], world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self._row = list(row)
        self._work: dist.Work | None = None
        if world_size > 1:
            numbers = torch.tensor(self._row, dtype=torch.float64)
            self._rows = [torch.empty_like(numbers) for _ in range(world_size)]
            self._work = dist.all_gather(self._rows, numbers, group=group, async_op=True)

    def wait(self) -> list[list[float]]:
        """Wait for the rows of all workers, and return them, [workers][numbers], in rank order."""
        if self._work is None:
            return [self._row]
        self._work.wait()
        gathered: list[list[float]] = torch.stack(self._rows).tolist()
        return gathered


def gather_texts(text: str, world_size: int, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return all workers' texts by rank; every worker of ``group`` (None: the default group) must call it.

    Of several workers a text travels as its first 256 bytes of UTF-8: a longer one comes back cut. With ``world_size``
    1 it comes back whole.
    """
    if world_size == 1:
        return [text]
    rows = Gathering(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), world_size, group).wait()
    return [bytes(map(int, row)).rstrip(b"\0").decode(errors="ignore") for row in rows]
