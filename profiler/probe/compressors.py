"""What compressing a real gradient costs a worker, by compressor and ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hetopt.core.comm.options import ROUNDED
from hetopt.core.errors import BadInput
from hetopt.core.events.probe_records import CompressorPoint
from hetopt.core.probe_schedule import CompressorProbe
from hetopt.core.run_spec import Compression
from hetopt.profiler.probe.crew import Alignment, ProbeGroup, align
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Turn
from hetopt.trainer.comm.error_feedback import ErrorFeedback
from hetopt.trainer.comm.methods import make_chain
from hetopt.trainer.comm.topk import TopK

COMPRESSORS = {TopK.name: TopK}

FEW, MANY = 2, 8
"""Workers between which the own work of an exchange in slices is timed: calls grow with their number, bytes do not."""

Times = tuple[float, float]
"""Median seconds of compressing, and of decompressing one payload."""


def time_compressors(
    crew: ProbeGroup, sweep: int, probe: CompressorProbe, gradient: Tensor | None, group: Alignment
) -> None:
    """Time every compressor at every ratio on ``gradient`` (None: this rank only listens) and record the medians.

    As in training: ``compress_s`` holds adding the residual, selecting, and keeping what was not sent; ``decompress_s``
    turning one payload back into a dense gradient. Of what is rounded and summed by slices, ``decompress_s`` is what
    each further worker adds.
    """

    def record(name: str, ratio: float, measure: Callable[[Tensor], Times]) -> None:
        times = (0.0, 0.0) if gradient is None else measure(gradient)
        rows = [row for row in crew.gather(times) if any(row)]
        compress_s, decompress_s = (statistics.median(column) for column in zip(*rows, strict=True))
        crew.record(
            CompressorPoint(sweep=sweep, name=name, ratio=ratio, compress_s=compress_s, decompress_s=decompress_s)
        )

    for name in probe.names:
        if name in COMPRESSORS:
            for ratio in probe.ratios:
                record(name, ratio, partial(_selected, name, ratio, probe.repeats, group))
        elif name in ROUNDED:
            record(name, 1.0, partial(_rounded, name, probe.repeats, group))
        else:
            known = ", ".join((*COMPRESSORS, *ROUNDED))
            raise BadInput(f"there is no compressor '{name}' to time.", hint=f"choose from {known}")


def _selected(name: str, ratio: float, repeats: int, group: Alignment, gradient: Tensor) -> Times:
    compressor, residual = COMPRESSORS[name](ratio), ErrorFeedback(gradient.numel(), device=gradient.device)
    compress_s, decompress_s = [], []
    for _ in range(1 + repeats):
        align(group)
        begun = _now(gradient)
        prepared = residual.prepare(gradient)
        payload = compressor.encode(prepared, Turn(Channel()))
        residual.commit(prepared, payload)
        compressed = _now(gradient)
        payload.dense()
        compress_s.append(compressed - begun)
        decompress_s.append(_now(gradient) - compressed)
    return statistics.median(compress_s[1:]), statistics.median(decompress_s[1:])


def _rounded(name: str, repeats: int, group: Alignment, gradient: Tensor) -> Times:
    few_s, many_s = (_in_slices(name, workers, repeats, group, gradient) for workers in (FEW, MANY))
    further_s = max(0.0, (many_s - few_s) / (MANY - FEW))
    return max(0.0, few_s - FEW * further_s), further_s


def _in_slices(name: str, workers: int, repeats: int, group: Alignment, gradient: Tensor) -> float:
    """Own work of an exchange among so many workers, in the median."""
    residual = ErrorFeedback(gradient.numel(), device=gradient.device)
    links = make_chain(Compression(name=name), gradient.numel(), device=gradient.device)
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
        super().__init__(on=device)
        self.workers, self.rank = workers, 0

    def all_to_all(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows)

    def gather_slices(self, own: Tensor, out: Tensor) -> None:
        out.view(self.workers, -1).copy_(own.view(1, -1).expand(self.workers, -1))


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
