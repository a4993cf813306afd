"""Search for the best cluster: every cluster of one type is priced, and mixes are searched by branch and bound.

Mixes of two types are searched exactly (`mixes`), and those of three where bounds leave few of them. Batch shares and
the exchange are no dimensions: they are solved exactly for each cluster. Beyond the choice, neighbours of the front are
priced. The best clusters are the first trials of an Optuna study (`study`), in which other samplers may go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hetopt.core.interruption import goes_on
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, uniform_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel
from hetopt.optimizer.search.mixes import BOXES, BOXES_OF_THREE, Pool, Proof, search_mixes
from hetopt.optimizer.search.objective import Limits, best_rows, choose, plan_front
from hetopt.optimizer.search.pareto import thin
from hetopt.optimizer.search.search_space import MAX_TYPES, Cluster, SearchSpace

if TYPE_CHECKING:
    import optuna

__all__ = ["Effort", "Limits", "Proof", "SearchResult", "choose", "search"]


NEAR_BEST = 400
"""Number of the best clusters of one type that are looked at with every count, where the enumeration goes in steps."""

FRONT = 12
SHORTLIST = 24
"""Number of machine options that the clusters of the front are mixed with."""
FIRST_TRIALS = 25
"""Number of the best clusters that are a study's first trials, beside the front."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits on a search's work: machine options in one mix, and boxes of mixes that branch and bound looks at.

    Attributes:
        types: most instance types in one cluster.
        boxes: most boxes of mixes of two types that are bounded.
        boxes_of_three: most boxes of mixes of three types.
    """

    types: int = MAX_TYPES
    boxes: int = BOXES
    boxes_of_three: int = BOXES_OF_THREE


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search: the clusters that it priced and kept, their forecast, the chosen row, the front, the proof.

    Attributes:
        rows: the clusters, those of one type first.
        uniform: number of clusters of one type.
        forecast: predicted time and cost of the rows.
        chosen: row of the choice; None: nothing fits the limits even at its median.
        safe: whether the choice keeps the limits with the probability `SURE`.
        front: rows of the front (see `plan_front`) of those that keep the limits as the choice does, thinned.
        mixes: clusters of several types that were priced, whether kept or not.
        proof: what branch and bound has shown of mixes; None: no mixes were searched.
        trials: finished trials of the study, those of other samplers included; 0 without a study.
        stopped: whether Ctrl-C ended the search early.
    """

    rows: ClusterRows
    uniform: int
    forecast: Forecast
    chosen: int | None
    safe: bool
    front: NDArray[np.intp]
    mixes: int
    proof: Proof | None
    trials: int = 0
    stopped: bool = False

    def cluster(self, row: int) -> Cluster:
        """Return the cluster in row ``row``, from 0, of `forecast`, as indices into the search space."""
        return self.rows.cluster(row)


