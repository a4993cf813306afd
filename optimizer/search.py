"""Finds the best cluster: enumeration of uniform clusters, an Optuna study of mixes, and refinement around the best.

Enumeration covers every cluster of one machine type. Mixes of two and three types are too many to enumerate; the study
searches them with NSGA-II for time and cost at once, starting from what enumeration found. Shares of the batch are no
dimension of the study: they are solved exactly inside. A descent over single changes makes the winner a local optimum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from numpy.typing import NDArray

from hetopt.optimizer.forecast import Forecast, JobModel, forecast, tabulate, tabulate_uniform
from hetopt.optimizer.pareto import pareto_front, thin
from hetopt.optimizer.search_space import MAX_TYPES, Cluster, SearchSpace

Array = NDArray[np.float64]

NEAR = 1.02
"""Plans this close to the best are equals; the better in the other respect wins. Predictions are not that fine."""

STUDY_TRIALS = 400
POPULATION = 40
SHORTLIST = 16
"""Options that are mixed; more than the starts of the study, so that each start is among them."""

FRONT = 12
MAX_ROUNDS = 40
_IMPOSSIBLE = 1e12


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Totals that must not be exceeded. With a deadline the cheapest plan is wanted, without one the quickest."""

    budget_usd: float | None = None
    deadline_s: float | None = None

    @property
    def wants_cheapest(self) -> bool:
        """Whether cost is minimised; without any limit it is, as time alone would rent everything."""
        return self.deadline_s is not None or self.budget_usd is None

    def overrun(self, forecast: Forecast) -> Array:
        """The expected total over its limit, the worse of cost and time; at most 1 when it fits."""
        return self._ratio(forecast.cost_usd, forecast.total_s)

    def risk(self, forecast: Forecast) -> Array:
        """The same at the upper end of the 90 % intervals."""
        return self._ratio(forecast.cost_high_usd, forecast.total_high_s)

    def _ratio(self, cost: Array, time: Array) -> Array:
        ratio = np.zeros_like(cost)
        if self.budget_usd is not None:
            ratio = np.maximum(ratio, cost / self.budget_usd)
        if self.deadline_s is not None:
            ratio = np.maximum(ratio, time / self.deadline_s)
        return ratio


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that was priced, and the choice.

    Attributes:
        uniform_rows: what `tabulate_uniform` enumerated; they come first in ``forecast``.
        others: the clusters of the study and of the refinement, which follow.
        chosen: row of the choice; absent when nothing fits the limits even on expectation.
        safe: whether the choice stays within the limits at the upper end of its interval.
        front: rows of the Pareto front of expected time and cost, thinned.
        studied, refined: clusters priced by the study and by the refinement.
    """

    uniform_rows: NDArray[np.intp]
    others: tuple[Cluster, ...]
    forecast: Forecast
    chosen: int | None
    safe: bool
    front: NDArray[np.intp]
    studied: int
    refined: int

    def cluster(self, row: int) -> Cluster:
        """The cluster that a row of the forecast is about."""
        return _cluster_at(self.uniform_rows, self.others, row)


def search(space: SearchSpace, job: JobModel, limits: Limits, *, seed: int, trials: int = STUDY_TRIALS) -> Found:
    """Find the best cluster of the space within the limits. The same arguments find the same cluster."""
    rows, table = tabulate_uniform(space)
    pool = _Pool(space=space, job=job, rows=rows, forecast=forecast(table, job))
    studied = refined = 0
    if len(rows):
        promising = _promising(pool.forecast, limits)
        starts = [pool.cluster(row) for row in promising]
        shortlist = _shortlist(pool, promising, limits)
        studied = pool.price(study_mixes(space, job, limits, starts, shortlist, seed=seed, trials=trials))
        refined = _descend(pool, limits, shortlist)
        best = [pool.cluster(row) for row in _front(pool.forecast)]
        refined += pool.price([other for cluster in best for other in _neighbours(space, cluster, shortlist)])
    chosen, safe = choose(pool.forecast, limits)
    whole_front = pareto_front(pool.forecast.total_s, pool.forecast.cost_usd)
    front = thin(whole_front, pool.forecast.total_s, FRONT)
    if chosen is not None and chosen in whole_front:
        front = np.array(sorted({*front.tolist(), chosen}, key=pool.forecast.total_s.__getitem__), dtype=np.intp)
    return Found(
        uniform_rows=rows,
        others=tuple(pool.others),
        forecast=pool.forecast,
        chosen=chosen,
        safe=safe,
        front=front,
        studied=studied,
        refined=refined,
    )


def choose(found: Forecast, limits: Limits) -> tuple[int | None, bool]:
    """The best row, and whether it is safe.

    A limit is a promise, so a plan should keep it even at the upper end of its interval. Among those the quickest wins
    (the cheapest when there is a deadline), and within 2 % of it the one that is better in the other respect. Where no
    plan is that safe, the one least likely to exceed the limits wins, whatever its speed: see docs/decisions.
    """
    first, second = (found.cost_usd, found.total_s) if limits.wants_cheapest else (found.total_s, found.cost_usd)
    safe = np.flatnonzero(limits.risk(found) <= 1)
    if safe.size:
        near = safe[first[safe] <= NEAR * first[safe].min()]
        return int(near[np.lexsort((first[near], second[near]))[0]]), True
    expected = np.flatnonzero(limits.overrun(found) <= 1)
    if expected.size:
        return int(expected[np.lexsort((first[expected], limits.risk(found)[expected]))[0]]), False
    return None, False


class _Pool:
    """The clusters priced so far. Each is priced once."""

    def __init__(self, *, space: SearchSpace, job: JobModel, rows: NDArray[np.intp], forecast: Forecast) -> None:
        self.space, self.job, self.rows, self.forecast = space, job, rows, forecast
        self.others: list[Cluster] = []
        self._known: set[Cluster] = set()
        self._counts = frozenset(space.machine_counts)

    def cluster(self, row: int) -> Cluster:
        return _cluster_at(self.rows, self.others, row)

    def _enumerated(self, cluster: Cluster) -> bool:
        return len(cluster.machines) == 1 and cluster.machine_count in self._counts

    def price(self, clusters: Sequence[Cluster]) -> int:
        """Add clusters that are new; returns how many were possible."""
        new = [c for c in dict.fromkeys(clusters) if c not in self._known and not self._enumerated(c)]
        self._known.update(new)
        possible, table = tabulate(self.space, new)
        if possible:
            self.others += possible
            self.forecast = Forecast.concatenate([self.forecast, forecast(table, self.job)])
        return len(possible)


def _cluster_at(uniform: NDArray[np.intp], others: Sequence[Cluster], row: int) -> Cluster:
    if row >= len(uniform):
        return others[row - len(uniform)]
    option, count, batch, exchange = uniform[row].tolist()
    return Cluster(machines=((option, count),), batch=batch, exchange=exchange)


def _front(found: Forecast) -> NDArray[np.intp]:
    return thin(pareto_front(found.total_s, found.cost_usd), found.total_s, FRONT)


def _order(found: Forecast, limits: Limits) -> NDArray[np.intp]:
    """Rows from best to worst: those that are safe, then those that fit on expectation, then the rest."""
    first, second = (found.cost_usd, found.total_s) if limits.wants_cheapest else (found.total_s, found.cost_usd)
    risk, overrun = limits.risk(found), limits.overrun(found)
    level = np.where(risk <= 1, 0, np.where(overrun <= 1, 1, 2))
    return np.lexsort((second, np.select([level == 0, level == 1], [first, risk], overrun), level)).astype(np.intp)


def _promising(found: Forecast, limits: Limits) -> list[int]:
    """Rows that the study starts from: the best one, and the front."""
    return list(dict.fromkeys([int(_order(found, limits)[0]), *_front(found).tolist()]))


def _shortlist(pool: _Pool, promising: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """Options worth mixing: those that the study starts from, then those of the best uniform clusters."""
    best = _order(pool.forecast, limits)
    ranked = [*pool.rows[list(promising), 0].tolist(), *pool.rows[best, 0].tolist()]
    return tuple(dict.fromkeys(ranked))[:SHORTLIST]


def study_mixes(
    space: SearchSpace,
    job: JobModel,
    limits: Limits,
    starts: Sequence[Cluster],
    shortlist: Sequence[int],
    *,
    seed: int,
    trials: int,
) -> list[Cluster]:
    """Clusters that NSGA-II asks for, minimising time and cost under the limits.

    Its dimensions are the types and counts of up to three groups, the batch size and the exchange.
    """
    asked: list[Cluster] = []
    slots = range(min(MAX_TYPES, len(shortlist)))
    with _quiet():
        study = optuna.create_study(
            directions=["minimize", "minimize"],
            sampler=optuna.samplers.NSGAIISampler(seed=seed, population_size=POPULATION),
        )
        for cluster in starts[: max(0, trials)]:
            ((option, count),) = cluster.machines
            place = shortlist.index(option)
            groups = {f"type_{k}": place for k in slots} | {f"machines_{k}": count if k == 0 else 0 for k in slots}
            study.enqueue_trial({**groups, "batch": cluster.batch, "exchange": cluster.exchange})
        for _ in range(trials):
            trial = study.ask()
            counts = []
            for k in slots:
                # An integer costs a third of a categorical; crossover and mutation treat both alike.
                option = shortlist[trial.suggest_int(f"type_{k}", 0, len(shortlist) - 1)]
                counts.append((option, trial.suggest_int(f"machines_{k}", 0, space.max_machines)))
            cluster = Cluster.of(
                counts,
                batch=trial.suggest_int("batch", 0, len(space.batch_sizes) - 1),
                exchange=trial.suggest_int("exchange", 0, len(space.exchanges) - 1),
            )
            possible, table = tabulate(space, [cluster])
            if not possible:
                # Empty, too large, or without room for the batch: further from possible the more machines it has.
                trial.set_constraint("possible", 1.0 + cluster.machine_count)
                study.tell(trial, [_IMPOSSIBLE, _IMPOSSIBLE])
                continue
            asked.append(cluster)
            found = forecast(table, job)
            trial.set_constraint("limits", float(limits.risk(found)[0]) - 1.0)
            study.tell(trial, [float(found.total_s[0]), float(found.cost_usd[0])])
    return asked


def _descend(pool: _Pool, limits: Limits, shortlist: Sequence[int]) -> int:
    """Price the neighbours of the best cluster until none is better: a local optimum. Returns how many were priced."""
    priced = 0
    seen: set[int] = set()
    for _ in range(MAX_ROUNDS):
        best = int(_order(pool.forecast, limits)[0])
        if best in seen:
            break
        seen.add(best)
        priced += pool.price(_neighbours(pool.space, pool.cluster(best), shortlist))
    return priced


def _neighbours(space: SearchSpace, cluster: Cluster, shortlist: Sequence[int]) -> list[Cluster]:
    """Clusters one change away: a machine more, less or of another type, a step in batch size, another exchange."""
    found: list[Cluster] = []
    batch, exchange = cluster.batch, cluster.exchange
    held = cluster.machines
    for option, _ in held:
        smaller = [*held, (option, -1)]
        found += [Cluster.of([*held, (option, 1)], batch, exchange), Cluster.of(smaller, batch, exchange)]
        found += [Cluster.of([*smaller, (other, 1)], batch, exchange) for other in shortlist]
    found += [Cluster.of([*held, (other, 1)], batch, exchange) for other in shortlist]
    sizes = [size for size in (batch - 1, batch + 1) if 0 <= size < len(space.batch_sizes)]
    found += [Cluster.of(held, size, exchange) for size in sizes]
    found += [Cluster.of(held, batch, other) for other in range(len(space.exchanges)) if other != exchange]
    return [neighbour for neighbour in found if len(neighbour.machines) <= MAX_TYPES]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log for the duration; it is a library's business here."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
