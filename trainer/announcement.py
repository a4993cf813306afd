"""The first event of a run: what is trained, and on whom."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hetopt.trainer.agreement import gather_numbers, gather_texts
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.step import trainable_parameters


def announce(context: WorkerContext, model: nn.Module, *, shares: Sequence[int], step: int) -> None:
    """Write ``run_started``; called by every rank.

    Args:
        context: this worker.
        model: what is trained.
        shares: of the first step, in rank order.
        step: steps done by earlier attempts.
    """
    spec = context.spec
    name = "cpu" if context.device.type == "cpu" else torch.cuda.get_device_name(context.device)
    devices = gather_texts(name, context.world_size)
    threads = gather_numbers([torch.get_num_threads()], context.world_size)
    context.events.write(
        "run_started",
        task=spec.task,
        workers=[
            {
                "host": worker.host,
                "type": worker.type,
                "pace": worker.pace,
                "local_batch_size": share,
                "device": device,
                "threads": int(row[0]),
            }
            for worker, share, device, row in zip(spec.workers, shares, devices, threads, strict=True)
        ],
        global_batch_size=spec.global_batch_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes=sum(parameter.nbytes for parameter in trainable_parameters(model)),
        compression=spec.compression.model_dump(),
        resumed_step=step,
    )
