"""Pareto fronts of time and money: the plans that no other plan beats in both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def pareto_front(time: Array, cost: Array) -> NDArray[np.intp]:
    """Return the indices of the Pareto front of (time, cost), least ``time`` first; of equal points the first.

    Each point of the front is cheaper than all that are quicker. Empty for empty arrays.
    """
    order = np.lexsort((np.arange(len(time)), cost, time))
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], cost[order][:-1]])) if len(order) else cost
    return np.asarray(order[cost[order] < best_before], dtype=np.intp)


def thin(front: NDArray[np.intp], time: Array, count: int) -> NDArray[np.intp]:
    """Return up to ``count`` of the indices in ``front``, with both ends, evenly spread over the log of ``time``.

    Args:
        front: indices of points, least time first; returned as it is where it has no more than ``count``.
        time: time of every point, positive.
        count: most indices to return; from 2 on both ends are kept.
    """
    if len(front) <= count:
        return front
    logs = np.log(time[front])
    wanted = np.linspace(logs[0], logs[-1], count)
    nearest = np.abs(logs[None, :] - wanted[:, None]).argmin(axis=1)
    return np.asarray(front[np.unique(nearest)], dtype=np.intp)


def undominated(figures: Array, kinds: Sequence[Hashable]) -> list[int]:
    """Return the indices, ascending, of rows that no row of their kind equals or undercuts in all figures.

    Of equal rows the first is kept.

    Args:
        figures: figures of each row, (rows, figures); lower is better.
        kinds: kind of each row; rows of unlike kinds are not compared.
    """
    members: dict[Hashable, list[int]] = {}
    for row, kind in enumerate(kinds):
        members.setdefault(kind, []).append(row)
    kept: list[int] = []
    for group in members.values():
        # Whatever beats a row, or equals it and comes before it, stands before it in this order; and if that is
        # itself beaten, it is so by one that was kept. So each is compared with those that were kept.
        inorder = np.array(group)[np.lexsort([group, *figures[group].T[::-1]])]
        best = np.empty((len(group), figures.shape[1]))
        count = 0
        for row, values in zip(inorder.tolist(), figures[inorder], strict=True):
            if not (best[:count] <= values).all(axis=1).any():
                best[count] = values
                count += 1
                kept.append(row)
    return sorted(kept)