def search(
    space: SearchSpace,
    job: JobModel,
    limits: Limits,
    *,
    effort: Effort | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Return the best cluster of ``space`` within ``limits``, and all clusters priced; deterministic.

    Ctrl-C while mixes are searched ends the search early (``stopped``), with the clusters so far. Nothing is raised
    where no cluster fits: ``chosen`` is None then.

    Args:
        space: machines, batch sizes and exchanges to choose from.
        job: inputs of a forecast that do not depend on the cluster.
        limits: budget, deadline, and the weight of time.
        effort: how many types are mixed, and how many boxes are bounded at most; None: the defaults of `Effort`.
        tell: is called with a few words on the part of the search that begins.
    """
    effort = effort or Effort()
    pool = Pool(Columns(space), job, limits)
    tell("clusters of one type")
    pool.add(uniform_rows(pool.columns), keep=None)
    pool.add(_between(pool), keep=None)
    pool.uniform = len(pool.rows)
    proof: Proof | None = None
    stopped = False
    if pool.best is not None and effort.types > 1:
        try:
            tell("mixes of two types")
            proof = search_mixes(pool, types=2, most_boxes=effort.boxes)
            if effort.types > 2:
                tell("mixes of three types")
                proof = _proof_of_three(pool, proof, effort)
            _widen(pool, effort.types)
        except KeyboardInterrupt:
            goes_on()
            stopped = True
    return SearchResult(
        rows=pool.rows,
        uniform=pool.uniform,
        forecast=pool.forecast,
        mixes=pool.priced - pool.uniform,
        proof=proof,
        stopped=stopped,
        **choice(pool.forecast, pool.limits),
    )


def search_study(
    space: SearchSpace,
    job: JobModel,
    limits: Limits,
    result: SearchResult,
    *,
    seed: int,
    types: int,
    trials: int,
    kept: Path | optuna.Study | None,
) -> SearchResult:
    """Return exact search's result with the clusters of an Optuna study's trials added, and the choice made anew.

    Args:
        space: machines, batch sizes and exchanges to choose from.
        job: inputs of a forecast that do not depend on the cluster.
        limits: budget, deadline, and the weight of time.
        result: result of exact search, whose best clusters are the first trials.
        seed: seed of the sampler that proposes the other trials.
        types: instance types in one cluster at most.
        trials: number of trials beside the first; those that ``kept`` has from before count.
        kept: study that takes the trials, or journal file that keeps them; None: a study in memory.

    Raises:
        BadInput: the file of the study cannot be used.
    """
    from hetopt.optimizer.search.study import Study

    columns = Columns(space)
    asked = Study(columns, job, limits, types=types, seed=seed)
    chosen = [] if result.chosen is None else [result.chosen]
    best = [*chosen, *result.front.tolist(), *best_rows(result.forecast, limits, FIRST_TRIALS).tolist()]
    first = list(dict.fromkeys(replace(result.cluster(row), exchange=0) for row in best))
    study = asked.run(first, trials, kept)
    study.set_user_attr("proved", proved(result))
    more = [trial for trial in study.get_trials(deepcopy=False)[len(first) :] if trial.state.is_finished()]
    if more:
        pool = Pool(columns, job, limits)
        pool.add(ClusterRows.of([asked.cluster(trial.params) for trial in more]))
        rows = ClusterRows.concatenate([result.rows, pool.rows])
        forecast = Forecast.concatenate([result.forecast, pool.forecast])
        result = replace(result, rows=rows, forecast=forecast, **choice(forecast, limits))
    done = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
    return replace(result, trials=done, stopped=result.stopped or asked.stopped)


def proved(result: SearchResult) -> str:
    """Return in words what exact search proved: 'no mix of up to three types is better by more than 0.2 %'.

    The number of clusters that were priced goes first, and stands alone where no proof about mixes is complete.
    """
    proof = result.proof
    uniform = f"{result.uniform:,} clusters of one type were priced, each one"
    if proof is None or not proof.complete:
        return uniform
    types = "two" if proof.types == 2 else "up to three"
    gap = f" is better by more than {100 * proof.gap:.1f} %" if proof.gap is not None else " surely keeps the limits"
    return f"{uniform}; no mix of {types} types{gap}, by branch and bound over {proof.boxes:,} boxes"


def _proof_of_three(pool: Pool, pairs: Proof | None, effort: Effort) -> Proof | None:
    """Search mixes of three types; return the proof over mixes of up to three types, or ``pairs`` if incomplete.

    Args:
        pool: takes the good mixes.
        pairs: proof over mixes of two; if it is None or not complete, nothing is searched.
        effort: most boxes.
    """
    if pairs is None or not pairs.complete:
        return pairs
    threes = search_mixes(pool, types=3, most_boxes=effort.boxes_of_three)
    if threes is None or not threes.complete:
        return pairs
    bound, best = min(pairs.bound, threes.bound), pool.safe_score
    gap = 1 - bound / best if math.isfinite(best) else None
    return replace(threes, bound=bound, gap=gap, boxes=pairs.boxes + threes.boxes)


def choice(forecast: Forecast, limits: Limits) -> dict[str, Any]:
    """Return the chosen row, whether it is ``safe``, and the thinned ``front``: fields of `SearchResult`.

    ``chosen`` is None where no cluster fits. The front is that of clusters as safe as the choice.
    """
    chosen, safe = choose(forecast, limits)
    keeps = np.flatnonzero(limits.risk(forecast) <= 1 if safe else limits.overrun(forecast) <= 1)
    front = keeps[plan_front(forecast.take(keeps))]
    return {"chosen": chosen, "safe": safe, "front": thin(front, forecast.total_s, FRONT)}


def _between(pool: Pool) -> ClusterRows:
    """Return clusters of one type with counts that the enumeration skipped, within a tenth of the pool's best counts.

    All in ``pool`` must be of one type. Limits on machines are not checked.
    """
    counts = frozenset(pool.columns.space.machine_counts)
    skipped: dict[Cluster, None] = {}
    for row in best_rows(pool.forecast, pool.limits, NEAR_BEST).tolist():
        cluster = pool.rows.cluster(row)
        ((option, count),) = cluster.machines
        for other in range(count - count // 10, count + count // 9 + 1):
            if other not in counts:
                skipped[replace(cluster, machines=((option, other),))] = None
    return ClusterRows.of(list(skipped))


def _widen(pool: Pool, types: int) -> None:
    """Price the neighbours of the pool's front, of up to ``types`` types, and add the good ones to the pool.

    The proof covers the choice alone; without neighbours the fastest plan on two own cards is missed.
    """
    front = thin(plan_front(pool.forecast), pool.forecast.total_s, FRONT).tolist()
    rows = [*front, *best_rows(pool.forecast, pool.limits, 50 * SHORTLIST).tolist()]
    used = pool.rows.count[rows] > 0
    shortlist = tuple(dict.fromkeys(pool.rows.option[rows][used].tolist()))[:SHORTLIST]
    near = [other for row in front for other in _neighbours(pool.columns.space, pool.rows.cluster(row), shortlist)]
    pool.add(ClusterRows.of([cluster for cluster in near if len(cluster.machines) <= types]))


def _neighbours(space: SearchSpace, cluster: Cluster, shortlist: Sequence[int]) -> list[Cluster]:
    """Return clusters near ``cluster``, each once: a machine or an eighth more, less or of another type, a batch step.

    They may break the limits of ``space``. ``shortlist`` has the indices of options to take other types from.
    """
    near: list[Cluster] = []
    batch, exchange = cluster.batch, cluster.exchange
    held = cluster.machines
    for option, count in held:
        for step in sorted({1, max(1, count // 8)}):
            smaller = [*held, (option, -step)]
            near += [Cluster.of([*held, (option, step)], batch, exchange), Cluster.of(smaller, batch, exchange)]
            near += [Cluster.of([*smaller, (other, more)], batch, exchange) for other in shortlist for more in (1, 2)]
    near += [Cluster.of([*held, (other, 1)], batch, exchange) for other in shortlist]
    sizes = [size for size in (batch - 1, batch + 1) if 0 <= size < len(space.batch_sizes)]
    near += [Cluster.of(held, size, exchange) for size in sizes]
    return list(dict.fromkeys(near))
