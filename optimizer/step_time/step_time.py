"""The equations of one synchronous training step, for one cluster or for columns of many.

    C   = max_i t_i (1 + jitter E_n)                               the slowest of n workers, whose steps scatter
    T   = messages alpha + traffic / bw (1 + growth log2(n / 2))   the exchange over its slowest hop (Hockney 1994;
                                                                   growth: more hosts share)
    tau = f C + (((1-f) C)^p + ((1-g) T)^p)^(1/p) + g T + compression

``f`` is the part of the computation that is over before an exchange can begin, ``g`` the part of the exchange that
cannot begin before computing ends (the last bucket), and ``p`` says how well the rest hides the rest: with f = g = 0
this is the overlap of Pollux (Qiao et al., OSDI 2021), f = 1 or g = 1 is none at all, and tau = C + T + compression.
Everything that predicts a step goes through here: planning, launching, and the model that is fitted to samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from hetopt.optimizer.convergence.steps_law import Array

_NOTHING_S = 1e-300


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Parameters of the overlap of computing and an exchange: parts of both that cannot overlap, and an exponent.

    Attributes:
        forward: f, in [0, 1].
        power: p, at least 1.
        last: g, in [0, 1].
    """

    forward: float
    power: float
    last: float = 0.0


NO_OVERLAP = Overlap(forward=1.0, power=1.0, last=1.0)


@dataclass(frozen=True, kw_only=True)
class Together:
    """Seconds of computing and exchanging with overlap, and their derivatives by both times and by `Overlap`.

    Attributes:
        time_s: seconds of both together.
        by_compute, by_exchange: derivatives of ``time_s`` by ln C and ln T, which add up to ``time_s``.
        by_forward, by_power: derivatives of ``time_s`` by the logit of f and ln (p - 1).
    """

    time_s: Array
    by_compute: Array
    by_exchange: Array
    by_forward: Array
    by_power: Array


def overlapped(
    compute_s: ArrayLike, exchange_s: ArrayLike, *, forward: ArrayLike, power: float, last: ArrayLike = 0.0
) -> Together:
    """Return the seconds of computing and exchanging with overlap, and derivatives; compression comes on top.

    All element by element.

    Args:
        compute_s: seconds of computing.
        exchange_s: seconds of the exchange alone.
        forward: share of computing, 0 to 1, that is over before the exchange can begin; 1: nothing overlaps.
        power: exponent of the overlap, at least 1: at 1 nothing is hidden; infinite: only the longer of both counts.
        last: share of the exchange, 0 to 1, that begins when computing is over.
    """
    compute, exchange = np.asarray(compute_s, dtype=np.float64), np.asarray(exchange_s, dtype=np.float64)
    first, tail = np.asarray(forward, dtype=np.float64), np.asarray(last, dtype=np.float64)
    hiding, hidden = (1 - first) * compute, (1 - tail) * exchange
    # Both are divided by the larger: x^p overflows, or is nothing, for seconds of every size.
    largest = np.maximum(np.maximum(hiding, hidden), _NOTHING_S)
    behind, ahead = (hiding / largest) ** power, (hidden / largest) ** power
    both = np.maximum(behind + ahead, _NOTHING_S)
    middle = largest * both ** (1 / power)
    behind, ahead = behind / both, ahead / both
    entropy = _times_log(behind) + _times_log(ahead)
    return Together(
        time_s=first * compute + middle + tail * exchange,
        by_compute=first * compute + middle * behind,
        by_exchange=tail * exchange + middle * ahead,
        by_forward=first * (hiding - middle * behind),
        by_power=middle * entropy * (power - 1) / power**2,
    )


