"""Finds the best cluster: every cluster of one type, mixes of two by branch and bound, of three by an Optuna study.

Enumeration covers the clusters of one machine type, and says what is worth mixing. Mixes of two types are searched
exactly (`mixes`); those of three are too many, so NSGA-II looks for them, for time and cost at once, starting from the
best that is known. Shares of the batch are no dimension: they are solved exactly inside. A descent over single changes
makes the winner a local optimum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from hetopt.optimizer.aims import NEAR, Limits, choose, order
from hetopt.optimizer.cluster_rows import ClusterRows, Columns, tabulate_rows, uniform_rows
from hetopt.optimizer.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.mixes import BOXES, Proof, search_pairs
from hetopt.optimizer.pareto import pareto_front, thin
from hetopt.optimizer.pool import Pool
from hetopt.optimizer.search_space import MAX_TYPES, Cluster, SearchSpace
from hetopt.profiler.errors import BadInput

__all__ = ["NEAR", "Effort", "Found", "Limits", "Proof", "choose", "search", "study_mixes"]

Array = NDArray[np.float64]

STUDY_TRIALS = 400
POPULATION = 40
SHORTLIST = 24
"""Options that are mixed by the study and the descent; more than the starts, so that each start is among them."""

NEAR_BEST = 400
"""Of the best clusters of one type so many are looked at with every count, where the enumeration goes in steps."""

FRONT = 12
MAX_ROUNDS = 40
_IMPOSSIBLE = 1e12


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is searched.

    Attributes:
        types: instance types in one cluster at most.
        trials: of the study of three types.
        boxes: of mixes of two types that are bounded at most.
        journal: where the study is kept, so that a search that was stopped goes on; absent: in memory.
    """

    types: int = MAX_TYPES
    trials: int = STUDY_TRIALS
    boxes: int = BOXES
    journal: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what is no effort."""
        if not 1 <= self.types <= MAX_TYPES:
            raise BadInput(f"Clusters of {self.types} types are not planned.", hint=f"choose 1 to {MAX_TYPES}")
        if self.trials < 0:
            raise BadInput(f"{self.trials} trials cannot be.", hint="--trials must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was priced and kept, and the choice.

    Attributes:
        rows: the clusters, those of one type first.
        uniform: how many those are.
        forecast: of the rows.
        chosen: row of the choice; absent when nothing fits the limits even on expectation.
        safe: whether the choice stays within the limits at the upper end of its interval.
        front: rows of the Pareto front of expected time and cost, thinned.
        mixes: clusters of several types that were priced, whether kept or not.
        proof: what branch and bound has shown of mixes of two types; absent where none was asked for.
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
    columns = Columns.of(space)
    pool = Pool(columns, job, limits)
    tell("clusters of one type")
    pool.add(uniform_rows(columns), keep=None)
    pool.add(_between(pool), keep=None)
    pool.uniform = len(pool.rows)
    proof: Proof | None = None
    stopped = False
    asked: list[Cluster] = []
    if pool.best is not None and effort.types > 1:
        try:
            _, shortlist = _worth_mixing(pool)
            tell("mixes around the best")
            _descend(pool, shortlist, types=2)
            tell("mixes of two types")
            proof = search_pairs(pool, most_boxes=effort.boxes)
            if effort.types > 2 and effort.trials:
                tell("mixes of three types")
                promising, shortlist = _worth_mixing(pool)
                starts = [pool.rows.cluster(row) for row in promising]
                study_mixes(
                    columns,
                    job,
                    limits,
                    starts,
                    shortlist,
                    seed=seed,
                    trials=effort.trials,
                    journal=effort.journal,
                    asked=asked,
                )
                pool.add(ClusterRows.of(asked))
                _descend(pool, shortlist, types=effort.types)
            best = [pool.rows.cluster(row) for row in _front(pool)]
            around = [other for cluster in best for other in _neighbours(space, cluster, shortlist, effort.types)]
            pool.add(ClusterRows.of(around))
        except KeyboardInterrupt:
            stopped = True
            pool.add(ClusterRows.of(asked))
    return _found(pool, proof, stopped=stopped)


def _found(pool: Pool, proof: Proof | None, *, stopped: bool) -> Found:
    found = pool.forecast
    chosen, safe = choose(found, pool.limits)
    whole_front = pareto_front(found.total_s, found.cost_usd)
    front = thin(whole_front, found.total_s, FRONT)
    if chosen is not None and chosen in whole_front:
        front = np.array(sorted({*front.tolist(), chosen}, key=found.total_s.__getitem__), dtype=np.intp)
    return Found(
        rows=pool.rows,
        uniform=pool.uniform,
        forecast=found,
        chosen=chosen,
        safe=safe,
        front=front,
        mixes=pool.priced - pool.uniform,
        proof=proof,
        stopped=stopped,
    )


def _between(pool: Pool) -> ClusterRows:
    """The counts that the enumeration of large clusters skipped, around the best of them."""
    counts = frozenset(pool.columns.space.machine_counts)
    skipped: dict[Cluster, None] = {}
    for row in order(pool.forecast, pool.limits)[:NEAR_BEST].tolist():
        cluster = pool.rows.cluster(row)
        ((option, count),) = cluster.machines
        for other in range(count - count // 10, count + count // 9 + 1):
            if other not in counts:
                skipped[replace(cluster, machines=((option, other),))] = None
    return ClusterRows.of(list(skipped))


def _front(pool: Pool) -> NDArray[np.intp]:
    return thin(pareto_front(pool.forecast.total_s, pool.forecast.cost_usd), pool.forecast.total_s, FRONT)


def _worth_mixing(pool: Pool) -> tuple[list[int], tuple[int, ...]]:
    """Rows that the study starts from, and options worth mixing.

    The rows are the best one and the front; the options theirs, then those of the best clusters.
    """
    ranked = order(pool.forecast, pool.limits)[: 50 * SHORTLIST].tolist()
    promising = list(dict.fromkeys([ranked[0], *_front(pool).tolist()]))
    rows = [*promising, *ranked]
    used = pool.rows.count[rows] > 0
    return promising, tuple(dict.fromkeys(pool.rows.option[rows][used].tolist()))[:SHORTLIST]


def study_mixes(
    columns: Columns,
    job: JobModel,
    limits: Limits,
    starts: Sequence[Cluster],
    shortlist: Sequence[int],
    *,
    seed: int,
    trials: int,
    journal: Path | None = None,
    asked: list[Cluster] | None = None,
) -> list[Cluster]:
    """Clusters that NSGA-II asks for, minimising time and cost under the limits.

    Its dimensions are the types and counts of up to three groups, the batch size and the exchange. With a ``journal``
    the trials that it holds count, and the study goes on from there. ``asked`` takes the clusters as they come, for
    who stops the study before it returns.

    Raises:
        BadInput: the journal is of another question, or no journal.
    """
    space = columns.space
    asked = [] if asked is None else asked
    slots = range(min(MAX_TYPES, len(shortlist)))
    with _quiet():
        study = _study(journal, _question(space, limits, shortlist, seed), seed)
        done = len(study.trials)
        if not done:
            for cluster in starts[: max(0, trials)]:
                held = [*cluster.machines, *[(cluster.machines[0][0], 0)] * MAX_TYPES]
                groups = {f"type_{k}": shortlist.index(held[k][0]) for k in slots}
                groups |= {f"machines_{k}": held[k][1] for k in slots}
                study.enqueue_trial({**groups, "batch": cluster.batch, "exchange": cluster.exchange})
        for trial in study.trials:
            if trial.state.is_finished():
                asked.append(_cluster_of(trial.params, shortlist, slots))
        for _ in range(max(0, trials - len(asked))):
            trial_ = study.ask()
            params = {
                # An integer costs a third of a categorical; crossover and mutation treat both alike.
                **{f"type_{k}": trial_.suggest_int(f"type_{k}", 0, len(shortlist) - 1) for k in slots},
                **{f"machines_{k}": trial_.suggest_int(f"machines_{k}", 0, space.max_machines) for k in slots},
                "batch": trial_.suggest_int("batch", 0, len(space.batch_sizes) - 1),
                "exchange": trial_.suggest_int("exchange", 0, len(space.exchanges) - 1),
            }
            cluster = _cluster_of(params, shortlist, slots)
            asked.append(cluster)
            possible, table = tabulate_rows(columns, ClusterRows.of([cluster]))
            if not len(possible):
                # Empty, too large, or without room for the batch: further from possible the more machines it has.
                trial_.set_constraint("possible", 1.0 + cluster.machine_count)
                study.tell(trial_, [_IMPOSSIBLE, _IMPOSSIBLE])
                continue
            found = forecast(table, job)
            trial_.set_constraint("limits", float(limits.risk(found)[0]) - 1.0)
            study.tell(trial_, [float(found.total_s[0]), float(found.cost_usd[0])])
    return asked


def _cluster_of(params: Mapping[str, int], shortlist: Sequence[int], slots: range) -> Cluster:
    counts = [(shortlist[params[f"type_{k}"]], params[f"machines_{k}"]) for k in slots]
    return Cluster.of(counts, batch=params["batch"], exchange=params["exchange"])


def _study(journal: Path | None, question: str, seed: int) -> optuna.Study:
    """The study of one question: a journal may hold those of several.

    Raises:
        BadInput: the file is no journal, or cannot be written.
    """
    try:
        return optuna.create_study(
            storage=None if journal is None else JournalStorage(JournalFileBackend(str(journal))),
            study_name=None if journal is None else question,
            load_if_exists=True,
            directions=["minimize", "minimize"],
            sampler=optuna.samplers.NSGAIISampler(seed=seed, population_size=POPULATION),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{journal} cannot be used as the journal of a search: {error}.", hint="name another file with --resume"
        ) from None


def _question(space: SearchSpace, limits: Limits, shortlist: Sequence[int], seed: int) -> str:
    """A name that two searches share where the trials of one are those of the other."""
    options = [
        (space.options[o].name, space.options[o].offer.price.market, space.options[o].usd_per_hour) for o in shortlist
    ]
    asked = [options, space.batch_sizes, [str(e.compression) for e in space.exchanges], space.max_machines,
             space.max_workers, repr(limits), seed]  # fmt: skip
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def _descend(pool: Pool, shortlist: Sequence[int], *, types: int) -> None:
    """Price the neighbours of the best cluster until none is better: a local optimum."""
    seen: set[Cluster] = set()
    for _ in range(MAX_ROUNDS):
        best = pool.best
        if best is None or best in seen:
            break
        seen.add(best)
        pool.add(ClusterRows.of(_neighbours(pool.columns.space, best, shortlist, types)))


def _neighbours(space: SearchSpace, cluster: Cluster, shortlist: Sequence[int], types: int) -> list[Cluster]:
    """Clusters near by: a machine or an eighth more, less or of another type, a step in batch, another exchange."""
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
    found += [Cluster.of(held, batch, other) for other in range(len(space.exchanges)) if other != exchange]
    return [neighbour for neighbour in dict.fromkeys(found) if len(neighbour.machines) <= types]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log for the duration; it is a library's business here."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
