"""Searches that know nothing of the model, with as much processor time: random, TPE, and a Gaussian process.

All of them ask for one cluster after another: types and counts of up to three groups, batch size. The
Gaussian process is in the manner of CherryPick (Alipourfard et al., NSDI 2017): a Matern kernel, and the cluster of the
largest expected improvement, weighed with the chance that it keeps the limits.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import optuna
from numpy.typing import NDArray
from scipy.special import ndtr
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from benchmarks._search_spaces import Question
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import forecast
from hetopt.optimizer.search.search_space import MAX_TYPES, Cluster

Contender = Callable[["Trials", int], None]

MOST_POINTS = 250
"""Of the Gaussian process: its time grows with their cube."""


@dataclass(kw_only=True)
class Trials:
    """A budget of processor time in which clusters are priced, and the best score that keeps the limits."""

    question: Question
    columns: Columns
    seconds: float
    started: float = field(default_factory=time.process_time)
    best: float = math.inf
    count: int = 0

    @property
    def open(self) -> bool:
        """Return whether there is time left."""
        return time.process_time() - self.started < self.seconds

    def price(self, cluster: Cluster) -> tuple[float, float] | None:
        """Return the score and risk of a cluster; None where it is impossible."""
        self.count += 1
        possible, table = tabulate_rows(self.columns, ClusterRows.of([cluster]), self.question.job)
        if not len(possible):
            return None
        predicted, limits = forecast(table, self.question.job), self.question.limits
        score = float(limits.expected_score(predicted)[0])
        risk = float(limits.risk(predicted)[0])
        if risk <= 1:
            self.best = min(self.best, score)
        return score, risk

    def sizes(self) -> list[int]:
        """Return the number of values of each dimension: types and counts of each group, batch."""
        space = self.question.space
        groups = [len(space.options), space.max_machines + 1] * MAX_TYPES
        return [*groups, len(space.batch_sizes)]

    def cluster(self, point: Sequence[int]) -> Cluster:
        """Return the cluster at a point of the search space."""
        groups = [(int(point[2 * k]), int(point[2 * k + 1])) for k in range(MAX_TYPES)]
        return Cluster.of(groups, batch=int(point[-1]), exchange=0)


def run(contender: Contender, question: Question, seconds: float, seed: int) -> Trials:
    """Let a contender search for ``seconds`` seconds of processor time, and return its trials."""
    trials = Trials(question=question, columns=Columns(question.space), seconds=seconds)
    contender(trials, seed)
    return trials


def random_search(trials: Trials, seed: int) -> None:
    """Price clusters drawn uniformly over the dimensions."""
    random, sizes = np.random.default_rng(seed), trials.sizes()
    while trials.open:
        trials.price(trials.cluster(random.integers(0, sizes).tolist()))


def tpe(trials: Trials, seed: int) -> None:
    """Price clusters chosen by Optuna's tree-structured Parzen estimator, with its own constraints."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    sizes = trials.sizes()
    while trials.open:
        trial = study.ask()
        point = [trial.suggest_int(f"x{k}", 0, size - 1) for k, size in enumerate(sizes)]
        score, risk = trials.price(trials.cluster(point)) or (1e12, 1e12)
        trial.set_constraint("limits", risk - 1)
        study.tell(trial, score)


def gaussian_process(trials: Trials, seed: int) -> None:
    """Price clusters of the largest expected improvement of the log score times the probability of the limits.

    The first ten are drawn at random; it goes on until the trials are over.
    """
    random, sizes = np.random.default_rng(seed), trials.sizes()
    scale = np.maximum(np.array(sizes) - 1, 1)
    seen: list[NDArray[np.float64]] = []
    scores: list[float] = []
    risks: list[float] = []
    kernel = ConstantKernel(1.0) * Matern(length_scale=0.5, nu=2.5) + WhiteKernel(1e-3)
    while trials.open:
        candidates = random.integers(0, sizes, size=(500, len(sizes)))
        place = 0
        if len(scores) >= 10:
            some = slice(max(0, len(scores) - MOST_POINTS), None)
            x = np.array(seen[some])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                of_score, of_risk = (
                    GaussianProcessRegressor(
                        kernel,
                        normalize_y=True,
                        optimizer=None,  # pyright: ignore[reportArgumentType]  # documented; read off a default
                    ).fit(x, np.array(values[some]))
                    for values in (scores, risks)
                )
                mean, sd = of_score.predict(candidates / scale, return_std=True)
                over, over_sd = of_risk.predict(candidates / scale, return_std=True)
            aim = math.log(trials.best) if math.isfinite(trials.best) else max(scores)
            z = (aim - mean) / np.maximum(sd, 1e-9)
            improvement = sd * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
            place = int(np.argmax(improvement * ndtr(-over / np.maximum(over_sd, 1e-9))))
        priced = trials.price(trials.cluster(candidates[place].tolist()))
        if priced is not None:
            seen.append(candidates[place] / scale)
            scores.append(math.log(priced[0]))
            risks.append(math.log(priced[1]))


CONTENDERS: dict[str, Contender] = {
    "random": random_search,
    "TPE": tpe,
    "Gaussian process": gaussian_process,
}
