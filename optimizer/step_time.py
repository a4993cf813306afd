"""The time of one synchronous training step: computing, waiting for the slowest, compressing and exchanging gradients.

    tau = max_i t_i(b_i) (1 + jitter E_n) + t_compress + t_exchange

This is the overlap exponent p = 1 of AdaptDL's form: the exchange begins when the last local gradient is there. It is
what the trainer's fused exchange does; the dense path that overlaps buckets with the backward pass can only be quicker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hetopt.trainer.exchange.wire import Collective, collective_time_s

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the seconds of one step go.

    Attributes:
        compute_s: until the slowest worker has its gradient.
        waiting_s: the part of ``compute_s`` that a worker spends waiting for the slowest, mean over workers.
        communication_s: compressing, exchanging and decompressing.
    """

    compute_s: float
    waiting_s: float
    communication_s: float

    @property
    def step_time_s(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + self.communication_s


def step_time(
    compute_s: Sequence[float], *, exchange_s: float, compress_s: float = 0.0, jitter: float = 0.0
) -> Breakdown:
    """Time of a step.

    Args:
        compute_s: time that each worker computes its share, optimizer step included.
        exchange_s: from when the slowest worker begins to exchange.
        compress_s: compression and decompression on the slowest worker.
        jitter: relative standard deviation of one worker's steps.
    """
    count = len(compute_s)
    slowest_s = max(compute_s) * (1 + jitter * expected_maximum(count))
    # The mean of equal times may round to just above them.
    waiting_s = max(0.0, slowest_s - sum(compute_s) / count)
    return Breakdown(compute_s=slowest_s, waiting_s=waiting_s, communication_s=compress_s + exchange_s)


def collective_terms(collective: Collective, payload_bytes: float, workers: int) -> tuple[float, float]:
    """Messages in a row, and bytes over the slowest link: a collective's time is linear in latency and 1 / bandwidth.

    ``collective_time_s(...) == messages * latency_s + traffic_bytes / bytes_per_s``, which lets a search price many
    networks at once with the very function that the trainer is checked against.
    """
    messages = collective_time_s(collective, 0.0, workers, 1.0, 1.0)
    return messages, collective_time_s(collective, payload_bytes, workers, 0.0, 1.0)


@cache
def expected_maximum(count: int) -> float:
    """E_n, the expected maximum of ``count`` standard normals: what the slowest of equal workers adds, in deviations.

    ``E_n = integral of x n phi(x) Phi(x)^(n-1) dx``. The popular sqrt(2 ln n) is twice too large at n = 2.
    """
    if count <= 1:
        return 0.0
    x, density, below = _normal()
    return float(np.trapezoid(x * count * density * below ** (count - 1), x))


@cache
def _normal() -> tuple[Array, Array, Array]:
    """A grid with the normal density and distribution on it; fine enough for six digits of every E_n."""
    x = np.linspace(-9.0, 9.0, 1801)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return x, density, np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])
