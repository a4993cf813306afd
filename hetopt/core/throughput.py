"""Robust summaries of repeated timings, and the batch sizes worth timing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""

NOISY_SPREAD = 0.15
"""Relative standard error of a median above which a set of timings says too little."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What repeated timings of one thing say.

    Attributes:
        median_s: half of the timings were shorter.
        spread_s: standard deviation, robustly: 1.4826 times the median absolute deviation.
        count: timings summarised.
    """

    median_s: float
    spread_s: float
    count: int

    @property
    def relative_error(self) -> float:
        """Standard error of the median relative to it (normal theory: ``sqrt(pi / 2) * spread / sqrt(count)``)."""
        return math.sqrt(math.pi / 2 / self.count) * self.spread_s / self.median_s

    @property
    def is_noisy(self) -> bool:
        """The machine was too busy with other things for this median to be relied on."""
        return self.relative_error > NOISY_SPREAD


def summarize(samples_s: Sequence[float]) -> Timing:
    """Median and spread of ``samples_s``.

    Raises:
        ValueError: no samples, or one that is not a positive time.
    """
    if not samples_s or not all(0 < sample < math.inf for sample in samples_s):
        raise ValueError("timings must be positive and finite, and there must be at least one")
    median = statistics.median(samples_s)
    deviation = statistics.median(abs(sample - median) for sample in samples_s)
    return Timing(median_s=median, spread_s=NORMAL_MAD * deviation, count=len(samples_s))


def usual_mean(samples_s: Sequence[float]) -> float:
    """Mean without the longest tenth: what a run pays on average, hiccups that come every few steps included.

    Collectives scatter by whole time slices of the operating system, which a median would not see.
    """
    ordered = sorted(samples_s)
    return statistics.fmean(ordered[: len(ordered) - len(ordered) // 10])


def settled(samples_s: Sequence[float]) -> tuple[float, ...]:
    """The timings from the first that looks like the second half of them: what is left of the warm-up goes.

    A leading timing is dropped while it is more than three spreads (and 10 %) above the median of the second half. At
    most half of the timings go, so that a machine that never settles still shows its noise.
    """
    half = len(samples_s) // 2
    if half < 2:
        return tuple(samples_s)
    steady = summarize(samples_s[half:])
    limit = steady.median_s + max(3 * steady.spread_s, 0.1 * steady.median_s)
    start = 0
    while start < half and samples_s[start] > limit:
        start += 1
    return tuple(samples_s[start:])


def batch_ladder(batch_size: int, *, dataset_size: int | None, below: int = 4, above: int = 2) -> tuple[int, ...]:
    """Local batch sizes to time: the task's own and powers of two around it, in increasing order.

    Two times are the least that a line through them needs, five let the curve at small batches show. The top is the
    task's batch size times ``2 ** above`` (one worker alone may have to take a batch that large) but never more than
    the data set. One sample alone is left out where the task's own batch has more: BatchNorm cannot normalise it.

    Args:
        batch_size: the global batch size that the task was tuned at, samples.
        dataset_size: samples in one epoch; None: nobody knows.
        below: halvings of ``batch_size``.
        above: doublings of ``batch_size``.
    """
    if batch_size < 1 or (dataset_size is not None and dataset_size < 1):
        raise ValueError("a batch size ladder needs a batch size and samples")
    sizes = {max(min(2, batch_size), round(batch_size * 2.0**power)) for power in range(-below, above + 1)}
    return tuple(sorted({size if dataset_size is None else min(size, dataset_size) for size in sizes}))
