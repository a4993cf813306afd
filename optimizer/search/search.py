"""Finds the best cluster: every cluster of one type, and mixes by branch and bound.

Enumeration covers the clusters of one machine type, and says what is worth mixing. Mixes of two types are searched
exactly (`mixes`), and so are those of three where what is known leaves few of them. Shares of the batch and the
exchange are no dimensions: they are solved exactly inside. A descent over single changes makes the winner a local
optimum, of three types as well. A study of Optuna may be asked for beside all that: it looks through the whole space
for time and cost at once, told of the best that is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.interruption import goes_on
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, uniform_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel
from hetopt.optimizer.search.mixes import BOXES, BOXES_OF_THREE, Proof, search_mixes
from hetopt.optimizer.search.objective import Limits, choose, plan_front
from hetopt.optimizer.search.pareto import thin
from hetopt.optimizer.search.pool import Pool
from hetopt.optimizer.search.search_space import MAX_TYPES, Cluster, SearchSpace

__all__ = ["Effort", "Found", "Limits", "Proof", "choose", "search"]

Array = NDArray[np.float64]

STUDY_TRIALS = 400
MOST_TRIALS = 1_000_000
SHORTLIST = 24
"""Options that are mixed by the descent."""

NEAR_BEST = 400
"""Of the best clusters of one type so many are looked at with every count, where the enumeration goes in steps."""

FRONT = 12
MAX_ROUNDS = 40


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is searched.

    Attributes:
        types: instance types in one cluster at most.
        trials: of a study beside the exact search.
        boxes: of mixes of two types that are bounded at most.
        boxes_of_three: of mixes of three types.
        journal: where the study is kept, so that a search that was stopped goes on; absent: in memory.
    """

    types: int = MAX_TYPES
    trials: int = 0
    boxes: int = BOXES
    boxes_of_three: int = BOXES_OF_THREE
    journal: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what is no effort."""
        if not 1 <= self.types <= MAX_TYPES:
            raise BadInput(
                f"`mixed_types` must be 1 to {MAX_TYPES}, got {self.types}.",
                hint="a cluster has so many instance types at most",
            )
        if not 0 <= self.trials <= MOST_TRIALS:
            raise BadInput(
                f"`trials` must be 0 to {MOST_TRIALS:,}, got {self.trials}.", hint="0 searches without a study"
            )


@dataclass(frozen=True, kw_only=True)
class Studied:
    """What a study found that the exact parts of the search had not.

    Attributes:
        trials: that were priced.
        gain: by how much its best plan, and what a descent from there leads to, beats theirs, as a part of the score;
            absent where no plan keeps the limits without it.
        front: points of the Pareto front that are its own.
    """

    trials: int
    gain: float | None = None
    front: int = 0


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was priced and kept, and the choice.

    Attributes:
        rows: the clusters, those of one type first.
        uniform: how many those are.
        forecast: of the rows.
        chosen: row of the choice; absent when nothing fits the limits even at its median.
        safe: whether the choice keeps the limits with the probability `SURE`.
        front: rows of the front (see `plan_front`) of those that keep the limits as the choice does, thinned.
        mixes: clusters of several types that were priced, whether kept or not.
        proof: what branch and bound has shown of mixes; absent where none was asked for.
        studied: what a study found; absent where there was none.
        stopped: whether somebody stopped the search before it was done.
    """

    rows: ClusterRows
    uniform: int
    forecast: Forecast
    chosen: int | None
    safe: bool
    front: NDArray[np.intp]
    mixes: int
    proof: Proof | None
    studied: Studied | None = None
    stopped: bool = False

    def cluster(self, row: int) -> Cluster:
        """The cluster that a row of the forecast is about."""
        return self.rows.cluster(row)


