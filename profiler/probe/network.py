"""Times the collectives between all workers of the probe as a training step meets them: right after computing.

Back to back, collectives find their threads awake, their sockets hot and the payload in the cache, and on a small
gradient they take half the time or less that they add to a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.profile import Collective
from hetopt.core.run_spec import NetworkProbe
from hetopt.profiler.probe.crew import ProbeGroup, align
from hetopt.profiler.records import LinkPoint
from hetopt.trainer.comm.channel import staging_device

ROUND = 5
"""Steps that one timing averages. In a single one, a worker that was quick before seems to be slow now."""

SHORTEST_S = 1e-6
"""Even so a difference may come out at nothing."""

LARGEST_BYTES = 1 << 26
"""Of a gradient larger than this only so much is sent: the line through the payloads is straight long before."""


def time_collectives(
    crew: ProbeGroup, probe: NetworkProbe, *, compute: Callable[[], None], gradient_bytes: int, time_limit_s: float
) -> None:
    """Record every collective at every payload of the schedule, and at the size of the job's own gradient.

    A timing is what the collective adds to the computation of the slowest worker, mean over the workers. Payloads are
    fp32, as gradients are. When time runs short the largest payloads are left out, though never the two smallest.

    Args:
        crew: all workers of the probe.
        probe: what to time, how often.
        compute: a few milliseconds of the job's own computation.
        gradient_bytes: the job's.
        time_limit_s: for all of it.
    """
    context = crew.context
    begun_s = crew.elapsed_s()
    across_hosts = len({worker.host for worker in context.spec.workers}) > 1
    wanted = (*probe.payload_bytes, min(gradient_bytes, LARGEST_BYTES))
    payloads = sorted({size // 4 * 4 for size in wanted if size >= 4})
    for count, payload_bytes in enumerate(payloads):
        if count >= 2 and crew.elapsed_s() - begun_s > time_limit_s:
            return
        allowed_s = time_limit_s / (len(payloads) * len(probe.collectives))
        for collective in probe.collectives:
            run = _collective(collective, payload_bytes, context.device, context.rank, context.world_size)
            crew.record(
                LinkPoint(
                    collective=collective,
                    workers=context.world_size,
                    across_hosts=across_hosts,
                    payload_bytes=payload_bytes,
                    samples_s=_samples(crew, probe, compute, run, allowed_s),
                )
            )


def _samples(
    crew: ProbeGroup, probe: NetworkProbe, compute: Callable[[], None], run: Callable[[], None], time_limit_s: float
) -> tuple[float, ...]:
    """As many timings as there is time for, each the mean of `ROUND` steps; the same on every rank."""
    align(dist.group.WORLD)
    warmup = [_step(crew, compute, run) for _ in range(probe.warmup)]
    once_s = max(row[0] for row in crew.gather([warmup[-1][1]]))
    rounds = min(probe.most_rounds, max(probe.least_rounds, int(time_limit_s / (ROUND * once_s))))
    _step(crew, compute, run)
    own = [_step(crew, compute, run) for _ in range(rounds * ROUND)]
    rows = crew.gather([seconds for pair in own for seconds in pair])
    added = [
        sum(row[2 * step + 1] for row in rows) / len(rows) - max(row[2 * step] for row in rows)
        for step in range(len(own))
    ]
    return tuple(
        max(SHORTEST_S, statistics.fmean(added[first : first + ROUND])) for first in range(0, len(added), ROUND)
    )


def _step(crew: ProbeGroup, compute: Callable[[], None], run: Callable[[], None]) -> tuple[float, float]:
    """Seconds that this worker computed, and seconds until the collective behind it was over.

    As in training nobody waits before the next step: a worker that is done computes while others still receive.
    """
    clock = crew.context.clock
    begun = clock()
    compute()
    computed = clock()
    run()
    return computed - begun, clock() - begun


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
