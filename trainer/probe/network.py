"""Times the collectives between all workers of the probe over a range of payloads."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.profiler.measurement import LinkPoint
from hetopt.profiler.profile import Collective
from hetopt.profiler.schedule import NetworkProbe
from hetopt.trainer.exchange.group import staging_device
from hetopt.trainer.probe.crew import Crew, align

LARGEST_BYTES = 1 << 26
"""Of a gradient larger than this only so much is sent: the line through the payloads is straight long before."""


def time_collectives(crew: Crew, probe: NetworkProbe, *, gradient_bytes: int, time_limit_s: float) -> None:
    """Record every collective at every payload of the schedule, and at the size of the job's own gradient.

    A timing is that of the worker that waited longest. Payloads are fp32, as gradients are. When time runs short the
    largest payloads are left out, though never the two smallest.
    """
    context = crew.context
    begun_s = crew.elapsed_s()
    across_hosts = len({worker.host for worker in context.spec.workers}) > 1
    wanted = (*probe.payload_bytes, min(gradient_bytes, LARGEST_BYTES))
    payloads = sorted({size // 4 * 4 for size in wanted if size >= 4})
    for count, payload_bytes in enumerate(payloads):
        spent_s = crew.elapsed_s() - begun_s
        # The next payload takes longer than all before it together once sizes grow several-fold.
        if count >= 2 and 2 * spent_s > time_limit_s:
            return
        for collective in probe.collectives:
            run = _collective(collective, payload_bytes, context.device, context.rank, context.world_size)
            own = [_time(crew, run) for _ in range(probe.warmup + probe.repeats)][probe.warmup :]
            crew.record(
                LinkPoint(
                    collective=collective,
                    workers=context.world_size,
                    across_hosts=across_hosts,
                    payload_bytes=payload_bytes,
                    samples_s=tuple(max(column) for column in zip(*crew.gather(own), strict=True)),
                )
            )


def _time(crew: Crew, run: Callable[[], None]) -> float:
    context = crew.context
    align(dist.group.WORLD)
    begun = context.clock()
    run()
    return context.clock() - begun


def _collective(
    name: Collective, payload_bytes: int, device: torch.device, rank: int, workers: int
) -> Callable[[], None]:
    """The collective as the trainer would run it: tensors of a GPU go through the host where the backend is gloo's."""
    payload = torch.full((payload_bytes // 4,), float(rank), device=device)
    staging = staging_device(payload, None)
    gathered = [torch.empty_like(payload, device=staging) for _ in range(workers)] if name == "all_gather" else []

    def run() -> None:
        staged: Tensor = payload.to(staging)
        if name == "all_reduce":
            dist.all_reduce(staged)
        elif name == "all_gather":
            dist.all_gather(gathered, staged)
        else:
            dist.broadcast(staged, src=0)
        if device.type == "cuda":
            payload.copy_(staged)
            torch.cuda.synchronize(device)

    return run
