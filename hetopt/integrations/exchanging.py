"""What the workers of a session tell each other beside gradients: figures and rows of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.trainer.agreement import gather_numbers, sum_numbers
from hetopt.trainer.session import Session

_MOST_DIMS = 8


def total(run: Session, values: Sequence[float]) -> list[float]:
    """The sums of all workers' values, the same everywhere."""
    with run.together():
        return sum_numbers(values, run.world_size)


def of_leader(run: Session, values: Sequence[float]) -> list[float]:
    """Worker 0's values: figures that all computed of the same data may differ in their last digit by the machine."""
    with run.together():
        return gather_numbers(values, run.world_size)[0]


def gather(run: Session, tensor: Tensor) -> list[Tensor]:
    """The tensors of all workers in rank order, whatever their shapes; without gradients."""
    if run.world_size == 1:
        return [tensor]
    own = tensor.detach().cpu().contiguous()
    shape = [own.dim(), *own.shape, *[0] * (_MOST_DIMS - own.dim())]
    with run.together():
        shapes = [[int(one) for one in row] for row in gather_numbers(shape, run.world_size)]
        sizes = [math.prod(row[1 : 1 + row[0]]) * own.element_size() for row in shapes]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.nbytes] = own.reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(parts, padded)
    return [
        part[:size].view(own.dtype).view(row[1 : 1 + row[0]]).to(tensor.device)
        for part, size, row in zip(parts, sizes, shapes, strict=True)
    ]


def told_by_leader(run: Session | None, value: Any) -> Any:
    """Worker 0's value, of what JSON has; all workers wait for it.

    Args:
        run: that the workers are in; None: they have met, and train not yet, or no more.
        value: this worker's.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    with nullcontext() if run is None else run.together():
        data = json.dumps(value).encode()
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0)
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
        if dist.get_rank() != 0:
            text = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, src=0)
    return json.loads(bytes(text.tolist()))
