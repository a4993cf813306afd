"""Mixes of two instance types by branch and bound: nothing is left out that could be better by more than a stated gap.

A box holds all mixes of two options whose counts lie between two ends, with one batch size and one exchange. Where its
bound is worse than the best plan so far, it is dropped whole; the others are halved until they are small enough to
price every cluster in them. Where the number of boxes runs out first, the best bound of what is left states the gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.aims import Limits
from hetopt.optimizer.bounds import could_beat
from hetopt.optimizer.cluster_rows import Boxes, ClusterRows, Columns
from hetopt.optimizer.forecast import JobModel
from hetopt.optimizer.pool import CHUNK, Pool
from hetopt.optimizer.rental_bound import RentalBound

Integers = NDArray[np.intp]

GAP = 0.002
"""Mixes that could be better by less than this are not looked for: far less than predictions can tell apart."""

PRICED_WHOLE = 12
"""Clusters of a box that are priced one by one rather than bounded again."""

BOXES = 1_000_000
"""Boxes that are bounded at most: some seconds. A count, not a time, so that the same question has the same answer."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What branch and bound has shown.

    Attributes:
        gap: no mix of two types beats the best plan by more than this part of its score; absent where no plan keeps
            the limits, so that there is nothing to beat.
        bound: the score that none of them undercuts; 0 where nothing was shown.
        boxes: that were bounded. ``complete`` is whether none was left.
    """

    gap: float | None
    bound: float
    boxes: int
    complete: bool


def search_pairs(pool: Pool, *, most_boxes: int = BOXES) -> Proof:
    """Price every mix of two options that could be the best plan of the pool by more than `GAP`.

    Args:
        pool: holds the best so far, and takes what is found.
        most_boxes: bounded before it gives up.
    """
    columns, job, limits = pool.columns, pool.job, pool.limits
    best = pool.safe_score
    if not np.isfinite(best) or columns.space.max_workers < 2:
        return Proof(gap=None, bound=0.0, boxes=0, complete=False)
    waiting = _roots(columns, job, limits, best * (1 - GAP))
    bounded = 0
    while waiting:
        boxes = waiting.pop()
        while waiting and len(boxes) < CHUNK // 2:
            boxes = Boxes.concatenate([boxes, waiting.pop()])
        if bounded + len(boxes) > most_boxes:
            waiting.append(boxes)
            break
        bounded += len(boxes)
        boxes = boxes.take(columns.allowed(boxes.least.option, boxes.least.count))
        open_, _ = could_beat(columns, boxes, job, limits, best * (1 - GAP))
        boxes = boxes.take(open_)
        small = np.prod(np.where(boxes.most > 0, boxes.most - boxes.least.count + 1, 1), axis=1) <= PRICED_WHOLE
        if small.any():
            pool.add(_members(boxes.take(small)))
            best = pool.safe_score
        halves = _halve(boxes.take(~small))
        waiting += _chunks(halves)
    left = np.inf
    for boxes in waiting:
        open_, least = could_beat(columns, boxes, job, limits, best * (1 - GAP))
        left = min(left, float(np.min(least[open_], initial=np.inf)))
    bound = min(left, best * (1 - GAP))
    return Proof(gap=1 - bound / best, bound=bound, boxes=bounded, complete=not np.isfinite(left))


def _roots(columns: Columns, job: JobModel, limits: Limits, score: float) -> list[Boxes]:
    """One box for each two options, batch size and exchange that could be good together, in chunks.

    Every option of a cluster has to be quick enough, and one of them cheap enough: a mix is no cheaper than its parts.
    """
    space = columns.space
    most = columns.most_machines()
    shape = (len(space.options), len(space.batch_sizes), len(space.exchanges))
    usable = np.broadcast_to((most >= 1)[:, None, None], shape)
    cheap = usable
    rental = RentalBound.of(columns, job, limits, score)
    if rental is not None:
        usable = usable & (rental.samples > 0)
        expected_usd, high_usd = rental.alone_usd()
        cheap = usable & (limits.ratio(high_usd, np.zeros_like(high_usd)) <= 1)
        if limits.wants_cheapest:
            cheap &= expected_usd < score
    chunks = []
    for batch in range(shape[1]):
        for exchange in range(shape[2]):
            one, other = (np.flatnonzero(some[:, batch, exchange]) for some in (cheap, usable))
            first, second = (side.reshape(-1) for side in np.meshgrid(one, other, indexing="ij"))
            # Two cheap ones meet twice.
            kept = (first < second) | ((first > second) & ~cheap[second, batch, exchange])
            option = np.stack([first[kept], second[kept]], axis=1)
            boxes = Boxes(
                least=ClusterRows(
                    option=option,
                    count=np.ones_like(option),
                    batch=np.full(len(option), batch, dtype=np.intp),
                    exchange=np.full(len(option), exchange, dtype=np.intp),
                ),
                most=most[option],
            )
            chunks += _chunks(boxes)
    return chunks


def _chunks(boxes: Boxes) -> list[Boxes]:
    return [boxes.take(np.arange(i, min(i + CHUNK, len(boxes)))) for i in range(0, len(boxes), CHUNK)]


def _halve(boxes: Boxes) -> Boxes:
    """Each box in two, across the group whose counts differ by the largest factor, at their geometric mean."""
    if not len(boxes):
        return boxes
    low, high = boxes.least.count, boxes.most
    row = np.arange(len(boxes))
    group = np.argmax(np.where(high > low, (high + 1) / np.maximum(low, 1), 0.0), axis=1)
    middle = np.clip(np.floor(np.sqrt(low[row, group] * high[row, group])), low[row, group], high[row, group] - 1)
    lower, upper = high.copy(), low.copy()
    lower[row, group] = middle.astype(np.intp)
    upper[row, group] = middle.astype(np.intp) + 1
    return Boxes.concatenate(
        [Boxes(least=boxes.least, most=lower), Boxes(least=boxes.least.counting(upper), most=boxes.most)]
    )


def _members(boxes: Boxes) -> ClusterRows:
    """Every cluster of the boxes."""
    low, high = boxes.least.count, boxes.most
    widths = high - low + 1
    sizes = widths.prod(axis=1)
    row = np.repeat(np.arange(len(boxes)), sizes)
    place = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    count = np.empty((len(row), low.shape[1]), dtype=np.intp)
    for group in range(low.shape[1]):
        count[:, group] = low[row, group] + place % widths[row, group]
        place = place // widths[row, group]
    return boxes.least.take(row).counting(count)
