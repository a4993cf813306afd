"""The study of whole plans: NSGA-II of Optuna, for expected time and cost at once, under the limits.

Its dimensions are the machine options (type, market, zone and precision) and counts of up to three groups, and the
batch size. What has an exact answer given these is solved inside, and no dimension: local batch sizes, the exchange
(compressor, ratio, collective, and how often workers are synchronized), and the checkpoint interval. A trial of another
value of them would only be worse. The best that is known from elsewhere is enqueued, so that it is among the trials.

The only file that imports Optuna, and itself imported only where there is a study: it takes as long as planning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.step_samples import IN_PRECISION
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.exchange_menu import ExchangeOption
from hetopt.optimizer.search.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.search.objective import Limits, expected_totals
from hetopt.optimizer.search.search_space import MAX_TYPES, Cluster, MachineOption, SearchSpace

POPULATION = 40
_IMPOSSIBLE = math.inf
"""Time and cost of what cannot be: a plot leaves it out."""


def study_mixes(
    columns: Columns,
    job: JobModel,
    limits: Limits,
    starts: Sequence[Cluster],
    options: Sequence[int],
    *,
    types: int = MAX_TYPES,
    seed: int,
    trials: int,
    journal: Path | None = None,
    asked: list[Cluster] | None = None,
) -> list[Cluster]:
    """Clusters that NSGA-II asks for, minimising expected time and cost under the limits.

    Args:
        columns: the space.
        job: what does not depend on the cluster.
        limits: become constraints of the study.
        starts: clusters of these options that are enqueued first.
        options: machine options to choose from, as indices into the space.
        types: groups of a cluster at most.
        seed: of the sampler.
        trials: in all; with a ``journal`` those that it holds count, and the study goes on from there.
        journal: file that keeps them, for a later study or for Optuna's dashboard; absent: nothing is kept.
        asked: takes the clusters as they come, for who stops the study before it returns.

    Raises:
        BadInput: the journal is of another question, or no journal.
    """
    space = columns.space
    asked = [] if asked is None else asked
    slots = range(min(types, len(options)))
    with _quiet(), _interruptible():
        study = _study(journal, _question(space, limits, options, types, seed), seed)
        done = len(study.trials)
        if not done:
            study.set_metric_names(["expected time, s", "expected cost, USD"])
            study.set_user_attr("types", [_name(space.options[option]) for option in options])
            study.set_user_attr("batches", list(space.batch_sizes))
            place = {option: index for index, option in enumerate(options)}
            for cluster in starts[: max(0, trials)]:
                held = [*cluster.machines, *[(cluster.machines[0][0], 0)] * MAX_TYPES]
                groups = {f"type_{k}": place[held[k][0]] for k in slots}
                groups |= {f"machines_{k}": held[k][1] for k in slots}
                study.enqueue_trial({**groups, "batch": cluster.batch})
        for trial in study.trials:
            if trial.state.is_finished():
                asked.append(_cluster_of(trial.params, options, slots))
        while (left := trials - len(asked)) > 0:
            # Parents come from generations that are over, so that one generation is priced together.
            begun = [
                _ask(study, space, len(options), slots) for _ in range(min(left, POPULATION - len(asked) % POPULATION))
            ]
            clusters = [_cluster_of(trial.params, options, slots) for trial in begun]
            asked += clusters
            for trial_, cluster, priced in zip(begun, clusters, _priced(columns, job, clusters), strict=True):
                if priced is None:
                    # Empty, too large, or without room for the batch: further from possible the more machines it has.
                    trial_.set_constraint("possible", 1.0 + cluster.machine_count)
                    study.tell(trial_, [_IMPOSSIBLE, _IMPOSSIBLE])
                else:
                    told, whole = priced
                    trial_.set_constraint("limits", float(limits.risk(told)[0]) - 1.0)
                    if journal is not None:
                        trial_.set_user_attr("plan", _described(space, whole, told))
                    study.tell(trial_, [float(total[0]) for total in expected_totals(told)])
    return asked


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """An interrupt that comes while the journal's lock is let go shows as what letting go of it then runs into."""
    try:
        yield
    except OSError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise


def _ask(study: optuna.Study, space: SearchSpace, options: int, slots: range) -> optuna.Trial:
    """A trial whose parameters are all known."""
    trial = study.ask()
    # An integer costs a third of a categorical; crossover and mutation treat both alike.
    for k in slots:
        trial.suggest_int(f"type_{k}", 0, options - 1)
    for k in slots:
        trial.suggest_int(f"machines_{k}", 0, space.max_machines)
    trial.suggest_int("batch", 0, len(space.batch_sizes) - 1)
    return trial


def _priced(columns: Columns, job: JobModel, clusters: Sequence[Cluster]) -> list[tuple[Forecast, Cluster] | None]:
    """The forecast of each cluster, and the cluster with its exchange; absent where it is impossible."""
    rows, table = tabulate_rows(columns, ClusterRows.of(clusters), job)
    found = forecast(table, job) if len(rows) else None
    places = {replace(rows.cluster(row), exchange=0): row for row in range(len(rows))}
    return [
        (found.take(np.array([places[cluster]])), rows.cluster(places[cluster]))
        if found is not None and cluster in places
        else None
        for cluster in clusters
    ]


def _cluster_of(params: Mapping[str, int], options: Sequence[int], slots: range) -> Cluster:
    counts = [(options[params[f"type_{k}"]], params[f"machines_{k}"]) for k in slots]
    return Cluster.of(counts, batch=params["batch"], exchange=0)


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
            f"{journal} cannot be used as the journal of a search: {error}.", hint="name another file as `journal`"
        ) from None


def _question(space: SearchSpace, limits: Limits, options: Sequence[int], types: int, seed: int) -> str:
    """A name that two searches share where the trials of one are those of the other: '$5.00, 1 h, 7bce33adf51cfc9e'."""
    offered = [(_name(space.options[option]), space.options[option].usd_per_hour) for option in options]
    asked = [offered, types, space.batch_sizes, [_way(e) for e in space.exchanges], space.max_machines,
             space.max_workers, repr(limits), seed]  # fmt: skip
    named = [] if limits.budget_usd is None else [formatting.usd(limits.budget_usd)]
    named += [] if limits.deadline_s is None else [formatting.duration(limits.deadline_s)]
    return ", ".join([*named, hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]])


def _name(option: MachineOption) -> str:
    kind = option.name if option.precision == "fp32" else f"{option.name}{IN_PRECISION}{option.precision}"
    return f"{kind} {option.offer.price.market}"


def _described(space: SearchSpace, cluster: Cluster, told: Forecast) -> str:
    """A trial for who looks at the journal: its machines, and what was solved inside."""
    machines = formatting.cluster((count, _name(space.options[option])) for option, count in cluster.machines)
    interval_s = float(told.interval_s[0])
    kept = f", a checkpoint every {formatting.duration(interval_s)}" if math.isfinite(interval_s) else ""
    way = space.exchanges[cluster.exchange]
    return (
        f"{machines}, batch {space.batch_sizes[cluster.batch]}, {formatting.exchange(way.compression, way.sync)}{kept}"
    )


def _way(exchange: ExchangeOption) -> str:
    return str(exchange.compression) + (f" {exchange.sync}" if exchange.sync.is_local else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log for the duration, and that names of objectives are new in it; both are its own business."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
