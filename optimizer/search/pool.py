"""The clusters that a search has priced and kept: all of one type, and of the mixes those that could matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.search.objective import Keys, Limits, expected_totals
from hetopt.optimizer.search.pareto import pareto_front
from hetopt.optimizer.search.search_space import Cluster

KEPT_OF_A_BATCH = 64
"""Of clusters that are priced together the best so many are kept beside their front: something to compare with."""

CHUNK = 32_768
"""Rows that are priced at a time: their columns fit a processor's cache."""


class Pool:
    """Rows with their forecast, in the order in which they came. The first ``uniform`` are of one type each."""

    def __init__(self, columns: Columns, job: JobModel, limits: Limits) -> None:
        """Make an empty pool, for clusters of these machine options and limits."""
        self.columns, self.job, self.limits = columns, job, limits
        self.uniform = 0
        self.priced = 0
        self.safe_score = float("inf")
        """The least score of a row that surely keeps the limits; infinite where none does."""
        self.best: Cluster | None = None
        """The best cluster, whether or not it keeps the limits."""
        self._best_rank: tuple[float, ...] = ()
        nothing, table = tabulate_rows(columns, ClusterRows.of([]))
        # Rows stand with their forecast: an interruption leaves none without.
        self._parts = [(nothing, forecast(table, job))]
        self._known: set[Cluster] = set()

    @property
    def rows(self) -> ClusterRows:
        """All rows that were kept."""
        return self._whole()[0]

    @property
    def forecast(self) -> Forecast:
        """Predicted time and cost of every row in the pool."""
        return self._whole()[1]

    def _whole(self) -> tuple[ClusterRows, Forecast]:
        if len(self._parts) > 1:
            rows, forecasts = zip(*self._parts, strict=True)
            self._parts = [(ClusterRows.concatenate(rows), Forecast.concatenate(forecasts))]
        return self._parts[0]

    def add(self, rows: ClusterRows, *, keep: int | None = KEPT_OF_A_BATCH) -> None:
        """Price rows, each with its best exchange, and keep those that could matter (``keep`` absent: all)."""
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
        """Return the rows whose cluster was not kept before, each cluster once."""
        new: dict[Cluster, int] = {}
        for row in some.tolist():
            new.setdefault(rows.cluster(row), row)
        kept = [row for cluster, row in new.items() if cluster not in self._known]
        self._known.update(new)
        return np.array(kept, dtype=np.intp)
