"""Pareto fronts of time and money: the plans that no other plan beats in both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


MANY = 4096
"""Of more points most are sieved out before they are sorted."""


def pareto_front(time: Array, cost: Array) -> NDArray[np.intp]:
    """Indices of the non-dominated points, quickest first. Of equal points the first is kept."""
    if len(time) <= MANY:
        return _front(time, cost)
    some = _sieve(time, cost)
    return np.asarray(some[_front(time[some], cost[some])], dtype=np.intp)


def _sieve(time: Array, cost: Array) -> NDArray[np.intp]:
    """Points that are not beaten by the front of a sample: few, with the whole front among them."""
    sample = slice(None, None, len(time) // MANY)
    few = _front(time[sample], cost[sample])
    cheapest = np.concatenate([[np.inf], cost[sample][few]])
    return np.flatnonzero(cost < cheapest[np.searchsorted(time[sample][few], time)])


def _front(time: Array, cost: Array) -> NDArray[np.intp]:
    order = np.lexsort((np.arange(len(time)), cost, time))
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], cost[order][:-1]])) if len(order) else cost
    return np.asarray(order[cost[order] < best_before], dtype=np.intp)


def thin(front: NDArray[np.intp], time: Array, count: int) -> NDArray[np.intp]:
    """At most ``count`` points of a front, both ends included, about evenly spread over the logarithm of time."""
    if len(front) <= count:
        return front
    logs = np.log(time[front])
    wanted = np.linspace(logs[0], logs[-1], count)
    nearest = np.abs(logs[None, :] - wanted[:, None]).argmin(axis=1)
    return np.asarray(front[np.unique(nearest)], dtype=np.intp)
