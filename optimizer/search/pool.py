"""The clusters that a search has priced and kept: all of one type, and of the mixes those that could matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

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

SLACK = 1.1
"""Room for rows to come, over those that are there: what is added after the enumeration is little, and comes often."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Rows, their forecast and what orders them."""

    rows: ClusterRows
    forecast: Forecast
    keys: Keys

    def arrays(self) -> list[NDArray[Any]]:
        """All of its columns."""
        records = (self.rows, self.forecast)
        return [*(getattr(one, f.name) for one in records for f in fields(one)), *self.keys]

    @classmethod
    def of(cls, arrays: Sequence[NDArray[Any]]) -> _Part:
        """A part of these columns."""
        columns = iter(arrays)
        rows = ClusterRows(**{f.name: next(columns) for f in fields(ClusterRows)})
        found = Forecast(**{f.name: next(columns) for f in fields(Forecast)})
        return cls(rows=rows, forecast=found, keys=Keys(*columns))


class Pool:
    """Rows with their forecast, in the order in which they came. The first ``uniform`` are of one type each."""

    def __init__(self, columns: Columns, job: JobModel, limits: Limits) -> None:
        """A pool that nothing was added to, for clusters of these machine options and limits."""
        self.columns, self.job, self.limits = columns, job, limits
        self.uniform = 0
        self.priced = 0
        self.safe_score = float("inf")
        """The least score of a row that surely keeps the limits; infinite where none does."""
        self.best: Cluster | None = None
        """The best cluster, whether or not it keeps the limits."""
        self._best_rank: tuple[float, ...] = ()
        nothing, table = tabulate_rows(columns, ClusterRows.of([]))
        found = forecast(table, job)
        # Rows one with their forecast: an interruption leaves none without.
        self._whole = _Part(rows=nothing, forecast=found, keys=Keys.of(found, limits))
        self._room = self._whole.arrays()
        self._known: set[Cluster] = set()

    @property
    def rows(self) -> ClusterRows:
        """All rows that were kept."""
        return self._whole.rows

    @property
    def forecast(self) -> Forecast:
        """Predicted time and cost of every row in the pool."""
        return self._whole.forecast

    def best_rows(self, count: int) -> NDArray[np.intp]:
        """The best so many rows, the best first."""
        return self._whole.keys.best(count)

    def add(self, rows: ClusterRows, *, keep: int | None = KEPT_OF_A_BATCH) -> int:
        """Price rows, each with its best exchange, and keep those that could matter (``keep`` absent: all).

        Returns how many were possible.
        """
        priced = 0
        if keep is None:
            self._reserve(len(self._whole.rows) + len(rows))
        for start in range(0, len(rows), CHUNK):
            part = rows.take(np.arange(start, min(start + CHUNK, len(rows))))
            some, table = tabulate_rows(self.columns, part, self.job)
            if not len(some):
                continue
            found = forecast(table, self.job)
            priced += len(some)
            keys = Keys.of(found, self.limits)
            ranked = keys.best(keep or 1)
            self._look_at(some, keys, int(ranked[0]))
            if keep is not None:
                kept = self._new(some, np.union1d(ranked, pareto_front(*expected_totals(found))))
                some, found, keys = some.take(kept), found.take(kept), keys.take(kept)
            self._append(_Part(rows=some.widened(), forecast=found, keys=keys))
        self.priced += priced
        return priced

    def _look_at(self, rows: ClusterRows, keys: Keys, first: int) -> None:
        """See whether the first of new rows is better than the best."""
        place = keys.rank(first)
        if self.best is None or place < self._best_rank:
            self.best, self._best_rank = rows.cluster(first), place
        self.safe_score = min(self.safe_score, keys.least_safe)

    def _append(self, part: _Part) -> None:
        before, length = len(self._whole.rows), len(self._whole.rows) + len(part.rows)
        self._reserve(length)
        for room, column in zip(self._room, part.arrays(), strict=True):
            room[before:length] = column
        self._whole = _Part.of([room[:length] for room in self._room])

    def _reserve(self, length: int) -> None:
        """Have room for so many rows, and for a few more behind them."""
        if length > len(self._room[0]):
            columns = self._whole.arrays()
            larger = [np.empty((int(SLACK * length), *one.shape[1:]), dtype=one.dtype) for one in columns]
            for room, column in zip(larger, columns, strict=True):
                room[: len(column)] = column
            self._room = larger

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
