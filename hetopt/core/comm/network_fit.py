"""The line through timed collectives: a latency, and a bandwidth for the payload."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetopt.core.comm.cost import LinkSpeed
from hetopt.core.least_squares import robust_non_negative
from hetopt.core.profile import Collective, Link

HUBER = 1.345
"""Residuals beyond this many standard deviations lose weight (95 % efficient on normal noise, Huber 1964)."""

FASTEST_BYTES_PER_S = 1e13
"""No link between two workers is faster. Stands for a bandwidth that payloads of the given size could not show."""


def fit_alpha_beta(payload_bytes: Sequence[int], time_s: Sequence[float]) -> LinkSpeed:
    """Fit a non-negative latency and a positive bandwidth to timed payloads: ``latency_s + payload / bytes_per_s``.

    Least squares on the *relative* error: payloads span orders of magnitude, and on absolute errors the largest would
    decide alone, leaving a latency of any sign. Huber weights keep one disturbed timing from deciding.

    Args:
        payload_bytes: at least one payload; with a single payload size everything is taken for latency.
        time_s: seconds, one for each payload.

    Raises:
        ValueError: nothing to fit, lengths differ, or a time that is not positive.
    """
    payloads = np.asarray(payload_bytes, dtype=np.float64)
    times = np.asarray(time_s, dtype=np.float64)
    if payloads.size == 0 or payloads.shape != times.shape:
        raise ValueError("a line needs as many times as payloads, at least one")
    if not (np.isfinite(times).all() and (times > 0).all() and (payloads >= 0).all()):
        raise ValueError("payloads must not be negative, and times must be positive and finite")
    rows = np.stack([1 / times, payloads / times], axis=1)

    def limit(residuals: NDArray[np.float64]) -> float:
        return HUBER * max(1.4826 * float(np.median(residuals)), 1e-12)

    latency, slope = robust_non_negative(rows, limit).tolist()
    return LinkSpeed(latency_s=latency, bytes_per_s=1 / max(slope, 1 / FASTEST_BYTES_PER_S))


def make_link(
    collective: Collective, *, workers: int, across_hosts: bool, payload_bytes: Sequence[int], time_s: Sequence[float]
) -> Link:
    """The measured `Link`: its samples in order of payload, and the line through them."""
    pairs = sorted(zip(payload_bytes, time_s, strict=True))
    payloads, times = tuple(size for size, _ in pairs), tuple(time for _, time in pairs)
    line = fit_alpha_beta(payloads, times)
    return Link(
        scope="network" if across_hosts else "host",
        collective=collective,
        workers=workers,
        payload_bytes=payloads,
        time_s=times,
        latency_s=line.latency_s,
        bytes_per_s=line.bytes_per_s,
    )
