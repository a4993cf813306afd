"""What compressing a real gradient costs a worker, by compressor and ratio."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from hetopt.profiler.errors import BadInput
from hetopt.profiler.measurement import CompressorPoint
from hetopt.profiler.schedule import CompressorProbe
from hetopt.trainer.exchange.memory import ErrorFeedback
from hetopt.trainer.exchange.topk import TopKCompressor
from hetopt.trainer.probe.crew import Alignment, Crew, align

COMPRESSORS = {TopKCompressor.name: TopKCompressor}


def time_compressors(crew: Crew, sweep: int, probe: CompressorProbe, gradient: Tensor | None, group: Alignment) -> None:
    """Time every compressor at every ratio on ``gradient`` (None: this rank only listens) and record the medians.

    As in training: ``compress_s`` holds adding the residual, selecting, and keeping what was not sent; ``decompress_s``
    turning one payload back into a dense gradient.
    """
    for name in probe.names:
        if name not in COMPRESSORS:
            raise BadInput(f"there is no compressor '{name}' to time.", hint=f"choose from {', '.join(COMPRESSORS)}")
        for ratio in probe.ratios:
            times = (0.0, 0.0) if gradient is None else _time(name, ratio, probe.repeats, gradient, group)
            rows = [row for row in crew.gather(times) if any(row)]
            compress_s, decompress_s = (statistics.median(column) for column in zip(*rows, strict=True))
            crew.record(
                CompressorPoint(sweep=sweep, name=name, ratio=ratio, compress_s=compress_s, decompress_s=decompress_s)
            )


def _time(name: str, ratio: float, repeats: int, gradient: Tensor, group: Alignment) -> tuple[float, float]:
    compressor, memory = COMPRESSORS[name](), ErrorFeedback(gradient.numel(), device=gradient.device)
    compress_s, decompress_s = [], []
    for _ in range(1 + repeats):
        align(group)
        begun = _now(gradient)
        prepared = memory.prepare(gradient)
        payload = compressor.compress(prepared, ratio, None)
        memory.commit(prepared, payload)
        compressed = _now(gradient)
        payload.dense()
        compress_s.append(compressed - begun)
        decompress_s.append(_now(gradient) - compressed)
    return statistics.median(compress_s[1:]), statistics.median(decompress_s[1:])


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
