"""Timing of the parts of an exchange: collectives between all workers, and each worker's compressing and unpacking.

Collectives are timed right after computing, as in a training step: back to back, with threads awake and payloads in the
cache, they take half that time on a small gradient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.comm.composition import GATHER, METHODS
from hetopt.core.comm.compression_text import USUAL_RATIO, parse_compression
from hetopt.core.comm.options import ROUNDED, SELECTOR, settled_collective
from hetopt.core.comm.payload_bytes import Shapes
from hetopt.core.profile import Collective, CompressorCost
from hetopt.core.run_spec import Compression, CompressorProbe, NetworkProbe
from hetopt.profiler.probe.crew import Alignment, ProbeGroup, align
from hetopt.profiler.records import CompressorPoint, LinkPoint
from hetopt.trainer.comm.channel import Channel, Reduction, staging_device
from hetopt.trainer.comm.methods import make_chain, make_residual

COMPUTED_SIDE = {"cpu": 512, "cuda": 4096}
"""Side of the square matrices that are multiplied before a collective, by device: some milliseconds, in which
communication threads fall asleep and the caches come to hold other things."""

ROUND = 5
"""Number of steps that one timing averages: in a single step, a worker that was quick before seems to be slow."""

SHORTEST_S = 1e-6
"""Least seconds of a timing, as a difference may come out at nothing."""

LARGEST_BYTES = 1 << 26
"""Most bytes of a gradient that are sent: the time is linear in the payload long before."""


def time_collectives(crew: ProbeGroup, probe: NetworkProbe, *, gradient_bytes: int, time_limit_s: float) -> None:
    """Time collectives at each payload of ``probe`` and the gradient's size, and log them; every rank must call it.

    A timing is what the collective adds to the computation of the slowest worker, mean over the workers. Payloads are
    fp32, as gradients are. When time runs short the largest payloads are left out, though never the two smallest.

    Args:
        crew: all workers of the probe.
        probe: collectives and payloads to time, and how often.
        gradient_bytes: size of the job's dense gradient; of more than `LARGEST_BYTES` only so many are sent.
        time_limit_s: seconds for all of it; the two smallest payloads are timed whatever it is.

    Raises:
        ProbeStopped: any worker was asked to stop.
    """
    context = crew.context
    side = COMPUTED_SIDE[context.device.type]
    matrix = torch.rand(side, side, device=context.device)

    def compute() -> None:
        torch.mm(matrix, matrix)[0, 0].item()  # waits for the device

    begun_s = crew.elapsed_s()
    across_hosts = len({worker.host for worker in context.spec.workers}) > 1
    wanted = (*probe.payload_bytes, min(gradient_bytes, LARGEST_BYTES))
    payloads = sorted({size // 4 * 4 for size in wanted if size >= 4})
    for count, payload_bytes in enumerate(payloads):
        if count >= 2 and crew.elapsed_s() - begun_s > time_limit_s:
            return
        allowed_s = time_limit_s / (len(payloads) * len(get_args(Collective)))
        for collective in get_args(Collective):
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
    """Return timings of a collective, each the mean seconds of `ROUND` steps, within ``time_limit_s``; collective.

    The result is the same on every rank. ``run`` is the collective, ``compute`` the work before it.
    """
    align(dist.group.WORLD)
    warmup = [_step(crew, compute, run) for _ in range(probe.warmup)]
    once_s = max(row[0] for row in crew.gather([warmup[-1][1]]))
    rounds = min(probe.most_rounds, max(1, int(time_limit_s / (ROUND * once_s))))
    _step(crew, compute, run)
    timed = [_step(crew, compute, run) for _ in range(rounds * ROUND)]
    rows = crew.gather([seconds for pair in timed for seconds in pair])
    added = [
        sum(row[2 * step + 1] for row in rows) / len(rows) - max(row[2 * step] for row in rows)
        for step in range(len(timed))
    ]
    return tuple(
        max(SHORTEST_S, statistics.fmean(added[first : first + ROUND])) for first in range(0, len(added), ROUND)
    )


def _step(crew: ProbeGroup, compute: Callable[[], None], run: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds that this worker computed, and the seconds from then on until its collective was over.

    As in training, workers are not aligned before: one that is done computes while others still receive.
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
    """Return a function that runs a collective as the trainer does: a GPU's tensors go through the host with gloo."""
    payload = torch.full((payload_bytes // 4,), float(rank), device=device)
    staging = staging_device(payload, None)
    operations: dict[Collective, Callable[[Tensor], object]] = {
        "all_reduce": dist.all_reduce,
        "all_gather": partial(dist.all_gather, [torch.empty_like(payload, device=staging) for _ in range(workers)]),
        "broadcast": partial(dist.broadcast, src=0),
    }

    def run() -> None:
        """Run the collective once, and wait until a GPU has its result."""
        staged: Tensor = payload.to(staging)
        operations[name](staged)
        if device.type == "cuda":
            payload.copy_(staged)
            torch.cuda.synchronize(device)

    return run


FEW, MANY = 2, 8
"""Numbers of workers, 2 and 8, between which the own work of an exchange in slices is timed: calls grow with their
number, bytes do not."""


def time_compressors(
    crew: ProbeGroup,
    sweep: int,
    probe: CompressorProbe,
    gradient: Tensor | None,
    group: Alignment,
    shapes: Shapes | None = None,
) -> None:
    """Time each compressor on ``gradient``, and log the median over the ranks that compute; every rank must call it.

    ``compress_s`` includes adding the residual, selecting or rounding, and keeping the unsent part; ``decompress_s`` is
    added by each worker whose payload is gathered or summed by slices. When time runs short, all but Top-k and the
    roundings are left out.

    Args:
        crew: all workers of the probe.
        sweep: number of the sweep in whose division of the host this is.
        probe: compressors, ratios and repeats.
        gradient: gradient computed last, flat; None on ranks that do not compute in this sweep.
        group: the workers that compute at the same time; None: one alone.
        shapes: shapes of the parameters; None: not known, and compressors that need them are left out.

    Raises:
        ProbeStopped: any worker was asked to stop.
    """

    begun_s = crew.elapsed_s()
    for name in probe.names:
        way = parse_compression(name)
        method = METHODS[way.name]
        late = probe.time_limit_s is not None and crew.elapsed_s() - begun_s > probe.time_limit_s
        if (late and way.name not in (SELECTOR, *ROUNDED)) or (shapes is None and method.by_shape):
            continue
        ratios = probe.ratios
        if way.name != SELECTOR:  # one ratio tells what looking at the gradient takes, which is most of it
            ratios = (USUAL_RATIO,) if method.by_ratio else (1.0,)
        for ratio in ratios:
            times = (0.0, 0.0)
            if gradient is not None:
                times = _times(way.model_copy(update={"ratio": ratio}), shapes, probe.repeats, group, gradient)
            rows = [row for row in crew.gather(times) if any(row)]
            compress_s, decompress_s = (statistics.median(column) for column in zip(*rows, strict=True))
            cost = CompressorCost(name=name, ratio=ratio, compress_s=compress_s, decompress_s=decompress_s)
            crew.record(CompressorPoint(sweep=sweep, cost=cost))


def _times(
    way: Compression, shapes: Shapes | None, repeats: int, group: Alignment, gradient: Tensor
) -> tuple[float, float]:
    """Return the seconds of compressing a gradient, and of unpacking each payload; the latter 0 if they are summed."""
    if way.name not in ROUNDED and settled_collective(way) != GATHER:
        return _own_work(way, FEW, shapes, repeats, group, gradient), 0.0  # one sum arrives, whatever the workers
    few_s, many_s = (_own_work(way, workers, shapes, repeats, group, gradient) for workers in (FEW, MANY))
    further_s = max(0.0, (many_s - few_s) / (MANY - FEW))
    return max(0.0, few_s - FEW * further_s), further_s


def _own_work(
    way: Compression, workers: int, shapes: Shapes | None, repeats: int, group: Alignment, gradient: Tensor
) -> float:
    """Return the median seconds of a worker's own work in an exchange among ``workers``, network time excluded."""
    residual = make_residual(way, gradient.numel(), device=gradient.device)
    links = make_chain(way, gradient.numel(), shapes=shapes, device=gradient.device)
    times_s = []
    for step in range(1 + repeats):
        align(group)
        channel, out = _Alike(workers, gradient.device), torch.empty_like(gradient)
        begun = channel.now()
        residual.commit(links.run(residual.prepare(gradient), out, channel, step))
        times_s.append(channel.now() - begun - sum(message.time_s for message in channel.messages))
    return statistics.median(times_s[1:])


class _Alike(Channel):
    """Stand-in for a channel, in which every other worker sends the same as this one; nothing travels."""

    def __init__(self, workers: int, device: torch.device) -> None:
        super().__init__(on=device, clock=time.perf_counter if device.type == "cuda" else time.thread_time)
        self.workers, self.rank = workers, 0

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        if reduction == "sum":
            tensor.mul_(self.workers)  # codes that were packed into words are spoilt, which takes no other time

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        return tensor.view(1, -1).expand(self.workers, -1)

    def all_to_all(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows)

    def gather_slices(self, own: Tensor, out: Tensor) -> None:
        out.view(self.workers, -1).copy_(own.view(1, -1).expand(self.workers, -1))
