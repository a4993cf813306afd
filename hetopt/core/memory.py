"""Memory as a line in the local batch size: what is always there, and what each sample adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.core.least_squares import non_negative


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """``peak_bytes = fixed_bytes + per_sample_bytes * local_batch_size``."""

    fixed_bytes: float
    per_sample_bytes: float

    def peak_bytes(self, local_batch_size: int) -> float:
        """Peak memory of one worker at this batch size."""
        return self.fixed_bytes + self.per_sample_bytes * local_batch_size

    def largest_batch(self, limit_bytes: float) -> int | None:
        """The largest batch that stays within the limit: 0 when not even one sample fits, None when any does."""
        if self.fixed_bytes > limit_bytes:
            return 0
        if self.per_sample_bytes <= 0:
            return None
        return math.floor((limit_bytes - self.fixed_bytes) / self.per_sample_bytes)


def fit_memory(local_batch_sizes: Sequence[int], peak_bytes: Sequence[int]) -> MemoryLine:
    """Fit the line, never sloping down: least squares, or the mean when one batch size (or noise) shows no growth.

    Raises:
        ValueError: nothing to fit, lengths differ, or a value that is not positive.
    """
    if not local_batch_sizes or len(local_batch_sizes) != len(peak_bytes):
        raise ValueError("a line needs as many peaks as batch sizes, at least one")
    if min(local_batch_sizes) < 1 or min(peak_bytes) < 1:
        raise ValueError("batch sizes and peaks must be positive")
    sizes, peaks = np.asarray(local_batch_sizes, dtype=np.float64), np.asarray(peak_bytes, dtype=np.float64)
    # Never below zero bytes before the first sample. Weighted so that it is absolute errors that count.
    fixed, slope = non_negative(np.stack([1 / peaks, sizes / peaks], axis=1), peaks**2).tolist()
    return MemoryLine(fixed_bytes=fixed, per_sample_bytes=slope)


def memory_limit_bytes(total_bytes: int, *, workers: int, fraction: float) -> int:
    """What one of ``workers`` equal workers may use of a memory they share, ``fraction`` of it at most."""
    if total_bytes < 1 or workers < 1 or not 0 < fraction <= 1:
        raise ValueError("a limit needs memory, workers and a fraction in (0, 1]")
    return max(1, int(total_bytes * fraction) // workers)
