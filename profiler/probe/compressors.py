"""What compressing a real gradient costs a worker, by compressor and ratio."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from hetopt.core.comm.composition import GATHER, METHODS
from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.options import ROUNDED, SELECTOR, settled_collective
from hetopt.core.comm.payload_bytes import Shapes
from hetopt.core.run_spec import Compression, CompressorProbe
from hetopt.profiler.probe.crew import Alignment, ProbeGroup, align
from hetopt.profiler.records import CompressorPoint
from hetopt.trainer.comm.channel import Channel, Reduction
from hetopt.trainer.comm.methods import make_chain, make_residual

FEW, MANY = 2, 8
"""Workers between which the own work of an exchange in slices is timed: calls grow with their number, bytes do not."""


def time_compressors(
    crew: ProbeGroup,
    sweep: int,
    probe: CompressorProbe,
    gradient: Tensor | None,
    group: Alignment,
    shapes: Shapes | None = None,
) -> None:
    """Time every compressor at every ratio on ``gradient`` (None: this rank only listens) and record the medians.

    As in training: ``compress_s`` holds adding the residual, selecting or rounding, and keeping what was not sent;
    ``decompress_s`` is what each further worker adds, of what is gathered or summed by slices.

    Args:
        crew: of the workers.
        sweep: whose division of the host it is.
        probe: what to time.
        gradient: as it was computed last.
        group: those who compute at the same time.
        shapes: of the parameters; None: not known, and what needs them is left out.
    """

    begun_s = crew.elapsed_s()
    for name in probe.names:
        way = parse_compression(name)
        method = METHODS[way.name]
        late = probe.time_limit_s is not None and crew.elapsed_s() - begun_s > probe.time_limit_s
        if (late and way.name not in (SELECTOR, *ROUNDED)) or (shapes is None and method.by_shape):
            continue
        for ratio in probe.ratios if method.by_ratio else (1.0,):
            told = (0.0, 0.0)
            if gradient is not None:
                told = _times(way.model_copy(update={"ratio": ratio}), shapes, probe.repeats, group, gradient)
            rows = [row for row in crew.gather(told) if any(row)]
            compress_s, decompress_s = (statistics.median(column) for column in zip(*rows, strict=True))
            crew.record(
                CompressorPoint(sweep=sweep, name=name, ratio=ratio, compress_s=compress_s, decompress_s=decompress_s)
            )


def _times(
    way: Compression, shapes: Shapes | None, repeats: int, group: Alignment, gradient: Tensor
) -> tuple[float, float]:
    """Return the seconds of compressing a gradient, and of what each further worker sends of one."""
    if way.name not in ROUNDED and settled_collective(way) != GATHER:
        return _own_work(way, FEW, shapes, repeats, group, gradient), 0.0  # one sum arrives, whatever the workers
    few_s, many_s = (_own_work(way, workers, shapes, repeats, group, gradient) for workers in (FEW, MANY))
    further_s = max(0.0, (many_s - few_s) / (MANY - FEW))
    return max(0.0, few_s - FEW * further_s), further_s


def _own_work(
    way: Compression, workers: int, shapes: Shapes | None, repeats: int, group: Alignment, gradient: Tensor
) -> float:
    """Own work of an exchange among so many workers, in the median."""
    residual = make_residual(way, gradient.numel(), device=gradient.device)
    links = make_chain(way, gradient.numel(), shapes=shapes, device=gradient.device)
    times_s = []
    for step in range(1 + repeats):
        align(group)
        channel, out = _Alike(workers, gradient.device), torch.empty_like(gradient)
        begun = channel.now()
        prepared = residual.prepare(gradient)
        residual.commit(prepared, links.run(prepared, out, channel, step))
        times_s.append(channel.now() - begun - sum(message.time_s for message in channel.messages))
    return statistics.median(times_s[1:])


class _Alike(Channel):
    """To workers that are taken to send what this one sends: nothing travels."""

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
