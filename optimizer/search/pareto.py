"""Pareto fronts of time and money: the plans that no other plan beats in both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def pareto_front(time: Array, cost: Array) -> NDArray[np.intp]:
    """Return the indices of the non-dominated points, quickest first. Of equal points the first is kept."""
    order = np.lexsort((np.arange(len(time)), cost, time))
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], cost[order][:-1]])) if len(order) else cost
    return np.asarray(order[cost[order] < best_before], dtype=np.intp)


def thin(front: NDArray[np.intp], time: Array, count: int) -> NDArray[np.intp]:
    """Return at most ``count`` points of a front, with both ends, about evenly spread over the logarithm of time."""
    if len(front) <= count:
        return front
    logs = np.log(time[front])
    wanted = np.linspace(logs[0], logs[-1], count)
    nearest = np.abs(logs[None, :] - wanted[:, None]).argmin(axis=1)
    return np.asarray(front[np.unique(nearest)], dtype=np.intp)