def search(
    space: SearchSpace,
    job: JobModel,
    limits: Limits,
    *,
    seed: int,
    effort: Effort | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """Find the best cluster of the space within the limits. The same arguments find the same cluster.

    Ctrl-C ends it early with the best so far, once all clusters of one type are priced.

    Args:
        space: what there is to choose from.
        job: what does not depend on the cluster.
        limits: what must be kept, and what is wanted.
        seed: of the study.
        effort: how much is searched.
        tell: is called with what is going on.
    """
    effort = effort or Effort()
    columns = Columns(space)
    pool = Pool(columns, job, limits)
    tell("clusters of one type")
    pool.add(uniform_rows(columns), keep=None)
    pool.add(_between(pool), keep=None)
    pool.uniform = len(pool.rows)
    proof: Proof | None = None
    stopped = False
    asked: list[Cluster] = []
    before: tuple[float, int] | None = None
    if pool.best is not None and effort.types > 1:
        tell(f"the best of one type is {_in_words(pool)}")
        try:
            _, shortlist = _worth_mixing(pool)
            tell("mixes around the best")
            _descend(pool, shortlist, types=2)
            tell("mixes of two types")
            proof = search_mixes(pool, types=2, most_boxes=effort.boxes)
            if effort.types > 2:
                tell("mixes of three types")
                proof = _proof_of_three(pool, proof, effort)
                _descend(pool, _worth_mixing(pool)[1], types=effort.types)
            _widen(pool, effort.types)
            if effort.trials:
                tell("a study of mixes")
                from hetopt.optimizer.search.study import study_mixes  # Optuna's import takes most of a second.

                promising, shortlist = _worth_mixing(pool)
                before = (pool.safe_score, len(pool.rows))
                study_mixes(
                    columns,
                    job,
                    limits,
                    [pool.rows.cluster(row) for row in promising],
                    range(len(space.options)),
                    types=effort.types,
                    seed=seed,
                    trials=effort.trials,
                    journal=effort.journal,
                    asked=asked,
                )
                pool.add(ClusterRows.of(asked))
                _descend(pool, shortlist, types=effort.types)
                _widen(pool, effort.types)
        except KeyboardInterrupt:
            goes_on()
            stopped = True
            pool.add(ClusterRows.of(asked))
    studied = None if before is None else _studied(pool, len(asked), *before)
    return _found(pool, proof, studied, stopped=stopped)


def _studied(pool: Pool, trials: int, score: float, rows: int) -> Studied:
    """What came of a study that began with this best score, and so many rows."""
    gain = 1 - pool.safe_score / score if math.isfinite(score) else None
    return Studied(trials=trials, gain=gain, front=int((plan_front(pool.forecast) >= rows).sum()))


def _proof_of_three(pool: Pool, pairs: Proof | None, effort: Effort) -> Proof | None:
    """What is shown of mixes of up to three types, or of two where three are too many."""
    if pairs is None or not pairs.complete:
        return pairs
    threes = search_mixes(pool, types=3, most_boxes=effort.boxes_of_three)
    if threes is None or not threes.complete:
        return pairs
    bound, best = min(pairs.bound, threes.bound), pool.safe_score
    gap = 1 - bound / best if math.isfinite(best) else None
    return replace(threes, bound=bound, gap=gap, boxes=pairs.boxes + threes.boxes)


def _in_words(pool: Pool) -> str:
    """The best so far, for who waits."""
    found, space = pool.forecast, pool.columns.space
    row, _ = choose(found, pool.limits)
    if row is None:
        return "none that fits"
    machines = formatting.cluster(
        (count, space.options[option].name) for option, count in pool.rows.cluster(row).machines
    )
    return f"{machines}: {formatting.duration(float(found.total_s[row]))}, {formatting.usd(float(found.cost_usd[row]))}"


def _found(pool: Pool, proof: Proof | None, studied: Studied | None, *, stopped: bool) -> Found:
    found = pool.forecast
    chosen, safe = choose(found, pool.limits)
    keeps = np.flatnonzero(pool.limits.risk(found) <= 1 if safe else pool.limits.overrun(found) <= 1)
    return Found(
        rows=pool.rows,
        uniform=pool.uniform,
        forecast=found,
        chosen=chosen,
        safe=safe,
        front=_front(found, keeps),
        mixes=pool.priced - pool.uniform,
        proof=proof,
        studied=studied,
        stopped=stopped,
    )


def _between(pool: Pool) -> ClusterRows:
    """The counts that the enumeration of large clusters skipped, around the best of them."""
    counts = frozenset(pool.columns.space.machine_counts)
    skipped: dict[Cluster, None] = {}
    for row in pool.best_rows(NEAR_BEST).tolist():
        cluster = pool.rows.cluster(row)
        ((option, count),) = cluster.machines
        for other in range(count - count // 10, count + count // 9 + 1):
            if other not in counts:
                skipped[replace(cluster, machines=((option, other),))] = None
    return ClusterRows.of(list(skipped))


def _front(found: Forecast, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return some rows of the front of these rows, quickest first."""
    front = rows[plan_front(found.take(rows))]
    return thin(front, found.total_s, FRONT)


def _front_of(pool: Pool) -> NDArray[np.intp]:
    return _front(pool.forecast, np.arange(len(pool.rows)))


def _worth_mixing(pool: Pool) -> tuple[list[int], tuple[int, ...]]:
    """Rows that the study starts from, and options worth mixing.

    The rows are the best one and the front; the options theirs, then those of the best clusters.
    """
    ranked = pool.best_rows(50 * SHORTLIST).tolist()
    promising = list(dict.fromkeys([ranked[0], *_front_of(pool).tolist()]))
    rows = [*promising, *ranked]
    used = pool.rows.count[rows] > 0
    return promising, tuple(dict.fromkeys(pool.rows.option[rows][used].tolist()))[:SHORTLIST]


def _descend(pool: Pool, shortlist: Sequence[int], *, types: int) -> None:
    """Price the neighbours of the best cluster until none is better: a local optimum."""
    seen: set[Cluster] = set()
    for _ in range(MAX_ROUNDS):
        best = pool.best
        if best is None or best in seen:
            break
        seen.add(best)
        pool.add(ClusterRows.of(_neighbours(pool.columns.space, best, shortlist, types)))


def _widen(pool: Pool, types: int) -> None:
    """Price the neighbours of the front."""
    _, shortlist = _worth_mixing(pool)
    best = [pool.rows.cluster(row) for row in _front_of(pool)]
    near = [other for cluster in best for other in _neighbours(pool.columns.space, cluster, shortlist, types)]
    pool.add(ClusterRows.of(near))


def _neighbours(space: SearchSpace, cluster: Cluster, shortlist: Sequence[int], types: int) -> list[Cluster]:
    """Clusters near by: a machine or an eighth more, less or of another type, a step in batch."""
    found: list[Cluster] = []
    batch, exchange = cluster.batch, cluster.exchange
    held = cluster.machines
    for option, count in held:
        for step in sorted({1, max(1, count // 8)}):
            smaller = [*held, (option, -step)]
            found += [Cluster.of([*held, (option, step)], batch, exchange), Cluster.of(smaller, batch, exchange)]
            found += [Cluster.of([*smaller, (other, more)], batch, exchange) for other in shortlist for more in (1, 2)]
    found += [Cluster.of([*held, (other, 1)], batch, exchange) for other in shortlist]
    sizes = [size for size in (batch - 1, batch + 1) if 0 <= size < len(space.batch_sizes)]
    found += [Cluster.of(held, size, exchange) for size in sizes]
    return [neighbour for neighbour in dict.fromkeys(found) if len(neighbour.machines) <= types]
