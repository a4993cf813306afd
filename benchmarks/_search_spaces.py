"""Search spaces of recorded profiles: random ones that can be enumerated whole, and the whole catalogue."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from hetopt.core.profile import Profile
from hetopt.optimizer.cost.bill import load_billing
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.recommend import Options, job_of, space_of
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search_space import MAX_TYPES, Cluster, SearchSpace
from hetopt.optimizer.step_time.model import learned_shape, sampled_machines
from hetopt.optimizer.step_time.transfer import reference_host

RECORDED = Path(__file__).parent.parent / "tests" / "recorded"

EPOCHS = {"digits": 50_000.0, "lstm-small": 500.0, "resnet20-cifar10": 5_000.0}
"""Long enough that start-up does not decide: hours on the profiled machine."""

TYPES, MACHINES, BATCHES = 5, 8, 3


@dataclass(frozen=True, kw_only=True)
class Question:
    """A search problem: space, job and limits."""

    name: str
    space: SearchSpace
    job: JobModel
    limits: Limits


@cache
def whole(name: str, workers: int = 64, market: str = "spot") -> tuple[SearchSpace, JobModel]:
    """Return the search space of the whole catalogue for a recorded profile, and its job model."""
    profile = Profile.load(RECORDED / f"{name}.json")
    catalog = load_catalog()
    model = fit(profile)
    sampled = sampled_machines(profile, catalog.instance_types)
    shape = learned_shape(model, sampled)
    goal = Goal(ends="epochs", amount=EPOCHS[name], budget_usd=1.0)
    options = Options(market="any" if market == "any" else "spot", max_workers=workers)
    host = reference_host(model, catalog.instance_types.values())
    job = job_of(model, shape, goal, options, 1.0, load_billing())
    return space_of(model, shape, sampled, catalog, goal, options, host), job


def small(count: int, *, seed: int) -> Iterator[Question]:
    """Yield random parts of the catalogue with random limits that some of their clusters keep."""
    random = np.random.default_rng(seed)
    for number in range(count):
        name = sorted(EPOCHS)[number % len(EPOCHS)]
        space, job = whole(name)
        drawn = sorted(random.choice(len(space.options), TYPES, replace=False).tolist())
        batches = sorted(random.choice(space.batch_sizes, min(BATCHES, len(space.batch_sizes)), replace=False).tolist())
        part = replace(
            space, options=tuple(space.options[option] for option in drawn), batch_sizes=tuple(batches),
            max_machines=MACHINES, max_workers=64,
        )  # fmt: skip
        _, predicted = everything(part, job, MAX_TYPES)
        kind = ("budget", "deadline", "both")[int(random.integers(3))]
        share = float(random.uniform(0.02, 0.6))
        budget = float(np.quantile(predicted.cost_high_usd, share))
        deadline = float(np.quantile(predicted.total_high_s, float(random.uniform(0.02, 0.6))))
        limits = Limits(
            budget_usd=budget if kind != "deadline" else None,
            deadline_s=deadline if kind != "budget" else None,
            time_weight=1.0 if kind == "budget" else 0.0,
        )
        yield Question(name=f"{number} {name} {kind}", space=part, job=job, limits=limits)


def everything(space: SearchSpace, job: JobModel, types: int) -> tuple[ClusterRows, Forecast]:
    """Return every cluster of at most ``types`` machine types, as rows, and the forecast of each."""
    clusters = [
        Cluster.of(zip(chosen, counts, strict=True), batch, 0)
        for kinds in range(1, types + 1)
        for chosen in itertools.combinations(range(len(space.options)), kinds)
        for counts in itertools.product(range(1, space.max_machines + 1), repeat=kinds)
        if sum(counts) <= space.max_machines
        for batch in range(len(space.batch_sizes))
    ]
    rows, table = tabulate_rows(Columns(space), ClusterRows.of(clusters), job)
    return rows, forecast(table, job)


def best_score(predicted: Forecast, limits: Limits) -> float:
    """Return the least score that keeps the limits at the upper end; infinite where nothing does."""
    safe = limits.risk(predicted) <= 1
    return float(np.min(limits.expected_score(predicted)[safe], initial=math.inf))
