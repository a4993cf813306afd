"""Judges the model with all workers: each evaluates a part, and exact sums make the metrics of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetopt.core.batch_partition import largest_remainder
from hetopt.core.errors import RunFailed
from hetopt.trainer.agreement import sum_numbers
from hetopt.trainer.data.fetch import MapDataset
from hetopt.trainer.task import Task, evaluation_sums


def evaluate(
    task: Task, model: nn.Module, dataset: MapDataset, *, shares: Sequence[float], rank: int, device: torch.device
) -> dict[str, float]:
    """The task's metrics over the whole dataset, the same on every rank.

    Args:
        task: how to evaluate.
        model: the same on every rank, buffers included (see `average_buffers`).
        dataset: the evaluation data.
        shares: how fast the workers are, in rank order; each evaluates its proportion of the samples.
        rank: this worker's.
        device: this worker's.

    Raises:
        RunFailed: a metric is NaN or infinite.
    """
    world_size = len(shares)
    parts = largest_remainder(list(shares), len(dataset), minimum=[0] * world_size, maximum=[None] * world_size)
    last = list(accumulate(parts))[rank]
    sums = evaluation_sums(task, model, dataset, range(last - parts[rank], last), device)
    if not sums:
        # A worker without samples still has to know which sums there are.
        sums = dict.fromkeys(evaluation_sums(task, model, dataset, range(1), device), 0.0)
    names = sorted(sums)
    totals = sum_numbers([sums[name] for name in names], world_size)
    metrics = task.metrics(dict(zip(names, totals, strict=True)), len(dataset))
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise RunFailed(
                f"the evaluation gives {name} = {value}.", hint="lower the learning rate, or check the task's evaluate"
            )
    return metrics


def has_averages(model: nn.Module) -> bool:
    """Whether there is anything for `average_buffers`."""
    return bool(_averages(model))


def _averages(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.numel()]


def average_buffers(model: nn.Module, weight: float, world_size: int) -> None:
    """Replace floating-point buffers (running statistics of BatchNorm) by their weighted mean over the workers.

    Every worker's statistics come from its own samples; ``weight`` is its share of the batch, and the weights sum to 1.
    Counters are the same everywhere and stay.
    """
    buffers = _averages(model)
    if world_size == 1 or not buffers:
        return
    flat = torch.cat([buffer.detach().reshape(-1).to("cpu", torch.float64) for buffer in buffers]).mul_(weight)
    dist.all_reduce(flat)
    with torch.no_grad():
        for buffer, mean in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))