def _times_log(share: Array) -> Array:
    return np.asarray(share * np.log(np.maximum(share, _NOTHING_S)))


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of one step: computation, waiting for the slowest worker, and communication that nothing hides.

    Attributes:
        compute_s: until the slowest worker has its gradient.
        waiting_s: part of ``compute_s`` that a worker waits for the slowest, mean over workers.
        communication_s: compressing, exchanging and decompressing, as far as computation does not hide them.
    """

    compute_s: float
    waiting_s: float
    communication_s: float

    @property
    def step_time_s(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + self.communication_s


def step_time(
    compute_s: Sequence[float],
    *,
    exchange_s: float,
    compress_s: float = 0.0,
    jitter: float = 0.0,
    overlap: Overlap = NO_OVERLAP,
) -> Breakdown:
    """Return the seconds of one synchronous step, split by use, from workers' computation and the exchange's time.

    Args:
        compute_s: time that each worker computes its share, optimizer step included; at least one.
        exchange_s: seconds of the whole exchange, hidden or not, without waiting for a worker.
        compress_s: compression and decompression on the slowest worker.
        jitter: relative standard deviation of one worker's steps.
        overlap: how computing hides the exchange.
    """
    slowest_s = expected_latest_s(compute_s, jitter)
    # The mean of equal times may round to just above them.
    waiting_s = max(0.0, slowest_s - sum(compute_s) / len(compute_s))
    both = overlapped(slowest_s, exchange_s, forward=overlap.forward, power=overlap.power, last=overlap.last)
    exposed_s = max(0.0, float(both.time_s) - slowest_s)
    if overlap == NO_OVERLAP:
        exposed_s = exchange_s  # exactly
    return Breakdown(compute_s=slowest_s, waiting_s=waiting_s, communication_s=compress_s + exposed_s)


def expected_latest_s(times_s: Sequence[float], jitter: float) -> float:
    """Return the expected seconds until the last worker is done; ``jitter``: relative standard deviation of each.

    ``E max_i t_i (1 + jitter z_i)``; equal times t give ``t (1 + jitter E_n)``. A worker far behind the others decides
    alone, and its own scatter averages out.
    """
    latest = max(times_s)
    near = [time for time in times_s if time * (1 + 6 * jitter) >= latest * (1 - 6 * jitter)]
    if len(near) == 1 or jitter == 0:
        return latest
    if min(near) == latest:
        return latest * (1 + jitter * expected_maximum(len(near)))
    # E max = end - integral of P(max < x) up to an end that nobody reaches.
    x = np.linspace(min(near) * (1 - 8 * jitter), latest * (1 + 8 * jitter), _GRID)
    below = np.ones(_GRID)
    for time in near:
        below *= _normal_cdf((x - time) / (jitter * time))
    return max(latest, float(x[-1] - np.trapezoid(below, x)))


@cache
def expected_maximum(count: int) -> float:
    """Return E_n, the expected maximum of ``count`` independent standard normal variables.

    ``E_n = integral of x n phi(x) Phi(x)^(n-1) dx``. The popular sqrt(2 ln n) is twice too large at n = 2.
    """
    if count <= 1:
        return 0.0
    x, density, below = _normal()
    return float(np.trapezoid(x * count * density * below ** (count - 1), x))


def growth(workers: ArrayLike, per_doubling: ArrayLike) -> Array:
    """Return the factor on the time of an exchange's bytes: 1 for two workers, ``per_doubling`` more a doubling."""
    doublings = np.log2(np.maximum(np.asarray(workers, dtype=np.float64), 2.0) / 2)
    return np.asarray(1 + np.asarray(per_doubling) * doublings)


def sharing(crowd: ArrayLike, power: float) -> Array:
    """Return the factor on a hop's time as ``crowd`` workers use a machine's links; 1 for up to two, or at power 0."""
    return np.asarray((np.maximum(np.asarray(crowd, dtype=np.float64), 2.0) / 2) ** power)


def slower(first: ArrayLike, other: ArrayLike) -> Array:
    """Return the time of a ring whose hops of two kinds work at once: their norm of order four.

    That is the longer time, and a fifth more if both are equal, as stragglers of one kind are not those of the other.
    """
    return np.asarray((np.asarray(first, dtype=np.float64) ** 4 + np.asarray(other, dtype=np.float64) ** 4) ** 0.25)


_GRID = 1801


def _normal_cdf(x: Array) -> Array:
    grid, _, below = _normal()
    return np.interp(x, grid, below)


@cache
def _normal() -> tuple[Array, Array, Array]:
    """Return a grid with the normal density and distribution on it; fine enough for six digits of every E_n.

    Every plan needs it; `scipy.special.ndtr` is the same, and to import it takes a bare python's start seven times.
    """
    x = np.linspace(-9.0, 9.0, _GRID)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return x, density, np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])
