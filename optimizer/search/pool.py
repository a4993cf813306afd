"""The clusters that a search has priced and kept: all of one type, and of the mixes those that could matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.search.objective import Limits, best_rows, rank
from hetopt.optimizer.search.pareto import pareto_front
from hetopt.optimizer.search.search_space import Cluster

KEPT_OF_A_BATCH = 64
"""Of clusters that are priced together the best so many are kept beside their front: something to compare with."""

CHUNK = 32_768
"""Rows that are priced at a time: their columns fit a processor's cache."""


class Pool:
    """Rows with their forecast, in the order in which they came. The first ``uniform`` are of one type each."""

    def __init__(self, columns: Columns, job: JobModel, limits: Limits) -> None:
        """A pool that nothing was added to, for clusters of these machine options and limits."""
        self.columns, self.job, self.limits = columns, job, limits
        self.uniform = 0
        self.priced = 0
        self.safe_score = float("inf")
        """The least score of a row that keeps the limits even at the upper end; infinite where none does."""
        self.best: Cluster | None = None
        """The best cluster, whether or not it keeps the limits."""
        self._best_rank: tuple[float, ...] = ()
        nothing, table = tabulate_rows(columns, ClusterRows.of([]))
        # In parts, one with the other: an interruption leaves no row without its forecast.
        self._parts: list[tuple[ClusterRows, Forecast]] = [(nothing, forecast(table, job))]
        self._known: set[Cluster] = set()

    @property
    def rows(self) -> ClusterRows:
        """All rows that were kept."""
        return self._joined()[0]

    @property
    def forecast(self) -> Forecast:
        """Predicted time and cost of every row in the pool."""
        return self._joined()[1]

    def add(self, rows: ClusterRows, *, keep: int | None = KEPT_OF_A_BATCH) -> int:
        """Price rows and keep those that could matter (``keep`` absent: all). Returns how many were possible."""
        priced = 0
        for start in range(0, len(rows), CHUNK):
            some, table = tabulate_rows(self.columns, rows.take(np.arange(start, min(start + CHUNK, len(rows)))))
            if not len(some):
                continue
            found = forecast(table, self.job)
            priced += len(some)
            ranked = best_rows(found, self.limits, keep or 1)
            self._look_at(some, found, int(ranked[0]))
            if keep is not None:
                kept = self._new(some, np.union1d(ranked, pareto_front(found.total_s, found.cost_usd)))
                some, found = some.take(kept), found.take(kept)
            self._parts.append((some.widened(), found))
        self.priced += priced
        return priced

    def _look_at(self, rows: ClusterRows, found: Forecast, first: int) -> None:
        """See whether the first of new rows is better than the best."""
        place = rank(found.take(np.array([first])), self.limits)
        if self.best is None or place < self._best_rank:
            self.best, self._best_rank = rows.cluster(first), place
        safe = self.limits.risk(found) <= 1
        score = self.limits.score(found.total_s, found.cost_usd)[safe]
        self.safe_score = min(self.safe_score, float(score.min(initial=np.inf)))

    def _joined(self) -> tuple[ClusterRows, Forecast]:
        if len(self._parts) > 1:
            rows = ClusterRows.concatenate([part for part, _ in self._parts])
            self._parts = [(rows, Forecast.concatenate([found for _, found in self._parts]))]
        return self._parts[0]

    def _new(self, rows: ClusterRows, some: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of some rows that are not in the pool."""
        counts = frozenset(self.columns.space.machine_counts) if self.uniform else frozenset[int]()
        new: list[int] = []
        for row in some.tolist():
            cluster = rows.cluster(row)
            enumerated = len(cluster.machines) == 1 and cluster.machine_count in counts
            if not enumerated and cluster not in self._known:
                self._known.add(cluster)
                new.append(row)
        return np.array(new, dtype=np.intp)
