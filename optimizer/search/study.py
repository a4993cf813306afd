"""The search as an Optuna study: exact search's best clusters are its first trials, and other samplers go on.

    trial      a cluster: up to three machine types with their counts, and a batch size; the exchange is solved inside
    values     expected time and expected cost: Optuna's own tools read and plot both
    constraint by how much the cluster exceeds the limits at the probability `SURE`, or that it is impossible

The choice needs no trial: exact search has proved it, as the study's attribute ``proved`` says. Samplers are for
dimensions that exact search does not cover.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler, NSGAIISampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.interruption import delay_signals, goes_on
from hetopt.core.step_samples import IN_PRECISION
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import JobModel, forecast
from hetopt.optimizer.search.objective import Limits, expected_totals
from hetopt.optimizer.search.search_space import Cluster, MachineOption, SearchSpace

NOTHING = "none"
"""Value of a trial's machine type where it has no machines in that place."""

Parameters = dict[str, Any]


class Study:
    """Optuna study of a search, whose trials are clusters of the search space, priced by the forecast.

    Args:
        columns: arrays of the search space.
        job: inputs of a forecast that do not depend on the cluster.
        limits: budget and deadline of the constraint.
        types: instance types in one cluster at most.
        seed: seed of the sampler.

    Attributes:
        stopped: whether Ctrl-C ended the trials early.
    """

    def __init__(self, columns: Columns, job: JobModel, limits: Limits, *, types: int, seed: int) -> None:
        """Make a study of these columns and limits without trials; nothing is read or written."""
        space = columns.space
        self.columns, self.job, self.limits, self.seed = columns, job, limits, seed
        self.stopped = False
        self.names = [_name(option) for option in space.options]
        self.slots = range(min(types, len(self.names)))

    def run(
        self,
        first: Sequence[Cluster],
        trials: int,
        kept: Path | optuna.Study | None = None,
        then: BaseSampler | None = None,
    ) -> optuna.Study:
        """Run trials in ``kept``: the ``first`` clusters, then ``trials`` that ``then`` proposes; return the study.

        Ctrl-C ends the trials early, and sets ``stopped``.

        Args:
            first: clusters of the first trials; the first n of them are skipped where ``kept`` has n finished trials.
            trials: number of trials beside ``first``; finished ones in ``kept`` count.
            kept: journal file of the trials, or the study that takes them; None: a new study in memory.
            then: sampler of the other trials; None: NSGA-II.

        Raises:
            BadInput: the file cannot be used as Optuna's journal.
        """
        with _quiet():
            study = kept if isinstance(kept, optuna.Study) else self._study(kept)
            study.sampler = then or NSGAIISampler(seed=self.seed % 2**32)  # all that NumPy's old generator takes
            before = study.get_trials(deepcopy=False)
            done = sum(trial.state.is_finished() for trial in before)
            for cluster in first[done:]:
                study.enqueue_trial(self._parameters(cluster), skip_if_exists=bool(before))
            try:
                for _ in range(len(first) + trials - done):
                    with delay_signals():  # Optuna's lock of a journal is not let go where an interrupt comes meanwhile
                        study.optimize(self._price, n_trials=1)
            except KeyboardInterrupt:
                goes_on()
                self.stopped = True
        return study

    def cluster(self, parameters: Mapping[str, Any]) -> Cluster:
        """Return the cluster that a trial's Optuna parameters (types, machines, batch) describe, with exchange 0.

        Raises:
            ValueError: the parameters name a type or a batch size that the search space has not.
        """
        counts = [
            (self.names.index(parameters[f"type_{k}"]), parameters[f"machines_{k}"])
            for k in self.slots
            if parameters[f"type_{k}"] != NOTHING
        ]
        return Cluster.of(counts, batch=self.columns.space.batch_sizes.index(parameters["batch"]), exchange=0)

    def _parameters(self, cluster: Cluster) -> Parameters:
        """Return a cluster as Optuna parameters: batch size, and type and machines of each slot; `NOTHING`: empty."""
        held = [(self.names[option], count) for option, count in cluster.machines]
        held += [(NOTHING, 0)] * (len(self.slots) - len(held))
        parameters: Parameters = {"batch": self.columns.space.batch_sizes[cluster.batch]}
        for k in self.slots:
            parameters[f"type_{k}"], parameters[f"machines_{k}"] = held[k]
        return parameters

    def _price(self, trial: optuna.Trial) -> tuple[float, float]:
        """Return the expected time, s, and cost, USD, of the cluster that a trial suggests; infinite: it is impossible.

        Sets the trial's constraint (above 0: broken) and, for a possible cluster, its attribute ``plan`` in words.
        """
        for k in self.slots:
            trial.suggest_categorical(f"type_{k}", [NOTHING, *self.names])
            trial.suggest_int(f"machines_{k}", 0, self.columns.space.max_machines)
        trial.suggest_categorical("batch", self.columns.space.batch_sizes)
        cluster = self.cluster(trial.params)
        rows, table = tabulate_rows(self.columns, ClusterRows.of([cluster]), self.job)
        if not len(rows):
            # Empty, too large, or without room for the batch: further from possible the more machines it has.
            trial.set_constraint("possible", 1.0 + cluster.machine_count)
            return math.inf, math.inf
        predicted = forecast(table, self.job)
        trial.set_constraint("limits", float(self.limits.risk(predicted)[0]) - 1.0)
        trial.set_user_attr("plan", _described(self.columns.space, rows.cluster(0), float(predicted.interval_s[0])))
        time_s, cost_usd = (float(total[0]) for total in expected_totals(predicted))
        return time_s, cost_usd

    def _study(self, journal: Path | None) -> optuna.Study:
        """Return the Optuna study of this question, of expected time and cost; the caller sets its sampler.

        A journal may hold the studies of several questions; None: a new study in memory.

        Raises:
            BadInput: the file cannot be used as Optuna's journal.
        """
        try:
            study = optuna.create_study(
                storage=None if journal is None else JournalStorage(JournalFileBackend(str(journal))),
                study_name=None if journal is None else self._question(),
                load_if_exists=True,
                directions=["minimize", "minimize"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"{journal} cannot be used as the journal of a search: {error}.", hint="name another file as `study`"
            ) from None
        if not study.trials:
            study.set_metric_names(["expected time, s", "expected cost, USD"])
        return study

    def _question(self) -> str:
        """Return the study's name, limits and a hash of the question, such as '$5.00, 1 h, 7bce33ad01f2c4e8'."""
        space, limits = self.columns.space, self.limits
        offered = [(name, option.usd_per_hour) for name, option in zip(self.names, space.options, strict=True)]
        exchanges = [f"{exchange.compression} {exchange.sync}" for exchange in space.exchanges]
        asked = [offered, len(self.slots), space.batch_sizes, exchanges, space.max_machines, space.max_workers,
                 repr(limits), self.seed]  # fmt: skip
        named = [] if limits.budget_usd is None else [formatting.usd(limits.budget_usd)]
        named += [] if limits.deadline_s is None else [formatting.duration(limits.deadline_s)]
        return ", ".join([*named, hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]])


def _name(option: MachineOption) -> str:
    kind = option.name if option.precision == "fp32" else f"{option.name}{IN_PRECISION}{option.precision}"
    return f"{kind} {option.offer.price.market}"


def _described(space: SearchSpace, cluster: Cluster, interval_s: float) -> str:
    """Return a cluster in words: machines, batch size, exchange, and the seconds between checkpoints if finite."""
    machines = formatting.cluster((count, _name(space.options[option])) for option, count in cluster.machines)
    kept = f", a checkpoint every {formatting.duration(interval_s)}" if math.isfinite(interval_s) else ""
    way = space.exchanges[cluster.exchange]
    return (
        f"{machines}, batch {space.batch_sizes[cluster.batch]}, {formatting.exchange(way.compression, way.sync)}{kept}"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log, and its warning that names of objectives are new, for the duration."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
