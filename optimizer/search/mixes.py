"""Search of mixes of two or three machine options by branch and bound: no mix left out is better by more than a gap.

A box holds all mixes of the same options whose counts lie between two ends, with one batch size and one exchange. A box
whose bound is worse than the best plan so far is dropped; the others are halved until they are small enough to price
every cluster in them, each with the exchange that suits it best. If boxes run out first, the best bound of those left
gives the gap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.search.bounds import Bar, could_beat
from hetopt.optimizer.search.cluster_rows import Boxes, ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.search.group_shares import Integers, Mask
from hetopt.optimizer.search.objective import Keys, Limits, expected_totals, sure_quantile
from hetopt.optimizer.search.pareto import pareto_front
from hetopt.optimizer.search.search_space import Cluster

KEPT_OF_A_BATCH = 64
"""Number of the best clusters that are kept of those priced together, beside their front: something to compare with."""

CHUNK = 32_768
"""Number of rows that are priced at a time: their columns fit a processor's cache."""


class Pool:
    """Collection of priced clusters with their forecasts, in the order of adding, which keeps track of the best.

    Attributes:
        uniform: number of clusters of one type, as its user counts them.
        priced: number of clusters that were priced, kept or not.
        safe_score: least score of a cluster that surely keeps the limits; infinite: none does.
        best: the best cluster, whether or not it keeps the limits; None: none was priced.
    """

    def __init__(self, columns: Columns, job: JobModel, limits: Limits) -> None:
        """Make an empty pool, for clusters of these machine options and limits."""
        self.columns, self.job, self.limits = columns, job, limits
        self.uniform = 0
        self.priced = 0
        self.safe_score = float("inf")
        self.best: Cluster | None = None
        self._best_rank: tuple[float, ...] = ()
        nothing, table = tabulate_rows(columns, ClusterRows.of([]))
        # Rows stand with their forecast: an interruption leaves none without.
        self._parts = [(nothing, forecast(table, job))]
        self._known: set[Cluster] = set()

    @property
    def rows(self) -> ClusterRows:
        """All rows that were kept, in the order of adding; each belongs to the forecast in the same place."""
        return self._whole()[0]

    @property
    def forecast(self) -> Forecast:
        """Predicted time and cost of every row in the pool, in the order of `rows`."""
        return self._whole()[1]

    def _whole(self) -> tuple[ClusterRows, Forecast]:
        """Return all kept rows with their forecast; joins the parts in place."""
        if len(self._parts) > 1:
            rows, forecasts = zip(*self._parts, strict=True)
            self._parts = [(ClusterRows.concatenate(rows), Forecast.concatenate(forecasts))]
        return self._parts[0]

    def add(self, rows: ClusterRows, *, keep: int | None = KEPT_OF_A_BATCH) -> None:
        """Price clusters with their best exchanges; keep the ``keep`` best of each chunk and its front (None: all).

        Impossible clusters are passed over and, with ``keep``, also clusters that were kept before. `best`,
        `safe_score` and `priced` are updated by all that were priced, kept or not.
        """
        for start in range(0, len(rows), CHUNK):
            part = rows.take(np.arange(start, min(start + CHUNK, len(rows))))
            some, table = tabulate_rows(self.columns, part, self.job)
            if not len(some):
                continue
            forecasts = forecast(table, self.job)
            self.priced += len(some)
            keys = Keys.of(forecasts, self.limits)
            ranked = keys.best(keep or 1)
            place = keys.rank(int(ranked[0]))
            if self.best is None or place < self._best_rank:
                self.best, self._best_rank = some.cluster(int(ranked[0])), place
            self.safe_score = min(self.safe_score, float(keys.main[keys.level == 0].min(initial=np.inf)))
            if keep is not None:
                kept = self._new(some, np.union1d(ranked, pareto_front(*expected_totals(forecasts))))
                some, forecasts = some.take(kept), forecasts.take(kept)
            self._parts.append((some.widened(), forecasts))

    def _new(self, rows: ClusterRows, some: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the indices in ``some`` of rows whose cluster was not kept before, each cluster once; notes them."""
        new: dict[Cluster, int] = {}
        for row in some.tolist():
            new.setdefault(rows.cluster(row), row)
        kept = [row for cluster, row in new.items() if cluster not in self._known]
        self._known.update(new)
        return np.array(kept, dtype=np.intp)


GAP = 0.002
"""Part of the score by which a mix must be better to be looked for: far less than predictions can tell apart."""

PRICED_WHOLE = 12
"""Number of clusters of a box up to which they are priced one by one rather than bounded again."""

BOXES = 600_000
"""Most boxes of two options that are bounded: some seconds. A count, not a time, so that the same question has the same
answer."""

BOXES_OF_THREE = 300_000
"""Most boxes of three options that are bounded. Where two thirds of them are there from the start, no time is spent on
any."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of branch and bound over mixes: by how much a mix that was not found can be better, at most.

    Attributes:
        types: machine options in a mix that was searched, at most.
        gap: no such mix beats the best plan by more than this part of its score; None: no plan keeps the limits with
            the probability `SURE`, so that there is nothing to beat.
        bound: the score that no such mix undercuts while it keeps the limits; infinite where none keeps them.
        boxes: number of boxes that were bounded.
        complete: whether no box was left that might hold a better mix.
    """

    types: int
    gap: float | None
    bound: float
    boxes: int
    complete: bool


def search_mixes(pool: Pool, *, types: int, most_boxes: int = BOXES) -> Proof | None:
    """Search mixes of ``types`` options, add the good to ``pool``, and return the proved gap; None: too many to begin.

    Args:
        pool: holds the best so far, and takes the good mixes.
        types: machine options in each mix, 2 or 3; with fewer workers allowed than that, the proof is complete at once.
        most_boxes: boxes that are bounded before the search gives up, with what was found by then.

    Returns:
        Proof, whose gap is at least `GAP` as smaller gains are not looked for, and which is not ``complete`` if the
        search gave up. None, with the pool unchanged: too many mixes of three.
    """
    columns, job, limits = pool.columns, pool.job, pool.limits
    best = pool.safe_score
    if columns.space.max_workers < types:
        return Proof(types=types, gap=0.0 if np.isfinite(best) else None, bound=best, boxes=0, complete=True)
    bar = Bar.of(columns, job, limits, best * (1 - GAP))
    waiting = _roots(bar, types, most_boxes)
    if waiting is None:
        return None
    bounded = 0
    while waiting:
        boxes = waiting.pop()
        while waiting and len(boxes) < CHUNK // 2:
            boxes = Boxes.concatenate([boxes, waiting.pop()])
        if bounded + len(boxes) > most_boxes:
            waiting.append(boxes)
            break
        bounded += len(boxes)
        boxes = boxes.take(columns.allowed(boxes.option, boxes.count))
        open_, _ = could_beat(boxes, bar)
        boxes = _narrowed(columns, boxes.take(open_))
        small = np.prod(np.where(boxes.most > 0, boxes.most - boxes.count + 1, 1), axis=1) <= PRICED_WHOLE
        if small.any():
            pool.add(_members(boxes.take(small)))
            if pool.safe_score < best:
                best = pool.safe_score
                bar = Bar.of(columns, job, limits, best * (1 - GAP))
        waiting += _chunks(_halve(boxes.take(~small)))
    left = np.inf
    for boxes in waiting:
        # Some have never been looked at: of these, some have more workers than may be.
        open_, least = could_beat(boxes.take(columns.allowed(boxes.option, boxes.count)), bar)
        left = min(left, float(np.min(least[open_], initial=np.inf)))
    bound = min(left, best * (1 - GAP))
    gap = 1 - bound / best if np.isfinite(best) else None
    return Proof(types=types, gap=gap, bound=bound, boxes=bounded, complete=not np.isfinite(left))


def _roots(bar: Bar, types: int, most_boxes: int) -> list[Boxes] | None:
    """Return a box of all counts for each set of ``types`` options, batch size and exchange that can pass the bar.

    Every option has to be quick enough, and one of them cheap enough. Boxes come in chunks; None: sets of three options
    are too many for ``most_boxes``.
    """
    columns, limits = bar.columns, bar.limits
    most = columns.most_machines()
    usable = (bar.samples > 0) & (most >= 1)[:, None, None]
    expected_usd, high_usd = bar.alone_usd()
    cheap = usable & (limits.ratio(sure_quantile(expected_usd, high_usd), np.zeros_like(high_usd)) <= 1)
    if limits.time_weight == 0:
        cheap &= expected_usd < bar.score
    if types > 2:
        threes = 0
        for way in range(columns.ways):
            alike = columns.way == way
            all_usable, all_cheap = usable[alike].sum(axis=0), cheap[alike].sum(axis=0)
            threes += int((_threes(all_usable) - _threes(all_usable - all_cheap)).sum())
        if threes > most_boxes * 2 // 3:
            return None
    chunks = []
    for batch, exchange in np.ndindex(usable.shape[1:]):
        option = _together(cheap[:, batch, exchange], usable[:, batch, exchange], types)
        if columns.ways > 1:
            option = option[columns.computes_alike(option, np.ones_like(option))]
        boxes = Boxes(
            option=option,
            count=np.ones_like(option),
            batch=np.full(len(option), batch, dtype=np.intp),
            exchange=np.full(len(option), exchange, dtype=np.intp),
            most=most[option],
        )
        chunks += _chunks(boxes)
    return chunks


def _together(cheap: Mask, usable: Mask, types: int) -> Integers:
    """Return the sets of ``types`` (2 or 3) usable options with a cheap one among them, as indices, (rows, types)."""
    cheap_index, usable_index = np.flatnonzero(cheap), np.flatnonzero(usable)
    first, second = (side.reshape(-1) for side in np.meshgrid(cheap_index, usable_index, indexing="ij"))
    # Two cheap ones meet twice.
    kept = (first < second) | ((first > second) & ~cheap[second])
    pairs = np.stack([first[kept], second[kept]], axis=1)
    if types == 2:
        return pairs
    row, third = (side.reshape(-1) for side in np.meshgrid(np.arange(len(pairs)), usable_index, indexing="ij"))
    threes = np.sort(np.column_stack([pairs[row], third]), axis=1)
    threes = threes[(threes[:, 0] < threes[:, 1]) & (threes[:, 1] < threes[:, 2])]
    return np.asarray(np.unique(threes, axis=0), dtype=np.intp)


def _threes(options: Integers) -> Integers:
    """Return the number of ways to choose three of ``options`` options, elementwise."""
    return options * (options - 1) * (options - 2) // 6


def _narrowed(columns: Columns, boxes: Boxes) -> Boxes:
    """Return the boxes with ``most`` lowered to what the space's limits leave beside the other groups' fewest."""
    space, most = columns.space, boxes.most
    for size, limit in (
        (np.ones_like(columns.workers), space.max_machines),
        (columns.workers, space.max_workers),
    ):
        each = size[boxes.option]
        others = (boxes.count * each).sum(axis=1, keepdims=True) - boxes.count * each
        most = np.minimum(most, np.maximum((limit - others) // each, boxes.count))
    return replace(boxes, most=np.where(boxes.most > 0, most, 0))


def _chunks(boxes: Boxes) -> list[Boxes]:
    return [boxes.take(np.arange(i, min(i + CHUNK, len(boxes)))) for i in range(0, len(boxes), CHUNK)]


def _halve(boxes: Boxes) -> Boxes:
    """Return each box in two, across the group whose counts differ by the largest factor, at their geometric mean.

    Each box must have a group with more than one count.
    """
    if not len(boxes):
        return boxes
    low, high = boxes.count, boxes.most
    row = np.arange(len(boxes))
    group = np.argmax(np.where(high > low, (high + 1) / np.maximum(low, 1), 0.0), axis=1)
    middle = np.clip(np.floor(np.sqrt(low[row, group] * high[row, group])), low[row, group], high[row, group] - 1)
    lower, upper = high.copy(), low.copy()
    lower[row, group] = middle.astype(np.intp)
    upper[row, group] = middle.astype(np.intp) + 1
    return Boxes.concatenate([replace(boxes, most=lower), replace(boxes, count=upper)])


def _members(boxes: Boxes) -> ClusterRows:
    """Return every cluster of the boxes, one a row."""
    low, high = boxes.count, boxes.most
    widths = high - low + 1
    sizes = widths.prod(axis=1)
    row = np.repeat(np.arange(len(boxes)), sizes)
    place = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    count = np.empty((len(row), low.shape[1]), dtype=np.intp)
    for group in range(low.shape[1]):
        count[:, group] = low[row, group] + place % widths[row, group]
        place = place // widths[row, group]
    some = boxes.take(row)
    return ClusterRows(option=some.option, count=count, batch=some.batch, exchange=some.exchange)
