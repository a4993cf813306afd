"""Small facts that all workers must share: gathered vectors, texts and sums. Everything here travels on the CPU.

A run of one worker has no process group and agrees with itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_TEXT_BYTES = 256


def gather_numbers(row: Sequence[float], world_size: int) -> list[list[float]]:
    """The rows of all workers, in rank order, bit for bit as they were (NaN included); all rows have one length."""
    if world_size == 1:
        return [list(row)]
    own = torch.tensor(row, dtype=torch.float64)
    rows = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(rows, own)
    return [[float(value) for value in gathered.tolist()] for gathered in rows]


def gather_texts(text: str, world_size: int) -> list[str]:
    """A short text of each worker, in rank order; cut to 256 bytes."""
    if world_size == 1:
        return [text]
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(rows, own)
    return [bytes(gathered.tolist()).rstrip(b"\0").decode(errors="ignore") for gathered in rows]


def sum_numbers(values: Sequence[float], world_size: int) -> list[float]:
    """The sums over all workers, in double precision and the same bits everywhere."""
    if world_size == 1 or not values:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]
