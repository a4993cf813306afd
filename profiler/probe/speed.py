"""How fast a device multiplies and copies: two figures that relate machines to each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 5
MATRIX_SIDE = {"cpu": 1024, "cuda": 4096}
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Far larger than the caches of one worker, so that memory itself is measured."""


def matmul_flops_per_s(device: torch.device) -> float:
    """Floating-point operations a second of a large fp32 matrix product, as this process may use the device now."""
    side = MATRIX_SIDE[device.type]
    left, right = torch.rand(side, side, device=device), torch.rand(side, side, device=device)
    out = torch.empty_like(left)
    return 2 * side**3 / _median_s(lambda: torch.mm(left, right, out=out), device)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes a second of a memory copy, read plus write."""
    source = torch.rand(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), device)


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + REPEATS):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])
